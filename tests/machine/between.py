"""What users do with a world: steps, settings, captures, exceptions; and what holds after it."""

from __future__ import annotations

from typing import Any

from megatron_fsdp_v2.runtime.machine import events, reductions, weights
from megatron_fsdp_v2.runtime.machine.state import Engine, Phase, RootState
from tests.machine.executors import ABSENT, REDUCING, Illegal, Root, require
from tests.machine.nodes import Node

PLAIN = ("forward", "call", "return", "backward 0", "step")
"""Beginnings of events in a program whose second run is predicted exactly by the first one."""


class Between:
    """Events of `World` that no forward and no backward reports."""

    def actions_between(self: Any) -> list[tuple[Any, ...]]:
        """Return the events that may happen next between passes."""
        setup, found = self.setup, []
        is_clean = not (self.graphs or self.kept)
        may_step = self.num_steps < setup.max_steps and self.num_forwards > 0
        if may_step and (setup.steps_early or not self.graphs):
            found.append(("step",))
        if is_clean:
            found += self.replacements()
        if (setup.accumulates or setup.manual) and is_clean and self.has_unsynced:
            found += [("synchronize",), ("discard",)]
        if setup.resets and setup.zero < 3 and self.num_resets < 2:
            if len(self.graphs) == 1:
                found.append(("lose",))
            elif is_clean and self.num_backwards:
                found.append(("reset",))
        if setup.unshards:
            units = self.units if self.num_unshards < 2 else ()
            found += [("unshard", unit.number) for unit in units]
            found += [("reshard", number) for number in sorted(self.unsharded)]
        if setup.idles and not self.has_idled:
            found.append(("idle",))
        if setup.draws and not self.has_drawn and is_clean:
            found.append(("draw",))
        if setup.captures and is_clean:
            if self.is_capturing:
                found.append(("capture", False))
            elif not self.has_captured:
                found.append(("capture", True))
            has_graph = any(root.state.has_graph for root in self.roots)
            if has_graph and not (self.is_capturing or self.has_replayed):
                found.append(("replay",))
        if is_clean:
            found += [("delete", unit) for unit in setup.deletes - self.deleted]
        if any(root.state.is_scheduled for root in self.roots):
            found.append(("abandon",))
        elif setup.schedules and is_clean and self.num_forwards < setup.max_forwards:
            found.append(("begin",))
        return found

    def replacements(self: Any) -> list[tuple[Any, ...]]:
        """Return the assignments of parameters that may happen next."""
        if not self.setup.replaces or self.has_replaced:
            return []
        found = [unit for unit in self.units if unit.state.is_gathered]
        return [("replace", unit.number) for unit in found if unit.number not in self.computing]

    def begin_synchronization(self: Any) -> None:
        """Count a backward; the first one before a step may leave gradients unsynchronized."""
        is_first, self.num_backwards = not self.num_backwards, self.num_backwards + 1
        self.set_synchronization(is_last=not (self.setup.accumulates and is_first))

    def set_synchronization(self: Any, *, is_last: bool) -> None:
        """Set what users set before a backward: whether it synchronizes gradients."""
        setup = self.setup
        for unit in self.units:
            setattr(unit.state.settings, setup.unsynced_by, is_last)
            unit.state.settings.is_finalized_manually = setup.manual
        # Without a second axis, there is nothing left to all-reduce.
        is_whole = setup.unsynced_by == "requires_all_reduce" and setup.axes == 1
        self.syncs = (is_last or is_whole) and not setup.manual
        self.has_unsynced |= not self.syncs

    def _step(self: Any) -> None:
        self.program.append("step")
        self.num_steps += 1
        self.version += 1
        self.kept = []
        for root in self.roots:
            if self.is_capturing:
                events.begin_capture(root.state)
                root.has_begun_capture = False
            # Not every optimizer reports a step right after a backward.
            if not self.may_hide:
                events.weights_changed(root.state)
        self.may_hide = self.has_unsynced = False
        self.num_forwards = self.num_backwards = 0
        self.evaluated = False

    def _synchronize(self: Any) -> None:
        """Reduce all gradients that backwards left."""
        self.program.append("synchronize")
        self.has_unsynced, self.is_synchronizing = False, True
        for root in self.roots:
            reductions.synchronize(root.state, root.state.units)
            expected = [unit.do.number for unit in reversed(root.state.units)]
            require(root.hooked == expected, f"hooks ran for {root.hooked}, not {expected}")
            root.hooked = []
            require(not root.state.is_reducing, "a reduction is in flight")
            require(root.has_ended_reductions, "reductions are not ended")
            root.has_ended_reductions = False
        self.is_synchronizing, self.may_hide = False, True
        for group in self.groups:
            what = f"after a call of `reduce_grad`, group {group.number}"
            require(not group.arrived, f"{what} has a gradient that was not reduced")
            require(group.full == group.partial == ABSENT, f"{what} has a gradient of its own")
            require(not group.is_owed, f"{what} owes a gradient")
            group.times_reduced = 0
        for unit in self.units:
            require(unit.has_collected, f"assigned gradients of {unit.name} are not collected")
            unit.has_collected = False

    def _discard(self: Any) -> None:
        """Discard all gradients that backwards left, as `zero_grad` does."""
        self.program.append("discard")
        self.has_unsynced = False
        for root in self.roots:
            reductions.discard(root.state, root.state.units)
            require(root.state.needs_repair or not root.state.pending, "units wait for reductions")
        for group in self.groups:
            state = self.root_of(group.number)
            is_clean = group.full == group.partial == ABSENT and not group.is_owed
            require(state.needs_repair or is_clean, f"group {group.number} keeps a gradient")
            group.times_reduced = 0

    def _lose(self: Any) -> None:
        """Let a backward fail in the loss, on this rank alone."""
        self.program.append("backward 0")
        self.begin_synchronization()
        self.graphs, self.must_reset = [], True

    def _reset(self: Any) -> None:
        """Repair on all ranks, after a backward that failed on some."""
        self.program.append("reset")
        self.must_reset = False
        self.num_resets += 1
        for root in self.roots:
            reductions.reset([root.state])
            require(not root.state.needs_repair, "a reset leaves something to repair")
        for group in self.groups:
            group.times_reduced = 0

    def _break(self: Any) -> None:
        """Let the next reduction of the backward under way raise before it is issued."""
        self.has_broken = self.breaks_next = True

    def _use(self: Any, number: int, is_kept: bool) -> None:
        """Use a parameter itself, or only look at it."""
        self.num_uses += 1
        # Ranks may differ in what they do with the result of a use in a forward that they finish.
        # Of a reentrant checkpoint, only the recomputation has a graph.
        has_grad = not self.open or self.open[-1].forward is not None
        root = self.root_of(number)
        begins = has_grad and not self.open and self.engine_run == -1
        differ = has_grad and not (self.setup.drops or self.root_of(number).needs_repair)
        self.program.append(f"use {number}" if differ else f"use {number} {is_kept}")
        unit = self.units[number].state
        use = events.begin_direct_use(unit) if has_grad else (unit.root.current, 0, False)
        if begins and not root.needs_repair:
            root.do.check_frozen()
        node = Node(number, None, is_checkpointed=False, version=self.version, use=use)
        if not is_kept:
            if has_grad:
                node.passed.drop_use(unit)
                self.looked_at.append(node)
        elif self.open:
            self.open[-1].children.append(node)
        else:
            self.graphs.append(node)

    def _use_again(self: Any, node: Node) -> None:
        """Use a parameter itself in a recomputation."""
        use = events.begin_direct_use(self.units[node.unit].state)
        require(not use[2], "a use is counted again in its recomputation")
        if self.setup.checkpointed == "reentrant":
            node.use = use

    def _unshard(self: Any, number: int) -> None:
        """Gather a unit for a user."""
        self.program.append(f"unshard {number}")
        self.num_unshards += 1
        self.unsharded.add(number)
        self.may_hide = False
        unit = self.units[number]
        events.unshard(unit.state, async_op=False)
        weights.wait(unit.state)
        require(unit.is_ready, f"{unit.name} is not gathered for the user")
        for group in unit.groups:
            is_current = group.version == self.version
            require(is_current, f"the user gets weights of before a step from {unit.name}")

    def _reshard(self: Any, number: int) -> None:
        """Free a unit that a user gathered."""
        self.program.append(f"reshard {number}")
        self.unsharded.remove(number)
        weights.free(self.units[number].state)

    def _idle(self: Any) -> None:
        """Free all weights, as before a checkpoint is saved."""
        self.program.append("idle")
        self.has_idled = True
        for root in self.roots:
            events.make_idle(root.state)
            state, gathers = root.state, root.state.gathers
            require(not state.needs_repair, "a call of `make_idle` leaves a unit in use")
            is_ahead = bool(gathers.prefetched or gathers.requested)
            require(not is_ahead, "a call of `make_idle` leaves units gathered ahead")
        for unit in self.units:
            require(not unit.state.is_gathered, f"{unit.name} is gathered, and was made idle")

    def _draw(self: Any) -> None:
        """Write random numbers into replicated weights, as an initialization does."""
        self.program.append("draw")
        self.has_drawn = True
        for root in self.roots:
            root.has_drawn, root.has_compared = True, False

    def _capture(self: Any, begins: bool) -> None:
        """Begin or end the capture of a CUDA graph."""
        self.program.append(f"capture {begins}")
        self.is_capturing, self.has_captured = begins, True
        self.may_hide = False

    def _replay(self: Any) -> None:
        """Replay a captured step, which runs no hook."""
        self.program.append("replay")
        self.has_replayed = True
        self.version += 1

    def _delete(self: Any, number: int) -> None:
        """Delete the modules of a unit; of a root, with those of all its units."""
        self.program.append(f"delete {number}")
        is_root = self.setup.parents[number] < 0
        root = self.root_of(number)
        units = list(root.units) if is_root else [self.units[number].state]
        for unit in units:
            unit.forget()
            is_known = unit in root.units or unit in root.gathers.forwards or root.pass_unit is unit
            require(not is_known, f"the root knows {unit.do.name}, which is deleted")
            self.deleted.add(unit.do.number)
            group = self.groups[unit.do.number]
            group.is_trained, group.references, group.version = False, 0, -1
            unit.do.is_ready = False
            group.abandon()
            group.times_reduced = 0
        if is_root:
            require(root not in self.process.under_way, "a deleted root has a backward under way")

    def _fail(self: Any, is_quiet: bool) -> None:
        """Let the next wait for gathered weights raise.

        Args:
            is_quiet: Whether no hook runs at the end of forwards, as after KeyboardInterrupt.
        """
        self.has_failed = self.fails_next = True
        self.is_quiet = is_quiet

    def _freeze(self: Any, number: int) -> None:
        """Freeze a unit, or unfreeze it."""
        self.program.append(f"freeze {number}")
        self.frozen_once.add(number)
        group = self.groups[number]
        if group.references:
            group.has_changed = True
        else:
            group.is_trained = not group.is_trained

    def _replace(self: Any, number: int) -> None:
        """Assign other parameters to a unit whose weights are gathered."""
        self.program.append(f"replace {number}")
        self.has_replaced = self.units[number].has_assigned = True

    def _load(self: Any, number: int) -> None:
        """Reshard a unit, as a load of its values does."""
        self.num_loads += 1
        self.program.append(f"load {number}")
        weights.free(self.units[number].state)

    def _write(self: Any, number: int) -> None:
        """Write main weights of a unit, perhaps in a forward of another one."""
        self.program.append(f"write {number}")
        self.has_written = True
        self.units[number].has_old_values = True

    def _interrupt(self: Any, is_late: bool, *, is_shared: bool = False) -> None:
        """Raise an exception, in a forward or in the engine.

        Args:
            is_late: Whether the engine drops its callback after the caller went on, and no hook
                runs at the end of forwards, as after KeyboardInterrupt.
            is_shared: Whether all ranks raise.
        """
        self.has_interrupted = True
        retried: list[Any] = []
        reached = self.reached_roots  # one per forward
        knows_all = len(set(reached)) == len(reached) and all(r.is_running for r in reached)
        if is_shared or self.setup.zero == 3 or self.open or not knows_all:
            # All ranks raise: otherwise those that go on would wait for this one, which does not
            # know which other forwards the backward would have reached.
            # What follows without a repair depends on how the forward before it ended.
            depends = self.setup.zero == 3 or self.setup.direct or is_shared
            how = f" {is_late}" if depends else ""
            self.program.append(f"interrupt{self.place()}{how}")
        self.computing.clear()
        # Not before the engine dropped the callback of the backward that failed: a backward that
        # begins then cannot be told from one inside it.
        if self.setup.repeats and self.engine_run != -1 and not (self.open or is_late):
            retried = self.running
        while self.open:
            node = self.open.pop()
            if not is_late:
                events.fail_forward(self.units[node.unit].state)
        if self.engine_run != -1:
            self.queue = []
            self.engine_run = -1
            for root in self.roots:
                if root.has_queued:
                    root.has_queued = False
                    if not is_late:
                        events.engine_dropped(root.state)
            self.graphs = []
            if self.setup.zero < 3 and len(self.roots) > 1:
                # As documented: ranks may be at different places of the roots' reductions.
                for root in self.roots:
                    if root.state.needs_repair:
                        reductions.repair(root.state)
        self.pending, self.kept, self.batches = {}, retried, []
        self.may_hide = self.fails_next = self.breaks_next = False
        self.expected = {}

    def _train(self: Any) -> None:
        """Run a backward and a step of the optimizer inside the forward of a root."""
        node = self.open[-1]
        self.program.append("train")
        self._begin_engine([node], 0)
        self.has_trained, self.pending = True, {}
        while self.engine_run != -1:
            self._engine()
        node.children, node.has_own = [], False
        self._step()
        node.version = self.version

    def _inner(self: Any) -> None:
        """Run the backward of other roots inside the one under way, in a run of its own."""
        self.program.append(f"inner{self.place()}")
        running = [root for root in self.roots if root.has_queued]
        graphs = [graph for graph in self.graphs if self.root_of(graph.unit).do not in running]
        self.graphs = [graph for graph in self.graphs if graph not in graphs]
        names = ("queue", "running", "engine_run", "reached_roots", "expected", "interleaved")
        before = {
            name: getattr(self, name) for name in (*names, "before_backward", "num_backwards")
        }
        computing = dict(self.computing)
        self.queue, self.expected, self.interleaved = [], {}, []
        for root in running:
            root.has_queued = False
        self._begin_engine(graphs, 0)
        while self.engine_run != -1:
            self._engine()
        for name, value in before.items():
            setattr(self, name, value)
        self.computing.update(computing)
        self.is_exact = False
        for root in running:
            root.has_queued = True
            self.interleaved += [root.state] * (self.setup.zero < 3)

    def place(self: Any) -> str:
        """Return what the engine runs next, equally on ranks that run different units."""
        ends = sum(self.setup.parents[node.unit] < 0 for _, node in self.queue)
        at = f"{self.queue[0][0]} {self.queue[0][1].unit}" if self.queue else "the end"
        return f" before {at}" + f", with {ends} nodes of roots left" * (ends > 0)

    # -- what must hold

    def _rest(self: Any) -> None:
        """Check what must hold when a backward is over."""
        # A root that an exception left is repaired in its next pass.
        over = [root.state for root in self.roots if self.open or not root.state.needs_repair]
        for group in self.groups:
            if self.root_of(group.number) not in over:
                if not self.root_of(group.number).is_running:
                    group.times_reduced = 0
                continue
            what = f"when the backward is over, group {group.number}"
            if group.number in self.deleted:
                continue
            # A backward leaves what other roots have to synchronize.
            syncs = self.syncs and self.root_of(group.number) in self.reached_roots
            if syncs or not group.accumulates_unreduced:
                require(not group.arrived, f"{what} has a gradient that was not reduced")
                require(group.full == ABSENT, f"{what} has a full gradient")
            if syncs:
                require(group.partial == ABSENT, f"{what} has a partial gradient")
                require(not group.is_owed, f"{what} owes a gradient")
            expected = self.expected.get(group.number, 0)
            if not syncs and group.accumulates_unreduced:
                expected = 0
            root = self.root_of(group.number)
            most = expected + (root in self.interleaved and expected > 0)
            # A recomputation may use a parameter itself after the unit was reduced.
            is_again = self.setup.checkpointed == "reentrant" and group.number in self.setup.direct
            most += self.setup.max_uses if is_again else 0
            # A unit that waits at the end of a pass is reduced with its forwards of the next one.
            least = min(expected, 1) if self.setup.zero == 3 else expected
            require(
                least <= group.times_reduced <= most,
                f"{what} was reduced {group.times_reduced} times instead of {expected}",
            )
            group.times_reduced = 0
        self.expected, self.interleaved, self.breaks_next = {}, [], False
        for state in over:
            if state in self.reached_roots:
                self._check_end(state.do, [unit.do.number for unit in reversed(state.units)])
            require(not state.inner and not state.outer, "a reduction is in flight")
            require(not state.deferred and not state.recomputed, "something is deferred")
            for unit in state.units:
                is_open = any(self.units[node.unit].state is unit for node in self.open)
                rests = unit.phase is (Phase.FORWARD if is_open else Phase.IDLE)
                require(rests, f"{unit.do.name} is {unit.phase} after a backward")
                is_reached = state in self.reached_roots
                is_kept = self.setup.keeps or not unit.is_gathered or not is_reached
                is_kept |= unit.do.number in self.unsharded
                require(is_kept, f"{unit.do.name} stays gathered after a backward")
            require(state not in self.process.under_way, "a backward is under way")
        # The pass of a forward that raised waits until the root's next pass begins.
        idle = [
            root.state.current.turn for root in self.roots if root.state not in self.reached_roots
        ]
        waiting = [turn for turn in self.process.numbers.unreduced if turn not in idle]
        # That of a forward inside a backward waits for the next one of the root; that of a backward
        # around this one, for its end.
        may_wait = self.has_interrupted or self.setup.nests or self.setup.inner
        require(not waiting or may_wait, "a pass waits for its reduction")

    def _check_end(self: Any, root: Root, numbers: list[int]) -> None:
        """Check what the end of a backward did beside reductions."""
        expected = numbers if self.syncs else []
        require(root.hooked == expected, f"hooks ran for {root.hooked}, not {expected}")
        root.hooked = []
        require(root.has_ended_reductions, "reductions are not ended")
        root.has_ended_reductions = False
        require(root.state.is_draining, "the wait for all reductions is told as one for room")
        if not self.open:
            require(not root.is_allocating, "a backward does not end for the allocator")
        # A backward reverses the forwards, so that no gather ahead is in vain.
        gathers = self.num_gathers - self.before_backward[0]
        for number, times in gathers.items():
            used = self.num_used[number] - self.before_backward[1][number]
            if self.setup.zero == 3 and self.is_exact:
                require(times <= used, f"unit {number} is gathered {times} times for {used} uses")
        # A step that repeats the last one gathers each unit once for each of its uses. Units that
        # users choose, and those of which a module does not run, may be gathered in vain.
        step = self.program[self.since :]
        is_plain = self.predicts_backward() and all(each.startswith(PLAIN) for each in step)
        # Each forward is predicted by the one before it.
        forwards = " ".join(step).replace("backward", "forward").split("forward")[:-1]
        is_plain &= len({calls.partition(" ")[2].strip() for calls in forwards[1:]}) <= 1
        self.may_hide = self.syncs and len(set(self.reached_roots)) == len(self.roots)
        if self.setup.zero == 3 and step == self.latest_step and is_plain:
            for number, times in self.num_gathers.items():
                used = self.num_used[number]
                require(times <= used, f"unit {number} is gathered {times} times for {used} uses")
        self.num_gathers.clear()
        self.num_used.clear()
        self.since, self.latest_step = len(self.program), step

    def _check(self: Any) -> None:
        """Check what must hold after every event."""
        if self.is_over:
            return
        for number in self.computing:
            require(self.units[number].is_ready, f"unit {number} lost its weights")
        for root in self.roots:
            state = root.state
            ran = len(state.gathers.forward.ran)
            require(ran <= self.setup.max_runs, f"{ran} uses of a pass are remembered")
            is_listed = state in self.process.under_way
            require(is_listed or not state.is_running, "a backward is under way, and is not listed")
            require(not (self.setup.waits and state.is_reducing), "the host did not wait")
            self._check_root(root)
            is_at_rest = state.engine is Engine.RESTING and not state.is_scheduled
            is_failed = state.needs_repair and not self.open
            is_pass = self.open or self.batches or self.engine_run != -1 or state.needs_repair
            require(is_pass or state.pass_unit is None, "a pass is over and has not ended")
            is_settled = all(unit.do.is_settled for unit in state.units)
            require(state.needs_repair or is_settled, "a repair leaves a unit as an exception did")
            require(is_failed or not (is_at_rest and state.is_reducing), "a reduction is in flight")
            if self.setup.zero == 3:
                self._check_gathered(state)

    def _check_root(self: Any, root: Root) -> None:
        """Check what a root tells the rest of the package."""
        state = root.state
        groups = [self.groups[unit.do.number] for unit in state.units]
        in_flight = any(REDUCING in (group.full, group.partial) for group in groups)
        require(state.is_reducing or not in_flight, "no reduction in flight is told")
        for unit in state.units if not self.has_interrupted else ():
            is_part = bool(self.batches) and self.setup.parents[unit.do.number] >= 0
            require(unit.is_scheduled == is_part, f"hooks of {unit.do.name} are told wrongly")

    def _check_gathered(self: Any, root: RootState) -> None:
        """Check that each gathered unit has a reason to be."""
        setup, gathers = self.setup, root.gathers
        ahead = gathers.prefetched
        # A micro-batch that begins where none was expected uses units that are gathered already.
        most = setup.num_ahead * (2 if root.is_scheduled else 1)
        require(len(ahead) <= most, f"{len(ahead)} units gathered ahead")
        if root.forward_failed or root.engine is Engine.FAILED:
            return  # the next pass repairs
        if root.needs_repair and not (self.open or root.is_running or root.is_scheduled):
            return
        computing = {self.units[number].state for number in self.computing}
        if any(unit.phase is Phase.FORWARD and unit not in computing for unit in root.units):
            return  # a forward that ended without hooks; the next pass repairs
        chosen = gathers.requested
        if not setup.loads:
            # A pass of their own root may have freed those that another root gathered ahead.
            of_others = any(self.root_of(a) is not self.root_of(b) for a, b in setup.chosen)
            for unit in (*ahead, *(() if of_others else chosen), *root.recomputed):
                require(unit.is_gathered, f"{unit.do.name} is noted as gathered, and is not")
        self._check_recomputed(root, computing)
        if setup.keeps:
            return
        outer = root.nested.gathers if root.nested is not None else gathers
        reasons = computing.union(ahead, chosen, root.recomputed, outer.prefetched, outer.requested)
        for unit in root.units:
            number = unit.do.number
            is_kept = unit.is_root or number in setup.stays or unit.num_users > 0
            is_kept |= number in self.unsharded
            is_kept |= unit.phase is Phase.BACKWARD
            if unit.is_gathered and not is_kept:
                require(unit in reasons, f"{unit.do.name} stays gathered without a reason")
        running = len([n for n in self.computing if self.root_of(n) is root])
        recomputed = len(root.recomputed) if setup.checkpointed != "no" else 0
        kept = (
            recomputed
            + len(setup.stays)
            + len(self.unsharded)
            + sum(unit.num_users > 0 for unit in root.units)
        )
        most = max(running, 1) + max(setup.num_ahead, len(ahead)) + kept + len(setup.chosen)
        gathered = sum(unit.is_gathered and not unit.is_root for unit in root.units)
        require(gathered <= most, f"{gathered} units are gathered at a time")

    def _check_recomputed(self: Any, root: RootState, computing: set[Any]) -> None:
        """Check that recomputed units wait for their backward within the limit."""
        waiting = [unit for unit in root.recomputed if unit not in computing]
        if not waiting:
            return
        newest = waiting[-1]
        around = {newest, *newest.ancestors}
        # Otherwise the backward of the newest one follows.
        is_busy = any(
            unit.phase is Phase.BACKWARD and unit.is_gathered and unit not in around
            for unit in root.units
        )
        num_ahead = len(waiting) - (not is_busy)
        most = max(self.setup.num_ahead, is_busy)
        # The unit around a region is in its backward first, then the last one inside it.
        most += any(newest in unit.ancestors for unit in waiting)
        require(num_ahead <= most, f"{num_ahead} recomputed units are gathered ahead")

    # -- what is not legal

    def illegal_actions(self: Any) -> list[tuple[Any, ...]]:
        """Return the events that a program must not make, and that the machine rejects."""
        found: list[tuple[Any, ...]] = []
        if self.open:
            found.append(("illegal", "move"))
            if self.setup.parents.count(self.open[-1].unit) and not self.is_capturing:
                found.append(("illegal", "capture"))
        elif self.engine_run != -1 and self.queue and self.queue[0][0] == "first":
            state = self.units[self.queue[0][1].unit].state
            if state.phase is Phase.IDLE and self.setup.zero == 3:
                found.append(("illegal", "create_graph"))
                if not state.is_gathered:
                    found.append(("illegal", "gradient"))
            if not state.root.is_running:
                found.append(("illegal", "captured backward"))
        return found

    def _illegal(self: Any, kind: str) -> None:
        """Let something happen that must raise; nothing happens after it."""
        self.program.append(f"illegal {kind}")
        self.is_over = True
        node = self.open[-1] if self.open else self.queue[0][1]
        unit = self.units[node.unit].state
        try:
            if kind == "move":
                unit.move(Phase.FORWARD)
            elif kind == "capture":
                self.is_capturing = not self.is_capturing
                child = self.units[self.setup.parents.index(node.unit)].state
                events.enter_module(child, 0, has_grad=True, is_packed=False)
            elif kind == "captured backward":
                self.is_capturing = not self.is_capturing
                events.first_gradient(node.forward, has_grad=False)
            elif kind == "create_graph":
                events.first_gradient(node.forward, has_grad=True)
            else:
                events.last_gradient(node.forward, has_grad=False)
        except RuntimeError as error:
            is_ours = isinstance(error, Illegal)
            ours = kind in ("capture", "captured backward", "gradient")
            require(is_ours == ours, f"{kind} raises {error}")
        else:
            require(False, f"{kind} is not rejected")
        self.computing.clear()
