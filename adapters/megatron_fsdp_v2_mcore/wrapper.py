"""The data-parallel wrapper that Megatron's training loop talks to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, override

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import (
    FullyShardedDataParallel as MegatronFullyShardedDataParallel,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2 import FSDPModule, fully_shard
from megatron_fsdp_v2_mcore.settings import ShardingSettings, sharding_settings

__all__ = ["FullyShardedDataParallel"]

UNIT_CLASSES: tuple[type, ...] = (TransformerLayer, MambaLayer)
"""Modules that are gathered on their own; what is left belongs to the root."""


class FullyShardedDataParallel(MegatronFullyShardedDataParallel):
    """A model chunk sharded by `fully_shard`, with the methods Megatron calls on it.

    A subclass of Megatron's wrapper of the same name, so that every `isinstance` of Megatron's
    holds; it shares none of its implementation.

    Args:
        config: The transformer configuration.
        ddp_config: A `DistributedDataParallelConfig`; see `settings.FIELDS` for every field.
        module: The chunk, on its device, in its compute dtype.
        fsdp_unit_modules: Classes of the units; transformer and Mamba layers when None.
        disable_bucketing: Not used; there are no buckets.
        device: Not used; parameters are where the module is.
        pg_collection: Process groups; Megatron's global ones when None.

    Raises:
        FlagError: The configuration asks for something that cannot be honoured.
        ValueError: The chunk has no parameters.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: torch.nn.Module,
        fsdp_unit_modules: list[type] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: Any = None,
    ) -> None:
        del disable_bucketing, device
        _BaseDataParallel.__init__(self, config=config, module=module)
        self.ddp_config = ddp_config
        self.settings: ShardingSettings = sharding_settings(ddp_config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        mesh = _mesh_of(groups.dp_cp, module)
        # Per-token loss divides by the number of tokens afterwards; otherwise the mean is taken.
        factor = 1.0 if config.calculate_per_token_loss else 1.0 / mesh.size()
        for unit in _units(module, tuple(fsdp_unit_modules or UNIT_CLASSES)):
            self._shard(unit, mesh, factor)
        self._shard(module, mesh, factor)
        for param in module.parameters():
            # Megatron's norms, clipping and checkpoints look for this mark to know a DTensor.
            param.__fsdp_param__ = True  # type: ignore[attr-defined]
        self.param_and_grad_buffer = _ParamAndGradBuffer()
        if not ddp_config.overlap_grad_reduce:
            # Megatron gives no sign of the last micro-batch; `finish_grad_sync` is that sign.
            self._root.set_requires_gradient_sync(False)

    def _shard(self, module: torch.nn.Module, mesh: DeviceMesh, factor: float) -> None:
        settings = self.settings
        fully_shard(
            module,
            mesh=mesh,
            sharding_strategy=settings.sharding_strategy,
            mp_policy=settings.policy,
            gradient_scaling_factor=factor,
            enable_unshard_prefetch=settings.enable_unshard_prefetch,
            enable_async_reduce_grad=settings.enable_async_reduce_grad,
        )

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    # -- gradients ----------------------------------------------------------------------------

    @contextlib.contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        """Defer what can be deferred of gradient reduction to the first backward after."""
        with self._root.no_sync():
            yield

    @override
    def start_grad_sync(self, *unused: Any) -> None:
        """Reductions are issued by the units, during the backward."""

    @override
    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Have every gradient reduced and in `param.grad`. Collective.

        Raises:
            RuntimeError: A gradient is not finite, where Megatron was told to check.
        """
        if force_all_reduce:
            raise RuntimeError(
                "--save-wgrads-interval asks for unsharded gradients; with sharded gradients "
                "there are none to save"
            )
        self._root.reduce_grad()
        if self.settings.checks_grads_for_nan:
            self._check_finite()

    def _check_finite(self) -> None:
        for name, param in self.module.named_parameters():
            if param.grad is None:
                continue
            local = param.grad.to_local()
            if not bool(torch.isfinite(local).all()):
                raise RuntimeError(
                    f"gradient of {name} is not finite on rank {torch.distributed.get_rank()} "
                    "(found by --check-for-nan-in-loss-and-grad)"
                )

    @override
    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiply every gradient, in place."""
        for param in self.module.parameters():
            if param.grad is not None:
                param.grad.to_local().mul_(scaling_factor)

    @override
    def zero_grad_buffer(self) -> None:
        """Drop every gradient; the next reduction overwrites."""
        for param in self.module.parameters():
            param.grad = None

    # -- parameters ---------------------------------------------------------------------------

    @override
    def broadcast_params(self) -> None:
        """Parameters are slices of what every rank built alike; nothing is left to broadcast."""

    def start_param_sync(self, *unused: Any, **kwargs: Any) -> None:
        """Gathers are issued by the units, during the forward."""

    def synchronize_param_gather(self) -> None:
        """Units wait for their own gathers."""

    @override
    def stop_communication(self) -> None:
        """A backward leaves no communication under way."""

    # -- state --------------------------------------------------------------------------------

    @override
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Copy parameters and buffers in; the next forward uses them."""
        _BaseDataParallel.load_state_dict(self, state_dict, strict=strict)


class _ParamAndGradBuffer:
    """What Megatron's distributed optimizer asks the wrapper's buffer for."""

    def __init__(self) -> None:
        self.parameter_groups: list[SimpleNamespace] = []

    def copy_main_weights_to_model_weights(self) -> None:
        """Units bring model weights up to date themselves, in the next forward."""


def _mesh_of(group: Any, module: torch.nn.Module) -> DeviceMesh:
    first = next(module.parameters(), None)
    if first is None:
        raise ValueError("a model chunk without parameters cannot be sharded")
    return DeviceMesh.from_group(group, first.device.type, mesh_dim_names=("dp",))


def _units(module: torch.nn.Module, classes: tuple[type, ...]) -> list[torch.nn.Module]:
    """Outermost modules of the unit classes, in the order they are registered."""
    found: list[torch.nn.Module] = []
    for child in module.children():
        if isinstance(child, classes):
            found.append(child)
        else:
            found += _units(child, classes)
    return found
