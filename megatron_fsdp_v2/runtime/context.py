"""What the units of one root share: what is gathered and reduced when, the allocator."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_fsdp_v2.comm.backends import is_capturing
from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.runtime.gather_rules import GatherSchedule
from megatron_fsdp_v2.runtime.reduction_queue import ReductionQueue
from megatron_fsdp_v2.runtime.reduction_rules import OrderedReductions, RootPass

if TYPE_CHECKING:
    import torch

    from megatron_fsdp_v2.comm.backends import LateFlag
    from megatron_fsdp_v2.comm.interface import Communicator
    from megatron_fsdp_v2.memory.allocator import Allocator
    from megatron_fsdp_v2.params.group import ParameterGroup
    from megatron_fsdp_v2.runtime.options import RuntimeOptions
    from megatron_fsdp_v2.runtime.unit_base import UnitBase

__all__ = ["Context"]


class Context:
    """State shared by the units under one root.

    Attributes:
        communicator: Issues collectives.
        allocator: Makes temporary buffers.
        options: How the units run.
        observer: Receives events of the units.
        gathers: What is gathered ahead of its use.
        reductions: Gradient reductions under way.
        ordered_reductions: When units are reduced in a backward; None without communication.
        stepped: `id()`s of parameters that optimizers stepped since the latest pass began, where
            gathers follow from that.
        weight_version: Counts events after which main weights may have changed.
        root_pass: What forwards with gradients are counted in: the root's latest one that is no
            recomputation, and units that ran outside of it.
        backward_pass: The forward whose backward is under way, or was the last.
        synced_in_backward: The units that synchronized gradients in it when it began.
        has_gradient: Whether a gradient of a parameter arrived in it.
        has_unreduced: Whether a backward left gradients to be synchronized.
        pass_has_grad: Whether the latest pass was made for a backward.
        forward_failed: Whether a pass ended in an exception.
        is_checked: Whether ranks have compared what they sharded.
        has_formats: Whether a weight format of a group talks to other ranks.
        num_scheduled: Micro-batches whose modules a schedule runs part by part, from the beginning
            of their forward to the end of their backward; see `ScheduledUnits`.
        use_numbers: A number for every run of a unit, larger than all before it.
        device: Where units compute.
        is_captured: Whether the latest pass is captured in a CUDA graph.
        has_graph: Whether a pass or a step was captured: replays change weights, and no hook tells.
        late_flags: Whether weights of groups, by name, changed unseen after they were gathered.
    """

    def __init__(
        self,
        communicator: Communicator,
        allocator: Allocator,
        options: RuntimeOptions,
    ) -> None:
        self.communicator = communicator
        self.allocator = allocator
        self.options = options
        self.observer = Observer()
        self.gathers: GatherSchedule[UnitBase] = GatherSchedule(
            options.prefetch_limit, communicator.together
        )
        self.reductions = ReductionQueue(
            options.max_live_grad_buffers,
            is_async=options.enable_async_reduce_grad,
            bucket_nbytes=options.bucket_bytes or 0,
            together=communicator.together,
            observer=self.observer,
        )
        self.ordered_reductions: OrderedReductions[UnitBase] | None = None
        self.stepped: set[int] = set()
        self.weight_version = 0
        self.root_pass: RootPass[UnitBase] = RootPass()
        self.backward_pass = self.root_pass
        self.synced_in_backward: weakref.WeakSet[UnitBase] = weakref.WeakSet()
        self.has_gradient = False
        self.has_unreduced = False
        self.pass_has_grad = False
        self.forward_failed = False
        self.is_checked = False
        self.has_formats = False
        self.num_scheduled = 0
        self.use_numbers = itertools.count()
        self.device: torch.device | None = None
        self.is_captured = False
        self.has_graph = False
        self.late_flags: list[tuple[str, LateFlag]] = []
        self._pass_unit: weakref.ref[UnitBase] | None = None
        self._units: list[weakref.ref[UnitBase]] = []
        # Kept gathered for their backwards, the oldest one first.
        self._recomputed: dict[weakref.ref[UnitBase], None] = {}
        self._in_backward: weakref.ref[UnitBase] | None = None
        # By the number of the use, what finishes its backward.
        self._nearly_over: dict[int, Callable[[], None]] = {}
        self._end_of_backward: weakref.ref[object] | None = None

    def set_units(self, units: Sequence[UnitBase]) -> None:
        """Register the units, parents before children as `modules()` lists them.

        Units hold the context; the context holds units weakly.

        Args:
            units: All units under the root, the root's own first.
        """
        self._units = [weakref.ref(unit) for unit in units]
        self.device = next((group.device for group in self.groups()), None)
        self.has_formats = any(group.weights.format.communicates for group in self.groups())
        if any(axis.size > 1 for group in self.groups() for axis in group.axes):
            # Where no use of a unit is a collective, ranks may run different ones.
            may_differ = all(unit.skips_safely for unit in units)
            self.ordered_reductions = OrderedReductions(units, in_order=may_differ)

    @property
    def is_capturing(self) -> bool:
        """Whether what is queued now is captured in a CUDA graph."""
        return self.device is not None and is_capturing(self.device)

    def note_replays(self) -> None:
        """Take weights for stale where a graph may have been replayed since the last pass."""
        if self.has_graph:
            self.weight_version += 1

    @property
    def ranks_may_differ(self) -> bool:
        """Whether another rank may run other units than this one."""
        return self.ordered_reductions is not None and self.ordered_reductions.in_order

    def units(self) -> list[UnitBase]:
        """Live units, parents before children."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def groups(self) -> list[ParameterGroup]:
        """Those of all live units."""
        return [group for unit in self.units() for group in unit.groups]

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule tells when units are used, and not their modules."""
        return self.num_scheduled > 0

    @property
    def is_in_forward(self) -> bool:
        """Whether a pass is under way: the forward of the root, or of a unit outside of that."""
        return self._pass_unit is not None and self._pass_unit() is not None

    def is_pass_of(self, unit: UnitBase) -> bool:
        """Whether the pass under way began with this unit."""
        return self._pass_unit is not None and self._pass_unit() is unit

    def begin_forward(self, unit: UnitBase, *, has_grad: bool) -> None:
        """Note that a pass starts (not a recomputation).

        Where ranks may run different units, a backward reduces all of them once for every pass.
        So units that run outside of the root's forward, before or after it, are in one pass with
        it: another rank may leave them out. Elsewhere every forward of the root is another pass.

        Args:
            unit: The unit it starts with.
            has_grad: Whether it is made for a backward.
        """
        self._pass_unit = weakref.ref(unit)
        self.stepped.clear()
        self.communicator.begin_pass()
        self.pass_has_grad = has_grad
        kind = "forward" if has_grad else "evaluation"
        name = kind if unit.is_root else f"{kind} of {unit.fqn}"
        self.allocator.begin_pass(name, no_pending_backward=self._no_pending_backward())
        self.gathers.begin_forward(unit)
        # An evaluation between a forward and its backward is in nobody's way.
        has_root = unit.is_root and has_grad
        is_another = has_root and (self.root_pass.has_root or not self.ranks_may_differ)
        if is_another or self.root_pass.is_over:
            self.root_pass = RootPass()
            self.gathers.forget_backwards()
        self.root_pass.has_root |= has_root

    def end_forward(self, *, failed: bool = False) -> None:
        """Note that the forward is over that the pass began with.

        Args:
            failed: Whether it ended in an exception. What was under way is left for `repair`:
                waiting for it may take other ranks, and the exception is to be seen at once.
        """
        self._pass_unit = None
        self.forward_failed |= failed

    def end_pass(self, name: str) -> None:
        """Note that a backward, or a forward that has none, is over.

        Args:
            name: What is over, for reports; empty for an evaluation.
        """
        self.allocator.end_pass(name, no_pending_backward=self._no_pending_backward())

    def _no_pending_backward(self) -> bool:
        """Whether no backward is still to come, as far as units tell that passes began with."""
        return not any(unit.is_expected_back for unit in self.gathers.first_units())

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward is under way, as far as known: one that failed may look like it."""
        return self._end_of_backward is not None

    @property
    def runs_backward(self) -> bool:
        """Whether a backward is under way that has not failed; asked for every gradient."""
        return self._end_of_backward is not None and self._end_of_backward() is not None

    @property
    def backward_failed(self) -> bool:
        """Whether the latest backward ended in an exception.

        The engine drops the callback that was to finish it together with the failed graph task.
        """
        return self._end_of_backward is not None and self._end_of_backward() is None

    def begin_backward(self, passed: RootPass[UnitBase], end_of_backward: object) -> None:
        """Note that a backward starts.

        Args:
            passed: The forward that it is of.
            end_of_backward: The callback that the engine runs at its end, and nobody else holds.
        """
        self._end_of_backward = weakref.ref(end_of_backward)
        self.has_gradient = False
        if self.ranks_may_differ:
            syncing = (unit for unit in self.units() if unit.syncs_gradients)
            self.synced_in_backward = weakref.WeakSet(syncing)
        self.gathers.begin_backward()
        self.begin_turns(passed)

    def note_nearly_over(self, number: int, finish: Callable[[], None]) -> None:
        """Finish a backward that does not tell its end when that of an earlier run begins.

        Args:
            number: Of the run that it is of.
            finish: Does that.
        """
        self._nearly_over[number] = finish

    def finish_later_than(self, number: int) -> None:
        """The backward of a run begins: those of runs that began after it are over.

        The engine runs what was made last first.
        """
        while self._nearly_over and (latest := max(self._nearly_over)) > number:
            self._nearly_over.pop(latest)()

    def forget_nearly_over(self, number: int) -> None:
        """A backward has told its end all the same."""
        self._nearly_over.pop(number, None)

    def begin_turns(self, passed: RootPass[UnitBase]) -> None:
        """Start a new round of reductions, of the units of one forward."""
        self.backward_pass = passed
        passed.is_over = True
        if self.ordered_reductions is not None:
            self.ordered_reductions.begin(passed)

    def forget_backward(self) -> None:
        """No backward is under way any more."""
        self._end_of_backward = None
        self._nearly_over.clear()

    def recompute(self, unit: UnitBase) -> None:
        """A unit is about to be recomputed: see that nobody drops it meanwhile, and make room.

        The oldest recomputed units that are in the way of one more are dropped.
        """
        self._recomputed.pop(weakref.ref(unit), None)
        waiting = list(self._recomputed)
        current = None if self._in_backward is None else self._in_backward()
        # A region is recomputed for a unit whose backward has begun, and which is gathered too.
        is_for_another = (
            current is not None
            and current is not unit
            and current.is_unsharded
            and not unit.is_inside(current)
        )
        # What waits comes next in the backward, the newest first.
        ahead = [unit] if is_for_another else []
        ahead += [each for ref in reversed(waiting) if (each := ref()) is not None]
        room = self.gathers.limit.count(each.gathered_nbytes for each in ahead) - is_for_another
        for ref in waiting[: max(0, len(waiting) - max(0, room))]:
            del self._recomputed[ref]
            oldest = ref()
            if oldest is not None:
                oldest.reshard()

    def keep_recomputed(self, unit: UnitBase) -> None:
        """Leave a recomputed unit gathered for its backward."""
        ref = weakref.ref(unit)
        self._recomputed.pop(ref, None)
        self._recomputed[ref] = None

    def forget_recomputed(self, unit: UnitBase | None = None) -> None:
        """A unit's own backward takes over from here, or (without one) the whole backward ends."""
        self._in_backward = None if unit is None else weakref.ref(unit)
        if unit is None:
            self._recomputed.clear()
        elif self._recomputed:
            self._recomputed.pop(weakref.ref(unit), None)
