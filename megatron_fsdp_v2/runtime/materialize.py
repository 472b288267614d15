"""Parameters on the meta device become real, one unit at a time, the same on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp_v2.comm.calls import broadcast_single
from megatron_fsdp_v2.comm.errors import naming_failures
from megatron_fsdp_v2.dtensor.tp_params import part_of
from megatron_fsdp_v2.params.attributes import propagate_attributes
from megatron_fsdp_v2.params.formats import DenseFormat, format_of
from megatron_fsdp_v2.params.unset_values import is_unset, mark_unset
from megatron_fsdp_v2.runtime.undo import keep_values

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_fsdp_v2.comm.interface import Axis
    from megatron_fsdp_v2.params.registration import OwnedParameter

__all__ = ["materialize"]


def materialize(
    owned: Sequence[OwnedParameter],
    modules: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    axes: Sequence[Axis],
    param_init_fn: Callable[[nn.Module], None] | None,
    undo: ExitStack,
) -> tuple[set[str], list[tuple[str, nn.Module, str]]]:
    """Give a unit's meta parameters and buffers memory and values, in place.

    Collective where there are some; nothing happens where there are none.

    Every module that holds some has its `reset_parameters()` called, parents after children and
    siblings in the order of their registration, as they were constructed, so that they draw
    random numbers in that order; torch's default generators are left where they were. The values of
    the first rank go to all others, so that every rank cuts its rows from the same full parameters,
    however ranks are seeded. Memory: this one unit in full, until the caller has cut it.

    Args:
        owned: Parameters of the unit; the meta ones are replaced by real ones, tied as before.
        modules: The unit's own modules with names, parents before children.
        device: Where values are made.
        axes: Axes of the data-parallel mesh.
        param_init_fn: What to call in place of `reset_parameters()`, with the module.
        undo: Has random numbers, and values that modules have besides, be as they were. What is
            registered is the caller's to restore.

    Returns:
        What still has no values, because a module has no `reset_parameters()` or that leaves it
        out: names of parameters; and buffers as name, module and attribute.

    Raises:
        ValueError: A module registered something else in the place of a parameter.
    """
    fresh = [parameter for parameter in owned if parameter.param.is_meta]
    holders = {id(module) for parameter in fresh for module, _ in parameter.sites}
    empty_buffers: list[tuple[str, nn.Module, str]] = []
    for name, module in modules:
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[attribute] = mark_unset(torch.empty_like(buffer, device=device))
                label = f"{name}.{attribute}" if name else attribute
                empty_buffers.append((label, module, attribute))
                holders.add(id(module))
    for parameter in fresh:
        _give_memory(parameter, device)
    made = {id(parameter.param) for parameter in fresh}
    made |= {id(module._buffers[attribute]) for _, module, attribute in empty_buffers}
    if holders:
        with _initial_values(device, modules[0][1], undo):
            for _, module in _children_first(modules):
                if id(module) in holders:
                    keep_values(_values_of(module, made), undo)
                    _initialize(module, param_init_fn)
    for parameter in fresh:
        _take_over(parameter)
    buffers = [(one[1]._buffers[one[2]], one) for one in empty_buffers]
    for parameter in fresh:
        if parameter.dtensor is not None and parameter.dtensor.placement.is_replicate():
            _share(part_of(parameter.param), parameter.dtensor.mesh.get_group())
    tensors = [_values(parameter) for parameter in fresh]
    tensors += [buffer for buffer, _ in buffers if buffer is not None]
    for tensor in tensors:
        # Along one axis, then the other.
        for axis in axes:
            if axis.size > 1:
                _share(tensor, axis.group)
    # Asked of what ranks share: memory that a module left as it got it may look so on some ranks.
    unset = {p.name for p in fresh if is_unset(_values(p))}
    return unset, [one for buffer, one in buffers if buffer is not None and is_unset(buffer)]


@dataclass(frozen=True, slots=True)
class _Draws:
    """Random numbers for initial values, drawn from generators of their own.

    Attributes:
        outside: States of torch's default generators, which do not move.
        inside: States from which the values of the next unit are drawn.
        latest: A module of the last unit that drew.
    """

    outside: Sequence[torch.Tensor]
    inside: Sequence[torch.Tensor]
    latest: weakref.ref[nn.Module]

    def is_continued(self, outside: Sequence[torch.Tensor]) -> bool:
        """Whether the next unit may be of the same model, which has not run yet."""
        unit = getattr(self.latest(), "_fsdp_unit", None)
        is_waiting = unit is not None and not unit.context.is_checked
        return is_waiting and all(map(torch.equal, self.outside, outside))


_DRAWS: dict[torch.device, _Draws] = {}


@contextmanager
def _initial_values(device: torch.device, module: nn.Module, undo: ExitStack) -> Iterator[None]:
    """Draw values of a unit, and leave torch's default generators where they are.

    Values begin where the generators are. Those of the units that follow continue there, as if the
    model had been built with memory, until the program draws, seeds anew or runs the model.
    """
    outside, last = _random_states(device), _DRAWS.get(device)
    undo.callback(_set_random_states, device, outside)
    if last is not None:
        undo.callback(_DRAWS.__setitem__, device, last)
        if last.is_continued(outside):
            _set_random_states(device, last.inside)
    yield
    _DRAWS[device] = _Draws(outside, _random_states(device), weakref.ref(module))
    _set_random_states(device, outside)


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """Of torch's default generators of the CPU and of a device."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_random_states(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


