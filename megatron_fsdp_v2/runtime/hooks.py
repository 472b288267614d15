"""Hooks on the modules of units: before and after forwards and state dicts.

The forward of a unit with several modules begins with the first module and ends with the last.
Hooks in the autograd graph are in `params/autograd.py`, hooks on parameters in `params/group.py`
and `params/parameters.py`, hooks on optimizers in `optimizer_steps.py`, and hooks on optimizer
state dicts in `dtensor/optimizer_state.py`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from typing import Any

from torch import nn

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.params.group import ParameterGroup, groups_of
from megatron_fsdp_v2.runtime.machine import events, weights
from megatron_fsdp_v2.runtime.machine.state import Phase
from megatron_fsdp_v2.runtime.unit import Unit, unit_owning


def install_hooks(module: nn.Module) -> None:
    """Register the hooks of a unit on one of its modules.

    The pre-forward hook runs before user hooks and the post-forward hook after them, because user
    hooks may read parameters.
    """
    module.register_forward_pre_hook(uncompiled(pre_forward), prepend=True, with_kwargs=True)
    module.register_forward_hook(uncompiled(post_forward))
    module.register_forward_hook(uncompiled(after_forward), always_call=True)


def install_state_dict_hooks(module: nn.Module) -> None:
    """Register the hooks of state dicts on a module that registers parameters of units.

    State dicts hold sharded parameters, also between a forward and its backward, and loads write
    them.
    """
    module.register_state_dict_pre_hook(_show_sharded)  # type: ignore[no-untyped-call]
    module.register_state_dict_post_hook(_show_gathered)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


# -- forward ------------------------------------------------------------------------------------


def pre_forward(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook of a module.

    Returns:
        The arguments for the forward.
    """
    unit: Unit = module._fsdp_unit
    state = unit.state
    if state.root.num_scheduled and state.is_scheduled:
        if not unit.is_unsharded:
            raise RuntimeError(
                f"{unit.name} runs outside the uses that its schedule reports, so its weights are "
                "not gathered; report each use with begin_forward and end_forward"
            )
        return unit.cast_inputs(args, kwargs)
    if state.has_begun and _is_called_again(module):
        unit.running.is_called_again = True
        return unit.cast_inputs(args, kwargs)
    return unit.pre_forward(module, args, kwargs)


def post_forward(module: Any, args: Any, output: Any) -> Any:
    """Forward hook of a module.

    Returns:
        The module's output.
    """
    del args
    unit: Unit = module._fsdp_unit
    state = unit.state
    if state.root.num_scheduled and state.is_scheduled:
        unit.forget_forward()
        return unit.cast_outputs(output)
    if unit.running.is_called_again and _is_called_again(module):
        return unit.wrap_outputs(output)
    return unit.post_forward(module, output)


def after_forward(module: Any, args: Any, output: Any) -> None:
    """Forward hook of a module that also runs if its forward or an earlier hook raised."""
    del args, output
    unit: Unit = module._fsdp_unit
    state = unit.state
    if not state.has_begun or state.is_scheduled:
        return
    if not (unit.running.is_called_again and _is_called_again(module)):
        unit.after_forward(module)


# Code of the functions around a forward; each has its module in the local variable `self`.
CALLS = {nn.Module.__call__.__code__}


def _is_called_again(module: Any) -> bool:
    """Return whether a module's forward that is called now is called inside its own forward.

    A method registered as a forward counts as one. Searches the stack, because an interrupted
    forward, or a method that torch registered and that raised, does not report its end.
    """
    if events.recomputes(module._fsdp_unit.state):
        return False
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code in CALLS)
    return sum(frame.f_locals["self"] is module for frame in frames) > 1


# -- state dicts ------------------------------------------------------------------------------

# The hooks find groups by the registered parameters: a module that refers to its groups could not
# be pickled.


def _holders(groups: Iterable[ParameterGroup]) -> list[Unit]:
    """Return the units that may have one of these groups unsharded."""
    held = [group for group in groups if group.is_held]
    owners = [owner for group in held if (owner := unit_owning(group)) is not None]
    units = {unit: None for owner in owners for unit in owner.context.units()}
    return [unit for unit in units if any(group in unit.held_groups for group in held)]


def _show_sharded(module: Any, *args: Any) -> None:
    """Register sharded parameters on a module before its state dict is made."""
    del args
    groups = groups_of(module)
    for unit in _holders(groups):
        # Weights kept after a backward; functions of torch look for sharded parameters after the
        # state dict is made too. The next forward would reshard them.
        state = unit.state
        if state.phase is Phase.IDLE and not state.expects_backward:
            weights.free_if_outdated(state)
    # A module that several units share has the hooks of each; the first one finds the groups.
    hidden: list[Any] = vars(module).setdefault("_fsdp_hidden", [])
    hidden += [group for group in groups if group.show_sharded(module)]


def _show_gathered(module: nn.Module, *args: Any) -> None:
    """Register gathered parameters again after a state dict was made."""
    del args
    for group in vars(module).pop("_fsdp_hidden", ()):
        group.show_gathered(module)


def _before_load(module: Any, *args: Any) -> None:
    """Reshard, so that a load writes sharded parameters and the next use gathers them."""
    del args
    module._fsdp_loading = groups = groups_of(module)
    for unit in filter(None, map(unit_owning, groups)):
        if not unit.state.root.is_checked:
            unit.join_tied()
    for unit in _holders(groups):
        unit.sync()
        weights.free(unit.state)
    for group in groups:
        # Before its first use, no unit holds it. What this load assigned to an outer module, whose
        # own load is under way, gives its values after it.
        others = (other for _, other, _ in group.parameters.sites() if other is not module)
        is_loading = any(group in vars(other).get("_fsdp_loading", ()) for other in others)
        if not (group.is_held or is_loading):
            group.parameters.sync()


def _after_load(module: Any, incompatible_keys: Any) -> None:
    """Give the sharded parameters the values that a load with `assign=True` registered."""
    del incompatible_keys
    for group in vars(module).pop("_fsdp_loading", ()):
        group.parameters.restore_replaced(adopts=False)
        owner = unit_owning(group)
        if owner is not None:
            # Modules may register parameters while they load.
            owner.context.state.owns_all = False
