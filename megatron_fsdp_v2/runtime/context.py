"""State shared by the units of one root: options, weight version, passes, and the backward."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_v2.comm.backends import is_capturing
from megatron_fsdp_v2.comm.interface import Communicator
from megatron_fsdp_v2.memory.allocator import Allocator
from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.runtime.backward import Backward
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from megatron_fsdp_v2.runtime.schedule import (
    FORWARD_NUMBERS,
    GatherSchedule,
    PrefetchLimit,
    RootPass,
    live,
)

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.unit import Unit


NUM_COMPARED = {True: 16, False: 1}
"""In how many first passes ranks compare their collectives, with gradients and without.

Those with gradients end with the first backward. A pipeline runs several forwards before it; a
program that runs no backward should not compare for ever.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class _NestedPass:
    """A pass nested in a backward, and what the context holds again at its end.

    Attributes:
        unit: The unit that the pass began with.
        gathers: Order of gathers of the enclosing backward.
        pass_has_grad: Whether gradients were enabled when the enclosing pass began.
    """

    unit: weakref.ref[Unit]
    gathers: GatherSchedule
    pass_has_grad: bool


class Context:
    """State shared by the units under one root.

    Attributes:
        communicator: Issues collectives.
        allocator: Makes temporary buffers.
        options: Options of the root.
        observer: Receives events of the units.
        gathers: Prefetches units.
        backward: The backward of the units.
        weight_version: Counts events after which main weights may have changed.
        root_pass: Counts the forwards of units in the root's latest forward with gradients (not a
            recomputation), and the forwards of units that ran outside of it.
        pass_has_grad: Whether gradients were enabled when the latest pass began.
        forward_failed: Whether a pass ended in an exception.
        is_checked: Whether ranks have compared their units.
        num_registrations: Registrations of parameters at the latest check of those that no unit
            owns; see `check_owned`.
        ranks_may_differ: Whether another rank may run other units than this one.
        has_formats: Whether the weight format of any group communicates.
        device: Device of the units' buffers.
        is_captured: Whether the latest pass is captured in a CUDA graph.
        is_early: Whether the latest pass is one of the first, whose collectives ranks compare.
        is_after_backward: Whether no pass with gradients began since the latest backward.
        has_graph: Whether a pass or a step was captured: replays change weights and run no hook.
    """

    def __init__(
        self, communicator: Communicator, allocator: Allocator, options: RuntimeOptions
    ) -> None:
        self.communicator = communicator
        self.allocator = allocator
        self.options = options
        self.observer = Observer()
        self.gathers: GatherSchedule = GatherSchedule(options.prefetch_limit)
        self.backward = Backward(self)
        self.root_pass: RootPass = RootPass()
        self.ranks_may_differ = False
        self.weight_version = 0
        self.pass_has_grad = False
        self.forward_failed = False
        self.is_checked = False
        self.num_registrations = 0
        self.has_formats = False
        self.device: torch.device | None = None
        self.is_captured = False
        self.is_early = False
        self.is_after_backward = True
        self._num_to_compare = dict(NUM_COMPARED)
        self.has_graph = False
        self._pass_unit: Callable[[], Unit | None] = lambda: None
        self._nested: _NestedPass | None = None
        self._num_draws = 0
        self._units: list[weakref.ref[Unit]] = []

    def set_units(self, units: Sequence[Unit]) -> None:
        """Register the units, parents before children as `modules()` lists them.

        Units hold the context; the context holds units weakly.

        Args:
            units: All units under the root, the root's own first.
        """
        self._units = [weakref.ref(unit) for unit in units]
        groups = self.groups()
        self.device = next((group.device for group in groups), None)
        self.has_formats = any(group.format.communicates for group in groups)
        # If no use of a unit is a collective, ranks may run different units.
        self.ranks_may_differ = any(a.size > 1 for group in groups for a in group.axes) and all(
            unit.needs_no_collective for unit in units
        )
        self.root_pass = self._new_pass()

    def _new_pass(self) -> RootPass:
        return RootPass(self._units[::-1] if self.ranks_may_differ else None)

    def units(self) -> list[Unit]:
        """Live units, parents before children."""
        return live(self._units)

    def groups(self) -> list[ParameterGroup]:
        """Parameter groups of all live units."""
        return [group for unit in self.units() for group in unit.groups]

    def change_options(self, **changes: Any) -> None:
        """Change options of reductions, from now on."""
        self.options = dataclasses.replace(self.options, **changes)
        for unit in self.units():
            # A root that is made around these units later inherits the values.
            unit.root_options.update(changes)

    @property
    def is_capturing(self) -> bool:
        """Whether operations queued now are captured in a CUDA graph."""
        return self.device is not None and is_capturing(self.device)

    def begin_capture(self) -> None:
        """Note that a pass or step that begins now is captured."""
        self.has_graph = True
        # A capture cannot wait for the stream of earlier passes.
        self.communicator.begin_pass(reuses_memory=False)

    def note_replays(self) -> None:
        """Mark weights as stale if a graph may have been replayed since the last pass."""
        if self.has_graph:
            self.weight_version += 1

    def note_draws(self) -> None:
        """Let ranks compare weights again if random numbers were written into replicated ones."""
        groups = self.groups()
        num_draws = sum([group.info.num_draws for group in groups])
        if num_draws != self._num_draws:
            self._num_draws = num_draws
            self.is_checked &= not any(group.has_replicas for group in groups)

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule, not the hooks of modules, reports the uses of units."""
        return self.backward.num_scheduled > 0

    def wait_for_host_memory(self) -> None:
        """Make the host wait for copies from offloaded main weights, which it may write next."""
        if any(group.spec.offload is not None for group in self.groups()):
            self.communicator.synchronize()

    @property
    def compares_collectives(self) -> bool:
        """Whether ranks compare the next collective of a unit before they issue it.

        Ranks that run different units at ZeRO-3 would gather parts of different weights, without an
        error if these have one size. Most programs that do so do it from the first step on.
        """
        if self.options.check_ranks == "once":
            return self.is_early and not (self.ranks_may_differ or self.is_captured)
        return self.options.check_ranks == "always"

    # -- forwards -----------------------------------------------------------------------------

    def forget_casts(self) -> None:
        """Clear autocast's cache if a unit frees its weights between its uses.

        The cache has casts of weights from earlier passes of the same autocast context, also from
        those without gradients. A gradient would reach the weight through the node of such a cast,
        after the backward of the unit has ended. Passes of one loss share their casts, as in a
        plain loop; a recomputation and the first pass of a loss do not use earlier ones.
        """
        device = self.device
        if (
            device is not None
            and torch.amp.autocast_mode.is_autocast_available(device.type)
            and torch.is_autocast_enabled(device.type)
            and torch.is_autocast_cache_enabled()
            and not all(unit.needs_no_collective for unit in self.units())
        ):
            torch.clear_autocast_cache()

    @property
    def is_in_forward(self) -> bool:
        """Whether a pass is under way: a forward of the root, or of a unit outside it."""
        return self._pass_unit() is not None

    @property
    def is_nested(self) -> bool:
        """Whether the pass under way is nested in a backward of the same root."""
        return self._nested is not None

    @property
    def belongs_to_backward(self) -> bool:
        """Whether what begins now is part of the backward under way, not of a nested pass."""
        return self._nested is None and self.backward.is_running

    @property
    def refreshes(self) -> bool:
        """Whether a use of a unit that begins now refreshes stale weights.

        A backward and its recomputations use the weights of their forward. Below ZeRO-3, passes
        nested in it use them too: a refresh would overwrite what the backward saved.
        """
        return not self.backward.is_running or (self.is_nested and not self.ranks_may_differ)

    def is_pass_of(self, unit: Unit) -> bool:
        """Whether the pass under way began with this unit."""
        begun = self._pass_unit if self._nested is None else self._nested.unit
        return begun() is unit

    def begin_forward(self, unit: Unit, *, has_grad: bool) -> None:
        """Begin a pass (not a recomputation).

        If ranks may run different units, a backward reduces all units once per root pass. Units
        that run outside the root's forward, before or after it, then belong to its root pass, since
        another rank may skip them. Otherwise every forward of the root begins a new root pass.

        Args:
            unit: The unit that the pass begins with.
            has_grad: Whether gradients are enabled.
        """
        self._pass_unit = weakref.ref(unit)
        if has_grad or self._no_pending_backward():
            # Otherwise memory of the backward would be freed for another stream than its own.
            self.communicator.begin_pass()
        self.pass_has_grad = has_grad
        self.is_early = self._num_to_compare[has_grad] > 0
        self._num_to_compare[has_grad] -= 1
        self.is_after_backward &= not has_grad
        kind = "forward" if has_grad else "evaluation"
        name = kind if unit.is_root else f"{kind} of {unit.fqn}"
        self.allocator.begin_pass(name, no_pending_backward=self._no_pending_backward())
        self.gathers.begin_forward(unit)
        # An evaluation between a forward and its backward does not start another root pass.
        has_root = unit.is_root and has_grad
        is_another = has_root and (self.root_pass.has_root or self.root_pass.has_forwards)
        if is_another or self.root_pass.is_over:
            self.root_pass = self._new_pass()
            self.gathers.forget_backwards()
        self.root_pass.has_root |= has_root
        if has_grad:
            self.root_pass.expect_backward()

    def begin_direct_use(self, unit: Unit) -> RootPass:
        """Count a use of a sharded parameter itself.

        Returns:
            The pass that the use belongs to.
        """
        if self.root_pass.is_over:
            self.root_pass = self._new_pass()
            self.gathers.forget_backwards()
        passed = self.root_pass
        passed.expect_backward()
        passed.add_direct_use(weakref.ref(unit))
        if not passed.has_root:
            passed.turn = next(FORWARD_NUMBERS)
        return passed

    def begin_nested_pass(self, unit: Unit, *, has_grad: bool) -> None:
        """Begin a pass inside the backward under way, such as a forward in a tensor hook.

        The pass prefetches nothing and does not change the expected order of the backward. Its
        buffers are part of the backward's allocation trace.

        Args:
            unit: The unit that the pass begins with.
            has_grad: Whether gradients are enabled.
        """
        self.backward.finish_others()
        self._nested = _NestedPass(weakref.ref(unit), self.gathers, self.pass_has_grad)
        self.gathers = GatherSchedule(PrefetchLimit(units=0))
        self.pass_has_grad = has_grad
        if self.root_pass.is_over:
            self.root_pass = self._new_pass()
        if has_grad:
            self.root_pass.expect_backward()

    def end_nested_pass(self) -> None:
        """End a pass inside a backward, if one is under way."""
        if self._nested is not None:
            self.gathers, self.pass_has_grad = self._nested.gathers, self._nested.pass_has_grad
            self._nested = None

    def end_forward(self, *, failed: bool = False) -> None:
        """End the forward that began the pass.

        Args:
            failed: Whether it ended in an exception. Collectives under way are left to `repair`:
                waiting for them could block on other ranks and delay the exception.
        """
        unit = self._pass_unit() if self._nested is None else self._nested.unit()
        if (
            unit is not None
            and self.pass_has_grad
            and (unit.is_root or not self.root_pass.has_root)
        ):
            self.root_pass.turn = next(FORWARD_NUMBERS)
        if self._nested is None:
            self._pass_unit = lambda: None
        self.end_nested_pass()
        self.forward_failed |= failed

    def end_pass(self, name: str) -> None:
        """End a backward or an evaluation.

        Args:
            name: Kind of the pass, for reports; empty for an evaluation.
        """
        if name:
            self.is_early, self._num_to_compare[True] = False, 0
            self.is_after_backward = True
        self.allocator.end_pass(name, no_pending_backward=self._no_pending_backward())

    def _no_pending_backward(self) -> bool:
        """Whether no unit that began a pass expects a backward."""
        return not any(unit.expects_backward for unit in self.gathers.first_units())

    # -- after an exception -------------------------------------------------------------------

    @property
    def needs_repair(self) -> bool:
        """Whether an exception left a pass unfinished. Call between passes."""
        if self.backward.is_under_way or self.is_scheduled or self.forward_failed:
            return True
        return not all(unit.is_idle for unit in self.units())

    def repair(self) -> None:
        """Reset the units after a failed forward or backward.

        Drops the gradients of a failed backward that were collected but not reduced. Also drops
        gradients whose reduction was under way: it may have written them after a `zero_grad`. After
        a failed forward, no gradient is dropped.
        """
        for context in self.backward.abandon():
            context.end_forward()
            context.forward_failed = False
            context.is_after_backward = True
            for unit in context.units():
                unit.reset_after_error()