def _values(parameter: OwnedParameter) -> torch.Tensor:
    return part_of(parameter.param) if parameter.values is None else parameter.values


def _children_first(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The same modules with names, children before parents, siblings as they come."""
    ordered: list[tuple[str, nn.Module]] = []
    above: list[tuple[str, nn.Module]] = []
    for name, module in modules:
        while above and above[-1][0] and not name.startswith(f"{above[-1][0]}."):
            ordered.append(above.pop())
        above.append((name, module))
    return ordered + above[::-1]


def _give_memory(parameter: OwnedParameter, device: torch.device) -> None:
    old = parameter.param
    made = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
    with torch.no_grad():
        mark_unset(part_of(made))
    for key, value in vars(old).items():
        setattr(made, key, value)
    parameter.param, parameter.stood_in = made, old
    for module, attribute in parameter.sites:
        module._parameters[attribute] = made


def _values_of(module: nn.Module, made: set[int]) -> list[torch.Tensor]:
    """What a module had values of before; given are the `id()`s of what was made for it."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None and id(tensor) not in made]


def _initialize(module: Any, param_init_fn: Callable[[nn.Module], None] | None) -> None:
    reset = getattr(module, "reset_parameters", None)
    with torch.no_grad():
        if param_init_fn is not None:
            param_init_fn(module)
        elif reset is not None:
            reset()


def _take_over(parameter: OwnedParameter) -> None:
    """Take values and marks from what an initialization registered in a parameter's place.

    Transformer Engine's registers a parameter of its own over the same memory, and marks that one.
    """
    made = parameter.param
    for module, attribute in parameter.sites:
        found = module._parameters[attribute]
        if found is None or found is made:
            continue
        if found.shape != made.shape or found.is_meta:
            raise ValueError(
                f"the initialization of {type(module).__name__} left {attribute} of shape "
                f"{tuple(found.shape)} on {found.device}, where it was of {tuple(made.shape)}; "
                "write the values into the parameter that is there"
            )
        found_format = format_of(found)
        if found_format not in (None, DenseFormat):
            # The initialization quantized what it drew: that is what the module is to have.
            assert found_format is not None
            propagate_attributes(made, found)
            parameter.param, parameter.values = found, found_format.values(found)
            return
        if found.data_ptr() != made.data_ptr():
            with torch.no_grad():
                made.copy_(found)
        propagate_attributes(found, made)
        module._parameters[attribute] = made


def _share(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Give every rank of a group the first one's values."""
    with naming_failures("broadcast of initial values", group):
        broadcast_single(tensor, group=group)
