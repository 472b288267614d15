"""Hooks on the modules of units, and on the steps of all optimizers.

Hooks in the graph are in `params/autograd.py`, on parameters in `params/group.py` and
`params/registration.py`, on state dicts of optimizers in `dtensor/optimizer_state.py`.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.dtensor.optimizer_state import watch_state
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.params.gathered_parameter import gathered_name
from megatron_fsdp_v2.params.registration import find_owner_slot, num_retired
from megatron_fsdp_v2.runtime.after_step import unshard_after_step
from megatron_fsdp_v2.runtime.forward_of_modules import after_forward, post_forward, pre_forward
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from megatron_fsdp_v2.runtime.state_initialization import CurrentWeights, initializes_state

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from megatron_fsdp_v2.runtime.context import Context

__all__ = ["install_hooks", "watch_optimizers"]


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


def _pre_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return pre_forward(unit_of(module), module, args, kwargs)


def _post_forward(module: nn.Module, args: Any, output: Any) -> Any:
    del args
    return post_forward(unit_of(module), module, output)


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    """Also called where the forward, or a hook before it, raised an exception."""
    del args, output
    unit = unit_of(module)
    if unit.is_under_way:
        after_forward(unit, module)


def _show_sharded(module: nn.Module, *args: Any) -> None:
    """Before a state dict is made or loaded."""
    del args
    unit = unit_of(module)
    unit.hidden_groups = [group for group in unit.held_groups if group.show_sharded()]


def _after_state_dict(module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
    del state_dict, prefix, metadata
    unit = unit_of(module)
    # Those that a module around this one shares with it are still to be looked at there.
    for group in unit.hidden_groups:
        group.show_unsharded()
    unit.hidden_groups = ()


def _after_load(module: nn.Module, incompatible_keys: Any) -> None:
    """Forget weights gathered before: those loaded count from the next use on."""
    del incompatible_keys
    unit = unit_of(module)
    unit.hidden_groups = ()
    for group in unit.held_groups:
        group.changes.sync()
    unit.reshard()


type _Looked = tuple[int, int, frozenset[int]]
type _Contexts = list[weakref.ref[Context]]


class _OptimizerWatch:
    """Sees every optimizer step, before and after.

    Fused and foreach steps bump no version counter that one could watch, and torch offers these
    hooks for all optimizers at once; they are registered when the first model is sharded. Steps
    of optimizers that hold none of a context's parameters must not count: they may happen on some
    ranks only, and what follows from a step may be a collective.
    """

    def __init__(self) -> None:
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._num_changes = 0
        # Of every optimizer, what was looked at, and the contexts that it holds parameters of.
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[_Looked, _Contexts]] = (
            weakref.WeakKeyDictionary()
        )
        self._with_sharded_state: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Of optimizers in a step that makes state and changes no weight.
        self._unchanged: weakref.WeakKeyDictionary[Optimizer, CurrentWeights] = (
            weakref.WeakKeyDictionary()
        )
        self._is_registered = False

    def add(self, context: Context) -> None:
        if not self._is_registered:
            before, after = uncompiled(self._before_step), uncompiled(self._after_step)
            register_optimizer_step_pre_hook(before)
            register_optimizer_step_post_hook(after)
            self._is_registered = True
        self._contexts.add(context)
        self._num_changes += 1

    def discard(self, context: Context) -> None:
        self._contexts.discard(context)
        self._num_changes += 1

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        contexts = self._contexts_of(optimizer)
        for context in contexts:
            for unit in context.units():
                unit.check_no_late_gradient()
        self._unchanged.pop(optimizer, None)
        if initializes_state(optimizer, contexts):
            self._unchanged[optimizer] = CurrentWeights(contexts)

    def _contexts_of(self, optimizer: Optimizer) -> list[Context]:
        """Contexts that an optimizer holds parameters of, which are checked where they may be new.

        Args:
            optimizer: About to step.
        """
        held = frozenset([id(p) for group in optimizer.param_groups for p in group["params"]])
        looked = (num_retired(), self._num_changes, held)
        known = self._known.get(optimizer)
        if known is None or known[0] != looked:
            self._check(optimizer)
            contexts = [
                weakref.ref(context)
                for context in self._contexts
                if any(unit.holds(held) for unit in context.units())
            ]
            known = self._known[optimizer] = (looked, contexts)
        return _live(known[1])

    def _check(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                _check_is_current(param)
                if isinstance(param, UnevenDTensor):
                    _check_is_elementwise(optimizer)
                    self._watch_state(optimizer)

    def _watch_state(self, optimizer: Optimizer) -> None:
        """Until its first step, what an optimizer has of state is the same on all ranks."""
        if optimizer not in self._with_sharded_state:
            watch_state(optimizer)
            self._with_sharded_state.add(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        unchanged = self._unchanged.pop(optimizer, None)
        if unchanged is not None:
            unchanged.restore()
            return
        known = self._known.get(optimizer)
        if known is None:
            # It began before there was a sharded model.
            return
        (_, _, stepped), contexts = known
        for context in _live(contexts):
            context.weight_version += 1
            if context.options.enable_unshard_after_step:
                unshard_after_step(context, stepped)


def _live(contexts: _Contexts) -> list[Context]:
    return [context for ref in contexts if (context := ref()) is not None]


def _check_is_current(param: Any) -> None:
    """Refuse to step a tensor that a model no longer computes with."""
    name = gathered_name(param)
    if name is not None:
        raise RuntimeError(
            f"the optimizer holds the gathered weights of {name}, which no gradient reaches; it "
            "was built while they stood in place of the sharded ones, such as between a forward "
            "and its backward. Call reshard() on the model, then build it from model.parameters()"
        )
    found = find_owner_slot(param)
    if found is None:
        return
    group, home = found
    raise RuntimeError(
        f"the optimizer holds {group.names[home.index]} of {group.name} as it was {home.since}; "
        "the model no longer uses that tensor. Build the optimizer from model.parameters() after "
        "fully_shard"
    )


_WHOLE_MATRIX = {
    "Adafactor": "it factors whole matrices",
    "LBFGS": "it flattens all parameters into one vector and calls the model itself",
    "Muon": "it orthogonalizes whole matrices",
}


def _check_is_elementwise(optimizer: Optimizer) -> None:
    """Reject optimizers of torch that compute with whole tensors, of which a rank holds rows."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.optim") and name in _WHOLE_MATRIX:
        raise RuntimeError(
            f"torch.optim.{name} cannot step sharded parameters: {_WHOLE_MATRIX[name]}, and every "
            "rank holds some of their rows only; use an elementwise optimizer such as AdamW"
        )


_WATCH = _OptimizerWatch()


def watch_optimizers(context: Context, undo: ExitStack) -> None:
    """Have a context's model weights brought up to date after optimizer steps."""
    undo.callback(_WATCH.discard, context)
    _WATCH.add(context)
