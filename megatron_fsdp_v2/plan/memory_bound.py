"""How many bytes a step holds at most, by role: a formula of integers, without tensors and ranks.

    group = GroupBytes.of(numel, axis_sizes, placements, dtypes, on_cpu=False, is_trained=True)
    units = [UnitBytes((root,)), UnitBytes((block,), parent=0), UnitBytes((block,), parent=0)]
    peak = peak_bytes(units, RuntimeOptions(), optimizer_state=..., activations=...)
    peak.total, peak.gathered, peak.grad_buffer, peak.communication, peak.main_weight, ...

`numel` is that of the group's whole flat buffer, padding included (`BufferLayout.numel`). Units
are listed as `named_units` lists them: the root first, parents before children, in the order they
run. All numbers are bytes on one rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_fsdp_v2.plan.unit_bytes import GroupBytes, UnitBytes
from megatron_fsdp_v2.runtime.options import RuntimeOptions

__all__ = ["PeakBytes", "peak_bytes"]


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """Bytes by role at the moment of a step when most are alive.

    Attributes:
        model_weight: Model weights, all units.
        main_weight: Main weights, all units.
        main_grad: Main gradients of the units that have theirs already.
        optimizer: State of the optimizer.
        gathered: Gathered weights.
        grad_buffer: Full gradient buffers, and shards that wait for the outer axis.
        communication: Copies in the communication dtype, and what is received on a CPU.
        activations: Everything else.
        unit: Index of the unit that computes at that moment.
    """

    model_weight: int
    main_weight: int
    main_grad: int
    optimizer: int
    gathered: int
    grad_buffer: int
    communication: int
    activations: int
    unit: int

    @property
    def resting(self) -> int:
        """Bytes that are alive between steps, without gradients."""
        return self.model_weight + self.main_weight + self.optimizer

    @property
    def temporary(self) -> int:
        """Bytes that come and go with units."""
        return self.gathered + self.grad_buffer + self.communication

    @property
    def total(self) -> int:
        """All of them."""
        return self.resting + self.main_grad + self.temporary + self.activations


def peak_bytes(
    units: Sequence[UnitBytes],
    options: RuntimeOptions | None = None,
    *,
    optimizer_state: int = 0,
    activations: int = 0,
    num_held_beside: int = 0,
    accumulates: bool = False,
    has_gradients: bool | None = False,
) -> PeakBytes:
    """The most bytes that a step holds at once, for units that run in the order they are listed.

    The bound is the sum of weights, optimizer state and activations, and the largest sum over the
    moments of a step of: gathered weights of the unit that computes, of the units around it and of
    the units gathered ahead; full gradient buffers of `max_live_grad_buffers` units and of the
    units around them; buffers of reductions in flight; main gradients of the units reduced so far.

    Args:
        units: All units of one root, the root first, parents before children.
        options: Options of the root; the defaults when None.
        optimizer_state: Bytes of optimizer state on this rank.
        activations: Bytes of everything else at its peak.
        num_held_beside: Further units that are gathered at a time.
        accumulates: Whether gradients of earlier micro-batches wait to be synchronized.
        has_gradients: Whether main gradients exist before the backward begins: those of another
            backward, or the zeros of `zero_grad(set_to_none=False)`. None: earlier micro-batches
            leave them, where they are reduced in every backward.

    Raises:
        ValueError: There is no unit, or a parent is not listed before its child.
    """
    for index, unit in enumerate(units):
        if (unit.parent is None) is not (index == 0) or (unit.parent or 0) > index:
            raise ValueError(f"units: unit {index} has parent {unit.parent}; list parents first")
    if not units:
        raise ValueError("units is empty; list at least the root")
    step = _Step(units, options or RuntimeOptions(), num_held_beside, accumulates, has_gradients)
    peak = max(step.moments(), key=lambda moment: sum(moment[:-1]))
    return PeakBytes(
        model_weight=sum(unit.sum("model_weight") for unit in units),
        main_weight=sum(unit.sum("main_weight") for unit in units),
        optimizer=optimizer_state,
        activations=activations,
        **peak._asdict(),
    )


class _Moment(NamedTuple):
    """Bytes that may be the most of a step; see `PeakBytes`."""

    gathered: int
    grad_buffer: int
    communication: int
    main_grad: int
    unit: int


class _Step:
    """The moments of a step of units inside units."""

    def __init__(
        self,
        units: Sequence[UnitBytes],
        options: RuntimeOptions,
        num_beside: int,
        accumulates: bool,
        has_gradients: bool | None,
    ) -> None:
        self._options, self._num_beside, self._accumulates = options, num_beside, accumulates
        self._drain = options.max_live_grad_buffers if options.enable_async_reduce_grad else 0
        self._has_received = any(unit.sum("received") for unit in units)
        groups = [group for unit in units for group in unit.groups]
        self._settled = sum(g.main_grad for g in groups if _is_set(g, has_gradients))
        self._units = units = [
            replace(
                unit,
                groups=tuple(
                    group.in_backward(is_set=_is_set(group, has_gradients), is_waiting=accumulates)
                    for group in unit.groups
                ),
            )
            for unit in units
        ]
        groups = [group for unit in units for group in unit.groups]
        self._has_partial = any(group.partial_grad for group in groups)
        self._summed = max((group.summed for group in groups), default=0)
        # Along the outer axis that is when a full buffer has been freed, which is larger.
        self._summed_in_room = max((g.summed for g in groups if not g.partial_grad), default=0)
        self._children: list[list[int]] = [[] for _ in units]
        for index, unit in enumerate(units):
            if unit.parent is not None:
                self._children[unit.parent].append(index)
        # A backward enters a unit before those inside it, and leaves it after them.
        self._entered = [0, *itertools.chain(*map(self._enter, reversed(self._children[0])))]
        # Main gradients of each unit and all that are listed after it, in reverse.
        sums = (unit.sum("main_grad") for unit in reversed(units))
        self._main_from_end = [*itertools.accumulate(sums, initial=0)]

    def _enter(self, index: int) -> Iterator[int]:
        yield index
        for child in reversed(self._children[index]):
            yield from self._enter(child)

    def _around(self, index: int) -> list[int]:
        """The units that a unit is inside of, the innermost first."""
        parent = self._units[index].parent
        return [] if parent is None else [parent, *self._around(parent)]

    def moments(self) -> Iterator[_Moment]:
        """Every moment that may be the peak."""
        # The last reductions are waited for one by one.
        yield self._reducing(-1, self._drain, communication=self._summed_in_room)
        last = self._reducing(-1, 0, communication=self._summed)
        yield last
        if self._options.enable_unshard_after_step:
            # All gradients are reduced.
            yield self._in_forward(0)._replace(main_grad=last.main_grad)
        waiting = sum(map(self._unreduced, range(len(self._units))))
        for index in range(len(self._units)):
            yield self._in_forward(index)._replace(grad_buffer=waiting)
            yield from self._in_backward(index)

    def _in_forward(self, index: int) -> _Moment:
        there = self._gathered(index, range(index), range(index + 1, len(self._units)))
        gathered = sum(self._units[i].gathered for i in there)
        return _Moment(gathered, 0, 0, self._settled, index)

    def _in_backward(self, index: int) -> Iterator[_Moment]:
        """While the gradients of a unit arrive, and while they are reduced."""
        unit, drain, around = self._units[index], self._drain, self._around(index)
        last = index
        while self._children[last]:
            last = self._children[last][0]
        following = self._entered[self._entered.index(last) + 1 :]
        there = self._gathered(index, following, following)
        gathered = sum(self._units[i].gathered_in_backward for i in there)
        kept = sum(self._units[i].sum("grad_buffer") for i in around)
        kept += sum(self._unreduced(i, is_filling=i in around) for i in range(index))
        # Before it has a gradient, nobody waits for reductions; with the first one somebody does.
        waiting, summed = kept + self._unreduced(index), self._summed_in_room
        yield self._reducing(index, drain, gathered, waiting, summed)
        # A unit that others are inside of has its buffer before theirs are reduced.
        is_around = any(self._units[i].is_trained for i in self._children[index])
        num_inner = drain if is_around or not unit.is_trained else max(drain - 1, 0)
        waiting = kept + unit.sum("grad_buffer") + self._unreduced(index, is_filling=True)
        yield self._reducing(
            index, num_inner, gathered, waiting, summed if num_inner == drain else 0
        )
        # Gathered weights are dropped before gradients are reduced. A copy in the communication
        # dtype takes the place of the buffer it was made from, group by group.
        gathered -= unit.gathered_in_backward
        buffers, comm, main = kept + unit.sum("grad_buffer"), 0 if drain else summed, 0
        for group in unit.groups:
            buffers += group.partial_grad
            main += 0 if group.partial_grad else group.main_grad
            after = comm + group.grad_comm + group.received
            for held, sent in (
                (buffers, comm + group.grad_comm),
                (buffers - (group.grad_buffer if group.grad_comm else 0), after),
            ):
                found = self._reducing(index, max(drain - 1, 0), gathered, held, sent)
                yield found._replace(main_grad=found.main_grad + main)
            buffers, comm = held, after

    def _gathered(self, index: int, kept: Sequence[int], following: Sequence[int]) -> set[int]:
        """Units that are gathered while one computes: those around it, kept and ahead."""
        units = self._units
        ahead = [i for i in following if units[i].gathered]
        most = self._options.prefetch_limit.most(units[i].gathered for i in ahead)
        kept = [i for i in kept if units[i].keeps_gathered]
        return {index, *self._around(index), *ahead[: most + self._num_beside], *kept}

    def _reducing(
        self,
        index: int,
        num_inner: int,
        gathered: int = 0,
        grad_buffer: int = 0,
        communication: int = 0,
    ) -> _Moment:
        """A moment with reductions in flight that were issued before a unit's own.

        Args:
            index: Of the unit; units are reduced in the reverse of the order they are listed in.
            num_inner: Reductions along the inner axis; along the outer one there are as many as
                may be.
            gathered: Bytes beside those of the reductions, like the others.
            grad_buffer: Likewise.
            communication: Likewise.
        """
        trained = (unit for unit in self._units[index + 1 :] if unit.is_trained)
        groups = [group for unit in itertools.islice(trained, num_inner) for group in unit.groups]
        outer = itertools.islice(trained, self._drain)
        for group in groups:
            grad_buffer += group.partial_grad + (0 if group.grad_comm else group.grad_buffer)
            communication += group.grad_comm + group.received
        for group in (group for unit in outer for group in unit.groups):
            grad_buffer += 0 if group.outer_comm else group.partial_grad
            communication += group.outer_comm + group.outer_received
        nbytes = self._options.bucket_bytes or 0
        if nbytes and num_inner + self._drain:
            # One bucket fills while others are in flight, in full buffers, then in partial shards;
            # on a CPU it is sent from a copy and received beside it.
            num_partial = (num_inner + self._drain) * self._has_partial
            grad_buffer += (1 + num_inner + num_partial) * nbytes
            communication += 2 * (1 + num_inner) * nbytes * self._has_received
        main = self._settled + self._main_from_end[len(self._units) - 1 - index]
        # Along the outer axis comes later.
        main -= sum(group.main_grad for group in groups if group.partial_grad)
        return _Moment(gathered, grad_buffer, communication, main, max(index, 0))

    def _unreduced(self, index: int, *, is_filling: bool = False) -> int:
        """Bytes of gradients of earlier micro-batches that wait for the synchronized backward.

        Args:
            index: Of a unit whose own turn is still to come.
            is_filling: Whether its full buffer is counted elsewhere.
        """
        if not self._accumulates:
            return 0
        return sum(
            (0 if is_filling else g.grad_buffer) if g.accumulates_unreduced else g.partial_grad
            for g in self._units[index].groups
        )


def _is_set(group: GroupBytes, has_gradients: bool | None) -> bool:
    """Whether a group's main gradient exists before the last backward of a step."""
    if has_gradients is None:
        # Not where gradients wait somewhere else to be synchronized.
        return not (group.accumulates_unreduced or group.partial_grad)
    return has_gradients
