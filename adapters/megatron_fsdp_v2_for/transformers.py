"""transformers: `from_pretrained(..., distributed_config=...)` shards with this package.

    import megatron_fsdp_v2_for.transformers

    megatron_fsdp_v2_for.transformers.install(sharding_strategy="optim_grads_params")
    config = DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)

Each rank reads its rows of a folder, also of tensors that the library splits (a fused `qkv`), joins
or stacks. A tensor whose rows the library permutes is read whole, and this rank's rows are kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows, rows_like
from megatron_fsdp_v2_for import transformers_trainer
from megatron_fsdp_v2_for.adapter import Adapter
from megatron_fsdp_v2_patching import Patch

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
            "transformers.core_model_loading:WeightConverter.convert",
            wrap=f"{_HERE}:converts_own_rows",
            parameters=("self", "layer_name", "model"),
        ),
        _patch(
            "transformers.core_model_loading:set_param_for_module",
            wrap=f"{_HERE}:keeps_own_rows",
            parameters=("model", "target_name", "param_value"),
        ),
        Patch(
            "transformers.distributed.checkpoint:_redistribute_state_dict",
            reason="safetensors rejects two names of one memory",
            wrap=f"{_HERE}:copies_tied",
            parameters=("state_dict", "reference_state_dict"),
        ),
        *(
            _patch(
                f"transformers.{module}:_dtensor_from_local_like",
                wrap=f"{_HERE}:makes_rows",
                parameters=("local_tensor", "ref"),
            )
            for module in ("core_model_loading", "modeling_utils")
        ),
        *transformers_trainer.PATCHES,
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
            unread = _Unread(source, shape, device, dtype)
            return unread.own_rows(param) if tensor_idx is None else unread

    return OwnRows


class _Unread(NamedTuple):
    """A tensor in a file, of which `converts_own_rows` reads the rows that a conversion needs."""

    source: Any
    shape: tuple[int, ...]
    device: Any
    dtype: Any

    def read(self, rows: Any) -> Any:
        return self.source[rows].to(device=self.device, dtype=self.dtype)

    def own_rows(self, param: ShardedRows, start: int = 0) -> Any:
        """Read this rank's rows of a parameter whose first row is row `start` of the tensor."""
        return _own_rows(param, self.source, start).to(device=self.device, dtype=self.dtype)


