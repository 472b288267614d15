"""Hooks on the modules of units: around a unit's forward, and around state dicts.

A unit's forward is its module's, or goes from the first of several modules to the last of them.
Hooks in the graph are in `params/autograd.py`, on parameters in `params/group.py` and
`params/registration.py`, on optimizers in `optimizer_steps.py`, on state dicts of optimizers in
`dtensor/optimizer_state.py`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.params.autograd import in_backward
from megatron_fsdp_v2.runtime.unit_checks import check_has_values, check_outputs

if TYPE_CHECKING:
    from types import FrameType

    from megatron_fsdp_v2.runtime.unit import Unit
    from megatron_fsdp_v2.runtime.unit_base import UnitBase

__all__ = ["begin_method", "end_method", "fail_method", "install_hooks"]


def install_hooks(module: nn.Module) -> None:
    """Run the unit's life around the module's forward.

    The pre-forward hook comes before a user's, which may read parameters; the post-forward hook
    comes after, for the same reason.
    """
    module.register_forward_pre_hook(uncompiled(_pre_forward), prepend=True, with_kwargs=True)
    module.register_forward_hook(uncompiled(_post_forward))
    module.register_forward_hook(uncompiled(_after_forward), always_call=True)
    # A state dict is of sharded parameters, also between a forward and its backward.
    module.register_state_dict_pre_hook(_show_sharded)  # type: ignore[no-untyped-call]
    module.register_state_dict_post_hook(_after_state_dict)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_show_sharded)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


# -- a forward --------------------------------------------------------------------------------


def _pre_forward(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Before the forward of one of a unit's modules.

    Returns:
        The arguments to run it with.
    """
    unit: Unit = module._fsdp_unit
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


def _post_forward(module: Any, args: Any, output: Any) -> Any:
    """After the forward of one of a unit's modules.

    Returns:
        Its output.
    """
    del args
    unit: Unit = module._fsdp_unit
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


def _after_forward(module: Any, args: Any, output: Any) -> None:
    """After the forward of one of a unit's modules, also where it or a hook before it raised."""
    del args, output
    unit: Unit = module._fsdp_unit
    if not unit.is_under_way or _is_scheduled(unit):
        return
    if unit.method_frame is not None and _runs_method(unit):
        return
    if unit.left_to_run and not in_backward():
        if id(module) not in unit.left_to_run:
            # The others are still to come.
            return
        unit.left_to_run.clear()
    unit.after_forward()


def begin_method(module: Any, frame: FrameType, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Before a method that is run as a forward, and may run the module's forward inside.

    Args:
        module: Whose method; one that is sharded.
        frame: Of the function that calls it.
        args: What it is called with.
        kwargs: Likewise.

    Returns:
        The arguments to run it with.
    """
    unit: Unit = module._fsdp_unit
    is_inside = _runs_method(unit)
    args, kwargs = _pre_forward(module, args, kwargs)
    if not is_inside:
        unit.method_frame = frame
    return args, kwargs


def end_method(module: Any, frame: FrameType, output: Any) -> Any:
    """After such a method.

    Returns:
        Its output.
    """
    _leave_method(module, frame)
    return _post_forward(module, (), output)


def fail_method(module: Any, frame: FrameType) -> None:
    """After such a method raised."""
    _leave_method(module, frame)
    _after_forward(module, (), None)


def _leave_method(module: Any, frame: FrameType) -> None:
    unit: Unit = module._fsdp_unit
    if unit.method_frame is frame:
        unit.method_frame = None


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


# -- state dicts ------------------------------------------------------------------------------


def _show_sharded(module: Any, *args: Any) -> None:
    """Before a state dict is made or loaded."""
    del args
    unit: Unit = module._fsdp_unit
    unit.hidden_groups = [group for group in unit.held_groups if group.show_sharded()]


def _after_state_dict(module: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
    del state_dict, prefix, metadata
    unit: Unit = module._fsdp_unit
    # Those that a module around this one shares with it are still to be looked at there.
    for group in unit.hidden_groups:
        group.show_unsharded()
    unit.hidden_groups = ()


def _after_load(module: Any, incompatible_keys: Any) -> None:
    """Forget weights gathered before: those loaded count from the next use on."""
    del incompatible_keys
    unit: Unit = module._fsdp_unit
    unit.hidden_groups = ()
    for group in unit.held_groups:
        group.changes.sync()
    unit.reshard()
