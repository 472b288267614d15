"""Schedules of a world: micro-batches that run the units below the root part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2.runtime.machine import events, reductions
from tests.machine.executors import ABSENT, require


@dataclass
class Batch:
    """A micro-batch under way.

    Attributes:
        number: Its number since the last step.
        place: Forwards and backwards of parts that have begun.
        is_open: Whether the latest one has not ended.
    """

    number: int
    place: int = 0
    is_open: bool = False


class Schedules:
    """Events of `World` that a schedule reports, as `ScheduledUnits` of Megatron's adapter does."""

    @property
    def _parts(self: Any) -> list[Any]:
        """Units whose uses the schedule reports, in order."""
        return [unit for unit in self.units if self.setup.parents[unit.number] >= 0]

    def schedule_actions(self: Any) -> list[tuple[Any, ...]]:
        """Return the events that may happen next while micro-batches are under way."""
        setup = self.setup
        most = 2 * len(self._parts)
        found: list[tuple[Any, ...]] = []
        for place, batch in enumerate(self.batches):
            if batch.is_open:
                found.append(("stop", place))
                continue
            # Backwards run in the order of forwards.
            is_backward = batch.place >= len(self._parts)
            if is_backward and place:
                continue
            found.append(("start", place) if batch.place < most else ("finish", place))
        if self.num_forwards < setup.max_forwards and len(self.batches) < 2:
            found.append(("begin",))
        if setup.interrupts and not self.has_interrupted:
            found.append(("interrupt", False))
        if setup.illegal:
            found.append(("misuse",))
        return found

    def _begin(self: Any) -> None:
        """Begin a micro-batch."""
        self.program.append("begin")
        root = self.roots[0].state
        if not self.batches:
            self.is_ahead, self.roots[0].hooked = False, []
            self.begin_order()
        self.num_forwards += 1
        events.begin_schedule(root.units[0])
        self.batches.append(Batch(self.num_forwards))
        self._use_part(self.units[0])

    def _abandon(self: Any) -> None:
        """Discard the micro-batches that an exception ended."""
        self.program.append("abandon")
        root = self.roots[0].state
        reductions.repair(root)
        require(not (root.needs_repair or root.is_scheduled), "a schedule is not abandoned")

    def _use_part(self: Any, unit: Any) -> None:
        unit.was_ahead = unit.state in unit.state.root.gathers.prefetched
        was_gathered, order = unit.state.is_gathered, unit.state.root.gathers.schedule
        before = order.following
        events.begin_use(unit.state)
        self.num_used[unit.number] += 1
        require(unit.is_ready, f"{unit.name} computes without weights")
        self.orders[-1].use(unit, was_gathered=was_gathered)
        self._check_ahead(unit.number, order, (), may_follow=order.following != before)

    def _part(self: Any, place: int) -> tuple[Any, bool]:
        """Return a part that a micro-batch uses, and whether in its backward."""
        parts = self._parts
        is_backward = place >= len(parts)
        return parts[2 * len(parts) - 1 - place if is_backward else place], is_backward

    def _start(self: Any, place: int) -> None:
        self.program.append(f"start {place}")
        batch = self.batches[place]
        unit, _ = self._part(batch.place)
        batch.is_open = True
        self._use_part(unit)
        self._compute_part(unit)

    def _compute_part(self: Any, unit: Any) -> None:
        for group in unit.groups:
            require(group.version == self.version, f"{unit.name} computes with other weights")

    def _stop(self: Any, place: int) -> None:
        self.program.append(f"stop {place}")
        batch = self.batches[place]
        unit, is_backward = self._part(batch.place)
        batch.is_open, batch.place = False, batch.place + 1
        self._compute_part(unit)
        if is_backward:
            self._set(batch)
            self._reduce_part(unit)
        keeps = self.setup.keeps if is_backward else unit.number in self.setup.stays
        events.release(unit.state, reshard=not keeps)
        is_ahead = unit.state in unit.state.root.gathers.prefetched
        if not (keeps or unit.state.num_users or is_ahead):
            require(not unit.state.is_gathered, f"{unit.name} stays gathered after its last use")

    def _set(self: Any, batch: Batch) -> None:
        self.set_synchronization(
            is_last=not self.setup.accumulates or batch.number == self.setup.max_forwards
        )

    def _reduce_part(self: Any, unit: Any) -> None:
        for group in unit.groups[:1]:
            if group.is_trained:
                group.arrive()
        reductions.reduce(unit.state.root, [unit.state])

    def _finish(self: Any, place: int) -> None:
        """End the backward of a micro-batch."""
        self.program.append("finish")
        batch = self.batches.pop(place)
        root = self.units[0]
        self._set(batch)
        self._reduce_part(root)
        is_last = not self.batches
        events.release(root.state, reshard=is_last and not self.setup.keeps)
        reductions.end_scheduled(root.state.root)
        require(root.root.hooked == self._hooked, f"hooks ran for {root.root.hooked}")
        root.root.hooked = []
        require(not root.state.root.is_reducing, "a reduction is in flight")
        require(root.root.has_ended_reductions, "reductions are not ended")
        root.root.has_ended_reductions = False
        for group in self.groups:
            what = f"when a micro-batch is over, group {group.number}"
            if self.syncs or not group.accumulates_unreduced:
                times = 1 if group.is_trained else 0
                require(
                    group.times_reduced == times, f"{what} was reduced {group.times_reduced} times"
                )
                require(not group.arrived and group.full == ABSENT, f"{what} has a full gradient")
            if self.syncs:
                require(group.partial == ABSENT and not group.is_owed, f"{what} owes a gradient")
            group.times_reduced = 0
        if is_last:
            self.may_hide = self.syncs
            require(not root.root.is_allocating, "a schedule does not end for the allocator")
            for unit in self.units:
                is_kept = self.setup.keeps or unit.number in self.setup.stays
                require(is_kept or not unit.state.is_gathered, f"{unit.name} is gathered after it")

    @property
    def _hooked(self: Any) -> list[int]:
        return [unit.number for unit in reversed(self.units)] if self.syncs else []

    def _misuse(self: Any) -> None:
        """End a use that did not begin."""
        self.program.append("misuse")
        self.is_over = True
        unit = next((part for part in self._parts if not part.state.num_users), None)
        if unit is not None:
            try:
                events.release(unit.state, reshard=True)
            except RuntimeError:
                return
            require(False, "the end of a use that did not begin is not rejected")
