"""A training without tensors: the machine, executors that count, and a model of autograd's graph.

A `World` is one rank. Its actions are the events that autograd and a legal program can produce:
forwards that begin, run other units and end, backwards that reach some forwards, evaluations inside
of them, steps of an optimizer, exceptions. Executors check after each command what must hold, and
raise `Broken` if it does not.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.runtime.machine import events, reductions
from megatron_fsdp_v2.runtime.machine.orders import ExecutionOrder
from megatron_fsdp_v2.runtime.machine.state import (
    Engine,
    Forward,
    Phase,
    ProcessState,
    RootState,
)
from tests.machine.between import Between
from tests.machine.executors import (
    FailedReduction,
    Failure,
    Group,
    Root,
    Setup,
    Unit,
    require,
)
from tests.machine.nodes import Node, Order
from tests.machine.rules import Rules
from tests.machine.schedules import Batch, Schedules


class World(Between, Rules, Schedules):
    """One rank; see the module."""

    counts = True  # Whether numbers of full gradients and pending backwards are checked.

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.process = ProcessState()
        self.roots: list[Root] = []
        self.groups: list[Group] = [Group(self, n) for n in range(len(setup.parents))]
        self.units: list[Unit] = []
        self.version = 0
        self.log: list[tuple[str, int]] = []
        # Commands that an observer reports: gathers, frees and reductions of units.
        self.commands: list[tuple[str, int]] = []
        # What all ranks do together.
        self.program: list[str] = []
        # Units that compute now, with the version that they must have.
        self.computing: dict[int, int] = {}
        self.engine_run = -1
        self.runs = 0
        self.open: list[Node] = []  # forwards under way, the outermost first
        self.graphs: list[Node] = []  # finished forwards of roots
        self.kept: list[Node] = []  # graphs of the latest backward that may run once more
        self.pending: dict[int, Node] = {}  # units whose second module has not run
        self.frozen_once: set[int] = set()
        self.num_uses = self.num_loads = 0
        self.has_replaced = self.has_written = False
        self.recomputed_last = -1  # until its backward
        self.looked_at: list[Node] = []  # uses of parameters without a backward
        self.reached_roots: list[RootState] = []  # by the backward under way
        # Roots that may reduce all units once more, since another root communicated in between.
        self.interleaved: list[RootState] = []
        self.queue: list[tuple[str, Any]] = []  # what the engine runs next
        self.num_steps = self.num_forwards = self.num_backwards = 0
        # How often each group has to be reduced in the backward under way.
        self.expected: dict[int, int] = {}
        self.has_interrupted = False
        self.evaluated = self.has_trained = False
        # Whether the latest forward is one that other ranks need not run.
        self.is_ahead = False
        # Whether the backward under way, or the latest one, synchronizes gradients.
        self.syncs = True
        self.is_synchronizing = False  # in a call of a user
        self.has_unsynced = False  # since the last step
        self.is_capturing = self.has_captured = self.has_replayed = False
        self.has_drawn = self.fails_next = self.has_failed = self.has_idled = False
        self.unsharded: set[int] = set()  # by the user, and not resharded by them
        self.num_unshards = 0
        self.breaks_next = self.has_broken = self.must_reset = False
        self.num_resets = 0
        self.failed = -1  # unit
        self.is_quiet = False
        self.running: list[Node] = []  # graphs of the backward under way
        self.orders: dict[int, Order] = {}  # of the passes that begin with a unit
        self.is_over = False  # after an illegal event
        self.deleted: set[int] = set()
        self.entering: list[int] = []  # units whose forward begins
        # Gathers and uses since the latest backward ended, and the program since then.
        self.num_gathers: Counter[int] = Counter()
        self.num_used: Counter[int] = Counter()
        self.since, self.latest_step = 0, [""]
        self.before_backward: tuple[Counter[int], Counter[int]] = Counter(), Counter()
        self.is_exact = False  # whether forwards predict all uses of the backward under way
        # Whether an optimizer that does not report its steps may step next.
        self.may_hide = False
        self.batches: list[Batch] = []
        self.num_batches = 0
        self._make(setup)

    def _make(self, setup: Setup) -> None:
        ties = {user: owner for user, owner in setup.tied}
        roots: dict[int, Root] = {}
        for number, parent in enumerate(setup.parents):
            if parent < 0:
                roots[number] = Root(self, number)
                self.roots.append(roots[number])
            else:
                roots[number] = roots[parent]
            held = [self.groups[number]]
            if number in ties:
                held.append(self.groups[ties[number]])
            self.units.append(Unit(self, number, held, roots[number].state))
        for unit in self.units:
            unit.state.reduced_with = [unit.state]
            if unit.number in ties:
                unit.state.reduced_with.append(self.units[ties[unit.number]].state)
            above, ancestors = setup.parents[unit.number], []
            while above >= 0:
                ancestors.append(self.units[above].state)
                above = setup.parents[above]
            unit.state.ancestors = ancestors
            chosen = [
                self.units[second].state for first, second in setup.chosen if first == unit.number
            ]
            unit.state.settings.forward_prefetch = unit.state.settings.backward_prefetch = chosen
        ExecutionOrder.MAX_RUNS = setup.max_runs
        for root in self.roots:
            mine = [unit.state for unit in self.units if unit.state.root is root.state]
            root.state.ranks_may_differ, root.state.has_formats = setup.zero < 3, setup.formats
            events.adopt(root.state, mine)
            is_new = not (root.state.needs_repair or root.state.has_unreduced)
            require(is_new, "a root that never ran has something to finish")

    def root_of(self, number: int) -> RootState:
        """Return the root of a unit."""
        return self.units[number].state.root

    def communicate(self, kind: str, number: int) -> None:
        """Record a collective."""
        self.log.append((kind, number))

    # -- what may happen next

    def actions(self) -> list[tuple[Any, ...]]:
        """Return the events that may happen next."""
        setup = self.setup
        if self.is_over:
            return []
        if self.must_reset:
            return [("reset",)]
        if self.batches:
            return self.schedule_actions()
        found: list[tuple[Any, ...]] = []
        if self.open:
            node = self.open[-1]
            for unit, parent in enumerate(setup.parents):
                if parent == node.unit and unit not in self.deleted:
                    times = sum(child.unit == unit and child.use is None for child in node.children)
                    if setup.restarts and unit in self.pending and times < setup.max_calls:
                        found.append(("restart", unit))
                    if unit in self.pending or times < setup.max_calls:
                        kinds = [False] if setup.checkpointed == "no" else [False, True]
                        found += [("call", unit, kind) for kind in kinds]
            found.append(("return",))
            found += self.replacements()
            if setup.catches and len(self.open) > 1:
                found.append(("catch",))
            may_train = setup.trains_inside and not (self.graphs or self.has_trained)
            if may_train and len(self.open) == 1:
                found.append(("train",))
        elif self.engine_run != -1:
            found.append(("engine",))
            if setup.inner and any(not self.root_of(g.unit).is_running for g in self.graphs):
                found.append(("inner",))
            if self.queue and self.queue[0][0] == "gradient":
                found += [("miss",)] if self.queue[0][1].unit in setup.misses else []
            is_one = len(set(self.reached_roots)) == len(self.reached_roots)
            if setup.breaks and is_one and setup.zero < 3 and not self.has_broken:
                found.append(("break",))
            if setup.evaluates and not self.evaluated and self.queue:
                is_stale = self._is_stale(self.running)
                found += [
                    ("evaluate", root.number)
                    for root in self.roots
                    if root.state.is_running or not is_stale
                ]
                if setup.nests:
                    found += [("nest", root.number) for root in self.roots if root.state.is_running]
        else:
            is_stale = self._is_stale(self.graphs)
            if self.num_forwards < setup.max_forwards * len(self.roots) and not is_stale:
                first = self.units if setup.alone else self.roots
                alive = [each.number for each in first if each.number not in self.deleted]
                found += [("forward", number) for number in alive]
            if self.graphs and setup.drops:
                found.append(("drop",))
            if self.kept and not self.graphs:
                found.append(("again",))
            if not self.graphs and not self.kept:
                # A repair reduces what is trained then, as other ranks did before.
                frozen = set() if self._needs_repair() else setup.freezes - self.frozen_once
                found += [("freeze", unit) for unit in frozen]
            if setup.evaluates and not self.evaluated and not is_stale:
                found += [
                    ("evaluate", root.number)
                    for root in self.roots
                    if root.number not in self.deleted
                ]
            if self.graphs:
                found.append(("backward", 0))
                if setup.skips:
                    nodes = sum(len(graph.children) for graph in self.graphs)
                    found += [("backward", mask) for mask in range(1, 1 << min(nodes, 3))]
            found += self.actions_between()
        if self.num_uses < setup.max_uses and self.engine_run == -1:
            found += [("use", unit, kept) for unit in setup.direct for kept in (True, False)]
        if self.num_loads < 1:
            found += [("load", unit) for unit in setup.loads.difference(self.computing)]
        if not self.has_written and self.engine_run == -1:
            used = [self._units_in(node) for node in (*self.open, *self.graphs)]
            ahead = {unit for unit in setup.writes if self.units[unit].state.is_gathered}
            found += [("write", unit) for unit in ahead.difference(*used)]
        is_running = any(root.has_queued for root in self.roots)
        if setup.interrupts and not self.has_interrupted and (self.open or is_running):
            found.append(("interrupt", False))
            # A unit that runs next would be taken for one inside the forward of its root.
            if not (setup.alone and self.open):
                found.append(("interrupt", True))
        if setup.fails and not self.has_failed and (self.open or is_running):
            found += [("fail", False), ("fail", True)]
        if setup.illegal:
            found += self.illegal_actions()
        return found

    def _needs_repair(self) -> bool:
        return any(root.state.needs_repair for root in self.roots)

    def _is_stale(self, graphs: list[Node]) -> bool:
        """Return whether a pass overwrites weights that a backward waits for, below ZeRO-3."""
        return any(graph.version != self.version for graph in graphs)

    def apply(self, action: tuple[Any, ...]) -> None:
        """Let an event happen, and check what must hold after it."""
        try:
            getattr(self, f"_{action[0]}")(*action[1:])
        except FailedReduction:
            self._interrupt(is_late=False)
        except Failure:
            for number in () if self.is_quiet else reversed(self.entering):
                events.fail_forward(self.units[number].state)
            self.entering = []
            failed = self.units[self.failed]
            require(not failed.state.is_gathered, f"{failed.name} is gathered after a failed wait")
            self._interrupt(is_late=self.is_quiet, is_shared=True)
        self._check()

    # -- forwards

    def _enter(
        self, number: int, *, has_grad: bool, is_packed: bool = False, module: int = 0
    ) -> Forward | None:
        unit = self.units[number].state
        self.units[number].was_ahead = unit in unit.root.gathers.prefetched
        current = self._current_units(unit)
        was_gathered, num_gathers = unit.is_gathered, self.num_gathers[number]
        before = unit.root.gathers.forward, unit.root.gathers.forward.following
        self.entering.append(number)
        begins = events.enter_module(unit, module, has_grad=has_grad, is_packed=is_packed)
        self.entering.pop()
        for kept in current:
            require(kept.is_gathered, f"{kept.do.name} is freed, and its weights were current")
        if was_gathered and unit.is_recomputing:
            is_again = self.num_gathers[number] > num_gathers
            require(not is_again, f"{unit.do.name} is gathered twice for its recomputation")
        self.num_used[number] += 1
        require(unit.root.gathers.num_uses > 0, "uses of units are not counted")
        if begins and not unit.root.is_running:
            if unit.is_root or (current_pass := unit.root.pass_unit) is unit:
                self.orders[number] = Order(self.orders.get(number, Order()).following())
            require(unit.is_root or current_pass is not None, "a forward is taken for a nested one")
            first = number if unit.is_root else current_pass.do.number
            self.orders[first].use(unit.do, was_gathered=was_gathered)
        require(self.units[number].is_ready, f"unit {number} computes without weights")
        if begins and not (unit.is_recomputing or unit.root.nested is not None):
            order = unit.root.gathers.forward
            may_follow = (order, order.following) != before or unit.root.pass_unit is unit
            chosen = unit.settings.forward_prefetch
            self._check_ahead(number, order, chosen, may_follow=may_follow)
        require(begins or number in self.pending, f"unit {number} goes on without a beginning")
        return events.begin_graph(unit) if has_grad and begins else None

    def _leave(
        self, number: int, forward: Forward | None, *, has_grad: bool, computes_on: bool = False
    ) -> None:
        unit = self.units[number].state
        if not computes_on:
            self.computing.pop(number, None)
        events.end_unit_forward(unit, has_grad=has_grad)
        if forward is not None:
            events.end_graph(forward)
        unit.end_forward()

    def _compute(self, number: int, version: int, uses: WeightUse = WeightUse.FORWARD) -> None:
        """Check the weights that a unit computes with."""
        unit = self.units[number]
        lacking = any(group.lacks(uses) for group in unit.groups)
        require(not lacking, f"{unit.name} computes without weights of its direction")
        require(unit.is_ready, f"{unit.name} computes without weights")
        is_old = unit.has_assigned or unit.has_old_values
        require(not is_old, f"{unit.name} computes without what was assigned")
        for group in unit.groups:
            require(
                group.version == version,
                f"{unit.name} computes with version {group.version} of group {group.number}, not "
                f"{version}",
            )

    def _forward(self, number: int) -> None:
        self.num_forwards += 1
        # Below ZeRO-3, units of one root may run without it on some ranks only.
        is_own = self.setup.zero < 3 and self.setup.parents[number] >= 0 and len(self.roots) == 1
        self.is_ahead = is_own
        if not is_own:
            self.program.append(f"forward {number}")
        forward = self._enter(number, has_grad=True)
        self.open.append(Node(number, forward, is_checkpointed=False, version=self.version))
        self.computing[number] = self.version
        self._compute(number, self.version)

    def _restart(self, number: int) -> None:
        """Run the first module of a unit again, although its second one has not run."""
        self._call(number, False, is_restarted=True)

    def _call(self, number: int, is_checkpointed: bool, *, is_restarted: bool = False) -> None:
        if self.setup.zero == 3:
            what = "restart" if is_restarted else "call"
            self.program.append(f"{what} {number} {is_checkpointed}")
        node = self.open[-1]
        reentrant = is_checkpointed and self.setup.checkpointed == "reentrant"
        has_grad = not (reentrant or node.forward is None)
        if is_restarted:
            # The forward that skipped the second module ends.
            del self.pending[number], self.computing[number]
        if begun := self.pending.get(number):
            # What ran since its first module is inside the forward, as its second module ends it.
            self._enter(number, has_grad=has_grad, module=1)
            places = (i for i, child in enumerate(node.children) if child is begun)
            # Another unit of two modules, whose second one ran in between, may hold it.
            since = next(places, len(node.children))
            begun.children = node.children[since + 1 :]
            del node.children[since + 1 :]
            self.open.append(self.pending.pop(number))
            self._compute(number, self.version)
            return
        is_inside = is_checkpointed or node.is_checkpointed
        forward = self._enter(number, has_grad=has_grad, is_packed=is_inside)
        child = Node(number, forward, is_inside, version=self.version)
        node.children.append(child)
        self.computing[number] = self.version
        self._compute(number, self.version)
        if number in self.setup.several:
            is_last = events.leave_module(self.units[number].state, 0, has_grad=has_grad)
            require(not is_last, f"unit {number} ends before its second module")
            if forward is not None:
                events.end_graph(forward)
            self.pending[number] = child
        else:
            self.open.append(child)

    def _return(self) -> None:
        if self.setup.zero == 3:
            self.program.append("return")
        node = self.open.pop()
        if not self.open:
            # The second modules of these units did not run.
            for number in list(self.pending):
                self._leave(number, None, has_grad=True)
            self.pending = {}
        self._leave(node.unit, node.forward, has_grad=node.forward is not None)
        if not self.open:
            self._check_freed(node.unit)
            # Its backward follows at once.
            root = self.units[node.unit].state
            is_kept = root.is_gathered or not root.is_root or self.has_trained
            require(is_kept, f"{root.do.name} is freed before its backward")
            require(not self.root_of(node.unit).do.is_refreshing, "a refresh is not waited for")
        if not self.open:
            self.graphs.append(node)
        self.has_trained &= bool(self.open)

    def _catch(self) -> None:
        """Let the innermost unit raise; its caller goes on."""
        if self.setup.zero == 3:
            self.program.append("catch")
        node = self.open.pop()
        self.open[-1].children.remove(node)
        self.computing.pop(node.unit)
        events.fail_forward(self.units[node.unit].state)

    def _nest(self, number: int) -> None:
        """Run a root with gradients, inside its backward; the graph is dropped."""
        self._evaluate(number, has_grad=True)

    def _evaluate(self, number: int, *, has_grad: bool = False) -> None:
        """Run the root and each of its units once."""
        self.evaluated = True
        # All ranks run such a forward at the same point.
        kind = "nest" if has_grad else "evaluate"
        self.program.append(f"{kind} {number}{self.place() if self.queue else ''}")
        if self.engine_run != -1:
            self._interleave(self.root_of(number))
            self.is_exact = False
        self._run(number, has_grad=has_grad)
        if self.engine_run == -1:
            self._check_freed(number)
            root = self.root_of(number).do
            require(root.has_waited_for_host, "an evaluation does not wait for the host's memory")
            require(not root.is_allocating, "an evaluation does not end for the allocator")
            require(not root.is_refreshing, "a refresh is not waited for")
            root.has_waited_for_host = False

    def _run(self, number: int, *, has_grad: bool) -> None:
        # A unit whose backward is under way keeps computing with its weights afterwards.
        before = self.computing.get(number)
        was_gathered = self.units[number].state.is_gathered
        forward = self._enter(number, has_grad=has_grad)
        # A pass in a backward of its root computes with the weights of the backward: at ZeRO-3,
        # with those that are gathered.
        is_old = (self.setup.zero < 3 or was_gathered) and self.root_of(number).is_running
        version = self.groups[number].version if is_old else self.version
        self.computing[number] = version if before is None else before
        self._compute(number, self.computing[number])
        for unit, parent in enumerate(self.setup.parents):
            if parent == number and unit not in self.deleted:
                self._run(unit, has_grad=has_grad)
        if before is None:
            del self.computing[number]
        self._leave(number, forward, has_grad=has_grad, computes_on=before is not None)

    def begin_order(self) -> None:
        """Begin a schedule, predicted by the last one."""
        self.orders[-1] = Order(self.orders.get(-1, Order()).following())

    # -- backwards

    def _backward(self, mask: int) -> None:
        """Begin a backward through all forwards; bits of the mask are calls that it misses."""
        if self.setup.zero == 3 or not mask:
            self.program.append(f"backward {mask}")
        else:
            # Ranks may differ in what their gradients reach.
            self.program.append("backward 0")
        graphs, self.graphs = self.graphs, []
        if self.setup.inner and len(graphs) > 1:
            self.graphs, graphs = graphs[:1], graphs[1:]
        self._begin_engine(graphs, mask)
        self.kept = graphs if self.setup.repeats else []

    def _again(self) -> None:
        """Begin a second backward through the graphs of the latest one."""
        self.program.append("again")
        graphs, self.kept = self.kept, []
        self._begin_engine(graphs, 0)

    def _drop(self) -> None:
        """Free the graphs of forwards whose backward never runs."""
        self.program.append("drop")
        self.graphs = []

    def _begin_engine(self, graphs: list[Node], mask: int) -> None:
        self.runs += 1
        self.running = graphs
        self.engine_run = self.runs
        self.begin_synchronization()
        for root in self.roots:
            root.hooked = []
        self.before_backward = self.num_gathers.copy(), self.num_used.copy()
        self.is_exact = not (mask or self.setup.loads or self.open or self.setup.alone)
        self.is_exact &= not self.setup.inner and all(graph.has_own for graph in graphs)
        self.is_exact &= len(graphs) == 1 and self.predicts_backward()
        self.is_exact &= not self._needs_repair()
        numbered = 0
        passes: dict[int, set[int]] = {}
        with_root: set[int] = set()
        self.reached_roots = [self.root_of(graph.unit) for graph in graphs]
        for graph in reversed(graphs):
            passed = graph.passed
            if graph.forward is not None and self.setup.parents[graph.unit] < 0:
                require(id(passed) not in with_root, "two forwards of a root are one pass")
                with_root.add(id(passed))
            reached = passes.setdefault(id(passed), set())
            reached |= self._units_in(graph, has_forwards=False)
            if graph.forward is None or self.setup.parents[graph.unit] >= 0:
                self._plan(graph)
                reached |= self._units_in(graph)
            else:
                if graph not in self.open:
                    self.queue.append(("first", graph))
                reached.add(graph.unit)
                for child in reversed(graph.children):
                    missed = mask >> numbered & 1
                    numbered += 1
                    if not missed:
                        self._plan(child)
                        reached |= self._units_in(child)
                    elif child.forward is not None and child.is_checkpointed:
                        # Something else of its checkpoint has a gradient.
                        self.queue.append(("recompute", child))
                if graph.has_own:
                    # Inputs of a root need no gradients, so no hook marks the end of its backward.
                    self.queue.append(("gradient", graph))
            if self.setup.zero < 3:
                # Every unit takes its turn, since another rank may have used it.
                root = self.root_of(graph.unit)
                reached |= {unit.number for unit in self.units if unit.state.root is root}
        for node in self.looked_at:
            # Another rank may have a gradient.
            passes.get(id(node.passed), set()).add(node.unit)
        for reached in passes.values():
            for number in reached:
                if self.groups[number].is_trained or self.groups[number].is_owed:
                    times = self.expected.get(number, 0) + 1
                    # A root is reduced at the end of the backward, after all its forwards.
                    at_end = self.setup.zero == 3 and self.setup.parents[number] < 0
                    self.expected[number] = 1 if at_end else times

    def _units_in(self, node: Node, *, has_forwards: bool = True) -> set[int]:
        """Return the units whose parameters a forward used, or were used themselves in it."""
        used = {node.unit} if has_forwards or node.use is not None else set()
        if has_forwards and node.use is None:
            used.update(owner for user, owner in self.setup.tied if user == node.unit)
        inside = (self._units_in(child, has_forwards=has_forwards) for child in node.children)
        return used.union(*inside)

    def _needed(self, node: Node) -> int:
        """Return the version of the weights that the backward of a forward computes with."""
        if self.setup.zero == 3 and self.evaluated:
            # An evaluation in the backward refreshed the unit, which it shares with no graph.
            return self.groups[node.unit].version
        return node.version

    def _plan(self, node: Node, *, is_inside: bool = False) -> None:
        """Queue the backward of a forward.

        Args:
            node: The forward.
            is_inside: Whether another forward is recomputed with it.
        """
        if node.use is not None:
            self.queue.append(("direct", node))
            return
        if node.is_checkpointed and not is_inside:
            self.queue.append(("recompute", node))
        if self.setup.zero == 3 or node.unit not in self.setup.unseen:
            self.queue.append(("first", node))
        for child in reversed(node.children):
            self._plan(child, is_inside=node.is_checkpointed)
        self.queue.append(("gradient", node))
        if node.unit in self.setup.other_inputs:
            self.queue.append(("defer", node))
        elif node.unit not in self.setup.hookless:
            self.queue.append(("last", node))

    def _engine(self) -> None:
        """Let the engine run the next node, or end."""
        if not self.queue:
            self._end()
            return
        kind, node = self.queue.pop(0)
        unit = self.units[node.unit]
        if kind == "recompute":
            self._recompute(node)
        elif kind == "direct":
            assert node.use is not None
            passed, position, is_counted = node.use
            if passed is not unit.state.root.passed:
                self._interleave(unit.state.root)
            events.direct_gradient(unit.state, unit.groups[0], passed, position)
            if unit.groups[0].is_trained:
                unit.groups[0].arrive(makes_room=False)
            if is_counted:
                events.end_direct_use(unit.state, position)
        elif kind == "first":
            if node.passed is not unit.state.root.passed and unit.state.root.is_running:
                self._interleave(unit.state.root)
            is_begun = unit.state.phase is Phase.BACKWARD and unit.state.root.is_running
            is_begun &= unit.state.backward_number == node.forward.number
            is_first = not unit.state.root.is_running
            is_known = self.is_exact and not is_first and self.setup.checkpointed == "no"
            if is_known and self.predicts():
                require(unit.state.is_gathered, f"{unit.name} is not gathered ahead")
            if node.unit == self.recomputed_last and not self.setup.loads:
                require(unit.state.is_gathered, f"{unit.name} is freed after its recomputation")
            self.recomputed_last = -1
            unit.was_ahead = unit.state in unit.state.root.gathers.prefetched
            node.forward.has_end_hook = node.unit not in self.setup.hookless
            events.first_gradient(node.forward, has_grad=False)
            self._check_left(unit.state.root)
            if not is_begun:
                self.num_used[node.unit] += 1
                order = unit.state.root.gathers.backward
                chosen = unit.state.settings.backward_prefetch
                # A unit of two modules runs while others do.
                may_follow = not self.setup.several
                self._check_ahead(node.unit, order, chosen, may_follow=may_follow)
            if node.has_own:
                self.computing[node.unit] = self._needed(node)
                self._compute(node.unit, self._needed(node), WeightUse.BACKWARD)
        elif kind == "defer":
            reductions.defer(node.forward)
        elif kind == "gradient":
            if unit.state.phase is Phase.BACKWARD:  # Otherwise no hook saw its outputs.
                self._compute(node.unit, self._needed(node), WeightUse.BACKWARD)
            for group in unit.groups:
                if group.is_trained:
                    if not unit.state.root.is_running:
                        # A weight of the root, used before any unit below it.
                        events.expect_gradient(unit.state)
                    group.arrive(makes_room=node.unit not in self.setup.fused)
        else:
            self.computing.pop(node.unit, None)
            events.last_gradient(node.forward, has_grad=False)

    def _miss(self) -> None:
        """Let the engine run on where no parameter of a unit gets a gradient on this rank."""
        self.queue.pop(0)

    def _interleave(self, root: RootState) -> None:
        """Let other roots reduce their units, before this one communicates or changes its pass."""
        if self.setup.zero < 3:
            others = (other.state for other in self.roots if other.state is not root)
            self.interleaved += [other for other in others if other.is_running]

    def _recompute(self, node: Node, *, is_last: bool = True) -> None:
        """Repeat a forward, and those inside it.

        Args:
            node: The forward.
            is_last: Whether the last saved tensor is one of this forward.
        """
        is_packed = self.setup.checkpointed in ("packed", "stopping")
        root = self.units[node.unit].root
        root.has_forgotten = False
        forward = self._enter(node.unit, has_grad=True, is_packed=is_packed)
        require(root.has_forgotten != is_packed, "a reentrant recomputation uses earlier casts")
        root.has_forgotten = False
        self.computing[node.unit] = self._needed(node)
        self._compute(node.unit, self._needed(node))
        for child in node.children:
            if child.use is None:
                self._recompute(child, is_last=is_last and child is node.children[-1])
            else:
                self._use_again(child)
        if is_last and self.setup.checkpointed == "stopping":
            del self.computing[node.unit]
            events.fail_forward(self.units[node.unit].state)
        else:
            self._leave(node.unit, forward, has_grad=True)
        if node.forward is None:
            node.forward = forward
        self.recomputed_last = node.unit

    def _end(self) -> None:
        self.computing.clear()
        for root in self.roots:
            if root.has_queued:
                reductions.end(root.state)
                root.has_queued = False
        self.engine_run = -1
        self.looked_at = []
        for reached in self.reached_roots:
            require(reached.engine is Engine.RESTING, "a backward is over and did not end")
        self._rest()
