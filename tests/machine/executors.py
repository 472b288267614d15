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
from megatron_fsdp_v2.runtime.machine.state import (
    NUM_COMPARED,
    Control,
    Forward,
    RootState,
    Settings,
    UnitState,
)

ABSENT, ARRIVING, REDUCING, ACCUMULATED = "absent", "arriving", "reducing", "accumulated"


class Broken(AssertionError):
    """A property that must always hold does not."""


class Illegal(RuntimeError):
    """What the executors of a training raise if a program is not legal."""


class Failure(RuntimeError):
    """An exception that a command raises, as a failed collective does."""


class FailedReduction(RuntimeError):
    """An exception in a reduction before it is issued, as out of memory, on this rank alone."""


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
        max_uses: How many such uses there may be.
        unseen: Units with outputs that no hook sees; below ZeRO-3.
        inner: Whether a backward may run that of another root inside it, as a hook may.
        freezes: Units that may be frozen or unfrozen once, between two micro-batches.
        loads: Units that a load may reshard, at any time.
        writes: Units whose main weights may be written once; no graph needs the gathered ones.
        repeats: Whether a backward may run a second time through the same graphs.
        drops: Whether the graphs of forwards may be freed without a backward.
        steps_early: Whether an optimizer may step between a forward and its backward.
        chosen: Pairs of units; the first one gathers the second one ahead, instead of the predicted
            ones, in forwards and backwards.
        replaces: Whether other parameters may be assigned once to a unit that is gathered between
            two passes.
        prefetch_nbytes: Bytes gathered ahead, each unit having one; None is no limit.
        payloads: Whether weights are gathered for forwards and backwards separately (ZeRO-3).
        waits: Whether the host waits for each reduction.
        compares: How often ranks compare their collectives.
        fails: Whether one wait for gathered weights may raise.
        breaks: Whether one reduction may raise on this rank before it is issued; below ZeRO-3.
        resets: Whether a backward may fail on this rank in the loss, before it reaches a unit, and
            all ranks call `reset_iter_state`; below ZeRO-3.
        idles: Whether `make_idle` may be called between passes.
        unshards: Whether a user may unshard a unit twice between passes, and reshard it.
        captures: Whether steps may be captured in CUDA graphs and replayed.
        draws: Whether random numbers may be written into replicated weights once.
        formats: Whether the format of weights communicates when they are written.
        hookless: Units with inputs of which no hook marks the end of their backward.
        other_inputs: Units where a gradient reaches only an input that is not the first one.
        manual: Whether `finalize_backward` ends backwards.
        unsynced_by: Setting by which the first backward is left unsynchronized.
        deletes: Units that may be deleted between two passes; with a root, all its units.
        schedules: Whether a schedule runs the units below the root part by part.
        nests: Whether a forward with gradients, whose graph is dropped, may run inside a backward.
        misses: Units with parameters that may get no gradient on this rank.
        catches: Whether a unit may raise whose caller goes on.
        illegal: Whether the last event may be one that no program may make.
        fused: Units whose gradients kernels write, without a hook that makes room for them.
        restarts: Whether the first module of a unit of two modules may run again in place of the
            second one.
        max_runs: Uses of a pass that predict the next one.
    """

    zero: int = 3
    parents: tuple[int, ...] = (-1, 0, 0)
    axes: int = 1
    queues: bool = False
    prefetch: int | None = 1
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
    max_uses: int = 1
    unseen: frozenset[int] = frozenset()
    inner: bool = False
    freezes: frozenset[int] = frozenset()
    loads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    repeats: bool = False
    drops: bool = False
    steps_early: bool = False
    chosen: tuple[tuple[int, int], ...] = ()
    replaces: bool = False
    prefetch_nbytes: int | None = None
    payloads: bool = False
    waits: bool = False
    compares: str = "once"
    fails: bool = False
    breaks: bool = False
    resets: bool = False
    unshards: bool = False
    idles: bool = False
    captures: bool = False
    draws: bool = False
    formats: bool = False
    hookless: frozenset[int] = frozenset()
    other_inputs: frozenset[int] = frozenset()
    manual: bool = False
    unsynced_by: str = "requires_gradient_sync"
    deletes: frozenset[int] = frozenset()
    schedules: bool = False
    nests: bool = False
    misses: frozenset[int] = frozenset()
    catches: bool = False
    illegal: bool = False
    fused: frozenset[int] = frozenset()
    restarts: bool = False
    max_runs: int = 1 << 14

    @property
    def num_ahead(self) -> int:
        """Most units gathered ahead: the next one, and others that the limit has room for."""
        units = len(self.parents) if self.prefetch is None else self.prefetch
        if self.prefetch_nbytes is None:
            return units
        return min(units, max(1, self.prefetch_nbytes))


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
        # Whether a gathered parameter was frozen or unfrozen, which its sharded one is when freed.
        self.has_changed = False
        self.full = self.partial = ABSENT
        self.has_gradient = self.is_owed = False
        self.has_failed = False  # its latest reduction
        self.references = 0
        # Version of the gathered weights, and of model weights that are kept.
        self.version = self.model_version = self.refreshed_at = self.written_at = -1
        self.live = WeightUse(0)
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

    @property
    def weight_version(self) -> int:
        """Version of main weights as far as the machine knows."""
        return self.world.root_of(self.number).weight_version

    @property
    def is_stale(self) -> bool:
        return self.refreshed_at != self.weight_version

    def lacks(self, uses: WeightUse) -> bool:
        return bool(uses & ~self.live)

    def gather(self, uses: WeightUse, *, refreshes: bool) -> None:
        if not self.references:
            is_whole = self.world.setup.zero in (0, 3)
            if refreshes and (is_whole or self.is_stale):
                self.refresh()
            self.version = self.model_version
        self.references += 1
        self.add(uses)

    def add(self, uses: WeightUse) -> None:
        """Gather what lacks for these uses."""
        if not self.world.setup.payloads:
            uses = WeightUse.BOTH
        if self.world.setup.zero == 3:
            lacking = uses & ~self.live
            if WeightUse.FORWARD in lacking:
                self.world.communicate("gather", self.number)
            elif lacking:
                self.world.communicate("gather for backward", self.number)
        self.live |= uses

    def refresh(self) -> None:
        if self.world.setup.formats:
            require(
                self.written_at == self.weight_version,
                f"group {self.number} is refreshed before its format wrote it",
            )
        if self.world.setup.zero in (1, 2):
            self.world.communicate("refresh", self.number)
        self.model_version, self.refreshed_at = self.world.version, self.weight_version

    def free(self) -> None:
        require(self.references > 0, f"group {self.number} is freed twice")
        self.references -= 1
        if not self.references:
            self.version, self.live = -1, WeightUse(0)
            self.is_trained ^= self.has_changed
            self.has_changed = False

    # -- gradients

    def arrive(self, *, makes_room: bool = True) -> None:
        """Receive a gradient of autograd, as `Unit.collect` does."""
        if not self.is_arriving:
            root = self.world.root_of(self.number)
            if makes_room:
                reductions.make_room(root)
            require(not root.is_draining, "a wait for room is told as one for all reductions")
            require(len(root.inner) < self.world.setup.max_live, "a gradient has no room")
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
            if self.world.counts and not self.accumulates_unreduced:
                # The root's own gradients arrive while other units have theirs; so do a tied
                # parameter's.
                extra = len(self.world.roots) + len(self.world.setup.tied)
                # Backwards whose end no hook reports end late.
                extra += len(self.world.setup.hookless)
                # Units wait for the turn of one that a gradient missed.
                # So do uses of parameters themselves.
                misses = self.world.setup.skips or self.world.setup.catches
                extra += self.world.setup.max_uses - 1
                extra += len(self.world.units) if misses else 0
                require(live <= allowed + extra, f"{live} full gradients at a time")

    def reduce(self, *, async_op: bool) -> None:
        world, owner = self.world, self.world.units[self.number]
        if world.breaks_next:
            world.breaks_next, self.has_failed = False, True
            raise FailedReduction
        if (saved := owner.state.root.do.saved) is not None:
            writes = world.syncs or not self.accumulates_unreduced
            require(not writes or self in saved, f"{self.name} cannot undo its reduction")
            require(not (self.has_failed and self.has_gradient), f"{self.name} fails once more")
        self.has_failed = False
        require(async_op != world.setup.waits, "the host waits for a reduction, or should")
        root = owner.state.root.do
        require(root.is_compared == owner.has_compared, f"{owner.name} compares its reduction")
        owner.has_compared = False
        self._begin()
        self.full = REDUCING
        self.has_gradient, self.arrived = False, 0
        self.times_reduced += 1
        if self.reduces_partial:
            self.partial = ACCUMULATED
        # `param.grad` has what an earlier backward left, once the last reduction is issued.
        self.is_owed &= self.reduces_partial
        self.world.commands.append(("reduce", self.number))
        self.world.communicate("reduce", self.number)

    def end_inner(self) -> None:
        is_queued = self.queues_partial and not self.world.setup.waits
        is_left = is_queued and self.world.syncs and self.partial == ACCUMULATED
        require(not is_left, f"{self.name} is not queued for a reduction along the second axis")
        if self.full == REDUCING:
            self.full = ABSENT

    def reduce_outer(self, *, async_op: bool) -> None:
        require(async_op != self.world.setup.waits, "the host waits for a reduction, or should")
        require(self.reduces_partial, "a reduction along an axis that does not exist")
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
        self.is_ready = self.has_assigned = self.has_compared = self.has_collected = False
        self.was_ahead = self.has_old_values = False
        self.is_settled = True  # since the latest repair
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
            single_payload=not setup.payloads,
        )
        self.state.settings.reshard_after_forward = number not in setup.stays
        self.state.settings.reshard_after_backward = not setup.keeps

    @property
    def root(self) -> Root:
        """The executor of its root."""
        return self.state.root.do  # type: ignore[return-value]

    def check_pass(self) -> None:
        self.root.checked.append("pass")

    def check_owned(self) -> None:
        self.root.checked.append("owned")

    def check_is_gathered(self) -> None:
        if self.world.setup.zero == 3 and not self.is_ready:
            raise Illegal(f"{self.name} ran its backward without weights")

    def collect_assigned(self) -> None:
        self.has_collected = True

    def restore_inputs(self) -> None:
        """End a forward that did not end, in a repair."""
        self.root.is_after_backward = True

    def compare_reduction(self, *, along_all: bool) -> None:
        setup = self.world.setup
        syncs = self.world.syncs or self.world.is_synchronizing
        expected = setup.axes == 2 and setup.zero == 3 and syncs
        require(along_all == expected, f"{self.name} is compared along all axes, or should be")
        self.has_compared = True
        self.world.communicate("compare", self.number)

    def gather(self, uses: WeightUse, *, adds: bool, async_op: bool) -> None:
        del async_op
        world, root = self.world, self.root
        require(not self.state.is_gone, f"{self.name} is gathered after its deletion")
        require(root.has_compared, f"{self.name} is gathered before ranks compared their units")
        require(
            self.state.root.compares_collectives == root.is_compared,
            f"{self.name} is gathered with a comparison, or without",
        )
        if adds:
            require(world.setup.payloads, f"{self.name} is gathered twice")
            groups = [group for group in self.groups if group.lacks(uses)]
            if groups:
                # Whether a backward recomputes is known from the last one only.
                is_known = world.setup.checkpointed == "no"
                require(
                    not (self.was_ahead and is_known),
                    f"{self.name} was gathered ahead for another use than came",
                )
                for group in groups:
                    group.add(uses)
            return
        if self.state.root.compares_collectives and self.state.is_collective:
            world.communicate("compare", self.number)
        world.commands.append(("gather", self.number))
        world.num_gathers[self.number] += 1
        self.has_old_values = False
        self.has_assigned &= not self.state.root.refreshes
        for group in self.groups:
            group.gather(uses, refreshes=self.state.root.refreshes)

    def wait(self) -> None:
        if self.world.fails_next and not self.is_ready:
            self.world.fails_next, self.world.failed = False, self.number
            raise Failure
        self.is_ready = True

    def settle(self) -> None:
        self.is_settled = True
        gathers = self.state.root.gathers
        is_ahead = self.state in gathers.prefetched or self.state in gathers.requested
        require(not is_ahead, f"{self.name} is gathered ahead after a repair")
        held = [group.name for group in self.groups[:1] if group.references]
        require(not held, f"{held} is gathered after a repair")

    def abandon(self) -> None:
        for group in self.groups:
            group.references, group.live, group.version = 0, WeightUse(0), -1
            group.abandon()

    def free(self, *, after_error: bool) -> None:
        del after_error
        require(self.number not in self.world.computing, f"{self.name} is freed while it computes")
        self.is_ready = False
        self.world.commands.append(("free", self.number))
        for group in self.groups:
            group.free()

    def is_outdated(self) -> bool:
        return self.has_old_values or any(g.is_stale or g.has_changed for g in self.groups)

    def is_changed(self) -> bool:
        return self.has_assigned or self.has_old_values or any(g.is_stale for g in self.groups)

    def sync(self) -> None:
        self.has_assigned, self.has_old_values = False, True

    def end_backward(self, forward: Forward) -> None:
        self.world.computing.pop(self.number, None)
        events.last_gradient(forward, has_grad=False)


class Root:
    """Executes the commands of one root."""

    def __init__(self, world: Any, number: int) -> None:
        self.world, self.number = world, number
        setup = world.setup
        limit = PrefetchLimit(setup.prefetch, setup.prefetch_nbytes)
        control = Control(limit, not setup.waits, setup.max_live, setup.compares)
        self.state = RootState(world.process, self, control, no_report)
        self.has_queued = self.has_compared = False
        self.saved: list[Group] | None = None  # gradients that a repair can undo
        # What was checked since the last pass began.
        self.checked: list[str] = []
        self.num_passes = {True: 0, False: 0}
        # Whether a pass is one of the first; whether a backward ended or was repaired since the
        # last pass with gradients.
        self.is_early, self.is_after_backward = False, True
        self.has_forgotten = self.has_begun_stream = False
        # Between the beginning and the end of a pass of the allocator.
        self.is_allocating = False
        self.is_refreshing = self.has_waited_for_host = False
        self.has_drawn = self.has_begun_capture = self.is_captured = self.has_graph = False
        self.has_ended_backward = self.has_ended_reductions = False
        # Units whose hooks ran at the end of a backward.
        self.hooked: list[int] = []

    @property
    def engine_run(self) -> int:
        return self.world.engine_run

    @property
    def is_capturing(self) -> bool:
        return self.world.is_capturing

    @property
    def is_compared(self) -> bool:
        """Whether ranks have to compare collectives."""
        setup = self.world.setup
        if setup.compares == "once":
            return self.is_early and setup.zero == 3 and not self.is_captured
        return setup.compares == "always"

    def check_captured_pass(self, unit: Unit, phase: str) -> None:
        if self.is_capturing != self.state.is_captured:
            raise Illegal(f"the {phase} of {unit.name} is captured, and not the whole pass")

    def begin_capture(self) -> None:
        require(self.world.is_capturing, "a pass that is not captured begins a capture")
        self.has_begun_capture = self.has_graph = True

    def write_stale(self) -> None:
        for group in self._groups():
            if group.written_at != group.weight_version:
                self.world.communicate("write", group.number)
                group.written_at = group.weight_version

    def has_new_values(self) -> bool:
        has_drawn, self.has_drawn = self.has_drawn, False
        return has_drawn

    def check_hooks(self) -> None:
        self.checked.append("hooks")

    def check_units(self) -> None:
        self.has_compared = True
        self.world.communicate("check", self.number)

    def forget_casts(self) -> None:
        self.has_forgotten = True

    def begin_stream(self) -> None:
        self.has_begun_stream = True

    def begin_allocations(self, name: str, *, no_pending_backward: bool) -> None:
        world, has_grad = self.world, name.startswith("forward")
        expected = ["pass", *["owned"] * (name == "forward"), *["hooks"] * has_grad]
        require(self.checked == expected, f"a pass checked {self.checked}, not {expected}")
        self.checked = []
        self._check_pending(no_pending_backward)
        require(
            self.has_begun_stream == (has_grad or no_pending_backward),
            "a pass begins the stream, or should",
        )
        self.has_begun_stream = False
        self.num_passes[has_grad] += 1
        self.is_early = self.num_passes[has_grad] <= (NUM_COMPARED[True] if has_grad else 1)
        if has_grad:
            self.check_casts()
            self.is_early &= not self.has_ended_backward
        require(self.has_begun_capture == world.is_capturing, "a capture began, or should have")
        self.check_frozen()
        self.is_captured, self.has_begun_capture = self.has_begun_capture, False
        self.is_allocating = True
        world.may_hide = False

    def check_frozen(self) -> None:
        """Check that sharded parameters are frozen if gathered ones were, before a pass."""
        late = [group.name for group in self._groups() if group.has_changed]
        require(not late, f"{late} was frozen or unfrozen, and takes part in a pass as before")

    def check_casts(self) -> None:
        """Check that the first pass of a loss uses no earlier casts."""
        require(self.has_forgotten == self.is_after_backward, "casts are forgotten, or should be")
        self.has_forgotten = self.is_after_backward = False

    def end_allocations(self, name: str, *, no_pending_backward: bool) -> None:
        self._check_pending(no_pending_backward)
        if name:
            self.is_early, self.has_ended_backward = False, True
            self.is_after_backward = True
        self.is_allocating = False

    def _check_pending(self, no_pending_backward: bool) -> None:
        world, number = self.world, self.number
        # A use of a sharded parameter itself holds no temporary memory.
        # What follows a training step in a forward is not expected to have a backward.
        pending = [g.unit for g in world.graphs if g.forward is not None and g.has_own]
        is_pending = any(world.root_of(unit) is self.state for unit in pending)
        require(
            not (world.counts and no_pending_backward and is_pending),
            f"memory of a pending backward of root {number} is given away",
        )
        # A backward that never runs is not known to the machine.
        require(
            no_pending_backward or is_pending or world.may_lose_graphs,
            f"memory of root {number} is kept for a backward that does not follow",
        )

    def _groups(self) -> list[Group]:
        return [unit.do.groups[0] for unit in self.state.units]  # type: ignore[attr-defined]

    def has_stale(self) -> bool:
        is_local = self.world.setup.zero == 0 and not self.world.setup.formats
        return not is_local and any(group.is_stale for group in self._groups())

    def refresh_all(self, *, async_op: bool) -> None:
        require(async_op == (self.state.gathers.limit.units != 0), "refreshes are waited for")
        require(self.has_compared, "weights are refreshed before ranks compared their units")
        if self.world.setup.zero == 0:
            return
        for group in self._groups():
            if not group.references and group.is_stale:
                group.refresh()
        self.is_refreshing = True

    def wait_for_refreshes(self) -> None:
        self.is_refreshing = False

    def wait_for_host_memory(self) -> None:
        self.has_waited_for_host = True

    def queue_end(self) -> None:
        require(self.world.engine_run != -1, "a backward begins outside of the engine")
        self.has_queued = True

    def end_reductions(self) -> None:
        self.has_ended_reductions = True
        for group in self._groups():
            require(group.full != REDUCING, f"group {group.number} is reduced and not waited for")
        if any(group.times_reduced for group in self._groups()):
            self.world.communicate("flags", self.number)

    def run_hooks(self, units: Sequence[UnitState]) -> None:
        self.hooked += [unit.do.number for unit in units]  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def repairing(self) -> Iterator[None]:
        for unit in self.state.units:
            unit.do.is_settled = False  # type: ignore[attr-defined]
        yield

    def snapshot(self, groups: Sequence[Any]) -> None:
        in_flight = [g for g in self._groups() if REDUCING in (g.full, g.partial)]
        require(all(g in groups for g in in_flight), "a reduction in flight cannot be undone")
        self.saved = list(groups)

    def drop_gradients(self, before: None, *, is_shared: bool) -> None:
        del before
        self.saved = None
        if is_shared and any(group.times_reduced for group in self._groups()):
            self.world.communicate("flags", self.number)
        for group in self._groups():
            group.abandon()
            group.times_reduced = 0
