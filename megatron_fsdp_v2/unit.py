"""The life of a unit: unshard, forward, reshard, unshard, backward, reduce, reshard."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp_v2.autograd_engine import cast_floats, in_backward, watch_inputs, watch_outputs
from megatron_fsdp_v2.placement import Placement
from megatron_fsdp_v2.rank_checks import (
    CheckRanks,
    UnitRecord,
    checksum,
    compare_steps,
    compare_units,
)
from megatron_fsdp_v2.reduction_queue import Reduction

if TYPE_CHECKING:
    from megatron_fsdp_v2.context import Context
    from megatron_fsdp_v2.mixed_precision import MixedPrecisionPolicy
    from megatron_fsdp_v2.param_group import ParameterGroup

__all__ = ["Phase", "Unit", "synchronise_gradients"]


class Phase(enum.Enum):
    """What a unit is doing."""

    RESTING = "resting"
    """Not running; its modules hold sharded parameters unless something is kept gathered."""
    FORWARD = "forward"
    """Inside its forward, for the first time or as a recomputation."""
    BACKWARD = "backward"
    """Between the first gradient of its outputs and the last of its inputs."""


LEGAL_MOVES = {
    (Phase.RESTING, Phase.FORWARD),
    (Phase.FORWARD, Phase.RESTING),
    (Phase.RESTING, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.RESTING),
    # A recomputation may stop in the middle of the forward, once it has all it needs.
    (Phase.FORWARD, Phase.BACKWARD),
}


class Unit:
    """The sharded parameters of one module and what happens to them in a step.

    Attributes:
        fqn: Name of its module under the root; empty for the root.
        class_name: Class of its module, as it was before it was sharded.
        groups: Its parameter groups, which it reduces.
        borrowed: Groups of other units that hold a parameter tied to one of its own; gathered
            with it, reduced by their owner.
        held_groups: Groups it gathers: its own and those it borrows.
        context: What it shares with the other units under its root.
        policy: Dtypes of inputs and outputs.
        phase: What it is doing.
        is_root: Whether its module is the outermost one.
        reshard_after_forward: Whether gathered weights are dropped between forward and backward.
        requires_gradient_sync: Whether its backward is the one that synchronises.
        is_last_backward: Whether the next backward is the last before the optimizer steps.
        forward_prefetch: Units to gather when its forward starts, instead of the recorded next.
        backward_prefetch: Likewise for its backward.
        ranges: Makes a profiler range of a name, or None for no ranges.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParameterGroup],
        borrowed: Sequence[ParameterGroup],
        context: Context[Unit],
        policy: MixedPrecisionPolicy,
        *,
        reshard_after_forward: bool,
    ) -> None:
        self.fqn = ""
        self.class_name = type(module).__name__
        self.groups = list(groups)
        self.borrowed = list(borrowed)
        self.held_groups = [*self.groups, *self.borrowed]
        self.context = context
        self.policy = policy
        self.phase = Phase.RESTING
        self.is_root = True
        self.reshard_after_forward = reshard_after_forward
        self.requires_gradient_sync = True
        self.is_last_backward = True
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        self.ranges: Callable[[str], AbstractContextManager[Any]] | None = None
        self._is_unsharded = False
        # Forwards whose backward is still to come; some may never come.
        self._num_awaited = 0
        self._owes_reduction = False

    @property
    def name(self) -> str:
        """Name and class of the module, for messages."""
        return f"{self.fqn or 'the root'} ({self.class_name})"

    def holds(self, parameter_ids: set[int]) -> bool:
        """Whether one of its sharded parameters is among these `id()`s."""
        return any(id(p) in parameter_ids for group in self.groups for p in group.sharded_params)

    @property
    def is_unsharded(self) -> bool:
        """Whether gathered weights are installed, or on their way."""
        return self._is_unsharded

    @property
    def is_expected_back(self) -> bool:
        """Whether its backward is under way, or to be expected after a forward."""
        return self._num_awaited > 0 or self.phase is Phase.BACKWARD

    @property
    def skips_safely(self) -> bool:
        """Whether a rank may leave it out while others run it: no use of it is a collective."""
        return not any(group.weights.gathers_for_use for group in self.groups)

    @property
    def syncs_gradients(self) -> bool:
        """Whether gradients are brought all the way into `param.grad` in this backward."""
        return self.requires_gradient_sync and self.is_last_backward

    def is_inside(self, other: Unit) -> bool:
        """Whether its module is below another unit's."""
        return self is not other and f"{self.fqn}.".startswith(f"{other.fqn}." if other.fqn else "")

    def move(self, phase: Phase) -> None:
        """Change phase.

        Raises:
            RuntimeError: The move is not legal.
        """
        if (self.phase, phase) not in LEGAL_MOVES:
            raise RuntimeError(
                f"unit {self.name} cannot go from {self.phase.value} to {phase.value}; "
                "a module must not be run inside its own forward"
            )
        self.phase = phase

    # -- weights ------------------------------------------------------------------------------

    def unshard(self, *, async_op: bool) -> None:
        """Gather weights, after bringing them up to date outside of a backward. Collective."""
        if self._is_unsharded:
            return
        with self._range("unshard"):
            if not self.context.is_checked:
                self._check_ranks()
            if self.context.check_ranks is CheckRanks.ALWAYS:
                self._compare_steps("gather")
            epoch, in_forward = self.context.weights_epoch, not in_backward()
            for index, group in enumerate(self.held_groups):
                try:
                    group.unshard(epoch, in_forward=in_forward, async_op=async_op)
                except Exception:
                    for held in self.held_groups[:index]:
                        held.reshard()
                    raise
            self._is_unsharded = True

    def prefetch(self) -> None:
        """Start gathering ahead of use, unless what is live is in the way; then use gathers."""
        if self._is_unsharded:
            return
        # All are asked: each one that has no room is noted for the next plan.
        if all([group.is_held or group.weights.has_room() for group in self.held_groups]):
            self.unshard(async_op=True)

    def wait_for_unshard(self) -> None:
        """Have gathered weights in place and installed on the modules."""
        with self._range("wait_for_unshard"):
            for group in self.held_groups:
                group.wait_for_unshard()

    def reshard(self) -> None:
        """Install sharded parameters and drop gathered weights. Harmless when resharded."""
        if not self._is_unsharded:
            return
        with self._range("reshard"):
            self._is_unsharded = False
            for group in self.held_groups:
                group.reshard()

    def reshard_if_stale(self) -> None:
        """Drop weights left gathered that an optimizer may have stepped since."""
        if not self._is_unsharded:
            return
        epoch = self.context.weights_epoch
        if any(group.is_stale(epoch) for group in self.held_groups):
            self.reshard()

    # -- forward ------------------------------------------------------------------------------

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the module's forward: gather, cast inputs, watch for the end of the backward."""
        with self._range("pre_forward"):
            recomputes = in_backward()
            if not recomputes and self.is_root:
                self._begin_pass()
            if self.phase is not Phase.BACKWARD:
                self.move(Phase.FORWARD)
            self.context.arrive(self)
            if recomputes:
                self.context.make_room_for_recomputed(self)
            self.unshard(async_op=False)
            self.wait_for_unshard()
            if not recomputes:
                depth = self.context.unshard_prefetch_depth
                following = self.context.forward_order.record(self, depth)
                self._prefetch(self.forward_prefetch, following)
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), dtype)
        if torch.is_grad_enabled():
            args, kwargs = watch_inputs(self, args, kwargs)
        return args, kwargs

    def post_forward(self, output: Any) -> Any:
        """After the module's forward: reshard, watch for the start of the backward."""
        with self._range("post_forward"):
            has_grad = torch.is_grad_enabled()
            if in_backward():
                if self.phase is Phase.FORWARD:
                    self.move(Phase.RESTING)
                    self.context.keep_recomputed(self)
            else:
                context = self.context
                context.backward_order.record(self)
                self.move(Phase.RESTING)
                if self.is_root:
                    # An optimizer may write the weights next.
                    context.drop_prefetched()
                # A unit recomputed in the backward runs without grad now, inside a pass with it.
                self._num_awaited += has_grad or context.pass_has_grad
                # The root's backward comes right after its forward; others have to wait.
                if not (has_grad and (self.is_root or not self.reshard_after_forward)):
                    self.reshard()
                if self.is_root and not has_grad:
                    context.end_pass("")
        if self.policy.output_dtype is not None:
            output = cast_floats(output, self.policy.output_dtype)
        if has_grad:
            watch_outputs(self, output)
        return output

    def _begin_pass(self) -> None:
        """At the root's forward: repair what an exception left behind, start a new order."""
        context = self.context
        units = context.units()
        if context.finalizer_queued or any(u.phase is not Phase.RESTING for u in units):
            self._repair(units)
        for unit in units:
            unit.reshard_if_stale()
        context.begin_forward(has_grad=torch.is_grad_enabled())
        if context.turns is None:
            return
        if not context.is_checked:
            self._check_ranks()
        # Ranks may run different units, so bringing weights up to date belongs to no unit's use.
        for unit in units:
            for group in unit.groups:
                if not group.weights.is_refreshed_locally and not group.is_held:
                    group.settle_changes()
                    ahead = context.unshard_prefetch_depth > 0
                    group.refresh(context.weights_epoch, async_op=ahead)

    def _repair(self, units: Sequence[Unit]) -> None:
        context = self.context
        context.reductions.abandon()
        context.finalizer_queued = False
        context.forget_recomputed()
        for unit in units:
            unit.phase = Phase.RESTING
            unit._num_awaited = 0
            unit._owes_reduction = False
            unit.reshard()
            for group in unit.groups:
                if group.grads is not None:
                    group.grads.abandon()

    def _prefetch(self, chosen: list[weakref.ref[Unit]], recorded: Sequence[Unit]) -> None:
        if chosen:
            self.context.prefetch_requested(chosen)
        else:
            self.context.prefetch(recorded)

    # -- backward -----------------------------------------------------------------------------

    def pre_backward(self) -> None:
        """Before the module's backward: gather, and see to it that the backward is finished."""
        if self.phase is Phase.BACKWARD:
            return
        with self._range("pre_backward"):
            context = self.context
            if not context.finalizer_queued:
                context.begin_backward()
                torch.autograd.Variable._execution_engine.queue_callback(_finalizer(context))
            self.move(Phase.BACKWARD)
            self._owes_reduction = True
            context.forget_recomputed(self)
            context.arrive(self)
            self.unshard(async_op=False)
            self.wait_for_unshard()
            depth = context.unshard_prefetch_depth
            self._prefetch(self.backward_prefetch, context.backward_order.before(self, depth))

    def post_backward(self) -> None:
        """After the module's backward: reduce what arrived, reshard."""
        if self.phase is not Phase.BACKWARD:
            return
        with self._range("post_backward"):
            self._num_awaited = max(0, self._num_awaited - 1)
            turns = self.context.turns
            for unit in [self] if turns is None else turns.done(self):
                unit._owes_reduction = True
                unit.reduce_grad(synchronise=unit.syncs_gradients)
            self.reshard()
            self.move(Phase.RESTING)

    def reduce_grad(self, *, synchronise: bool) -> None:
        """Reduce gradients that arrived, as far as asked for. Collective.

        A unit whose backward ran takes part with all its groups: which of them got a gradient
        may differ between ranks.

        Args:
            synchronise: Whether to go all the way into `param.grad`, where gradients are
                otherwise left unreduced between micro-batches.
        """
        asynchronous = self.context.enable_async_reduce_grad
        owes, self._owes_reduction = self._owes_reduction, False
        issued: list[Reduction] = []
        with self._range("reduce_grad"):
            for group in self.groups:
                grads = group.grads
                if grads is None or (grads.collects_unsynced and not synchronise):
                    continue
                if not grads.has_gradient and not (owes and group.is_trained):
                    continue
                if not issued:
                    self.context.reductions.make_room_to_reduce()
                    if self.context.check_ranks is CheckRanks.ALWAYS:
                        self._compare_steps("reduce")
                has_outer = grads.has_outer_axis
                ticket = group.reduce_inner(async_op=asynchronous, is_final=not has_outer)
                issued.append(Reduction(group, ticket, has_outer and synchronise, asynchronous))
            self.context.reductions.push(issued)
            if not asynchronous:
                self.context.reductions.drain()

    def finish_gradients(self, *, synchronise: bool) -> None:
        """Reduce what is left, also along the outer axis where that is all that is left."""
        self.reduce_grad(synchronise=synchronise)
        if synchronise:
            for group in self.groups:
                if group.grads is not None and group.grads.has_partial:
                    self.context.reductions.push_outer(group)

    def finish_backward(self) -> None:
        """At the end of a backward: reduce what is left, rest."""
        self.finish_gradients(synchronise=self.syncs_gradients)
        self.reshard()
        if self.phase is Phase.BACKWARD:
            # Its inputs need no gradients, so nothing told the end of its backward.
            self._num_awaited = max(0, self._num_awaited - 1)
        self.phase = Phase.RESTING

    def set_reduces(self, reduces: bool) -> None:
        """Say whether gradients are summed over ranks.

        Raises:
            RuntimeError: Gradients are waiting to be synchronised.
        """
        for group in self.groups:
            grads = group.grads
            if grads is None:
                continue
            if grads.has_partial or grads.has_gradient:
                raise RuntimeError(
                    f"{self.name} has gradients that are not synchronised yet; call "
                    "set_requires_gradient_reduction between steps"
                )
            grads.reduces = reduces

    # -- whether ranks do the same -------------------------------------------------------------

    def _check_ranks(self) -> None:
        """At the first use: see that all ranks sharded the same. Collective."""
        self.context.is_checked = True
        units = self.context.units()
        for unit in units:
            for group in unit.borrowed:
                if not any(group in other.groups for other in units):
                    raise RuntimeError(
                        f"{unit.name} shares a parameter with {group.name}, which belongs to "
                        "another root; call fully_shard on a module that contains both"
                    )
        if self.context.check_ranks is CheckRanks.NEVER:
            return
        by_mesh: dict[Any, list[Unit]] = {}
        for unit in units:
            if unit.groups:
                by_mesh.setdefault(unit.groups[0].mesh, []).append(unit)
        for members in by_mesh.values():
            group = members[0].groups[0]
            compare_units([unit._record() for unit in members], group.axes, group.device)

    def _record(self) -> UnitRecord:
        options = [self.class_name]
        copies = [0] * len(self.groups[0].axes)
        for group in self.groups:
            options += [",".join(group.names), group.layout.fingerprint, repr(group.spec)]
            if group.grads is not None and not group.grads.reduces:
                continue
            for axis, placements in enumerate(group.spec.placements):
                replicated = placements.main_weight is Placement.REPLICATE
                if replicated and group.axes[axis].size > 1:
                    copies[axis] += checksum(group.main_weight.tensor)
        return UnitRecord(self.fqn, " ".join(options), tuple(copies))

    def _compare_steps(self, action: str) -> None:
        if not self.groups:
            return
        units, group = self.context.units(), self.groups[0]
        actions = ("gather", "reduce")
        names = [f"{known} {unit.name}" for unit in units for known in actions]
        code = units.index(self) * len(actions) + actions.index(action)
        compare_steps(action, self.name, code, group.axes[-1], group.device, names)

    def _range(self, name: str) -> AbstractContextManager[Any]:
        return _NO_RANGE if self.ranges is None else self.ranges(name)


