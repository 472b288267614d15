"""Parameters on the meta device become real, one unit at a time, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.comm_errors import naming_failures
from megatron_fsdp_v2.dtensor_parts import part_of

if TYPE_CHECKING:
    from megatron_fsdp_v2.comm_interface import Axis
    from megatron_fsdp_v2.registration import OwnedParameter

__all__ = ["materialise"]


def materialise(
    owned: Sequence[OwnedParameter],
    modules: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    axes: Sequence[Axis],
    param_init_fn: Callable[[nn.Module], None] | None = None,
) -> None:
    """Give a unit's meta parameters and buffers memory and values, in place.

    Collective where there are some; nothing happens where there are none.

    Every module that holds some has its `reset_parameters()` called, parents after children and
    siblings in the order of their registration, as they were constructed, so that they draw
    random numbers in that order. The values of the first rank go to all others, so that every
    rank cuts its rows from the same full parameters, however ranks are seeded. Memory: this one
    unit in full, until the caller has cut it.

    Args:
        owned: Parameters of the unit; the meta ones are replaced by real ones, tied as before.
        modules: The unit's own modules with names, parents before children.
        device: Where values are made.
        axes: Axes of the data-parallel mesh.
        param_init_fn: What to call in place of `reset_parameters()`, with the module.

    Raises:
        ValueError: A module cannot initialise itself, or left a buffer out.
    """
    fresh = [parameter for parameter in owned if parameter.param.is_meta]
    holders = {id(module) for parameter in fresh for module, _ in parameter.sites}
    empty_buffers = []
    for name, module in modules:
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[attribute] = _unset(buffer, device)
                empty_buffers.append((f"{name}.{attribute}" if name else attribute, module))
                holders.add(id(module))
    for parameter in fresh:
        _give_memory(parameter, device)
    for name, module in _children_first(modules):
        if id(module) in holders:
            _initialise(name, module, param_init_fn)
    for name, module in empty_buffers:
        value = module._buffers[name.rpartition(".")[2]]
        if value is not None and value.is_floating_point() and bool(value.isnan().all()):
            raise ValueError(
                f"buffer {name} is on the meta device and reset_parameters() of "
                f"{type(module).__name__} does not set it; set it there"
            )
    for parameter in fresh:
        if parameter.dtensor is not None and parameter.dtensor.placement.is_replicate():
            _share_along(part_of(parameter.param), parameter.dtensor.mesh.get_group())
    tensors = [part_of(parameter.param) for parameter in fresh]
    tensors += [m._buffers[name.rpartition(".")[2]] for name, m in empty_buffers]  # type: ignore[misc]
    for tensor in tensors:
        _share(tensor, axes)


def _children_first(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The same modules with names, children before parents, siblings as they come."""
    ordered: list[tuple[str, nn.Module]] = []
    above: list[tuple[str, nn.Module]] = []
    for name, module in modules:
        while above and above[-1][0] and not name.startswith(f"{above[-1][0]}."):
            ordered.append(above.pop())
        above.append((name, module))
    return ordered + above[::-1]


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(like, device=device)
    return made.fill_(float("nan")) if made.is_floating_point() else made


def _give_memory(parameter: OwnedParameter, device: torch.device) -> None:
    old = parameter.param
    made = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
    for key, value in vars(old).items():
        setattr(made, key, value)
    parameter.param, parameter.stood_in = made, old
    for module, attribute in parameter.sites:
        module._parameters[attribute] = made


def _initialise(name: str, module: Any, param_init_fn: Callable[[nn.Module], None] | None) -> None:
    if param_init_fn is not None:
        with torch.no_grad():
            param_init_fn(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"{name or 'the module'} ({type(module).__name__}) has parameters or buffers on the "
            "meta device and no reset_parameters() to give them values; define it, or build the "
            "module on a real device"
        )
    with torch.no_grad():
        reset()


def _share(tensor: torch.Tensor, axes: Sequence[Axis]) -> None:
    """Give every rank of the mesh the first rank's values: along one axis, then the other."""
    for axis in axes:
        if axis.size > 1:
            _share_along(tensor, axis.group)


def _share_along(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    with naming_failures("broadcast of initial values", group):
        dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