def converts_own_rows(
    original: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the method that converts tensors of a file, which reads this rank's rows if it can.

    It can if the conversion splits a tensor into parameters, joins tensors, or changes columns
    only. Otherwise it reads whole tensors, and `keeps_own_rows` selects rows of the result.
    """

    def convert(self: Any, layer_name: str, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        collected = self.materialize_tensors()
        patterns = [pattern for pattern in self.source_patterns if pattern in collected]
        tensors = [tensor for pattern in patterns for tensor in collected[pattern]]
        unread = [tensor for tensor in tensors if isinstance(tensor, _Unread)]
        if unread:
            rows: Sequence[Any] = [...] * len(unread)
            first, *_ = self.target_patterns
            names = [layer_name.replace(first, target) for target in self.target_patterns]
            params = {name: _find(model, name) for name in names}
            is_known = self.quantization_operation is None and len(unread) == len(tensors)
            is_known &= len(params) == len(names)
            if is_known and all(isinstance(param, ShardedRows) for param in params.values()):
                known = self.operations, [*params.values()], unread
                if (starts := _starts_of_parts(*known)) is not None:
                    parts = map(unread[0].own_rows, params.values(), starts)
                    return dict(zip(params, parts, strict=True))
                rows = _rows_to_convert(*known) or rows
            read = {
                id(tensor): tensor.read(part) for tensor, part in zip(unread, rows, strict=True)
            }
            for pattern in patterns:
                collected[pattern] = [read.get(id(t), t) for t in collected[pattern]]
        self.collected_tensors = collected
        return original(self, layer_name, model, *args, **kwargs)

    return convert


def _starts_of_parts(
    operations: Sequence[Any], params: Sequence[ShardedRows], tensors: Sequence[_Unread]
) -> list[int] | None:
    """Return the rows of a tensor at which parameters begin, if a conversion only splits it."""
    (operation, *more), lengths = operations, [param.shape[0] for param in params]
    match type(operation).__name__:
        case "Split":
            is_split = operation.dim == 0
        case "Chunk":
            is_split = operation.dim == 0 and len({*lengths}) == 1
        case "Transpose":
            # It changes nothing if the tensor has the shape of the parameter.
            is_split = operation.check_dims and tensors[0].shape == params[0].shape
        case _:
            return None
    shapes = {(sum(lengths), *param.shape[1:]) for param in params}
    if more or not is_split or [tensor.shape for tensor in tensors] != [*shapes]:
        return None
    return [*itertools.accumulate(lengths[:-1], initial=0)]


def _rows_to_convert(
    operations: Sequence[Any], params: Sequence[ShardedRows], tensors: Sequence[_Unread]
) -> list[slice] | None:
    """Return the rows of each tensor that become this rank's rows of a parameter.

    Returns:
        None, unless the conversion joins the tensors, or changes columns only.
    """
    param, chunks = params[0], params[0].chunks()
    if len(params) > 1 or len(chunks) > 1 or any(c.sizes[1:] != param.shape[1:] for c in chunks):
        return None
    dims = [_changed_dims(operation) for operation in operations]
    if not all(dims):
        return None
    lengths = [tensor.shape[0] for tensor in tensors]
    if min(itertools.chain(*dims)) > 0 and {*lengths} == {param.shape[0]}:
        starts = [0] * len(tensors)
    elif dims == [[0]] and _is_join(operations[0]) and sum(lengths) == param.shape[0]:
        starts = [*itertools.accumulate(lengths[:-1], initial=0)]
    else:
        return None
    own = chunks[0].block[0] if chunks else slice(0, 0)

    def inside(start: int, length: int) -> slice:
        first, end = (min(max(row - start, 0), length) for row in (own.start, own.stop))
        return slice(first, end)

    return [inside(start, length) for start, length in zip(starts, lengths, strict=True)]


def _is_join(operation: Any) -> bool:
    return type(operation).__name__ == "Concatenate"


def _changed_dims(operation: Any) -> list[int]:
    """Return the dimensions that an operation changes; none if they are not known."""
    names = {"Concatenate": ["dim"], "Interleave": ["dim"], "Transpose": ["dim0", "dim1"]}
    return [getattr(operation, name) for name in names.get(type(operation).__name__, ())]


def keeps_own_rows(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that registers a loaded tensor, which keeps this rank's rows of it."""

    def set_param(model: Any, target_name: str, param_value: Any, *args: Any, **kw: Any) -> None:
        param = _find(model, target_name)
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


def copies_tied(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that prepares a state dict for files, where each name has a copy."""

    def redistribute(state_dict: Any, reference_state_dict: Any = None) -> Any:
        found = original(state_dict, reference_state_dict)
        sharded = {key: value for key, value in found.items() if isinstance(value, ShardedRows)}
        first: dict[int, str] = {}
        for key, value in sharded.items():
            local = value.to_local()
            if local.numel() and first.setdefault(local.data_ptr(), key) != key:
                found[key] = rows_like(local.clone(), value)
        return found

    return redistribute


def _find(model: Any, name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(module), attribute, None)


def _own_rows(param: ShardedRows, source: Any, start: int = 0) -> Any:
    """Return this rank's rows of a tensor in memory, or in a file, which is read in slices.

    Row `start` of the tensor is the first row of the parameter.
    """
    parts = []
    for chunk in param.chunks():
        first, *columns = chunk.block
        parts.append(source[(slice(start + first.start, start + first.stop), *columns)])
    if len(parts) == 1:
        return parts[0]
    local = param.to_local()
    rows = torch.empty(local.shape, dtype=parts[0].dtype if parts else local.dtype)
    for chunk, part in zip(param.chunks(), parts, strict=True):
        rows[chunk.local] = part
    return rows
