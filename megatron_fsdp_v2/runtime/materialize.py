"""Materialization of parameters on the meta device, unit by unit, identical on every rank.

A parameter or buffer that its module does not initialize is filled with a marker: NaN, or the
smallest integer. If it still holds only the marker at the root's first use, an error names it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.comm.calls import broadcast_single
from megatron_fsdp_v2.comm.interface import Axis, naming_failures
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.params.formats import DenseFormat, format_of
from megatron_fsdp_v2.params.group import ParameterGroup, one_per_mesh
from megatron_fsdp_v2.params.parameters import OwnedParameter, propagate_attributes

# The name of a tensor without values, and a function that looks the tensor up.
type UnsetTensor = tuple[str, Callable[[], torch.Tensor | None]]


def materialize(
    owned: Sequence[OwnedParameter],
    roots: Sequence[nn.Module],
    modules: Iterable[tuple[str, nn.Module]],
    device: torch.device,
    axes: Sequence[Axis],
    holders: Mapping[str, torch.Tensor],
    param_init_fn: Callable[[nn.Module], None] | None,
    undo: ExitStack,
) -> tuple[set[str], list[UnsetTensor]]:
    """Allocate and initialize a unit's meta parameters and buffers, in place.

    Collective if there are any; otherwise a no-op.

    Calls `reset_parameters()` of every module that has meta tensors once, children before parents
    and siblings in order of registration. Modules are constructed in this order, so they draw the
    same random numbers as without the meta device; torch's default generators keep their state. The
    first rank broadcasts its values, so that every rank shards the same full parameters, however
    ranks are seeded. Memory: the full parameters of this unit, until the caller has sharded them.

    A tensor that some ranks have values of (as where only rank 0 loads a model) is not initialized:
    the first of these ranks broadcasts its values, parameters to all ranks and buffers to those on
    the meta device.

    Args:
        owned: Parameters of the unit; meta parameters are replaced by allocated ones, with the same
            ties.
        roots: The modules given to `fully_shard`.
        modules: The unit's own modules with names.
        device: Device to allocate on.
        axes: Axes of the unit's data-parallel mesh.
        holders: Of each tensor that is on the meta device on some ranks only, which ranks of its
            mesh have values.
        param_init_fn: Called with the module instead of `reset_parameters()`.
        undo: Restores generator states and the other tensors of the initialized modules. The caller
            restores registered parameters and buffers.

    Returns:
        Names of parameters without values, and buffers without values. A tensor has no values if
        its module has no `reset_parameters()`, or if that method skips the tensor.

    Raises:
        ValueError: A module replaced a parameter by one of another shape, or on the meta device.
    """
    fresh = [parameter for parameter in owned if parameter.param.is_meta]
    shared = [p for p in owned if p.param.is_meta or p.name in holders]
    # Modules to initialize.
    waiting = {id(m) for p in fresh if p.name not in holders for m, _ in p.sites}
    made: set[int] = set()
    buffers: list[UnsetTensor] = []
    held_buffers: set[str] = set()
    for name, module in modules:
        for attribute, buffer in module._buffers.items():
            label = f"{name}.{attribute}" if name else attribute
            if buffer is None or not (buffer.is_meta or label in holders):
                continue
            buffers.append((label, functools.partial(_buffer_of, weakref.ref(module), attribute)))
            if buffer.is_meta:
                empty = module._buffers[attribute] = torch.empty_like(buffer, device=device)
                made.add(id(mark_unset(empty)))
                if label not in holders:
                    waiting.add(id(module))
            else:
                held_buffers.add(label)
    for parameter in fresh:
        _materialize_parameter(parameter, device)
        made.add(id(parameter.param))

    if waiting:
        with _initial_values(device, roots[0], undo):
            for module in itertools.chain.from_iterable(map(_children_first, roots)):
                # A module that several modules register is visited for each of them.
                if id(module) in waiting:
                    waiting.remove(id(module))
                    _initialize(module, param_init_fn, made, undo)
    for parameter in fresh:
        _copy_from_replacement(parameter)
        if parameter.dtensor is not None and parameter.name not in holders:
            spec, data_axes = parameter.dtensor
            for number, placement in enumerate(spec.placements):
                if placement.is_replicate() and number not in data_axes:
                    _share(plain_of(parameter.param).detach(), spec.mesh.get_group(number))
    tensors: list[tuple[str, torch.Tensor, Sequence[Axis]]] = []
    for parameter in shared:
        if parameter.meta_original is None:
            # A copy, since the program may hold the original.
            parameter.values = _values(parameter).to(device, copy=True)
        among = axes if parameter.spec is None else parameter.spec.grid.axes
        tensors.append((parameter.name, _values(parameter), among))
    for label, buffer_of in buffers:
        if (found := buffer_of()) is not None:
            tensor = found.to(device, copy=True) if label in held_buffers else found
            tensors.append((label, tensor, axes))
    for name, tensor, among in tensors:
        _share_along(tensor, among, holders.get(name))
    # Checked after the broadcast, so that all ranks find the same tensors.
    unset = {p.name for p in fresh if p.name not in holders and _is_unset(_values(p))}
    initialized = [(label, look_up) for label, look_up in buffers if label not in holders]
    return unset, [(label, look_up) for label, look_up in initialized if _is_unset(look_up())]


@dataclass(frozen=True, slots=True)
class _GeneratorStates:
    """Generator states for initial values, separate from those of the program.

    Attributes:
        outside: States of torch's default generators, left unchanged.
        inside: States after the latest unit, from which the next unit continues.
        latest: A module of the unit initialized last.
    """

    outside: Sequence[torch.Tensor]
    inside: Sequence[torch.Tensor]
    latest: weakref.ref[nn.Module]

    def is_continued(self, outside: Sequence[torch.Tensor]) -> bool:
        """Return whether the next unit may belong to the same model, which has not run yet."""
        unit = getattr(self.latest(), "_fsdp_unit", None)
        is_waiting = unit is not None and not unit.context.state.is_checked
        return is_waiting and all(map(torch.equal, self.outside, outside))


_GENERATOR_STATES: dict[torch.device, _GeneratorStates] = {}


@contextmanager
def _initial_values(device: torch.device, module: nn.Module, undo: ExitStack) -> Iterator[None]:
    """Draw values of a unit without advancing torch's default generators.

    The first unit draws from the generators' current states and each later unit continues, as if
    the model had not been on the meta device, until the program draws, seeds or runs the model.
    """
    outside, last = _random_states(device), _GENERATOR_STATES.get(device)
    undo.callback(_set_random_states, device, outside)
    if last is not None:
        undo.callback(_GENERATOR_STATES.__setitem__, device, last)
        if last.is_continued(outside):
            _set_random_states(device, last.inside)
    yield
    _GENERATOR_STATES[device] = _GeneratorStates(
        outside, _random_states(device), weakref.ref(module)
    )
    _set_random_states(device, outside)


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's default generators of the CPU and of a device."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_random_states(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


def _values(parameter: OwnedParameter) -> torch.Tensor:
    return plain_of(parameter.param).detach() if parameter.values is None else parameter.values


def _materialize_parameter(parameter: OwnedParameter, device: torch.device) -> None:
    old = parameter.param
    made = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
    with torch.no_grad():
        mark_unset(plain_of(made))
    for key, value in vars(old).items():
        setattr(made, key, value)
    parameter.param, parameter.meta_original = made, old
    for module, attribute in parameter.sites:
        module._parameters[attribute] = made


def _copy_from_replacement(parameter: OwnedParameter) -> None:
    """Copy values and attributes from a parameter that an initialization registered in its place.

    Transformer Engine registers a new parameter over the same memory and sets attributes on it.
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
        if found_format is not None and found_format is not DenseFormat:
            # The initialization quantized its values; the module keeps the quantized parameter.
            propagate_attributes(made, found)
            parameter.param, parameter.values = found, found_format.values(found)
            return
        if found.data_ptr() != made.data_ptr():
            with torch.no_grad():
                made.copy_(found)
        propagate_attributes(found, made)
        module._parameters[attribute] = made


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules below a module, and the module. Calls no method that users override."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _initialize(
    module: Any,
    param_init_fn: Callable[[nn.Module], None] | None,
    made: Container[int],
    undo: ExitStack,
) -> None:
    """Initialize a module; `undo` restores its tensors, except the newly made ones.

    Args:
        module: The module.
        param_init_fn: Called with the module instead of `reset_parameters()`.
        made: `id()`s of the tensors that were made for meta tensors.
        undo: Restores the other tensors.
    """
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and id(tensor) not in made:
            undo.callback(tensor.detach().copy_, tensor.detach().clone())
    reset = getattr(module, "reset_parameters", None)
    with torch.no_grad():
        if param_init_fn is not None:
            param_init_fn(module)
        elif reset is not None:
            reset()


