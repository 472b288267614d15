"""What follows from the steps of optimizers, and what is checked before them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.dtensor.optimizer_kinds import needs_all_ranks, rejected
from megatron_fsdp_v2.dtensor.optimizer_state import watch_state
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from megatron_fsdp_v2.params.autograd import in_backward
from megatron_fsdp_v2.params.gathered_parameter import gathered_name
from megatron_fsdp_v2.params.registration import find_owner_slot, num_retired
from megatron_fsdp_v2.runtime.end_of_backward import needs_repair
from megatron_fsdp_v2.runtime.unit_checks import check_capture

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.group import ParameterGroup
    from megatron_fsdp_v2.runtime.context import Context

__all__ = ["watch_optimizers"]


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
        # Of optimizers in a step that makes state and changes no weight, what is up to date.
        self._unchanged: weakref.WeakKeyDictionary[
            Optimizer, list[tuple[Context, ParameterGroup]]
        ] = weakref.WeakKeyDictionary()
        # Of optimizers in a step that all ranks make.
        self._generators: weakref.WeakKeyDictionary[Optimizer, list[torch.Tensor]] = (
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
        contexts = self._contexts_of(optimizer)
        self._generators.pop(optimizer, None)
        # A closure may draw: what it computes has dropout of each rank's own.
        if contexts and len(args) < 2 and not kwargs and needs_all_ranks(type(optimizer)):
            self._generators[optimizer] = _generator_states()
        for context in contexts:
            if context.is_capturing:
                check_capture(context)
                context.has_graph = True
            for group in context.groups():
                group.members.check_no_late_gradient()
        self._unchanged.pop(optimizer, None)
        if _initializes_state(optimizer, contexts):
            self._unchanged[optimizer] = [
                (context, group)
                for context in contexts
                for group in context.groups()
                if not group.is_stale(context.weight_version)
            ]

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
                if any(id(p) in held for g in context.groups() for p in g.sharded_params)
            ]
            known = self._known[optimizer] = (looked, contexts)
        return _live(known[1])

    def _check(self, optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            _check_is_current(param)
        if any(isinstance(param, UnevenDTensor) for param in params):
            # Until its first step, what an optimizer has of state is the same on all ranks. One
            # that wraps another may have no state, nor hooks of its own.
            has_state = hasattr(optimizer, "_optimizer_state_dict_post_hooks")
            if has_state and optimizer not in self._with_sharded_state:
                watch_state(optimizer)
                self._with_sharded_state.add(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self._check_draws_nothing(optimizer)
        unchanged = self._unchanged.pop(optimizer, None)
        if unchanged is not None:
            # Version counters that the step moved mean nothing.
            for context, group in unchanged:
                group.note_refreshed(context.weight_version)
            return
        known = self._known.get(optimizer)
        if known is None:
            # It began before there was a sharded model.
            return
        (_, _, stepped), contexts = known
        for context in _live(contexts):
            context.weight_version += 1
            if context.options.enable_unshard_after_step:
                _unshard_after_step(context, stepped)

    def _check_draws_nothing(self, optimizer: Optimizer) -> None:
        before = self._generators.pop(optimizer, None)
        if before is None or all(map(torch.equal, before, _generator_states())):
            return
        raise rejected(
            optimizer,
            "its step draws random numbers, of which every rank has others, so that ranks would "
            "compute with different tensors",
        )


def _generator_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def _live(contexts: _Contexts) -> list[Context]:
    return [context for ref in contexts if (context := ref()) is not None]


def _unshard_after_step(context: Context, stepped: AbstractSet[int]) -> None:
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


def _initializes_state(optimizer: Optimizer, contexts: Sequence[Context]) -> bool:
    """Whether the step that begins has to do with state alone.

    `torch.distributed.checkpoint.state_dict` steps an optimizer that has no state, with a learning
    rate of 0 and zeros of its own as gradients. A rank without rows has none when all others have,
    so that it steps alone; what follows from a step of weights is collective, and must not follow
    from that one.

    Args:
        optimizer: About to step.
        contexts: Those that it holds parameters of.
    """
    groups = optimizer.param_groups
    if any(context.is_capturing for context in contexts):
        return False
    if not (contexts and all("lr" in group and _is_zero(group["lr"]) for group in groups)):
        return False
    grads: list[Any] = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    if not grads or any(grad is None for grad in grads):
        return False
    # A warm-up begins with a learning rate of 0 as well, and some rank's gradient may be 0.
    units = (unit for context in contexts for unit in context.units())
    if any(known.param_grads.found()[1] is not None for unit in units for known in unit.grads()):
        return False
    return not any(_rows_of(grad).count_nonzero() for grad in grads)


def _rows_of(grad: torch.Tensor) -> torch.Tensor:
    # Also of a plain DTensor, which would count over all ranks.
    return local_of(grad) if isinstance(grad, DTensor) else grad


def _is_zero(lr: Any) -> bool:
    # Not one on a device, which would be waited for at every step.
    # Some optimizers have None, for a rate of their own.
    is_known = lr.device.type == "cpu" if isinstance(lr, torch.Tensor) else lr is not None
    return is_known and float(lr) == 0


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


_WATCH = _OptimizerWatch()


def watch_optimizers(context: Context, undo: ExitStack) -> None:
    """Have a context's model weights brought up to date after optimizer steps."""
    undo.callback(_WATCH.discard, context)
    _WATCH.add(context)
