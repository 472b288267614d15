"""transformers: `from_pretrained(..., distributed_config=...)` shards with this package.

    import megatron_fsdp_v2_for.transformers

    megatron_fsdp_v2_for.transformers.install(sharding_strategy="optim_grads_params")
    config = DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)

Each rank reads its rows of a folder. A tensor that the library splits or permutes after reading it
(a fused `qkv`) is read whole, and this rank's rows are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from megatron_cpu_rehearsal.patching import Patch
from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows, rows_like
from megatron_fsdp_v2_for.adapter import Adapter

__all__ = ["PATCHES", "install", "uninstall"]

_HERE = "megatron_fsdp_v2_for.transformers"
_patch = functools.partial(
    Patch, reason="transformers assumes that every rank has equally many rows of a parameter"
)
PATCHES = dict.fromkeys(
    ("5.23", "5.24"),
    (
        Patch(
            "transformers.distributed.fsdp:fully_shard",
            reason="transformers imports FSDP2's function by name",
            wrap="megatron_fsdp_v2_for.adapter:with_options",
        ),
        Patch(
            "transformers.distributed.mixin:apply_fully_sharded_data_parallelism",
            reason="transformers ties weights after it shards them",
            wrap=f"{_HERE}:ties_before",
            parameters=("model",),
        ),
        _patch(
            "transformers.core_model_loading:DtensorShardOperation",
            wrap=f"{_HERE}:reads_own_rows",
            parameters=("param",),
        ),
        _patch(
            "transformers.core_model_loading:set_param_for_module",
            wrap=f"{_HERE}:keeps_own_rows",
            parameters=("model", "target_name", "param_value"),
        ),
        *(
            _patch(
                f"transformers.{module}:_dtensor_from_local_like",
                wrap=f"{_HERE}:makes_rows",
                parameters=("local_tensor", "ref"),
            )
            for module in ("core_model_loading", "modeling_utils")
        ),
    ),
)
"""Patches by version of transformers."""

_ADAPTER = Adapter("transformers", PATCHES)
install, uninstall = _ADAPTER.install, _ADAPTER.uninstall


def ties_before(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that shards a model, which ties the weights of the model before."""

    def apply(model: Any, *args: Any, **kwargs: Any) -> Any:
        model.tie_weights(recompute_mapping=False)
        return original(model, *args, **kwargs)

    return apply


def reads_own_rows(original: type[Any], options: Mapping[str, Any]) -> type[Any]:
    """Return the class that reads a rank's part of a tensor in a file."""

    class OwnRows(original):  # type: ignore[misc]
        def __init__(self, param: Any) -> None:
            super().__init__(param)
            self._param = param

        def shard_tensor(
            self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None
        ) -> Any:
            param = self._param
            is_tensor = isinstance(source, torch.Tensor)
            shape = tuple(source.shape if is_tensor else source.get_shape())
            if not isinstance(param, ShardedRows):
                return super().shard_tensor(source, tensor_idx, device=device, dtype=dtype)
            if tensor_idx is not None and len(shape) == param.ndim - 1:
                # One tensor of a stack, which this rank has whole or not at all. The library cannot
                # stack no tensors: a rank without any stacks one, which `keeps_own_rows` drops.
                if not param.chunks() and tensor_idx % param.shape[0] == 0:
                    return torch.empty(shape, dtype=dtype or param.dtype, device=device)
                return super().shard_tensor(source, tensor_idx, device=device, dtype=dtype)
            if tensor_idx is None and shape != param.shape:
                raise ValueError(
                    f"the folder has a tensor of shape {shape} for a parameter of shape "
                    f"{tuple(param.shape)}, and a rank cannot read rows of it; load the folder "
                    "with ignore_mismatched_sizes=True without sharding, and save it"
                )
            # A conversion may move rows; `keeps_own_rows` then selects those of this rank.
            rows = _own_rows(param, source) if tensor_idx is None else source[...]
            return rows.to(device=device, dtype=dtype)

    return OwnRows


def keeps_own_rows(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that registers a loaded tensor, which keeps this rank's rows of it."""

    def set_param(model: Any, target_name: str, param_value: Any, *args: Any, **kw: Any) -> None:
        module, _, name = target_name.rpartition(".")
        param = getattr(model.get_submodule(module), name, None)
        if isinstance(param, ShardedRows):
            if param_value.shape == param.shape:
                param_value = _own_rows(param, param_value).clone()
            elif not param.chunks():
                param_value = param_value[:0]
        original(model, target_name, param_value, *args, **kw)

    return set_param


def makes_rows(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that makes a parameter of this rank's rows, like another parameter."""

    def from_local_like(local_tensor: torch.Tensor, ref: Any) -> Any:
        if isinstance(ref, ShardedRows):
            like = cast("ShardedRows", ref.detach())
            return rows_like(local_tensor.detach().contiguous(), like)
        return original(local_tensor, ref)

    return from_local_like


def _own_rows(param: ShardedRows, source: Any) -> Any:
    """Return this rank's rows of a whole tensor, or of one in a file, which is read in slices."""
    parts = [source[chunk.block] for chunk in param.chunks()]
    if len(parts) == 1:
        return parts[0]
    local = param.to_local()
    rows = torch.empty(local.shape, dtype=parts[0].dtype if parts else local.dtype)
    for chunk, part in zip(param.chunks(), parts, strict=True):
        rows[chunk.local] = part
    return rows
