"""A unit's forward: its module's, or from the first of several modules to the last of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_v2.params.autograd import in_backward
from megatron_fsdp_v2.runtime.returned_weights import check_outputs
from megatron_fsdp_v2.runtime.unit_checks import check_has_values

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn

    from megatron_fsdp_v2.runtime.unit import Unit
    from megatron_fsdp_v2.runtime.unit_base import UnitBase

__all__ = [
    "after_forward",
    "begin_method",
    "end_method",
    "fail_method",
    "post_forward",
    "pre_forward",
]


def pre_forward(unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Before the forward of one of a unit's modules.

    Returns:
        The arguments to run it with.
    """
    if _is_scheduled(unit):
        unit.check_is_used()
        return unit.cast_inputs(args, kwargs)
    if unit.unset:
        check_has_values(unit)
    if unit.method_frame is not None and _runs_method(unit):
        return unit.cast_inputs(args, kwargs)
    # A recomputation runs one of them, for the backward of that one.
    if len(unit.modules) == 1 or in_backward():
        return unit.pre_forward(args, kwargs)
    if unit.left_to_run and id(module) not in unit.left_to_run:
        # It ran already: this is the next forward, and the others were left out of that one.
        _end_early(unit)
    if unit.left_to_run:
        return unit.cast_inputs(args, kwargs)
    routed = unit.pre_forward(args, kwargs)
    unit.left_to_run = {id(ref()) for ref in unit.modules}
    return routed


def post_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """After the forward of one of a unit's modules.

    Returns:
        Its output.
    """
    if _is_scheduled(unit):
        return unit.cast_outputs(output)
    if unit.method_frame is not None and _runs_method(unit):
        return unit.hand_on(output)
    if len(unit.modules) > 1 and not in_backward():
        unit.left_to_run.discard(id(module))
        if unit.left_to_run:
            if not torch.is_grad_enabled() and unit.context.pass_has_grad:
                # Its recomputation has a backward of its own.
                unit.note_use()
            check_outputs(unit, output, unit.context)
            return unit.hand_on(output)
    if unit.is_root and not in_backward():
        for other in unit.context.units():
            if other.left_to_run:
                _end_early(other)
    return unit.post_forward(output)


def after_forward(unit: Unit, module: nn.Module) -> None:
    """After the forward of one of a unit's modules, also where it raised."""
    if _is_scheduled(unit) or (unit.method_frame is not None and _runs_method(unit)):
        return
    if unit.left_to_run and not in_backward():
        if id(module) not in unit.left_to_run:
            # The others are still to come.
            return
        unit.left_to_run.clear()
    unit.after_forward()


def begin_method(
    unit: Unit, module: nn.Module, frame: FrameType, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Before a method that is run as a forward, and may run the module's forward inside.

    Args:
        unit: The module's.
        module: Whose method.
        frame: Of the function that calls it.
        args: What it is called with.
        kwargs: Likewise.

    Returns:
        The arguments to run it with.
    """
    is_inside = _runs_method(unit)
    args, kwargs = pre_forward(unit, module, args, kwargs)
    if not is_inside:
        unit.method_frame = frame
    return args, kwargs


def end_method(unit: Unit, module: nn.Module, frame: FrameType, output: Any) -> Any:
    """After such a method.

    Returns:
        Its output.
    """
    if unit.method_frame is frame:
        unit.method_frame = None
    return post_forward(unit, module, output)


def fail_method(unit: Unit, module: nn.Module, frame: FrameType) -> None:
    """After such a method raised."""
    if unit.method_frame is frame:
        unit.method_frame = None
    after_forward(unit, module)


def _is_scheduled(unit: Unit) -> bool:
    """Whether a schedule tells when the unit is used.

    No schedule calls the root: if somebody does, an exception has ended the schedule.
    """
    return unit.context.num_scheduled > 0 and not unit.is_root


def _runs_method(unit: Unit) -> bool:
    """Whether this is inside of a method that is run as the unit's forward.

    Who calls the method need not tell when it raised, so this is looked up.
    """
    if unit.method_frame is None or in_backward():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame is unit.method_frame:
            return True
        frame = frame.f_back
    unit.method_frame = None
    return False


def _end_early(unit: UnitBase) -> None:
    """End a forward that some of the modules took no part in."""
    unit.left_to_run.clear()
    unit.end_forward()
