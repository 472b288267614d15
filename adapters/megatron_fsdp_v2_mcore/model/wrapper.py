"""The data-parallel wrapper that Megatron's training loop uses."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import (
    FullyShardedDataParallel as MegatronFullyShardedDataParallel,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron_fsdp_v2 import FSDPModule, UnitOptions, fully_shard
from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.diagnostics import watch_collectives
from megatron_fsdp_v2.diagnostics.finite import not_finite
from megatron_fsdp_v2.runtime.registered_pool import register_pool
from megatron_fsdp_v2_mcore.flags.arguments import reject_model_options
from megatron_fsdp_v2_mcore.flags.errors import FlagError
from megatron_fsdp_v2_mcore.flags.options import (
    Options,
    active_options,
    require_active,
    training_globals,
)
from megatron_fsdp_v2_mcore.flags.settings import notices, sharding_settings
from megatron_fsdp_v2_mcore.formats import register_formats
from megatron_fsdp_v2_mcore.model.fp8_weights import limit_weight_caches
from megatron_fsdp_v2_mcore.model.initialize import initializer
from megatron_fsdp_v2_mcore.model.mamba_parameters import use_registered_parameters
from megatron_fsdp_v2_mcore.model.meshes import Meshes, dense_meshes, expert_meshes, gather_groups
from megatron_fsdp_v2_mcore.model.schedule_plans import attach_to_plan, scheduled_modules
from megatron_fsdp_v2_mcore.model.scheduled_units import ScheduledUnits
from megatron_fsdp_v2_mcore.model.tensor_shards import is_expert, tensor_shards
from megatron_fsdp_v2_mcore.model.units import (
    UNIT_CLASSES,
    broadcast_parameters,
    pass_gathered_weights,
    plan_units,
    shared_by_stages,
    synchronize_embeddings,
)

_WATCH: dict[str, Any] = {}
"""The watch of this process: `watched`, its folder and default process group, and `end`, which
ends the watch."""


def _watch_collectives(folder: str) -> None:
    """Watch the collectives of this process, whose model may have several chunks, once.

    A training that is restarted within the process has other process groups, and perhaps another
    rank. Ranks that join number their collectives from the beginning.
    """
    watched = folder, weakref.ref(dist.group.WORLD)
    if _WATCH.get("watched") != watched:
        if end := _WATCH.pop("end", None):
            end()
        _WATCH["end"] = watch_collectives(folder)
        _WATCH["watched"] = watched


class FullyShardedDataParallel(MegatronFullyShardedDataParallel):
    """A model chunk sharded by `fully_shard`, with the methods that Megatron calls.

    The class derives from Megatron's wrapper of the same name, so that `isinstance` checks in
    Megatron accept it. It does not use the implementation of that class.

    Dense parameters are sharded over data- and context-parallel ranks, expert parameters over
    expert-data-parallel ranks, as units inside their layer. Tensor-parallel parameters become
    DTensors over the data- and tensor-parallel axes.

    Args:
        config: The transformer configuration.
        ddp_config: A `DistributedDataParallelConfig`. docs/megatron_flags.md documents its fields.
        module: The chunk, on its device, in its compute dtype.
        fsdp_unit_modules: Classes of the units; transformer and Mamba layers if None.
        disable_bucketing: Not used, since there are no buckets.
        device: Not used; parameters stay on the device of the module.
        pg_collection: Process groups; Megatron's global groups if None. A missing group, except a
            data-parallel group, is treated as a group of size 1.
        options: Options without a field in Megatron's configuration. If None, the options of the
            command line, or the defaults without a command line.

    Attributes:
        options: Options without a field in Megatron's configuration; see `with_active_options`.
        embedding_group: The group of the pipeline stages that share an embedding, if any.

    Raises:
        RuntimeError: `enable()` was not called and Megatron's command line did not select this
            package.
        FlagError: The configuration has an option that is not supported.
        ValueError: The chunk has no parameters, or `pg_collection` lacks a required group.
    """

    options: Options = Options()
    _has_command_line = False

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: torch.nn.Module,
        fsdp_unit_modules: list[type] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: Any = None,
        options: Options | None = None,
    ) -> None:
        del disable_bucketing, device
        require_active()
        if not ddp_config.use_megatron_fsdp:
            raise FlagError(
                "DistributedDataParallelConfig(use_megatron_fsdp=False) builds Megatron's DDP; "
                "FullyShardedDataParallel needs use_megatron_fsdp=True"
            )
        reject_model_options(config)
        _BaseDataParallel.__init__(self, config=config, module=module)
        if options is not None:
            # Wrappers that Megatron builds use the options of their class.
            self.options = options
        self.ddp_config = ddp_config
        dtype = config.params_dtype
        gathered_dtype = torch.uint8 if ddp_config.fp8_param_gather else dtype
        self._settings = sharding_settings(ddp_config, self.options, dtype, gathered_dtype)
        if not self._has_command_line:
            # The validation of a command line has already printed the notices.
            for notice in notices(ddp_config, self.options):
                self._notify(notice)
        if self.options.hang_reports is not None:
            # Ranks number their collectives from the first one after this call.
            _watch_collectives(self.options.hang_reports)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        device_type = _device_type(module)
        _check_tensor_groups(groups, config)
        self.embedding_group = getattr(groups, "embd", None)
        hybrid = ddp_config.num_distributed_optimizer_instances > 1
        self._dense = dense_meshes(groups, device_type, is_hybrid=hybrid)
        self._expert: Meshes | None = None
        if any(is_expert(param) for param in module.parameters()):
            self._expert = expert_meshes(groups, device_type, is_hybrid=hybrid)
        use_registered_parameters(module)
        is_quantized = any(getattr(config, kind, None) for kind in ("fp8", "fp4"))
        is_quantized = is_quantized and register_formats()
        creates = self.options.uses_gather_groups
        self._gather_groups = gather_groups(groups, self._dense, self._expert, creates=creates)
        self._shard_units(tuple(fsdp_unit_modules or UNIT_CLASSES))
        if is_quantized:
            # Delayed scales change in every forward, so weights quantized again would differ.
            is_delayed = bool(config.fp8) and config.fp8_recipe == "delayed"
            limit_weight_caches(
                module,
                keeps_weights=ddp_config.keep_fp8_transpose_cache or is_delayed,
                keeps_transposes=ddp_config.keep_fp8_transpose_cache,
            )
        for param in module.parameters():
            # Megatron's norms, clipping and checkpoints recognize a DTensor by this attribute.
            param.__fsdp_param__ = True  # type: ignore[attr-defined]
        if config.init_model_with_meta_device:
            synchronize_embeddings(module, groups)
        self._scheduled = ScheduledUnits(module, scheduled_modules(module))
        self.param_and_grad_buffer = _ParamAndGradBuffer()
        has_pool = self.options.runtime.enable_trace_pool
        if ddp_config.nccl_ub and has_pool and not register_pool(module):
            self._notify(
                "--use-nccl-ub: no memory is registered, since gradients and weights are not "
                "communicated over NCCL"
            )
        if not ddp_config.overlap_grad_reduce:
            # Megatron does not announce the last micro-batch. `finish_grad_sync` reduces instead.
            self._root.set_requires_gradient_sync(False)

    def _shard_units(self, unit_classes: tuple[type, ...]) -> None:
        """Shard experts, layers, embedding and output layer, and the chunk, nested units first."""
        settings, dense = self._settings, self._dense
        shards = tensor_shards(self.module, dense, self._expert)
        shared, initialize = shared_by_stages(self.module), initializer(self.config, self.module)
        # Per-token loss divides by the number of tokens afterwards. Otherwise gradients are
        # averaged over all ranks with different tokens, even if fewer ranks share an expert.
        factor = 1.0 if self.config.calculate_per_token_loss else 1.0 / dense.data.size()
        strategy = self.ddp_config.data_parallel_sharding_strategy
        for unit in plan_units(
            self.module,
            unit_classes,
            dense,
            self._expert,
            strategy,
            self.options.expert_strategy or strategy,
            settings.unit_bytes,
            runs_whole=not self.config.overlap_moe_expert_parallel_comm,
        ):
            data = unit.meshes.data
            if self.options.broadcasts_parameters:
                broadcast_parameters(unit.modules, data.get_all_groups())
            fully_shard(
                unit.modules,
                mesh=data,
                sharding_strategy=unit.strategy,
                outer_dp_sharding_strategy=self.ddp_config.outer_dp_sharding_strategy,
                mp_policy=settings.policy,
                gradient_scaling_factor=factor,
                on_missing_grad="zero",
                options=UnitOptions(
                    # The other units use the options of the chunk, their root.
                    runtime=settings.runtime if self.module in unit.modules else None,
                    tensor_shards=shards,
                    separate_params=shared,
                    used_params=unit.used_params,
                    param_init_fn=initialize,
                    gather_group=self._gather_groups.get(data),
                ),
            )
        pass_gathered_weights(self.module)

    def _notify(self, notice: str) -> None:
        if not self._has_command_line:
            warnings.warn(notice, stacklevel=3)
        elif torch.distributed.get_rank() == 0:
            sys.stdout.write(f"{notice}\n")

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def build_schedule_plan(self, *args: Any, **kwargs: Any) -> Any:
        """Build the chunk's plan of a micro-batch, for `--overlap-moe-expert-parallel-comm`.

        Megatron runs the parts of layers that the plan contains, and interleaves the forward of one
        micro-batch with the backward of another. Every unit is gathered for the parts that use it.

        Args:
            args: Positional arguments of the chunk's forward.
            kwargs: Keyword arguments of the chunk's forward.
        """
        plan = get_attr_wrapped_model(self.module, "build_schedule_plan")(*args, **kwargs)
        attach_to_plan(plan, self._scheduled)
        return plan

    # -- gradients ----------------------------------------------------------------------------

    @contextlib.contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        """Defer the reduction of gradients to the first backward after the context."""
        with self._root.no_sync():
            yield

    @override
    def start_grad_sync(self, *unused: Any) -> None:
        """Do nothing: units issue their reductions during the backward."""

    @override
    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce all pending gradients into `param.grad`. Collective.

        Raises:
            RuntimeError: A gradient is not finite and Megatron's check is enabled, or
                `force_all_reduce` requests unsharded gradients.
        """
        if force_all_reduce:
            raise RuntimeError(
                "--save-wgrads-interval requires unsharded gradients, which do not exist with "
                "sharded gradients"
            )
        self._root.reduce_grad()
        bad = not_finite(self.module) if self.ddp_config.check_for_nan_in_grad else []
        if bad:
            raise RuntimeError(
                f"gradient of {listed(bad, 5)} is not finite on rank "
                f"{torch.distributed.get_rank()} (--no-check-for-nan-in-loss-and-grad turns this "
                "check off)"
            )

    @override
    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiply every gradient by a factor, in place."""
        for param in self.module.parameters():
            if param.grad is not None:
                param.grad.to_local().mul_(scaling_factor)

    @override
    def zero_grad_buffer(self) -> None:
        """Set every gradient to None; the next reduction does not accumulate."""
        # A step begins: a schedule that is still open was aborted by an exception.
        self._scheduled.abandon()
        for param in self.module.parameters():
            param.grad = None

    # -- parameters ---------------------------------------------------------------------------

    @override
    def broadcast_params(self) -> None:
        """Do nothing: parameters were broadcast before they were sharded.

        Megatron calls this method if ranks build different weights.

        Raises:
            RuntimeError: Parameters were not broadcast.
        """
        if not self.options.broadcasts_parameters:
            raise RuntimeError(
                "ranks build different weights, and shards of them cannot be broadcast; pass "
                "options=Options(broadcasts_parameters=True) to FullyShardedDataParallel, or "
                "broadcasts_parameters=True to the install() of a framework"
            )

    def start_param_sync(self, *unused: Any, **kwargs: Any) -> None:
        """Do nothing: units issue their gathers during the forward."""

    def synchronize_param_gather(self) -> None:
        """Do nothing: units wait for their own gathers."""

    @override
    def stop_communication(self) -> None:
        """Do nothing: all communication is complete at the end of a backward."""

    # -- state --------------------------------------------------------------------------------

    @override
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Copy parameters and buffers from a state dict; the next forward uses them."""
        _BaseDataParallel.load_state_dict(self, state_dict, strict=strict)


