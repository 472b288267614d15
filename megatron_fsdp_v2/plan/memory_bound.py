"""How many bytes a step holds at most, by role: integers only, no tensors and no ranks.

    group = GroupBytes.of(numel, axis_sizes, placements, dtypes, on_cpu=False, is_trained=True)
    units = [UnitBytes((root,)), UnitBytes((block,), parent=0), UnitBytes((block,), parent=0)]
    peak = peak_bytes(units, optimizer_state=..., activations=...)
    peak.total, peak.gathered, peak.grad_buffer, peak.communication, peak.main_weight, ...

`numel` is that of the group's whole flat buffer, padding included (`BufferLayout.numel`). Units
are listed as `named_units` lists them: the root first, parents before children, in the order they
run. All numbers are bytes on one rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_fsdp_v2.plan.unit_bytes import GroupBytes, UnitBytes
from megatron_fsdp_v2.runtime.gather_rules import PrefetchLimit

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
        unit: Index of the unit at work at that moment.
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
        """Bytes that are alive between steps, with no gradients."""
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
    *,
    optimizer_state: int = 0,
    activations: int = 0,
    unshard_prefetch_depth: int | None = None,
    unshard_prefetch_bytes: int | None = None,
    num_held_beside: int = 0,
    max_live_grad_buffers: int = 2,
    bucket_bytes: int | None = None,
    is_reduction_async: bool = True,
    accumulates: bool = False,
    has_gradients: bool | None = False,
    gathers_after_step: bool = False,
) -> PeakBytes:
    """The most bytes that a step holds at once, for units that run in the order they are listed.

    That is what rests, and the largest sum over the backward of: gathered weights of the unit at
    work, of those it is inside of and of those that may be gathered ahead; full gradient buffers
    of `max_live_grad_buffers` units and of those they are inside of; what reductions under way
    take besides; and main gradients of the units reduced so far. Also looked at are the forward,
    and what there is when the optimizer steps.

    Args:
        units: All units of one root, the root first, parents before children.
        optimizer_state: Bytes of optimizer state on this rank.
        activations: Bytes of everything else at its peak.
        unshard_prefetch_depth: Units gathered ahead; 0 without prefetching. None: any number with
            `unshard_prefetch_bytes`, and 1 without.
        unshard_prefetch_bytes: Bytes of weights gathered ahead; None for any number.
        num_held_beside: Further units that are gathered at a time.
        max_live_grad_buffers: Units whose gradients are in full buffers.
        bucket_bytes: Bytes up to which small units are gathered and reduced together; None for one
            by one. What is so is counted with full buckets.
        is_reduction_async: Whether reductions overlap the next unit's backward.
        accumulates: Whether gradients of earlier micro-batches wait to be synchronized.
        has_gradients: Whether gradients are set before the backward begins: those of another
            backward, or the zeros of `zero_grad(set_to_none=False)`. None: those are that earlier
            micro-batches leave in main gradients, before they are synchronized.
        gathers_after_step: Whether the optimizer's step gathers what the next forward begins with.

    Raises:
        ValueError: There is no unit, or a parent is not listed before its child.
    """
    for index, unit in enumerate(units):
        if (unit.parent is None) is not (index == 0) or (unit.parent or 0) > index:
            raise ValueError(f"units: unit {index} has parent {unit.parent}; list parents first")
    if not units:
        raise ValueError("units is empty; list at least the root")
    is_set = functools.partial(_is_set, has_gradients=has_gradients)
    settled = sum(g.main_grad for unit in units for g in unit.groups if is_set(g))
    is_received = any(unit.sum("received") for unit in units)
    units = [
        replace(
            u,
            groups=tuple(g.in_backward(is_set=is_set(g), is_waiting=accumulates) for g in u.groups),
        )
        for u in units
    ]
    resting = PeakBytes(
        model_weight=sum(unit.sum("model_weight") for unit in units),
        main_weight=sum(unit.sum("main_weight") for unit in units),
        main_grad=settled,
        optimizer=optimizer_state,
        gathered=0,
        grad_buffer=0,
        communication=0,
        activations=activations,
        unit=0,
    )
    moments = _Moments(
        _Tree(units, bucket_bytes or 0, is_received=is_received),
        resting,
        PrefetchLimit.of(unshard_prefetch_depth, unshard_prefetch_bytes, bucket_bytes),
        num_held_beside,
        max_live_grad_buffers if is_reduction_async else 0,
        accumulates,
    )
    return max(moments.of_step(gathers_after_step), key=lambda moment: moment.total)


@dataclass(frozen=True, slots=True)
class _Moments:
    """What there is at the moments of a step that may be its peak.

    Attributes:
        tree: The units.
        resting: What there is in all of them.
        limit: How far ahead is gathered.
        num_beside: See `peak_bytes`, like the last one.
        drain: Reductions that may be under way at a time.
        accumulates: Likewise.
    """

    tree: _Tree
    resting: PeakBytes
    limit: PrefetchLimit
    num_beside: int
    drain: int
    accumulates: bool

    def of_step(self, gathers_after_step: bool) -> Iterator[PeakBytes]:
        """All of them."""
        last = list(self.at_the_end())
        yield from last
        if gathers_after_step:
            # All gradients are reduced.
            yield replace(self.in_forward(0), main_grad=last[-1].main_grad)
        units = self.tree.units
        waiting = sum(_unreduced(unit, is_filling=False) for unit in units)
        for index in range(len(units)):
            moment = self.in_forward(index)
            yield replace(moment, grad_buffer=waiting) if self.accumulates else moment
            yield from self.in_backward(index)

    def at_the_end(self) -> Iterator[PeakBytes]:
        """The end of a backward, when its last reductions are waited for one by one."""
        settled = self.resting.main_grad
        for buffers, comm, main in self.tree.last_gradients(self.drain):
            yield replace(
                self.resting, main_grad=settled + main, grad_buffer=buffers, communication=comm
            )

    def in_forward(self, index: int) -> PeakBytes:
        """The forward of a unit, without gradients that wait."""
        there = self.tree.gathered_in_forward(index, self.limit, self.num_beside)
        gathered = sum(self.tree.units[i].gathered for i in there)
        return replace(self.resting, gathered=gathered, unit=index)

    def in_backward(self, index: int) -> Iterator[PeakBytes]:
        """The backward of a unit, while its gradients arrive and while they are reduced."""
        units = self.tree.units
        there = self.tree.gathered_at(index, self.limit, self.num_beside)
        gathered = sum(units[i].gathered_in_backward for i in there)
        *outside, _ = self.tree.path(index)
        kept = sum(units[i].sum("grad_buffer") for i in outside)
        if self.accumulates:
            kept += sum(_unreduced(units[i], is_filling=i in outside) for i in range(index))
        moments = self.tree.gradients_at(index, self.drain, accumulates=self.accumulates)
        for buffers, comm, main, is_over in moments:
            yield replace(
                self.resting,
                main_grad=self.resting.main_grad + main,
                # Dropped before its gradients are reduced.
                gathered=gathered - (units[index].gathered_in_backward if is_over else 0),
                grad_buffer=kept + buffers,
                communication=comm,
                unit=index,
            )


def _is_set(group: GroupBytes, *, has_gradients: bool | None) -> bool:
    """Whether a group's main gradient is there before the last backward of a step.

    Args:
        group: The group.
        has_gradients: See `peak_bytes`.
    """
    if has_gradients is None:
        # Not where gradients wait somewhere else to be synchronized.
        return not (group.accumulates_unreduced or group.partial_grad)
    return has_gradients


class _Tree:
    """Orders in which a backward goes through units inside units."""

    def __init__(
        self, units: Sequence[UnitBytes], bucket_nbytes: int, *, is_received: bool
    ) -> None:
        self.units = units
        self._bucket_nbytes = bucket_nbytes
        self._has_partial = any(unit.sum("partial_grad") for unit in units)
        self._has_received = is_received
        groups = [group for unit in units for group in unit.groups]
        self._summed = max((group.summed for group in groups), default=0)
        # Along the outer axis that is when a full buffer has been freed, which is larger.
        self._summed_in_room = max((g.summed for g in groups if not g.partial_grad), default=0)
        children: list[list[int]] = [[] for _ in units]
        for index, unit in enumerate(units):
            if unit.parent is not None:
                children[unit.parent].append(index)
        self._children = children
        # A backward enters a unit before those inside it, and leaves it after them.
        self._entered = [0, *itertools.chain(*(self._enter(i) for i in reversed(children[0])))]
        self._position = {index: position for position, index in enumerate(self._entered)}
        sums = (unit.sum("main_grad") for unit in reversed(units))
        # Main gradients of each unit and all that are listed after it, in reverse.
        self._main_from_end = list(itertools.accumulate(sums, initial=0))

    def _enter(self, index: int) -> Iterator[int]:
        pending = [index]
        while pending:
            index = pending.pop()
            yield index
            pending.extend(self._children[index])

    def path(self, index: int) -> list[int]:
        """The units that a unit is inside of, outermost first, and itself."""
        path = [index]
        while (parent := self.units[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def gathered_at(self, index: int, limit: PrefetchLimit, num_beside: int) -> set[int]:
        """Units that are gathered when a unit's gradients are reduced."""
        last = index
        while self._children[last]:
            last = self._children[last][0]
        following = self._entered[self._position[last] + 1 :]
        kept = (i for i in following if self.units[i].keeps_gathered)
        return {*self.path(index), *self._ahead(following, limit, num_beside), *kept}

    def gathered_in_forward(self, index: int, limit: PrefetchLimit, num_beside: int) -> set[int]:
        """Units that are gathered when a unit computes in the forward."""
        kept = (i for i in range(index) if self.units[i].keeps_gathered)
        following = range(index + 1, len(self.units))
        return {*self.path(index), *self._ahead(following, limit, num_beside), *kept}

    def _ahead(
        self, following: Sequence[int], limit: PrefetchLimit, num_beside: int
    ) -> Sequence[int]:
        """Of the units that come next, those that are gathered ahead or held."""
        following = [index for index in following if self.units[index].gathered]
        return following[: limit.most(self.units[i].gathered for i in following) + num_beside]

    def gradients_at(
        self, index: int, drain: int, *, accumulates: bool
    ) -> Iterator[tuple[int, int, int, bool]]:
        """Bytes of gradient buffers, communication, main gradients as a unit's gradients are made.

        Main gradients are those that come in this backward. And whether it has computed them all.
        """
        unit = self.units[index]
        # Before it has a gradient, nobody waits for reductions; with the first one somebody does.
        buffers, comm, main = self._under_way(index, drain, drain)
        waiting = _unreduced(unit, is_filling=False) if accumulates else 0
        yield buffers + waiting, comm + self._summed_in_room, main, False
        is_outside = any(self.units[i].is_trained for i in self._children[index])
        # A unit that others are inside of has its buffer before theirs are reduced.
        num_inner = drain if is_outside or not unit.is_trained else max(drain - 1, 0)
        buffers, comm, main = self._under_way(index, num_inner, drain)
        comm += self._summed_in_room if num_inner == drain else 0
        waiting = _unreduced(unit, is_filling=True) if accumulates else 0
        yield buffers + unit.sum("grad_buffer") + waiting, comm, main, False
        buffers, comm, main = self._under_way(index, max(drain - 1, 0), drain)
        comm += 0 if drain else self._summed_in_room
        for more_buffers, more_comm, more_main in _reducing(unit):
            yield buffers + more_buffers, comm + more_comm, main + more_main, True

    def last_gradients(self, drain: int) -> Iterator[tuple[int, int, int]]:
        """The same when the last reductions of a backward are waited for, and nothing computes."""
        buffers, comm, main = self._under_way(-1, drain, drain)
        yield buffers, comm + self._summed_in_room, main
        buffers, comm, main = self._under_way(-1, 0, drain)
        yield buffers, comm + self._summed, main

    def _under_way(self, index: int, num_inner: int, num_outer: int) -> tuple[int, int, int]:
        """Bytes of gradient buffers, communication, main gradients of reductions issued earlier."""
        # Units are reduced in the reverse of the order they are listed in.
        earlier = (i for i in range(index + 1, len(self.units)) if self.units[i].is_trained)
        units = [self.units[i] for i in itertools.islice(earlier, num_inner + num_outer)]
        inner, outer = units[:num_inner], units[num_inner:]
        buffers = sum(unit.sum("partial_grad") for unit in inner)
        buffers += sum(g.partial_grad for u in outer for g in u.groups if not g.outer_comm)
        buffers += sum(g.grad_buffer for u in inner for g in u.groups if not g.grad_comm)
        comm = sum(u.sum("grad_comm") + u.sum("received") for u in inner)
        comm += sum(u.sum("outer_comm") + u.sum("outer_received") for u in outer)
        if num_inner + num_outer:
            more_buffers, more_comm = self._in_buckets(num_inner, num_outer)
            buffers, comm = buffers + more_buffers, comm + more_comm
        main = self._main_from_end[len(self.units) - 1 - index]
        # Along the outer axis comes later.
        main -= sum(g.main_grad for unit in inner for g in unit.groups if g.partial_grad)
        return buffers, comm, main

    def _in_buckets(self, num_inner: int, num_outer: int) -> tuple[int, int]:
        """What small units may take besides, where a bucket of them counts as one unit.

        One bucket fills while others are under way, in full buffers, then in partial shards; on a
        CPU it is sent from a copy and received beside it.
        """
        nbytes = self._bucket_nbytes
        buffers = (1 + num_inner) * nbytes + (num_inner + num_outer) * nbytes * self._has_partial
        return buffers, 2 * (1 + num_inner) * nbytes * self._has_received


def _unreduced(unit: UnitBytes, *, is_filling: bool) -> int:
    """Bytes of gradients of earlier micro-batches that wait for the synchronized backward.

    Args:
        unit: A unit whose own turn is still to come.
        is_filling: Whether its full buffer is there in any case.
    """
    full = 0 if is_filling else sum(g.grad_buffer for g in unit.groups if g.accumulates_unreduced)
    return full + sum(g.partial_grad for g in unit.groups if not g.accumulates_unreduced)


def _reducing(unit: UnitBytes) -> Iterator[tuple[int, int, int]]:
    """Bytes of gradient buffers, communication, main gradients as a unit's groups are handed over.

    A copy in the communication dtype takes the place of the buffer it was made from, group by
    group.
    """
    buffers, comm, main = unit.sum("grad_buffer"), 0, 0
    for group in unit.groups:
        buffers += group.partial_grad
        main += 0 if group.partial_grad else group.main_grad
        yield buffers, comm + group.grad_comm, main
        buffers -= group.grad_buffer if group.grad_comm else 0
        comm += group.grad_comm + group.received
        yield buffers, comm, main
