"""State of the machine: units, forwards, passes, and what is under way for each root.

Values only: no tensor, no process group, no weak reference. The executor of an object's commands
(`do`) is not part of the state.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp_v2.runtime.machine.commands import GroupCommands, RootCommands, UnitCommands
from megatron_fsdp_v2.runtime.machine.orders import Gathers, Numbers, Pass, PrefetchLimit, UnitFacts

UNKNOWN = sys.maxsize
"""Position of a backward before the first unit that it reaches."""

AT_END = -2
"""Position of a backward that has left every forward."""

NUM_COMPARED = {True: 16, False: 1}
"""In how many first passes ranks compare their collectives, with gradients and without.

Those with gradients end with the first backward. A pipeline runs several forwards before it; a
program that runs no backward should not compare for ever.
"""


class Phase(enum.Enum):
    """Phase of a unit."""

    IDLE = "idle"
    """Not running. Its modules hold sharded parameters unless weights are kept gathered."""
    FORWARD = "forward"
    """In its forward, or in a recomputation of it."""
    BACKWARD = "backward"
    """Between the first gradient of its outputs and the last gradient of its inputs."""

    # Faster than the `__hash__` of enums, which is written in Python.
    __hash__ = object.__hash__


LEGAL_MOVES = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD},
    # In a unit of several modules, a backward may begin before the last module has run.
    Phase.FORWARD: {Phase.IDLE, Phase.BACKWARD},
    Phase.BACKWARD: {Phase.IDLE},
}


class Engine(enum.Enum):
    """What the autograd engine does with the units of a root."""

    RESTING = "resting"
    """No backward is under way."""
    RUNNING = "running"
    """A backward is under way."""
    FAILED = "failed"
    """A backward ended in an exception and is not repaired yet."""


@dataclass(slots=True)
class Settings:
    """Options of a unit that a user sets between passes.

    Attributes:
        reshard_after_forward: Whether to reshard between forward and backward.
        reshard_after_backward: Whether to reshard after a backward.
        requires_gradient_sync: Whether its backward synchronizes gradients.
        requires_all_reduce: Whether its backward also reduces gradients along the outer axis, if
            there is one.
        is_last_backward: Whether the next backward is the last before the optimizer steps.
        is_finalized_manually: Whether backwards leave synchronization to `finalize_backward`.
        forward_prefetch: Units to gather when its forward starts, instead of the recorded order.
        backward_prefetch: Units to gather when its backward starts, instead of the recorded order.
    """

    reshard_after_forward: bool
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    is_last_backward: bool = True
    is_finalized_manually: bool = False
    forward_prefetch: Sequence[UnitState] = ()
    backward_prefetch: Sequence[UnitState] = ()


@dataclass(slots=True)
class Control:
    """Options of a root that the machine obeys.

    Attributes:
        limit: Limit of gathers ahead of the running unit.
        is_async: Whether a unit is reduced while the next one computes.
        max_live: Number of units that have full gradient buffers at a time, at least 1.
        compares: How often ranks compare their collectives: `never`, `once` or `always`.
    """

    limit: PrefetchLimit = field(default_factory=PrefetchLimit)
    is_async: bool = True
    max_live: int = 2
    compares: str = "once"


# -- units -----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class UnitState(UnitFacts):
    """State of a unit.

    Attributes:
        do: Executes its commands.
        groups: Execute the commands of its own groups.
        settings: Options that a user sets between passes.
        root: Root that it belongs to.
        modules: Numbers of its modules.
        fqn: Names of its modules under the root, for reports.
        reduced_with: The unit itself, and the owners of the tied groups that it gathers too.
        ancestors: Units whose modules contain its modules.
        single_payload: Whether weights gathered for one use serve every use.
        has_outer: Whether a group has an outer axis.
        is_collective: Whether a use of the unit is a collective, so that no rank may skip it.
        is_root: Whether its module is the outermost one.
        phase: Current phase.
        is_gathered: Whether gathered weights are installed, or a gather is under way.
        num_users: Forwards and backwards of a schedule that use the unit now.
        num_pending_backwards: Number of forwards whose backward is expected; it may never run.
        is_recomputed: Whether its forward was recomputed in the latest backward.
        was_recomputed: Whether its forward was recomputed since its latest backward.
        backward_number: Number of the forward whose backward is under way.
        has_begun: Whether its forward is under way.
        is_recomputing: Whether the forward under way repeats an earlier one.
        is_gathered_around: Whether weights were gathered for a backward when its forward began.
        pending_modules: With several modules, those that have not run in the forward under way.
        passed: The pass that its latest forward was part of.
        first_number: Number that its forwards have at least, since the unit was abandoned.
    """

    do: UnitCommands
    groups: list[GroupCommands]
    settings: Settings
    root: RootState
    modules: Sequence[int] = (0,)
    fqn: str = ""
    reduced_with: list[UnitState] = field(default_factory=list)
    ancestors: list[UnitState] = field(default_factory=list)
    single_payload: bool = True
    has_outer: bool = False
    is_collective: bool = True
    is_root: bool = True
    phase: Phase = Phase.IDLE
    is_gathered: bool = False
    num_users: int = 0
    num_pending_backwards: int = 0
    is_recomputed: bool = False
    was_recomputed: bool = False
    backward_number: int = 0
    has_begun: bool = False
    is_recomputing: bool = False
    is_gathered_around: bool = False
    pending_modules: set[int] = field(default_factory=set)
    passed: Pass[UnitState] | None = None
    first_number: int = 0

    @property
    def expects_backward(self) -> bool:
        """Whether a backward is under way or expected after a forward."""
        return self.num_pending_backwards > 0 or self.phase is Phase.BACKWARD

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule, not the hooks of its modules, reports its uses.

        A schedule never calls the root: if the root runs, an exception has ended the schedule.
        """
        return self.root.num_scheduled > 0 and not self.is_root

    def syncs_gradients(self, *, is_finalized: bool = False) -> bool:
        """Return whether a backward or `finalize_backward` reduces gradients into `param.grad`."""
        settings = self.settings
        is_last = settings.is_last_backward and not settings.is_finalized_manually
        is_whole = settings.requires_all_reduce or not self.has_outer
        return (is_last or is_finalized) and settings.requires_gradient_sync and is_whole

    def reshards_after_forward(self, *, has_grad: bool) -> bool:
        """Return whether a forward that ends now reshards."""
        if self.is_recomputing:
            return False
        # The root stays gathered: its backward follows its forward at once.
        stays = self.is_root or not self.settings.reshard_after_forward
        return not (has_grad and stays)

    def move(self, phase: Phase) -> None:
        """Change phase.

        Raises:
            RuntimeError: `LEGAL_MOVES` does not allow it.
        """
        if phase not in LEGAL_MOVES[self.phase]:
            raise RuntimeError(
                f"unit {self.do.name} cannot go from {self.phase.value} to {phase.value}: its "
                "forwards and backwards overlap in a way that no program of torch does. After "
                "Ctrl-C in a forward, call the root before a unit alone"
            )
        self.phase = phase

    def end_forward(self) -> None:
        """Forget the forward under way."""
        self.has_begun = self.is_recomputing = self.is_gathered_around = False
        self.passed = None
        self.pending_modules.clear()

    def forget(self) -> None:
        """Forget the unit, whose modules were deleted."""
        self.is_gone, self.is_gathered = True, False
        self.groups = []
        root = self.root
        if self in root.units:
            root.units.remove(self)
        root.gathers.forwards.pop(self, None)
        if root.pass_unit is self:
            root.pass_unit = None
        if not root.units and root in root.process.under_way:
            root.process.under_way.remove(root)


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of a unit, held by the hooks in its graph.

    Attributes:
        unit: The unit.
        passed: The pass that it was part of.
        number: Sequence number; forwards that begin later have larger numbers.
        begins: Position of a backward that ends the unit's backward; see `Pass`.
        ends: Position of a backward that begins the unit's backward.
        is_recomputed: Whether it repeats a forward.
        is_nested: Whether it ran in a pass nested in a backward.
        has_end_hook: False if inputs require gradients, but no hook may mark the end of its
            backward.
    """

    unit: UnitState
    passed: Pass[UnitState]
    number: int
    begins: int
    ends: int
    is_recomputed: bool
    is_nested: bool
    has_end_hook: bool = True


# -- roots -----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ProcessState:
    """State that all roots of a process share.

    Attributes:
        numbers: Numbers of forwards.
        under_way: Roots whose backward began and has neither ended nor been repaired.
    """

    numbers: Numbers = field(default_factory=Numbers)
    under_way: list[RootState] = field(default_factory=list)


@dataclass(slots=True)
class Nested:
    """A pass nested in a backward, and what the root holds again at its end.

    Attributes:
        unit: The unit that the pass began with.
        gathers: Order of gathers of the enclosing backward.
        pass_has_grad: Whether gradients were enabled when the enclosing pass began.
    """

    unit: UnitState
    gathers: Gathers[UnitState]
    pass_has_grad: bool


@dataclass(slots=True, eq=False)
class Reduction:
    """Reductions of a unit in flight along one axis.

    Attributes:
        groups: Groups whose reduction was issued.
        synchronize: Whether the outer axis follows.
    """

    groups: list[GroupCommands] = field(default_factory=list)
    synchronize: bool = False


type Report = Callable[[str, str], AbstractContextManager[Any]]
"""Reports the beginning and end of a phase: the name of a unit or group, and the phase."""


class RootState:
    """State of the units under one root.

    Args:
        process: State that all roots share.
        do: Executes commands for all units.
        control: Options that the machine obeys.
        report: Reports a phase of a unit or group to observers.

    Attributes:
        units: All units, parents before children, the root's own first.
        gathers: Order of uses, and units gathered ahead.
        current: Counts the forwards of units in the root's latest forward with gradients (not a
            recomputation), and the forwards of units that ran outside of it.
        ranks_may_differ: Whether another rank may run other units than this one.
        has_formats: Whether the weight format of any group communicates.
        weight_version: Counts events after which main weights may have changed.
        pass_has_grad: Whether gradients were enabled when the latest pass began.
        forward_failed: Whether a pass ended in an exception.
        is_checked: Whether ranks have compared their units.
        owns_all: Whether units were found to own all parameters, and nothing happened since then
            that may have added trained ones.
        is_captured: Whether the latest pass is captured in a CUDA graph.
        has_graph: Whether a pass or a step was captured: replays change weights and run no hook.
        is_early: Whether the latest pass is one of the first, whose collectives ranks compare.
        is_after_backward: Whether no pass with gradients began since the latest backward.
        num_to_compare: Number of next passes whose collectives ranks compare, with gradients and
            without.
        pass_unit: The unit that the pass under way began with.
        nested: A pass nested in the backward under way.
        engine: What the engine does.
        run: Number of the run of the engine in which the backward is under way.
        passed: The pass that the current or latest backward belongs to.
        position: Number of the forward that the backward has reached.
        deferred: Forwards whose backward has to be ended from outside, by number.
        num_scheduled: Micro-batches under way in a schedule that runs modules part by part.
        has_unreduced: Whether the latest backward left gradients of any unit to be synchronized.
        is_draining: Whether the latest wait was for all reductions, not for room.
        synced: Units that synchronized gradients when the backward began, for a repair.
        pending: Units whose backward began and that are not reduced yet.
        in_turn: Units whose turn has come, and whose reductions are not all issued yet.
        unit: The unit whose backward began last.
        recomputed: Recomputed units, kept gathered for their backwards, the oldest one first.
        inner: Reductions along the inner axis in flight, the oldest one first.
        outer: Reductions along the outer axis in flight, the oldest one first.
    """

    ranks_may_differ: bool
    has_formats: bool

    def __init__(
        self, process: ProcessState, do: RootCommands, control: Control, report: Report
    ) -> None:
        self.process = process
        self.report = report
        self.do = do
        self.control = control
        self.units: list[UnitState] = []
        self.gathers: Gathers[UnitState] = Gathers(control.limit)
        self.current: Pass[UnitState] = Pass(process.numbers)
        self.weight_version = 0
        self.pass_has_grad = self.forward_failed = False
        self.is_checked = self.owns_all = False
        self.is_captured = self.has_graph = self.is_early = False
        self.is_after_backward = True
        self.num_to_compare = dict(NUM_COMPARED)
        self.pass_unit: UnitState | None = None
        self.nested: Nested | None = None
        self.engine = Engine.RESTING
        self.run = -1
        self.passed: Pass[UnitState] = Pass(process.numbers)
        self.position = UNKNOWN
        self.deferred: dict[int, Forward] = {}
        self.num_scheduled = 0
        self.has_unreduced = self.is_draining = False
        self.synced: list[UnitState] = []
        self.pending: set[UnitState] = set()
        self.in_turn: list[UnitState] = []
        self.unit: UnitState | None = None
        self.recomputed: dict[UnitState, None] = {}
        self.inner: deque[Reduction] = deque()
        self.outer: deque[Reduction] = deque()

    def new_pass(self) -> Pass[UnitState]:
        """Return a pass that no forward belongs to yet."""
        return Pass(self.process.numbers, self.units[::-1] if self.ranks_may_differ else None)

    @property
    def is_running(self) -> bool:
        """Whether a backward is under way and has not failed. Read for every gradient."""
        return self.engine is Engine.RUNNING

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule, not the hooks of modules, reports the uses of units."""
        return self.num_scheduled > 0

    @property
    def belongs_to_backward(self) -> bool:
        """Whether what begins now is part of the backward under way, not of a nested pass."""
        return self.nested is None and self.engine is Engine.RUNNING

    @property
    def is_between_passes(self) -> bool:
        """Whether no pass and no schedule is under way; a backward may be."""
        return self.pass_unit is None and self.nested is None and not self.is_scheduled

    @property
    def refreshes(self) -> bool:
        """Whether a use of a unit that begins now refreshes stale weights.

        A backward and its recomputations use the weights of their forward. Below ZeRO-3, passes
        nested in it use them too: a refresh would overwrite what the backward saved.
        """
        return self.engine is not Engine.RUNNING or (
            self.nested is not None and not self.ranks_may_differ
        )

    @property
    def compares_collectives(self) -> bool:
        """Whether ranks compare the next collective of a unit before they issue it.

        Ranks that run different units at ZeRO-3 would gather parts of different weights, without an
        error if these have one size. Most programs that do so do it from the first step on.
        """
        if self.control.compares == "once":
            return self.is_early and not (self.ranks_may_differ or self.is_captured)
        return self.control.compares == "always"

    @property
    def has_pending_backward(self) -> bool:
        """Whether a unit that began a pass expects a backward."""
        return any([unit.expects_backward for unit in self.gathers.forwards])

    @property
    def needs_repair(self) -> bool:
        """Whether an exception left a pass unfinished. Read between passes."""
        if self.engine is not Engine.RESTING or self.num_scheduled > 0 or self.forward_failed:
            return True
        return any([unit.phase is not Phase.IDLE for unit in self.units])

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction is in flight."""
        return bool(self.inner or self.outer)

    def is_pass_of(self, unit: UnitState) -> bool:
        """Return whether the pass under way began with this unit."""
        return (self.pass_unit if self.nested is None else self.nested.unit) is unit
