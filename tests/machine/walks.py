"""Random walks: long programs of many kinds of events at once, for `transitions.py`.

The exploration has every sequence of a few events of one kind of program, with all rules. A walk
mixes the kinds, and has more of what torch does: inputs that need no gradient or whose hooks miss
the end of a backward, outputs with several gradients, forwards with gradients inside a backward,
parts of a forward without gradients, a backward that reaches inputs alone or makes a graph, one
rank, and the methods that users call. It keeps the rules that do not count: units compute with
gathered weights, nothing is freed in use or twice, phases move as allowed.
"""

from __future__ import annotations

import random
from itertools import zip_longest
from typing import Any, override

from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.runtime.machine import events, reductions, weights
from megatron_fsdp_v2.runtime.machine.state import Forward, Phase
from tests.machine.executors import Setup, require
from tests.machine.world import Node, World

TREES = ((-1, 0, 0), (-1, 0, 1), (-1, 0, 1, 0), (-1, 0, 1, 1), (-1, -1, 0, 1), (-1, -1, 0, 1, 1))
LENGTH = 120
"""Number of actions of a walk."""
USER = ("idle", "state", "gather", "read", "sum", "sync", "free")
"""Methods that users call."""


def drawn(chance: random.Random) -> Setup:
    """Return a world at random."""

    def flags(probability: float, names: str) -> dict[str, Any]:
        return {name: chance.random() < probability for name in names.split()}

    def some(probability: float, names: str) -> dict[str, Any]:
        return {
            n: frozenset(u for u in inner if chance.random() < probability) for n in names.split()
        }

    parents = chance.choice(TREES)
    inner = [unit for unit, parent in enumerate(parents) if parent >= 0]
    first, second = chance.sample(inner, 2)
    is_tied = parents.count(-1) == 1 and chance.random() < 0.2
    numbers = {"zero": (3, 3, 2, 1, 0), "axes": (1, 1, 2), "prefetch": (0, 1, 2)}
    numbers |= {"max_live": (1, 2), "max_forwards": (1, 2, 4), "max_calls": (1, 2)}
    drawn: dict[str, Any] = {name: chance.choice(values) for name, values in numbers.items()}
    drawn |= some(0.1, "frozen freezes loads") | some(0.2, "stays") | some(0.3, "direct")
    drawn |= flags(0.3, "queues evaluates keeps skips alone repeats drops")
    checkpointed = chance.choice(["no", "no", "packed", "stopping", "reentrant"])
    if checkpointed == "no" and drawn["max_calls"] == 1 and chance.random() < 0.3:
        drawn |= some(0.2, "several")
    if chance.random() < 0.5:
        drawn["direct"] |= {0}
    return Setup(
        parents=parents,
        tied=((second, first),) if is_tied else (),
        checkpointed=checkpointed,
        max_steps=4,
        compares="never",
        interrupts=chance.random() < 0.4,
        **drawn,
    )


