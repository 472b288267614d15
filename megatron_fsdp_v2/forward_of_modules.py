"""A unit's forward: its module's, or from the first of several modules to the last of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_v2.autograd_engine import in_backward
from megatron_fsdp_v2.unit_checks import check_has_values

if TYPE_CHECKING:
    from torch import nn

    from megatron_fsdp_v2.unit import Unit

__all__ = ["after_forward", "post_forward", "pre_forward"]


def pre_forward(unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Before the forward of one of a unit's modules.

    Returns:
        The arguments to run it with.
    """
    if unit.unset:
        check_has_values(unit)
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
    if len(unit.modules) > 1 and not in_backward():
        unit.left_to_run.discard(id(module))
        if unit.left_to_run:
            if not torch.is_grad_enabled() and unit.context.pass_has_grad:
                # Its recomputation has a backward of its own.
                unit.note_use()
            return unit.hand_on(output)
    if unit.is_root and not in_backward():
        for other in unit.context.units():
            if other.left_to_run:
                _end_early(other)
    return unit.post_forward(output)


def after_forward(unit: Unit, module: nn.Module) -> None:
    """After the forward of one of a unit's modules, also where it raised."""
    if unit.left_to_run and not in_backward():
        if id(module) not in unit.left_to_run:
            # The others are still to come.
            return
        unit.left_to_run.clear()
    unit.after_forward()


def _end_early(unit: Unit) -> None:
    """End a forward that some of the modules took no part in."""
    unit.left_to_run.clear()
    unit.end_forward()