class _ParamAndGradBuffer:
    """The interface of the wrapper's buffer that Megatron's distributed optimizer uses."""

    def __init__(self) -> None:
        self.parameter_groups: list[SimpleNamespace] = []

    def manual_buffer_registration(self) -> None:
        """Do nothing: memory is registered when the trace pool allocates it."""

    def copy_main_weights_to_model_weights(self) -> None:
        """Do nothing: units update their model weights in the next forward."""


def with_active_options(original: type) -> type[FullyShardedDataParallel]:
    """Return a wrapper class with the command line's options, which Megatron does not pass."""
    del original
    attributes = {"options": active_options(), "_has_command_line": True}
    return type(FullyShardedDataParallel.__name__, (FullyShardedDataParallel,), attributes)


def sharded_without_training(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that builds model chunks, to shard them with `--skip-train` too.

    Megatron omits the wrapper if it does not train. Every rank would then hold the whole model, and
    a checkpoint would be read by names that are local to a rank.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        if training_globals().get_args().skip_train:
            kwargs["wrap_with_ddp"] = True
        return original(*args, **kwargs)

    return build


def _check_tensor_groups(groups: Any, config: Any) -> None:
    """Check that tensor-parallel shards are not treated as whole weights.

    Raises:
        ValueError: The tensor-parallel size is greater than 1 and its group is missing.
    """
    for name, size in (
        ("tp", config.tensor_model_parallel_size),
        ("expt_tp", config.expert_tensor_parallel_size),
    ):
        if getattr(groups, name, None) is None and (size or 1) > 1:
            raise ValueError(
                f"pg_collection has no group {name}, and the model is sharded over {size} "
                "tensor-parallel ranks; set it, or omit pg_collection to use Megatron's groups"
            )


def _device_type(module: nn.Module) -> str:
    first = next(module.parameters(), None)
    if first is None:
        raise ValueError(
            "a model chunk without parameters cannot be sharded; give every pipeline stage "
            "a layer, with a smaller --pipeline-model-parallel-size or another layout"
        )
    # Parameters on the meta device are materialized on the device of Megatron's own calls.
    return torch.empty(0, device="cuda").device.type if first.is_meta else first.device.type
