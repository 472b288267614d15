"""Factory of `--optimizer muon` and other emerging optimizers for sharded model chunks.

Megatron's factory wraps these optimizers in classes for unsharded parameters. This factory wraps
them in `ShardedOptimizer`, and matrix optimizers distribute their work over ranks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, override

import megatron.core.optimizer as megatron_optimizers
import torch
from emerging_optimizers.scalar_optimizers import Lion
from megatron.core.optimizer import emerging_optimizers as registry
from megatron.core.optimizer.grad_scaler import ConstantGradScaler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_fsdp_v2.dtensor.sharded_rows import add_to_rows, local_of, plain_attributes
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2_mcore.optim.config import check_config, check_gradients, clipping_config
from megatron_fsdp_v2_mcore.optim.muon import sharded_class
from megatron_fsdp_v2_mcore.optim.optimizer import (
    FSDPMuonChainedOptimizer,
    ShardedEmergingOptimizer,
)

_QKV = "linear_qkv.weight"


class ShardedLion(Lion):
    """`Lion` of emerging_optimizers, for parameters sharded by `fully_shard`.

    The original class compiles its update for plain tensors. Every rank has state for every
    parameter, including parameters without rows on the rank.
    """

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Perform one step, without communication.

        Args:
            closure: Not supported.

        Raises:
            ValueError: A closure was given.
        """
        if closure is not None:
            raise ValueError("ShardedLion.step takes no closure")
        for group in self.param_groups:
            self._init_group(group, skip_non_grad_params=False)
            with plain_attributes():
                params = [p for p in group["params"] if p.grad is not None and local_of(p).numel()]
                grads = [local_of(param.grad) for param in params]
            if not params:
                continue
            weights = [local_of(param) for param in params]
            means = [local_of(self.state[param]["exp_avg"]) for param in params]
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for weight, grad in zip(weights, grads, strict=True):
                self._apply_weight_decay_inplace(weight, grad, lr, group["weight_decay"])
            updates = torch._foreach_lerp(means, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_lerp_(means, grads, 1 - beta2)
            add_to_rows(params, updates, alpha=-lr)


def build_emerging_optimizer(
    original: Callable[..., Any],
    config: Any,
    model_chunks: Sequence[nn.Module],
    config_overrides: dict[Any, Any] | None = None,
    pg_collection: Any = None,
) -> Any:
    """Build a chain of optimizers: one for matrices, another for all other parameters.

    Args:
        original: Megatron's factory, for models that are not sharded by this package.
        config: Megatron's `OptimizerConfig`.
        model_chunks: Wrapped model chunks of this rank.
        config_overrides: Options of parameters, by `ParamKey`; Megatron's standard overrides if
            None.
        pg_collection: Process groups; Megatron's global groups if None.

    Raises:
        ValueError: The optimizer cannot step sharded parameters.
    """
    all_params = (param for chunk in model_chunks for param in chunk.parameters())
    params = [param for param in all_params if isinstance(param, UnevenDTensor)]
    if not params:
        return original(config, model_chunks, config_overrides, pg_collection)
    name = config.optimizer
    if name not in registry._EMERGING_OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is not registered by Megatron; use 'muon'")
    # With offload, only parameters that Adam steps are offloaded; matrices stay on their device.
    check_config(config, params)
    if config.fp16:
        raise ValueError(f"optimizer {name!r} cannot be used with fp16; use bf16")
    if config.use_layer_wise_distributed_optimizer:
        raise ValueError(
            "use_layer_wise_distributed_optimizer cannot be used with sharded parameters; disable "
            "it: matrices are distributed over ranks without it"
        )
    config = clipping_config(config, params)
    _tag_fused_projections(model_chunks)
    if config_overrides is None:
        config_overrides = megatron_optimizers.get_standard_config_overrides(config)
    overrides = {**config_overrides, **_default_overrides(config)}
    by_optimizer: dict[str, list[dict[str, Any]]] = {}
    for group in megatron_optimizers._get_param_groups(list(model_chunks), config, overrides):
        by_optimizer.setdefault(group.get("optimizer", name), []).append(group)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    return FSDPMuonChainedOptimizer(
        [
            _build_optimizer(config, model_chunks, chosen, param_groups, groups)
            for chosen, param_groups in by_optimizer.items()
        ]
    )


def _tag_fused_projections(model_chunks: Sequence[nn.Module]) -> None:
    """Mark fused projections of queries, keys and values, under the same condition as Megatron.

    The rows of the tensor-parallel shard must be whole groups of heads.
    """
    for chunk in model_chunks:
        for name, param in chunk.named_parameters():
            if _QKV not in name or param.ndim != 2 or not isinstance(param, UnevenDTensor):
                continue
            split = registry._get_qkv_split_shapes(chunk.config)
            if param.part_shape[0] % sum(split) == 0:
                param.is_qkv = True  # type: ignore[attr-defined]
                param.qkv_split_shapes = split  # type: ignore[attr-defined]


def _default_overrides(config: Any) -> dict[Any, Any]:
    """Return the overrides that assign parameters to another optimizer."""
    entry = registry._EMERGING_OPTIMIZERS[config.optimizer]
    overrides: dict[Any, Any] = copy.deepcopy(entry.default_param_overrides)
    if config.optimizer in ("muon", "adaptive_muon"):
        for override in overrides.values():
            if override.get("optimizer") in ("adam", "lion"):
                override["optimizer"] = config.muon_scalar_optimizer
    return overrides


def _build_optimizer(
    config: Any,
    model_chunks: Sequence[nn.Module],
    name: str,
    param_groups: list[dict[str, Any]],
    groups: Any,
) -> Any:
    """Build one optimizer of the chain for its parameter groups."""
    if name == config.optimizer:
        optimizer = _build_named_optimizer(config, param_groups, model_chunks, groups)
    elif name == "lion":
        betas = (config.lion_beta1, config.lion_beta2)
        optimizer = ShardedLion(param_groups, config.lr, betas, config.weight_decay)
    else:
        own = copy.copy(config)
        own.optimizer, own.use_distributed_optimizer = name, True
        # Megatron's function instantiates `DistributedOptimizer`, which a patch has replaced.
        part = megatron_optimizers._get_megatron_optimizer_based_on_param_groups(
            config=own,
            model_chunks=list(model_chunks),
            param_groups=param_groups,
            pg_collection=groups,
        )
        # All optimizers of a chain must have the same configuration.
        part.config = config
        return part
    if isinstance(optimizer, Lion):
        check_gradients(optimizer, [p for group in param_groups for p in group["params"]])
    part = ShardedEmergingOptimizer(
        optimizer,
        config,
        ConstantGradScaler(config.loss_scale) if config.loss_scale else None,
        registry._EMERGING_OPTIMIZERS[name].init_state_fn,
        model_chunks=list(model_chunks),
        per_model_buffers=None,
        data_parallel_group=None,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
    part.tp_group = groups.tp
    part.expert_tp_group = getattr(groups, "expt_tp", groups.tp)
    return part


def _build_named_optimizer(
    config: Any, param_groups: list[dict[str, Any]], model_chunks: Sequence[nn.Module], groups: Any
) -> Any:
    """Build the optimizer that `config.optimizer` names."""
    name = config.optimizer
    entry = registry._EMERGING_OPTIMIZERS[name]
    original = entry.optimizer_cls
    if entry.config_to_kwargs is not None:
        options = entry.config_to_kwargs(config, model_chunks, groups)
    else:
        options = registry._kwargs_from_config(original, name, config)
        if "betas" in inspect.signature(original).parameters:
            options["betas"] = (config.adam_beta1, config.adam_beta2)
    cls = ShardedLion if issubclass(original, Lion) else sharded_class(original)
    return cls(param_groups, **options)
