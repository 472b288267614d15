"""Optimizer state: templates of the state that a step creates, and `FusedAdam`'s scaled state.

Transformer Engine's `FusedAdam` keeps one scale per tensor of state in fp16 and fp8. A scale
belongs to the rows of one rank. After resharding, a rank may hold rows that were saved with
different scales. A checkpoint therefore contains the unscaled values in fp32, as `FusedAdam` reads
them in a step. This file does not import Transformer Engine; it recognizes its optimizer by its
attributes.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.dtensor.optimizer_state import has_no_rows
from megatron_fsdp_v2.dtensor.sharded_rows import local_of, rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALED = (torch.float16, torch.uint8)
_FP8 = torch.uint8
_MAX_NEIGHBOR_DISTANCE = 4
"""Number of fp32 values above and below a scale that the search for a saved scale tries."""


def optimizer_like(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """Return an optimizer of the same class and options with other parameters and no state.

    Args:
        optimizer: The optimizer to copy. It is not changed.
        groups: Parameter groups; missing options are set to the optimizer's defaults.
    """
    probe = object.__new__(type(optimizer))
    # Dictionaries are copied, so that hooks registered on one are not called for the other. A
    # schedule of learning rates sets a `step` on the instance that steps this instance.
    for key, value in vars(optimizer).items():
        if key not in ("state", "step"):
            vars(probe)[key] = copy.copy(value) if isinstance(value, dict) else value
    probe.state = defaultdict(dict)
    probe.param_groups = [{**optimizer.defaults, **group} for group in groups]
    return probe


def state_after_a_step(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], zero_param: torch.Tensor
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the state that a step creates for a zero parameter with a zero gradient.

    Args:
        optimizer: The optimizer whose class and options are used. It is not changed.
        options: Options of the parameter's group. Steps of some optimizers change them.
        zero_param: The parameter: zeros of the required shape and type.

    Returns:
        The state, or None if the step created none, and the options after the step.
    """
    if _rows(zero_param).numel():
        # Fused optimizers fail on empty tensors.
        zero_param.grad = torch.zeros_like(zero_param)
    probe = optimizer_like(optimizer, [{**copy.deepcopy(options), "params": [zero_param]}])
    probe.step()
    stepped = {key: value for key, value in probe.param_groups[0].items() if key != "params"}
    return probe.state.get(zero_param), stepped


def supports_any_grad_dtype(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer supports gradients of another dtype than the parameter's."""
    return hasattr(optimizer, "name_to_dtype_map")


def scaled_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of an optimizer's scaled state; empty for most optimizers."""
    dtypes: Mapping[str, torch.dtype] = getattr(optimizer, "name_to_dtype_map", {})
    return tuple(name for name in _MOMENTS if dtypes.get(name) in _SCALED)


def unscaled(optimizer: Any, param: torch.Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state for a checkpoint, with unscaled values of scaled tensors.

    Args:
        optimizer: The optimizer that has the state.
        param: A sharded parameter.
        entry: The parameter's state. It is returned itself if no tensor is scaled.
    """
    names = [name for name in scaled_names(optimizer) if name in entry]
    if not names:
        return entry
    like = cast("UnevenDTensor", param)
    values = {name: rows_like(optimizer.get_unscaled_state(param, name), like) for name in names}
    return entry | values


def unscaled_zeros(param: torch.Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    """Return zero tensors into which a checkpoint reads the state of these names."""
    like, rows = cast("UnevenDTensor", param), local_of(param)
    return {name: rows_like(torch.zeros_like(rows, dtype=torch.float32), like) for name in names}


def load_scaled(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load state that `unscaled` returned. Rows that one rank saved are bitwise identical.

    Rows that were saved with several scales are rounded again, with a new common scale.

    Args:
        optimizer: A `FusedAdam`.
        state_dict: State and groups, with arbitrary keys of parameters.
    """
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.state = defaultdict(dict)
    optimizer._scales = {}
    scaled = scaled_names(optimizer)
    for key, param in zip(keys, params, strict=True):
        if has_no_rows(param):
            # The amax of an empty tensor is an error; the next step creates empty state.
            continue
        for name, value in state_dict["state"].get(key, {}).items():
            values = _rows(value).float()
            # `set_scaled_state` overwrites its argument.
            optimizer.set_scaled_state(param, name, values.clone())
            if name in scaled:
                _reset_zero_scale(optimizer, param, name)
                _store_scaled(optimizer, param, name, values)


def _store_scaled(optimizer: Any, param: torch.Tensor, name: str, wanted: torch.Tensor) -> None:
    """Store values with the scale from which they were unscaled, if the search finds it.

    The values are products of stored elements and the scale, rounded to fp32. The optimizer
    computes a scale from the largest value, which may give a neighbor of the original scale.
    """
    stored = _rows(optimizer.state[param][name])
    scale = _scale_of(optimizer, param, name)
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
    for _ in range(_MAX_NEIGHBOR_DISTANCE):
        below = torch.nextafter(below, torch.zeros_like(scale))
        above = torch.nextafter(above, torch.full_like(scale, torch.inf))
        yield below
        yield above


def reset_zero_scales_after_steps(optimizer: Any) -> None:
    """Reset fp8 state with a zero scale to zeros after every step.

    If all values are zero, so is their scale: `FusedAdam` divides by it and stores NaN. For
    example, a rank's rows of an embedding have such state until a token uses one of them.
    """
    names = [name for name in scaled_names(optimizer) if optimizer.name_to_dtype_map[name] is _FP8]
    if names:
        optimizer.register_step_post_hook(lambda stepped, *_: _reset_zero_scales(stepped, names))


def _reset_zero_scales(optimizer: Any, names: list[str]) -> None:
    for param, entry in optimizer.state.items():
        for name in names:
            if name in entry and not has_no_rows(param):
                _reset_zero_scale(optimizer, param, name)


def _reset_zero_scale(optimizer: Any, param: torch.Tensor, name: str) -> None:
    stored = _rows(optimizer.state[param][name])
    if not _is_fp8(stored):
        return
    # A branch on the values would synchronize the host with the device.
    is_zero = optimizer._scales[param][name] == 0
    for factor in (stored._quantizer.scale, stored._scale_inv):
        factor.copy_(torch.where(is_zero.view_as(factor), 1.0, factor))
    stored._data.masked_fill_(is_zero, 0)


def _scale_of(optimizer: Any, param: torch.Tensor, name: str) -> torch.Tensor:
    """Return the factor of stored elements, of shape `(1,)` or `()`."""
    stored = _rows(optimizer.state[param][name])
    scale = stored._scale_inv if _is_fp8(stored) else optimizer._scales[param][name]
    return cast("torch.Tensor", scale)


def _is_fp8(stored: torch.Tensor) -> bool:
    return hasattr(stored, "_scale_inv")


def _rows(value: torch.Tensor) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value
