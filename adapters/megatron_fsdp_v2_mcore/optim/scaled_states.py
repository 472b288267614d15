"""State of Transformer Engine's `FusedAdam` in fp16 and fp8, whose tensors have a scale each.

A scale belongs to the rows that one rank holds. With other ranks, rows come together that had other
scales. So a checkpoint has the values themselves, in fp32, as `FusedAdam` reads them in a step.
Transformer Engine is not imported: an optimizer of its kind is known by what it has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.dtensor.optimizer_state import has_no_rows
from megatron_fsdp_v2.dtensor.sharded_rows import rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of

__all__ = [
    "load_scaled",
    "reads_any_gradient",
    "scaled_names",
    "unscaled",
    "unscaled_zeros",
    "watch_scales",
]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALED = (torch.float16, torch.uint8)
_FP8 = torch.uint8
_MOST_STEPS = 4
"""Neighbors of a scale, each way, among which that of saved values is looked for."""


def reads_any_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer steps a parameter with a gradient of another dtype."""
    return hasattr(optimizer, "name_to_dtype_map")


def scaled_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the state that an optimizer keeps with scales; none for most optimizers."""
    dtypes: Mapping[str, torch.dtype] = getattr(optimizer, "name_to_dtype_map", {})
    return tuple(name for name in _MOMENTS if dtypes.get(name) in _SCALED)


def unscaled(optimizer: Any, param: torch.Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state for a checkpoint: values instead of what is stored with a scale.

    Args:
        optimizer: Whose state it is.
        param: A sharded parameter.
        entry: What the optimizer has of it; the same object where nothing has a scale.
    """
    names = [name for name in scaled_names(optimizer) if name in entry]
    if not names:
        return entry
    like = cast("UnevenDTensor", param)
    values = {name: rows_like(optimizer.get_unscaled_state(param, name), like) for name in names}
    return entry | values


def unscaled_zeros(param: torch.Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    """What state of these names is read into from a checkpoint."""
    like = cast("UnevenDTensor", param)
    return {
        name: rows_like(torch.zeros_like(local_of(param), dtype=torch.float32), like)
        for name in names
    }


def load_scaled(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load what `unscaled` made. Where the rows are those that were saved, stored bits are, too.

    Rows that had several scales are rounded once more, to the one they have from now on.

    Args:
        optimizer: A `FusedAdam`.
        state_dict: State and groups; keys of parameters may be any.
    """
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.state = defaultdict(dict)
    optimizer._scales = {}
    scaled = scaled_names(optimizer)
    for key, param in zip(keys, params, strict=True):
        if has_no_rows(param):
            # An amax of nothing is an error; the next step makes state of no elements.
            continue
        for name, value in state_dict["state"].get(key, {}).items():
            values = _rows(value).float()
            # What it is given is overwritten.
            optimizer.set_scaled_state(param, name, values.clone())
            if name in scaled:
                _settle_zeros(optimizer, param, name)
                _keep_values(optimizer, param, name, values)


def _keep_values(optimizer: Any, param: torch.Tensor, name: str, wanted: torch.Tensor) -> None:
    """Find the scale that the values were stored with.

    They are products of it, rounded to fp32. The largest one divided by what it was stored as,
    which is how the optimizer makes a scale, may be its neighbor.
    """
    stored = _rows(optimizer.state[param][name])
    scale = _factor(optimizer, param, name)
    first = scale.clone()
    for candidate in _neighbors(first):
        _store(stored, wanted, scale, candidate)
        if torch.equal(optimizer.get_unscaled_state(param, name), wanted):
            return
    _store(stored, wanted, scale, first)


def _store(stored: Any, values: torch.Tensor, scale: torch.Tensor, candidate: torch.Tensor) -> None:
    inverse = torch.where(candidate > 0, candidate.reciprocal(), 0.0)
    if _is_fp8(stored):
        stored._quantizer.scale.copy_(inverse)
        stored.copy_(values)
    else:
        stored.copy_(values * inverse)
    scale.copy_(candidate)


def _neighbors(scale: torch.Tensor) -> Iterator[torch.Tensor]:
    yield scale
    below = above = scale
    for _ in range(_MOST_STEPS):
        below = torch.nextafter(below, torch.zeros_like(scale))
        above = torch.nextafter(above, torch.full_like(scale, torch.inf))
        yield below
        yield above


def watch_scales(optimizer: torch.optim.Optimizer) -> None:
    """Have state in fp8 whose elements are all zero be zeros.

    `FusedAdam` divides by a scale of zero there, and what it stores is NaN. The rows that a rank
    has of an embedding may well have seen no token.
    """
    names = [
        name
        for name in scaled_names(optimizer)
        if cast("Any", optimizer).name_to_dtype_map[name] is _FP8
    ]
    if names:
        optimizer.register_step_post_hook(lambda stepped, *_: _settle_all(stepped, names))


def _settle_all(optimizer: Any, names: list[str]) -> None:
    for param, entry in optimizer.state.items():
        for name in names:
            if name in entry and not has_no_rows(param):
                _settle_zeros(optimizer, param, name)


def _settle_zeros(optimizer: Any, param: torch.Tensor, name: str) -> None:
    stored = _rows(optimizer.state[param][name])
    if not _is_fp8(stored):
        return
    # Without a look at the values, for which the host would have to wait.
    is_zero = optimizer._scales[param][name] == 0
    factors = (stored._quantizer.scale, stored._scale_inv)
    for factor in factors:
        factor.copy_(torch.where(is_zero.view_as(factor), 1.0, factor))
    stored._data.masked_fill_(is_zero, 0)


def _factor(optimizer: Any, param: torch.Tensor, name: str) -> torch.Tensor:
    """What stored elements are multiplied with: `(1,)`, or without dimensions."""
    stored = _rows(optimizer.state[param][name])
    scale = stored._scale_inv if _is_fp8(stored) else optimizer._scales[param][name]
    return cast("torch.Tensor", scale)


def _is_fp8(stored: torch.Tensor) -> bool:
    return hasattr(stored, "_scale_inv")


def _rows(value: torch.Tensor) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value