def _share_along(tensor: torch.Tensor, axes: Sequence[Axis], holders: torch.Tensor | None) -> None:
    """Broadcast a tensor along one axis of a mesh after the other, from the first rank with values.

    Args:
        tensor: This rank's tensor.
        axes: Axes of the mesh, outermost first.
        holders: Which ranks have values, of the shape of the mesh; None: all.
    """
    for number, axis in enumerate(axes):
        source = 0
        if holders is not None:
            along = holders[*(slice(None) if a is axis else a.rank for a in axes)].tolist()
            holders = holders.any(number, keepdim=True).expand_as(holders)
            if True not in along:
                continue
            source = along.index(True)
        if axis.size > 1:
            _share(tensor, axis.group, source)


def _share(tensor: torch.Tensor, group: dist.ProcessGroup, source: int = 0) -> None:
    """Broadcast a tensor from a rank of a group, the first one by default."""
    with naming_failures("broadcast of initial values", group):
        broadcast_single(tensor, group=group, source=source)


# -- tensors without values -------------------------------------------------------------------


def mark_unset(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with the marker. Booleans, unsigned and complex dtypes have no marker.

    The smallest value of booleans and unsigned dtypes (False, 0) is a common value of buffers.
    """
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype.is_signed and not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def _is_unset(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor has elements and all of them are the marker."""
    if tensor is None or not tensor.numel() or tensor.is_meta:
        return False
    if tensor.is_floating_point():
        return bool(tensor.isnan().all())
    if not tensor.dtype.is_signed or tensor.is_complex():
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _buffer_of(module: weakref.ref[nn.Module], attribute: str) -> torch.Tensor | None:
    owner = module()
    buffer = None if owner is None else owner._buffers.get(attribute)
    return None if buffer is None else plain_of(buffer)


def check_has_values(
    name: str, unset: Sequence[UnsetTensor], groups: Sequence[ParameterGroup]
) -> None:
    """Check that all tensors of a unit have values. Collective if some had none when it was made.

    Args:
        name: Name of the unit.
        unset: Its tensors that had no values when it was made.
        groups: Its own groups.

    Raises:
        RuntimeError: A tensor has no values on some rank.
    """
    if not unset:
        return
    for group in groups:
        group.parameters.sync()
    found = [_is_unset(look_up()) for _, look_up in unset]
    # Ranks without rows of a parameter get the result from the ranks that have some.
    for group in one_per_mesh(groups):
        table = torch.tensor(found, dtype=torch.int32, device=group.device)
        for axis in group.axes:
            if axis.size > 1:
                dist.all_reduce(table, op=dist.ReduceOp.MAX, group=axis.group)
        found = [bool(one) for one in table.tolist()]
    names = [label for (label, _), is_missing in zip(unset, found, strict=True) if is_missing]
    if names:
        raise RuntimeError(
            f"{', '.join(names)} of unit {name} had no values on the meta device, or after "
            "rebuild(), and got none since: load a state dict, define reset_parameters() on the "
            "module that has it, or give fully_shard UnitOptions(param_init_fn=...)"
        )
