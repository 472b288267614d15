"""Builds a module from a description. Its units have the described parameters and take time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast, override

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.diagnostics.walk import parent_of
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.params.autograd import in_backward
from megatron_fsdp_v2.params.formats import (
    DenseFormat,
    GroupWrite,
    WeightFormat,
    register_format,
)
from megatron_fsdp_v2.plan.description import (
    ParameterDescription,
    PayloadBytes,
    TrainingDescription,
    UnitDescription,
)
from megatron_fsdp_v2.plan.machine import Machine
from megatron_fsdp_v2.plan.simulation import Device


class DescribedUnit(nn.Module):
    """A module with the parameters, the nested units and the time of a described unit.

    Args:
        unit: Its description.
        training: The training.
        device: Device that computes.
        seconds: Time of its forward, without units inside it.

    Attributes:
        described: Description of the unit.
        inside: Nested units.
        runs: Nested units in the order in which they run; a unit that runs twice is listed twice.
    """

    def __init__(
        self,
        unit: UnitDescription,
        training: TrainingDescription,
        device: Device,
        seconds: float,
    ) -> None:
        super().__init__()
        self.described = unit
        self.inside = nn.ModuleList()
        self.runs: list[DescribedUnit] = []
        self._training = training
        self._device = device
        self._seconds = seconds
        for index, param in enumerate(unit.params):
            self.register_parameter(f"param_{index}", _parameter(param))

    def described_params(self, names: Sequence[str]) -> tuple[ParameterDescription, ...]:
        """Descriptions of its own parameters."""
        return tuple(self.described.params[int(name.removeprefix("param_"))] for name in names)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Most of the root's own computation is the output layer, which runs last. Units nested in
        # another unit run after its own layers.
        is_root = not self.described.name
        # Inputs of the root have no gradients, those of the units inside it do.
        x = x.detach().requires_grad_() if is_root else self._compute(x)
        for unit in self.runs:
            x = self._run(unit, x)
        return self._compute(x) if is_root else x

    def _run(self, unit: DescribedUnit, x: torch.Tensor) -> torch.Tensor:
        training, is_outermost = self._training, not self.described.name
        is_outermost |= self.described.keeps_gathered
        if not training.recompute_factor or not is_outermost or unit.described.keeps_gathered:
            return cast("torch.Tensor", unit(x))
        is_reentrant = training.recomputes_reentrantly
        found = checkpoint(unit, x, use_reentrant=is_reentrant, preserve_rng_state=False)
        return cast("torch.Tensor", found)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        factor = self._training.recompute_factor if in_backward() else 1.0
        x = _apply(_Compute, x, self._device, factor * self._seconds, 2 * self._seconds)
        # Tied parameters are used first, so their gradients arrive last.
        for name in sorted(self._parameters, key=lambda name: not name.startswith("tied_")):
            x = _apply(_Use, x, self._parameters[name])
        return x


def _apply(function: Any, *values: object) -> torch.Tensor:
    """Call a function that autograd records."""
    result: torch.Tensor = function.apply(*values)
    return result


class _Compute(torch.autograd.Function):
    """A computation that takes virtual time."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: torch.Tensor, device: Device, seconds: float, backward_seconds: float
    ) -> torch.Tensor:
        ctx.device, ctx.seconds = device, backward_seconds
        device.compute(seconds)
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.device.compute(ctx.seconds)
        return grads[0], None, None, None


class _Use(torch.autograd.Function):
    """The use of a parameter; its backward produces the gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(param)
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (param,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grads[0], None
        return grads[0], torch.empty(param.shape, dtype=param.dtype, device="meta")


def build(
    training: TrainingDescription, device: Device, machine: Machine | None
) -> list[DescribedUnit]:
    """Build the units of a training, with tied parameters and nested units.

    Args:
        training: The training.
        device: Device that computes.
        machine: Gives the times of forwards; None for no times.

    Returns:
        The units, in the order of `training.units`.
    """
    made = {}
    for unit in training.units:
        flops = unit.flops_per_token * training.tokens
        seconds = machine.compute_seconds(flops) if machine else 0.0
        made[unit.name] = DescribedUnit(unit, training, device, seconds)
    for unit in training.units[1:]:
        made[parent_of(unit.name, made)].inside.append(made[unit.name])
    for name in training.runs or list(made)[1:]:
        made[parent_of(name, made)].runs.append(made[name])
    for unit in training.units:
        for number, (owner, name) in enumerate(unit.tied):
            index = [param.name for param in made[owner].described.params].index(name)
            param = made[owner].get_parameter(f"param_{index}")
            made[unit.name].register_parameter(f"tied_{number}", param)
    return list(made.values())


def in_order_of_owners(units: Sequence[DescribedUnit]) -> list[DescribedUnit]:
    """Sort inner units before outer ones, and owners of tied parameters before their users."""
    names = {unit.described.name: unit for unit in units}
    ordered: dict[str, DescribedUnit] = {}

    def visit(unit: DescribedUnit) -> None:
        if unit.described.name in ordered:
            return
        for inside in unit.inside:
            visit(cast("DescribedUnit", inside))
        for owner, _ in unit.described.tied:
            visit(names[owner])
        ordered[unit.described.name] = unit

    for unit in units:
        visit(unit)
    return list(ordered.values())


def _parameter(described: ParameterDescription) -> nn.Parameter:
    """A parameter that has the memory of one element and no meaningful values."""
    values = torch.zeros(1, dtype=described.dtype).expand(described.shape)
    param = nn.Parameter(values, requires_grad=described.requires_grad)
    if described.payload is not None:
        register_format(_format(described.payload))
        param.planned_payload = described.payload  # type: ignore[attr-defined]
    return param


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def _format(payload: PayloadBytes) -> type[WeightFormat]:
    """A weight format whose payloads have these sizes and no values."""

    class PlannedFormat(DenseFormat):
        """See `WeightFormat`."""

        own_attributes: ClassVar[frozenset[str]] = frozenset({"planned_payload"})
        communicates: ClassVar[bool] = payload.is_kept and len(payload.uses) == 1
        packing: ClassVar[int] = payload.packing
        payloads: ClassVar[Mapping[str, WeightUse]] = {
            f"payload_{number}": uses for number, uses in enumerate(payload.uses)
        }

        def __init__(self, dtypes: GroupDtypes) -> None:
            del dtypes
            self.payload_dtype = _INTEGERS[payload.itemsize]
            self._views: list[Sequence[torch.Tensor]] = []

        @staticmethod
        @override
        def takes(param: torch.Tensor) -> bool:
            return getattr(param, "planned_payload", None) == payload

        @staticmethod
        @override
        def itemsize(dtypes: GroupDtypes) -> int:
            del dtypes
            return payload.itemsize

        @override
        def bind(
            self, views: Sequence[torch.Tensor], index: int, like: torch.Tensor
        ) -> torch.Tensor:
            del index
            self._views.append(views)
            return torch.empty(1, dtype=like.dtype, device="meta").expand(like.shape)

        @override
        def memory(self, bound: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
            del bound
            return self._views[index]

        @classmethod
        @override
        def write(cls, parts: Sequence[GroupWrite[Self]], axes: Sequence[Axis]) -> None:
            del parts, axes

    return PlannedFormat
