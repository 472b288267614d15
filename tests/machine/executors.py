"""Executors of a world: they execute the machine's commands with counters, and check each one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.runtime.machine import events, reductions
from megatron_fsdp_v2.runtime.machine.orders import PrefetchLimit
from megatron_fsdp_v2.runtime.machine.state import Control, Forward, RootState, Settings, UnitState

ABSENT, ARRIVING, REDUCING, ACCUMULATED = "absent", "arriving", "reducing", "accumulated"


class Broken(AssertionError):
    """A property that must always hold does not."""


def require(holds: object, what: str) -> None:
    """Raise `Broken` unless a property holds."""
    if not holds:
        raise Broken(what)


@dataclass(frozen=True)
class Setup:
    """What a world consists of.

    Attributes:
        zero: ZeRO level.
        parents: Of each unit, the unit that calls it; -1 for a root. Roots come before their units.
        axes: Number of mesh axes.
        queues: Whether the reduction along the second axis is queued behind the first one.
        prefetch: Number of units gathered ahead.
        max_live: Number of full gradients at a time.
        frozen: Units without trained parameters.
        tied: Pairs of units; the first one uses a parameter of the second one, too.
        checkpointed: Kind of checkpoints: `no`, `packed`, `stopping` (a packed one whose
            recomputation stops with an exception at the last saved tensor) or `reentrant`.
        stays: Units that stay gathered between forward and backward.
        accumulates: Whether the first backward after a step leaves gradients unsynchronized.
        max_forwards: Forwards of each root before a step.
        max_calls: Calls of each unit in one forward of its parent.
        max_steps: Steps of the optimizer.
        interrupts: Whether one exception may occur.
        evaluates: Whether evaluations may run anywhere, also inside a backward.
        keeps: Whether units stay gathered after a backward.
        skips: Whether gradients may miss forwards.
        trains_inside: Whether the forward of a root may run a backward and a step, and go on.
        several: Units of two modules, which the caller of the unit runs one after the other.
        alone: Whether units may run outside the forward of their root.
        direct: Units with a parameter that may be used itself, or only looked at.
        freezes: Units that may be frozen or unfrozen once, between two micro-batches.
        loads: Units that a load may reshard, at any time.
        repeats: Whether a backward may run a second time through the same graphs.
        drops: Whether the graphs of forwards may be freed without a backward.
        steps_early: Whether an optimizer may step between a forward and its backward.
        chosen: Pairs of units; the first one gathers the second one ahead, instead of the predicted
            ones, in forwards and backwards.
        replaces: Whether other parameters may be assigned once to a unit that is gathered between
            two passes.
    """

    zero: int = 3
    parents: tuple[int, ...] = (-1, 0, 0)
    axes: int = 1
    queues: bool = False
    prefetch: int = 1
    max_live: int = 2
    frozen: frozenset[int] = frozenset()
    tied: tuple[tuple[int, int], ...] = ()
    checkpointed: str = "no"
    stays: frozenset[int] = frozenset()
    accumulates: bool = False
    max_forwards: int = 1
    max_calls: int = 1
    max_steps: int = 2
    interrupts: bool = False
    evaluates: bool = False
    keeps: bool = False
    skips: bool = False
    trains_inside: bool = False
    several: frozenset[int] = frozenset()
    alone: bool = False
    direct: frozenset[int] = frozenset()
    freezes: frozenset[int] = frozenset()
    loads: frozenset[int] = frozenset()
    repeats: bool = False
    drops: bool = False
    steps_early: bool = False
    chosen: tuple[tuple[int, int], ...] = ()
    replaces: bool = False


def no_report(owner: str, phase: str) -> AbstractContextManager[Any]:
    """Report nothing."""
    del owner, phase
    return contextlib.nullcontext()


class Group:
    """Executes the commands of one parameter group."""

    def __init__(self, world: Any, number: int) -> None:
        self.world, self.number = world, number
        self.name = f"group {number}"
        setup = world.setup
        self.accumulates_unreduced = setup.zero < 2
        self.reduces_partial = setup.axes == 2
        self.queues_partial = setup.queues and self.reduces_partial
        self.is_trained = number not in setup.frozen
        self.full = self.partial = ABSENT
        self.has_gradient = self.is_owed = False
        self.references = 0
        # Version of the gathered weights, and of model weights that are kept.
        self.version = self.model_version = -1
        # Gradients of this backward: arrived, and not reduced yet.
        self.arrived = 0
        self.times_reduced = 0

    @property
    def has_partial(self) -> bool:
        return self.partial == ACCUMULATED

    @property
    def is_arriving(self) -> bool:
        return self.full == ARRIVING

    # -- weights

    def gather(self, *, refreshes: bool) -> None:
        if not self.references:
            world = self.world
            if world.setup.zero == 3:
                world.communicate("gather", self.number)
                if refreshes:
                    self.model_version = world.version
                self.version = self.model_version
            elif world.setup.zero == 0:
                self.version = world.version
            else:
                if refreshes and self.model_version != world.version:
                    self.refresh()
                self.version = self.model_version
        self.references += 1

    def refresh(self) -> None:
        self.world.communicate("refresh", self.number)
        self.model_version = self.world.version

    def free(self) -> None:
        require(self.references > 0, f"group {self.number} is freed twice")
        self.references -= 1
        if not self.references:
            self.version = -1

    # -- gradients

    def arrive(self) -> None:
        """Receive a gradient of autograd, as `Unit.collect` does."""
        if not self.is_arriving:
            reductions.make_room(self.world.root_of(self.number))
            self._begin()
        self.has_gradient = True
        self.arrived += 1

    def _begin(self) -> None:
        if self.full == REDUCING:
            self.end_inner()
        if self.full != ARRIVING:
            self.full = ARRIVING
            live = sum(group.full != ABSENT for group in self.world.groups)
            allowed = self.world.setup.max_live * len(self.world.roots)
            # Accumulated micro-batches keep the full gradients of all units.
            if not self.accumulates_unreduced:
                # The root's own gradients arrive while other units have theirs; so do a tied
                # parameter's.
                extra = len(self.world.roots) + len(self.world.setup.tied)
                require(live <= allowed + extra, f"{live} full gradients at a time")

    def reduce(self, *, async_op: bool) -> None:
        del async_op
        self._begin()
        self.full = REDUCING
        self.has_gradient, self.arrived = False, 0
        self.times_reduced += 1
        if self.reduces_partial:
            self.partial = ACCUMULATED
        self.is_owed = False if not self.reduces_partial else self.is_owed
        self.world.commands.append(("reduce", self.number))
        self.world.communicate("reduce", self.number)

    def end_inner(self) -> None:
        if self.full == REDUCING:
            self.full = ABSENT

    def reduce_outer(self, *, async_op: bool) -> None:
        del async_op
        if self.has_partial:
            self.partial = REDUCING
            self.is_owed = False
            self.world.communicate("outer", self.number)

    def end_outer(self) -> None:
        if self.partial == REDUCING:
            self.partial = ABSENT

    def owe(self) -> None:
        if self.accumulates_unreduced or self.reduces_partial:
            self.is_owed |= self.is_trained

    def abandon(self) -> None:
        self.full = self.partial = ABSENT
        self.has_gradient = self.is_owed = False
        self.arrived = 0


class Unit:
    """Executes the commands of one unit."""

    def __init__(self, world: Any, number: int, groups: Sequence[Group], root: RootState) -> None:
        self.world, self.number = world, number
        self.groups = list(groups)
        self.name = f"unit {number}"
        self.is_ready = self.has_assigned = False
        setup = world.setup
        self.state = UnitState(
            self,
            [groups[0]],
            Settings(number in setup.stays, requires_gradient_sync=True),
            root,
            nbytes=1 if setup.zero == 3 else 0,
            has_outer=setup.axes == 2,
            is_collective=setup.zero == 3,
            modules=(0, 1) if number in setup.several else (0,),
        )
        self.state.settings.reshard_after_forward = number not in setup.stays
        self.state.settings.reshard_after_backward = not setup.keeps

    def check_pass(self) -> None:
        """No transform runs."""

    def check_owned(self) -> None:
        """Nothing is registered."""

    def check_is_gathered(self) -> None:
        require(self.is_ready, f"{self.name} ran its backward without weights")

    def collect_assigned(self) -> None:
        """Nothing is assigned."""

    def restore_inputs(self) -> None:
        """There are none."""

    def compare_reduction(self, *, along_all: bool) -> None:
        del along_all

    def gather(self, uses: WeightUse, *, adds: bool, async_op: bool) -> None:
        del uses, async_op
        require(not adds, f"{self.name} is gathered twice")
        has_compared = self.state.root.do.has_compared  # type: ignore[attr-defined]
        require(has_compared, f"{self.name} is gathered before ranks compared their units")
        self.world.commands.append(("gather", self.number))
        for group in self.groups:
            group.gather(refreshes=self.state.root.refreshes)

    def wait(self) -> None:
        self.is_ready = True

    def free(self, *, after_error: bool) -> None:
        del after_error
        require(self.number not in self.world.computing, f"{self.name} is freed while it computes")
        require(not self.has_assigned, f"{self.name} loses parameters that were assigned")
        self.is_ready = False
        self.world.commands.append(("free", self.number))
        for group in self.groups:
            group.free()

    def is_outdated(self) -> bool:
        return any(group.version != self.world.version for group in self.groups)

    def is_replaced(self) -> bool:
        return self.has_assigned

    def sync(self) -> None:
        self.has_assigned = False

    def end_backward(self, forward: Forward) -> None:
        events.last_gradient(forward, has_grad=False)


class Root:
    """Executes the commands of one root."""

    def __init__(self, world: Any, number: int) -> None:
        self.world, self.number = world, number
        setup = world.setup
        control = Control(PrefetchLimit(setup.prefetch), max_live=setup.max_live)
        self.state = RootState(world.process, self, control, no_report)
        self.has_queued = self.has_compared = False

    @property
    def engine_run(self) -> int:
        return self.world.engine_run

    is_capturing = False

    def check_captured_pass(self, what: str) -> None:
        del what

    def begin_capture(self) -> None:
        """Nothing is captured."""

    def write_stale(self) -> None:
        """No format communicates."""

    def has_new_values(self) -> bool:
        return False

    def check_hooks(self) -> None:
        """There are none."""

    def check_units(self) -> None:
        self.has_compared = True
        self.world.communicate("check", self.number)

    def forget_casts(self) -> None:
        """Nothing is cast."""

    def begin_stream(self) -> None:
        """There are no streams."""

    def begin_allocations(self, name: str, *, no_pending_backward: bool) -> None:
        """There is no pool."""

    end_allocations = begin_allocations

    def _groups(self) -> list[Group]:
        return [unit.do.groups[0] for unit in self.state.units]  # type: ignore[attr-defined]

    def has_stale(self) -> bool:
        return any(group.model_version != self.world.version for group in self._groups())

    def refresh_all(self, *, async_op: bool) -> None:
        del async_op
        if self.world.setup.zero == 0:
            return
        for group in self._groups():
            if not group.references and group.model_version != self.world.version:
                group.refresh()

    def wait_for_refreshes(self) -> None:
        """They are done."""

    def wait_for_host_memory(self) -> None:
        """There is none."""

    def queue_end(self) -> None:
        require(self.world.engine_run != -1, "a backward begins outside of the engine")
        self.has_queued = True

    def end_reductions(self) -> None:
        for group in self._groups():
            require(group.full != REDUCING, f"group {group.number} is reduced and not waited for")
        if any(group.times_reduced for group in self._groups()):
            self.world.communicate("flags", self.number)

    def run_hooks(self, units: Sequence[UnitState]) -> None:
        del units

    @contextlib.contextmanager
    def repairing(self) -> Iterator[None]:
        yield

    def snapshot(self, groups: Sequence[Any]) -> None:
        del groups

    def drop_gradients(self, before: None, *, is_shared: bool) -> None:
        del before
        if is_shared and any(group.times_reduced for group in self._groups()):
            self.world.communicate("flags", self.number)
        for group in self._groups():
            group.abandon()
            group.times_reduced = 0
