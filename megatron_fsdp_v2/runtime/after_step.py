"""The first gathers of a step, issued when the optimizer has stepped what they gather."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from megatron_fsdp_v2.params.autograd import in_backward
from megatron_fsdp_v2.runtime.end_of_backward import needs_repair

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.context import Context

__all__ = ["unshard_after_step"]


def unshard_after_step(context: Context, stepped: AbstractSet[int]) -> None:
    """Start to gather what the next forward begins with, as far as its parameters were stepped.

    Host work until that forward then overlaps the gathers. Collective, where steps are.

    Args:
        context: Of a root whose parameters were stepped.
        stepped: `id()`s of all parameters that the optimizer holds.
    """
    context.stepped |= stepped
    units = context.units()
    is_between = context.is_checked and not (in_backward() or context.is_in_forward)
    if not (units and is_between) or context.is_scheduled or needs_repair(context):
        return
    for unit in units:
        if unit.is_gathered_after_step:
            unit.note_unstepped(stepped, context.weight_version)
    for unit in context.gathers.gather_before_pass(
        # One that is not done would have to be gathered again.
        units[0],
        lambda unit: unit.is_stepped(context.stepped),
    ):
        unit.is_gathered_after_step = unit.is_unsharded
