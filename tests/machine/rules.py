"""What must hold of a world while it runs: weights in time, and gradients and memory no longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_fsdp_v2.runtime.machine.orders import ExecutionOrder
from megatron_fsdp_v2.runtime.machine.state import RootState, UnitState
from tests.machine.executors import require


class Rules:
    """Rules of `World` that its events check."""

    def _check_ahead(
        self: Any,
        number: int,
        order: ExecutionOrder[UnitState],
        chosen: Sequence[UnitState],
        *,
        may_follow: bool = True,
    ) -> None:
        """Check that the units that follow an expected use are gathered, or the chosen ones.

        Unless the place in the order is not that of this use (`may_follow`).
        """
        unit, num_ahead = self.units[number].state, self.setup.num_ahead
        if self.root_of(number).nested is not None:
            return
        last = order.expected[order.following - 1 : order.following]
        is_expected = may_follow and last == [unit]
        following = [u for u in order.expected[order.following :] if not u.is_gone]
        following = following[:num_ahead] if is_expected else []
        for expected in chosen if chosen and num_ahead else following:
            # Below ZeRO-3, not those of another root.
            if expected.is_gone or (self.setup.zero < 3 and expected.root is not unit.root):
                continue
            require(expected.is_gathered, f"{expected.do.name} is not gathered ahead")

    def _check_freed(self: Any, number: int) -> None:
        """Check that the end of a pass freed what it gathered, ahead of its use too."""
        for unit in self.units:
            is_kept = self.setup.keeps or unit.state.is_root or unit.number in self.setup.stays
            is_kept |= unit.number in self.unsharded
            if unit.state.root is self.root_of(number) and not is_kept:
                require(not unit.state.is_gathered, f"{unit.name} is gathered after a pass")

    def _check_left(self: Any, root: RootState) -> None:
        """Check that no gradient of a root that the backward has left waits any longer."""
        setup = self.setup
        may_wait = setup.direct or setup.interrupts or setup.breaks or setup.resets
        if setup.zero == 3 or may_wait or setup.alone or self.open:
            return
        left = {self.root_of(node.unit) for _, node in self.queue} | {root}
        for group in self.groups:
            state = self.root_of(group.number)
            is_due = group.is_trained and (self.syncs or not group.accumulates_unreduced)
            if is_due and state in self.reached_roots and state not in left:
                require(group.times_reduced, f"group {group.number} waits after its last gradient")

    def _current_units(self: Any, first: UnitState) -> list[UnitState]:
        """Return the gathered units that a pass need not free if it begins with a unit."""
        root = first.root
        is_first = first.is_root or root.pass_unit is None
        if self.engine_run != -1 or root.needs_repair or root.do.has_graph or not is_first:
            return []
        units = [unit for unit in root.units if unit.is_gathered]
        return [u for u in units if not (u.do.is_outdated() or u.do.is_changed())]

    def predicts_backward(self: Any) -> bool:
        """Return whether a backward reverses the uses of its forward one by one."""
        return not (self.setup.direct or self.setup.chosen or self.setup.several)

    def predicts(self: Any) -> bool:
        """Return whether uses that repeat earlier ones have to be gathered ahead."""
        setup = self.setup
        is_changed = setup.several or setup.chosen or setup.loads or setup.deletes
        # A unit that raised is not gathered for a call that follows.
        is_changed = is_changed or setup.catches or setup.max_runs < 99
        return setup.zero == 3 and setup.num_ahead > 0 and not (is_changed or self.has_trained)

    @property
    def may_lose_graphs(self: Any) -> bool:
        """Whether a forward may be under way, or have had no backward and never get one."""
        setup = self.setup
        is_under_way = bool(self.open or self.queue or self.batches or self.engine_run != -1)
        loses = (
            setup.drops
            or setup.nests
            or setup.interrupts
            or setup.fails
            or setup.breaks
            or setup.resets
            or setup.catches
            or setup.repeats
        )
        return not self.counts or loses or is_under_way or setup.alone or setup.trains_inside