class Walk(World):
    """A world that draws what torch may do; see the module."""

    counts = False

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.is_single = chance.random() < 0.2
        self.packs = random.Random(0)
        # Which gradients of the backward under way arrive, and whether it makes a graph.
        self.arrives, self.makes_graph = True, False
        super().__init__(drawn(chance))

    @override
    def _make(self, setup: Setup) -> None:
        super()._make(setup)
        for root in self.roots if self.is_single else ():
            root.state.ranks_may_differ = False
            for unit in root.state.units:
                unit.is_collective = False
            events.adopt(root.state, root.state.units)

    def walk(self) -> None:
        """Let events happen, up to `LENGTH` or the end of the world."""
        for _ in range(LENGTH):
            actions = self.actions()
            if not actions:
                break
            kinds = sorted({action[0] for action in actions})
            kind = self.chance.choice(kinds)
            is_failed = any(root.state.needs_repair for root in self.roots)
            if "use" in kinds and is_failed and self.chance.random() < 0.5:
                kind = "use"  # It repairs nothing, so that its backward may come before a repair.
            self.apply(self.chance.choice([each for each in actions if each[0] == kind]))

    @override
    def actions(self) -> list[tuple[Any, ...]]:
        found = super().actions()
        setup, is_quiet = self.setup, not self.open and self.engine_run == -1
        if setup.evaluates and self.queue and self.chance.random() < 0.2:
            found += [("echo", unit.number, grad) for unit in self.units for grad in (0, 1)]
        if self.engine_run != -1:
            found = [action for action in found if action[0] != "load"]
        if self.open and setup.skips and not setup.several:
            found += [
                ("call", action[1], None) for action in found if action[0] == "call" and action[2]
            ]
        if is_quiet and found and self.chance.random() < 0.1:
            found += [("user", kind) for kind in USER]
        if is_quiet and setup.interrupts and self.chance.random() < 0.2:
            found += [("raise", unit.number, grad) for unit in self.units for grad in (0, 1)]
        self.num_uses = self.num_loads = 0
        self.evaluated = False
        self.has_interrupted &= self.chance.random() < 0.8
        return found

    # -- forwards

    @override
    def _call(self, number: int, is_checkpointed: bool | None) -> None:
        caller = self.open[-1]
        before = caller.forward
        if is_checkpointed is None:
            caller.forward = None
        super()._call(number, bool(is_checkpointed))
        caller.forward = before

    def _echo(self, number: int, has_grad: int) -> None:
        self._run(number, has_grad=bool(has_grad))

    def _raise(self, number: int, has_grad: int) -> None:
        """Run a unit, and one inside it that raises, or let a check reject the call."""
        inside = [unit for unit, parent in enumerate(self.setup.parents) if parent == number]
        failing = [number, *inside[: self.chance.randrange(2)]]
        how = self.chance.choice(["before it", "in it", "after it", "without weights"])
        if how != "before it":
            for each in failing:
                forward = self._enter(each, has_grad=bool(has_grad))
        if how == "after it":
            events.end_unit_forward(self.units[failing[-1]].state, has_grad=bool(has_grad))
            if forward is not None:
                events.end_graph(forward)
            if forward is not None and len(failing) == 1 and self.chance.random() < 0.5:
                # A hook after those of the unit runs the backward.
                self._begin_engine([Node(number, forward, is_checkpointed=False)], 0)
                while self.engine_run != -1:
                    self._engine()
        for each in reversed(failing):
            if how == "without weights":
                weights.free(self.units[each].state)
            events.fail_forward(self.units[each].state)
        self.graphs = []

    @override
    def _enter(
        self, number: int, *, has_grad: bool, is_packed: bool = False, module: int = 0
    ) -> Forward | None:
        if self.engine_run != -1 and is_packed and self.chance.random() < 0.1:
            has_grad = False  # A reentrant checkpoint in one that is not.
        if self.engine_run == -1 and self.packs.random() < 0.05:
            is_packed = True  # Hooks pack saved tensors, such as those that offload them.
        return super()._enter(number, has_grad=has_grad, is_packed=is_packed, module=module)

    @override
    def _leave(
        self, number: int, forward: Forward | None, *, has_grad: bool, computes_on: bool = False
    ) -> None:
        if forward is not None and self.chance.random() < 0.15:
            forward.has_end_hook = False
        if self.units[number].state.is_recomputing:
            has_grad = forward is not None
        super()._leave(number, forward, has_grad=has_grad, computes_on=computes_on)

    def _user(self, kind: str) -> None:
        root = self.chance.choice(self.roots).state
        if kind == "idle":
            events.make_idle(root)
        elif kind == "gather":
            units = self.chance.sample(root.units, self.chance.choice([1, min(2, len(root.units))]))
            for each in units:
                events.unshard(each, async_op=self.chance.random() < 0.5)
            for each in units:
                weights.wait(each)
        elif kind == "read":
            if self.engine_run == -1:
                events.make_idle(root)
            events.begin_reading(root)
            for each, following in zip_longest(root.units, root.units[1:]):
                for ahead in (each, following) if following else (each,):
                    weights.gather(ahead, WeightUse.BOTH, async_op=True)
                weights.wait(each)
                weights.free(each)
        elif kind == "sum":
            reductions.synchronize(root, root.units)
        elif kind == "sync":
            reductions.repair(root)
        for each in root.units if kind == "free" else ():
            weights.free(each)
        for each in root.units if kind == "state" else ():
            if each.phase is Phase.IDLE and not each.expects_backward:
                weights.free_if_outdated(each)

    # -- backwards

    @override
    def _backward(self, mask: int) -> None:
        waiting = []
        if len(self.graphs) > 1 and self.chance.random() < 0.4:
            waiting = [self.graphs.pop(self.chance.randrange(len(self.graphs)))]
        super()._backward(mask)
        self.graphs = waiting

    @override
    def _begin_engine(self, graphs: list[Node], mask: int) -> None:
        super()._begin_engine(graphs, mask)
        for graph in graphs:
            if ("gradient", graph) in self.queue and self.setup.parents[graph.unit] < 0:
                # Inputs of a root may need gradients, and its outputs have several.
                place = self.queue.index(("gradient", graph))
                has_hook = graph.forward is not None and graph.forward.has_end_hook
                is_last = has_hook and self.chance.random() < 0.3
                self.queue.insert(place + 1, ("last" if is_last else "over", graph))
                if ("first", graph) in self.queue and self.chance.random() < 0.3:
                    self.queue.insert(place, ("again", graph))
        self.arrives = self.chance.random() < 0.9
        may_make_graph = self.setup.zero < 3 or self.is_single
        self.makes_graph = may_make_graph and self.chance.random() < 0.1
        if self.chance.random() < 0.3:
            for unit in self.units:
                unit.state.settings.requires_gradient_sync = self.chance.random() < 0.5

    @override
    def _plan(self, node: Node, *, is_inside: bool = False) -> None:
        is_reentrant = self.setup.checkpointed == "reentrant" and node.is_checkpointed
        if node.use is None and node.forward is None and not is_reentrant:
            return  # It ran without gradients.
        start = len(self.queue)
        super()._plan(node, is_inside=is_inside)
        if node.use is not None:
            return
        how = self.chance.choice(["hook", "hook", "hook", "put off", "none"])
        if node.forward is not None and not node.forward.has_end_hook:
            how = "lacks"
        if how != "hook":
            self.queue[-1] = ("defer" if how == "put off" else "over", node)
        if self.chance.random() < 0.3:
            # A further gradient of its outputs.
            begun = start + (self.queue[start][0] == "recompute")
            self.queue.insert(self.chance.randrange(begun + 1, len(self.queue)), ("again", node))

    @override
    def _engine(self) -> None:
        kind, node = self.queue[0] if self.queue else ("end", None)
        if node is None or kind in ("recompute", "direct"):
            super()._engine()
            return
        self.queue.pop(0)
        state = self.units[node.unit].state
        if kind in ("defer", "over", "last"):
            self.computing.pop(node.unit, None)
        if kind == "defer":
            reductions.defer(node.forward)
        elif kind == "last":
            events.last_gradient(node.forward, has_grad=self.makes_graph)
        elif kind in ("first", "again"):
            events.first_gradient(node.forward, has_grad=self.makes_graph)
            if kind == "first":
                self.computing[node.unit] = self.version
        elif kind == "gradient":
            for group in self.units[node.unit].groups if self.arrives else ():
                if group.is_trained:
                    if not state.root.is_running:
                        events.expect_gradient(state)
                    group.arrive()

    @override
    def _recompute(self, node: Node, *, is_last: bool = True) -> None:
        if node.use is None:
            super()._recompute(node, is_last=is_last)
        else:
            events.begin_direct_use(self.units[node.unit].state)

    @override
    def _end(self) -> None:
        super()._end()
        for root in self.reached_roots:
            events.engine_dropped(root)  # Its callback dies after it ran, too.

    # -- rules

    @override
    def _compute(self, number: int, version: int, uses: WeightUse = WeightUse.FORWARD) -> None:
        require(self.units[number].is_ready, f"{self.units[number].name} computes without weights")

    def _skip(self, *args: Any, **kwargs: Any) -> None:
        """Walks count no gathers and no reductions."""

    _check_ahead = _check_freed = _check = _skip

    @override
    def _rest(self) -> None:
        self.expected, self.interleaved = {}, []
        for group in self.groups:
            group.times_reduced = 0