_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def _finalizer(context: Context[Unit]) -> Callable[[], None]:
    """The callback that the autograd engine runs at the end of a backward."""

    def finalize() -> None:
        units = context.units()
        synchronise = any(unit.syncs_gradients for unit in units)
        for unit in [] if context.turns is None else context.turns.rest():
            unit._owes_reduction = True
            unit.reduce_grad(synchronise=unit.syncs_gradients)
        for unit in reversed(units):
            unit.finish_backward()
        context.drop_prefetched()
        _settle(context)
        context.forget_recomputed()
        # An optimizer that torch's hooks do not see may step now.
        context.weights_epoch += synchronise
        context.has_unsynced = not synchronise
        context.finalizer_queued = False
        context.end_pass("synchronised backward" if synchronise else "backward")

    return finalize


def synchronise_gradients(units: Sequence[Unit]) -> None:
    """Bring all gradients of these units into `param.grad`. Collective.

    Args:
        units: Units of one context, parents before children.
    """
    context = units[0].context
    for unit in reversed(units):
        unit._owes_reduction |= context.turns is not None and context.has_unsynced
        unit.finish_gradients(synchronise=True)
    _settle(context)
    # As after a synchronised backward: an optimizer may step next.
    context.weights_epoch += 1
    context.has_unsynced = False


def _settle(context: Context[Unit]) -> None:
    """Wait for all reductions, and take back what turned out to be no gradient at all."""
    context.reductions.drain()
    for unit in context.units():
        for group in unit.groups:
            if group.param_grads is not None:
                group.param_grads.drop_unused()
