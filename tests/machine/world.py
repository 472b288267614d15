"""A training without tensors: the machine, executors that count, and a model of autograd's graph.

A `World` is one rank. Its actions are the events that autograd and a legal program can produce:
forwards that begin, run other units and end, backwards that reach some forwards, evaluations inside
of them, steps of an optimizer, exceptions. Executors check after each command what must hold, and
raise `Broken` if it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp_v2.runtime.machine import events, reductions
from megatron_fsdp_v2.runtime.machine.state import Forward, Phase, ProcessState, RootState
from tests.machine.executors import ABSENT, Group, Root, Setup, Unit, require


@dataclass
class Node:
    """One forward in the graph: the forwards of other units that it called, in order."""

    unit: int
    forward: Forward | None
    is_checkpointed: bool
    children: list[Node] = field(default_factory=list)


class World:
    """One rank; see the module."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.process = ProcessState()
        self.roots: list[Root] = []
        self.groups: list[Group] = [Group(self, n) for n in range(len(setup.parents))]
        self.units: list[Unit] = []
        self.version = 0
        self.log: list[tuple[str, int]] = []
        # Forwards that the backward under way runs through.
        self.num_graphs = 0
        # What all ranks do together.
        self.program: list[str] = []
        # Units that compute now, with the version that they must have.
        self.computing: dict[int, int] = {}
        self.engine_run = -1
        self.runs = 0
        self.open: list[Node] = []  # forwards under way, the outermost first
        self.graphs: list[Node] = []  # finished forwards of roots
        self.queue: list[tuple[str, Any]] = []  # what the engine runs next
        self.num_steps = self.num_forwards = self.num_backwards = 0
        # How often each group has to be reduced in the backward under way.
        self.expected: dict[int, int] = {}
        self.has_interrupted = False
        self.evaluated = self.has_trained = False
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
        for root in self.roots:
            mine = [unit.state for unit in self.units if unit.state.root is root.state]
            root.state.ranks_may_differ = setup.zero < 3
            events.adopt(root.state, mine)

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
        found: list[tuple[Any, ...]] = []
        if self.open:
            node = self.open[-1]
            for unit, parent in enumerate(setup.parents):
                if parent == node.unit:
                    times = sum(child.unit == unit for child in node.children)
                    if times < setup.max_calls:
                        kinds = [False] if setup.checkpointed == "no" else [False, True]
                        found += [("call", unit, kind) for kind in kinds]
            found.append(("return",))
            if setup.trains_inside and len(self.open) == 1 and not self.has_trained:
                found.append(("train",))
        elif self.engine_run != -1:
            found.append(("engine",))
            if setup.evaluates and not self.evaluated and self.queue:
                found += [("evaluate", root.number) for root in self.roots]
        else:
            if self.num_forwards < setup.max_forwards * len(self.roots):
                found += [("forward", root.number) for root in self.roots]
            if setup.evaluates and not self.evaluated:
                found += [("evaluate", root.number) for root in self.roots]
            if self.graphs:
                found.append(("backward", 0))
                if setup.skips:
                    nodes = sum(len(graph.children) for graph in self.graphs)
                    found += [("backward", mask) for mask in range(1, 1 << min(nodes, 3))]
            elif self.num_steps < setup.max_steps and self.num_forwards:
                found.append(("step",))
        is_running = any(root.has_queued for root in self.roots)
        if setup.interrupts and not self.has_interrupted and (self.open or is_running):
            found.append(("interrupt", False))
            if not self.open:
                found.append(("interrupt", True))
        return found

    def apply(self, action: tuple[Any, ...]) -> None:
        """Let an event happen, and check what must hold after it."""
        getattr(self, f"_{action[0]}")(*action[1:])
        self._check()

    # -- forwards

    def _enter(self, number: int, *, has_grad: bool, is_packed: bool = False) -> Forward | None:
        unit = self.units[number].state
        events.enter_module(unit, 0, has_grad=has_grad, is_packed=is_packed)
        require(self.units[number].is_ready, f"unit {number} computes without weights")
        return events.begin_graph(unit) if has_grad else None

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

    def _compute(self, number: int, version: int) -> None:
        """Check the weights that a unit computes with."""
        unit = self.units[number]
        require(unit.is_ready, f"{unit.name} computes without weights")
        for group in unit.groups:
            require(
                group.version == version,
                f"{unit.name} computes with version {group.version} of group {group.number}, not "
                f"{version}",
            )

    def _forward(self, number: int) -> None:
        self.num_forwards += 1
        self.program.append(f"forward {number}")
        forward = self._enter(number, has_grad=True)
        self.open.append(Node(number, forward, is_checkpointed=False))
        self.computing[number] = self.version
        self._compute(number, self.version)

    def _call(self, number: int, is_checkpointed: bool) -> None:
        if self.setup.zero == 3:
            self.program.append(f"call {number} {is_checkpointed}")
        node = self.open[-1]
        reentrant = is_checkpointed and self.setup.checkpointed == "reentrant"
        has_grad = not (reentrant or node.forward is None)
        forward = self._enter(number, has_grad=has_grad, is_packed=is_checkpointed)
        child = Node(number, forward, is_checkpointed or node.is_checkpointed)
        node.children.append(child)
        self.open.append(child)
        self.computing[number] = self.version
        self._compute(number, self.version)

    def _return(self) -> None:
        if self.setup.zero == 3:
            self.program.append("return")
        node = self.open.pop()
        self._leave(node.unit, node.forward, has_grad=node.forward is not None)
        if not self.open and not self.has_trained:
            self.graphs.append(node)
        self.has_trained &= bool(self.open)

    def _evaluate(self, number: int) -> None:
        """Run the root and each of its units once, without gradients."""
        self.evaluated = True
        # All ranks run such a forward at the same point.
        at = f" before {self.queue[0][0]} {self.queue[0][1].unit}" if self.queue else ""
        self.program.append(f"evaluate {number}{at}")
        self._run(number, has_grad=False)

    def _run(self, number: int, *, has_grad: bool) -> None:
        # A unit whose backward is under way keeps computing with its weights afterwards.
        before = self.computing.get(number)
        forward = self._enter(number, has_grad=has_grad)
        self.computing[number] = self.version if before is None else before
        self._compute(number, self.computing[number])
        for unit, parent in enumerate(self.setup.parents):
            if parent == number:
                self._run(unit, has_grad=has_grad)
        if before is None:
            del self.computing[number]
        self._leave(number, forward, has_grad=has_grad, computes_on=before is not None)

    # -- backwards

    def _backward(self, mask: int) -> None:
        """Begin a backward through all forwards; bits of the mask are calls that it misses."""
        if self.setup.zero == 3 or not mask:
            self.program.append(f"backward {mask}")
        else:
            # Ranks may differ in what their gradients reach.
            self.program.append("backward 0")
        self._begin_engine(self.graphs, mask)
        self.graphs = []

    def _begin_engine(self, graphs: list[Node], mask: int) -> None:
        self.runs += 1
        self.engine_run, self.num_graphs = self.runs, len(graphs)
        is_first, self.num_backwards = not self.num_backwards, self.num_backwards + 1
        for unit in self.units:
            unit.state.settings.requires_gradient_sync = not (self.setup.accumulates and is_first)
        numbered = 0
        for graph in reversed(graphs):
            if graph not in self.open:
                self.queue.append(("first", graph))
            reached = {graph.unit}
            for child in reversed(graph.children):
                missed = mask >> numbered & 1
                numbered += 1
                if not missed:
                    self._plan(child)
                    reached |= self._units_in(child)
            self.queue.append(("gradient", graph))
            if self.setup.zero < 3:
                # Every unit takes its turn, since another rank may have used it.
                root = self.root_of(graph.unit)
                reached = {unit.number for unit in self.units if unit.state.root is root}
            for number in reached:
                if self.groups[number].is_trained:
                    self.expected[number] = self.expected.get(number, 0) + 1
            if self.setup.zero == 3:
                # At the end of the backward, after all its forwards.
                self.expected[graph.unit] = int(self.groups[graph.unit].is_trained)
            # Inputs of a root need no gradients, so no hook marks the end of its backward.

    def _train(self) -> None:
        """Run a backward and a step of the optimizer inside the forward of a root."""
        node = self.open[-1]
        self.program.append("train")
        self._begin_engine([node], 0)
        self.has_trained = True
        while self.engine_run != -1:
            self._engine()
        node.children = []
        self._step()

    def _units_in(self, node: Node) -> set[int]:
        """Return the units whose parameters a forward used."""
        used = {node.unit, *(owner for user, owner in self.setup.tied if user == node.unit)}
        return used.union(*map(self._units_in, node.children))

    def _plan(self, node: Node) -> None:
        if node.is_checkpointed:
            self.queue.append(("recompute", node))
        self.queue.append(("first", node))
        for child in reversed(node.children):
            if not node.is_checkpointed:
                self._plan(child)
        self.queue.append(("gradient", node))
        self.queue.append(("last", node))

    def _engine(self) -> None:
        """Let the engine run the next node, or end."""
        if not self.queue:
            self._end()
            return
        kind, node = self.queue.pop(0)
        unit = self.units[node.unit]
        if kind == "recompute":
            forward = self._enter(node.unit, has_grad=True)
            self.computing[node.unit] = self.version
            self._compute(node.unit, self.version)
            for child in node.children:
                inner = self._enter(child.unit, has_grad=True)
                self._compute(child.unit, self.version)
                self._leave(child.unit, inner, has_grad=True)
                child.forward = inner
            self._leave(node.unit, forward, has_grad=True)
            if node.forward is None:
                node.forward = forward
        elif kind == "first":
            events.first_gradient(node.forward, has_grad=False)
            self.computing[node.unit] = self.version
            self._compute(node.unit, self.version)
        elif kind == "gradient":
            self._compute(node.unit, self.version)
            for group in unit.groups:
                if group.is_trained:
                    if not unit.state.root.is_running:
                        # A weight of the root, used before any unit below it.
                        events.expect_gradient(unit.state)
                    group.arrive()
        else:
            self.computing.pop(node.unit, None)
            events.last_gradient(node.forward, has_grad=False)

    def _end(self) -> None:
        self.computing.clear()
        for root in self.roots:
            if root.has_queued:
                root.has_queued = False
                reductions.end(root.state)
        self.engine_run = -1
        self._rest()

    def _rest(self) -> None:
        """Check what must hold when a backward is over."""
        # A root that an exception left is repaired in its next pass.
        over = [root.state for root in self.roots if self.open or not root.state.needs_repair]
        for group in self.groups:
            if self.root_of(group.number) not in over:
                group.times_reduced = 0
                continue
            what = f"when the backward is over, group {group.number}"
            syncs = self.units[group.number].state.syncs_gradients
            if syncs or not group.accumulates_unreduced:
                require(not group.arrived, f"{what} has a gradient that was not reduced")
                require(group.full == ABSENT, f"{what} has a full gradient")
            if syncs:
                require(group.partial == ABSENT, f"{what} has a partial gradient")
                require(not group.is_owed, f"{what} owes a gradient")
            expected = self.expected.get(group.number, 0)
            if not syncs and group.accumulates_unreduced:
                expected = 0
            require(
                group.times_reduced == expected,
                f"{what} was reduced {group.times_reduced} times instead of {expected}",
            )
            group.times_reduced = 0
        self.expected = {}
        for state in over:
            require(not state.inner and not state.outer, "a reduction is in flight")
            require(not state.deferred and not state.recomputed, "something is deferred")
            for unit in state.units:
                is_open = any(self.units[node.unit].state is unit for node in self.open)
                rests = unit.phase is (Phase.FORWARD if is_open else Phase.IDLE)
                require(rests, f"{unit.do.name} is {unit.phase} after a backward")
                is_kept = self.setup.keeps or not unit.is_gathered
                require(is_kept, f"{unit.do.name} stays gathered after a backward")
            require(state not in self.process.under_way, "a backward is under way")
        # The pass of a forward that raised waits until the root's next pass begins.
        waiting = self.process.numbers.unreduced
        require(not waiting or self.has_interrupted, "a pass waits for its reduction")

    # -- steps and exceptions

    def _step(self) -> None:
        self.program.append("step")
        self.num_steps += 1
        self.version += 1
        for root in self.roots:
            events.weights_changed(root.state)
        self.num_forwards = self.num_backwards = 0
        self.evaluated = False

    def _interrupt(self, is_late: bool) -> None:
        """Raise an exception, in a forward or in the engine.

        Args:
            is_late: Whether the engine drops its callback after the caller went on.
        """
        self.has_interrupted = True
        if self.setup.zero == 3 or self.open or self.num_graphs > 1:
            # All ranks raise: otherwise those that go on would wait for this one, which does not
            # know which other forwards the backward would have reached.
            at = f"{self.queue[0][0]} {self.queue[0][1].unit}" if self.queue else "the end"
            self.program.append(f"interrupt before {at}")
        self.computing.clear()
        while self.open:
            node = self.open.pop()
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
        self.expected = {}

    def _check(self) -> None:
        """Check what must hold after every event."""
        for number in self.computing:
            require(self.units[number].is_ready, f"unit {number} lost its weights")
        if self.setup.zero == 3:
            for root in self.roots:
                units = root.state.units
                gathered = sum(unit.is_gathered and not unit.is_root for unit in units)
                running = len([n for n in self.computing if self.root_of(n) is root.state])
                kept = len(root.state.recomputed) + len(self.setup.stays)
                most = max(running, 1) + self.setup.prefetch + kept
                most = len(units) if self.setup.keeps else most
                require(gathered <= most, f"{gathered} units are gathered at a time")
