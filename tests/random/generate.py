"""Generates a case from a seed. The generated cases obey `rules.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.random import by_hand, models
from tests.random.calls import CALLS
from tests.random.cases import STRATEGIES, ZERO_3, Case, Event, Node, Options
from tests.random.precision import POLICIES
from tests.random.rules import broken_rule
from tests.random.sharded import COMPILED

MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (1, 1)],
    2: [(2,), (2,), (1, 2), (2, 1)],
    3: [(3,), (3,), (3, 1)],
    4: [(4,), (2, 2), (2, 2)],
}
SHAPES = ["0x3", "1", "1x5", "7", "3x2x5", "13x1", "11x3", "5x1x1x2"]
INNER = {
    **{"seq": 2, "repeat": 1, "checkpoint": 2, "detached": 1, "dead": 1},
    **{"no grad": 1, "branch": 2, "in place": 1, "own input": 1, "pack": 2, "echo": 1},
}
"""Kinds of containers and their probability weights."""
ECHOES = ["hook", "hook grad", "function", "hook other", "function grad other"]
OPTIMIZERS = ["sgd", "momentum", "momentum", "decay", "adamw", "adamw foreach", "adamw fused"]
OPTIMIZERS += ["momentum split", "adamw split", "adamw flat split"]
OPTIMIZERS += ["momentum flat", "adamw flat", "adamw flat", "muon", "muon gram", "muon blocks"]
PACKS = [how for how in models.PACKS if how != "tensor"]
GRANULARITIES = ["row", "row", "row", "block:2", "block:4", "tensor"]
DEFERRED = ["no sync", "some units", "not last", "no all reduce"]
AUTOCAST = ["", "", "", "", "cached", "uncached"]
NO_POLICY = 0.7
"""Probability of a case without a mixed-precision policy."""
INSIDE = ["waste", "state", "full", "functional", "dual"]
"""Events that may stand between a forward and its backward."""
OTHERS = [*INSIDE, "write", "write"]
VARIANTS = {
    "evaluate": ["", "", "", "inference", "thread"],
    "write": list(by_hand.WRITES),
    "grad": list(by_hand.GRADS),
    "hooked": ["", "", *by_hand.HOOKS],
    "clip": ["", "", "", "inf", "1", "3", "0.5", "0", "-1", "-inf"],
    "optimizer": OPTIMIZERS,
}
"""The values of `how`, by event."""
OUTPUTS = ["tensor", "tensor", "tuple", "dict", "dataclass", "nondifferentiable", "one unused"]


class Generator:
    """Generates one case."""

    def __init__(self, seed: int, world_size: int | None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.world_size = world_size or self.random.choice([1, 2, 2, 3, 3, 4, 4])
        self.num_nodes = 0
        self.nodes: list[Node] = []

    def chance(self, probability: float) -> bool:
        """Draw a boolean."""
        return self.random.random() < probability

    # -- the tree ------------------------------------------------------------------------------

    def node(self, kind: str, children: tuple[Node, ...] = (), **fields: object) -> Node:
        """Create a node with the next id."""
        self.num_nodes += 1
        made = Node(self.num_nodes, kind, children=children, **fields)  # type: ignore[arg-type]
        self.nodes.append(made)
        return made

    def leaf(self) -> Node:
        """Draw a module without children."""
        kind = self.random.choice(
            [
                "linear",
                "linear",
                "linear",
                "mlp",
                "mlp",
                "embed",
                "normed",
                "odd",
                "odd",
                "spare",
                "act",
                "gru",
            ]
        )
        how, size = "", 0
        if kind in ("linear", "gru"):
            how = "no bias" if self.chance(0.3) else ""
        elif kind == "mlp":
            size = self.random.choice([1, 3, 7, 11])
        elif kind == "embed":
            size = self.random.choice([1, 2, 11, 11, 13])
        elif kind == "odd":
            how = self.random.choice(SHAPES)
        unit, frozen, double = self.chance(0.5), self.chance(0.1), self.chance(0.06)
        return self.node(kind, how=how, size=size, unit=unit, frozen=frozen, double=double)

    def children(self, depth: int, most: int) -> tuple[Node, ...]:
        """Draw a list of modules."""
        return tuple(self.any(depth) for _ in range(self.random.randint(1, most)))

    def any(self, depth: int) -> Node:
        """Draw a module of any kind."""
        if depth <= 0 or self.chance(0.4):
            known = [node for node in self.nodes if node.kind not in ("again", "pack", "own input")]
            if known and self.chance(0.1):
                return self.node("again", size=self.random.choice(known).id)
            return self.leaf()
        kind = self.random.choices(list(INNER), list(INNER.values()))[0]
        children = self.children(depth - 1, 3 if kind == "seq" else 2)
        unit = self.chance(0.45)
        if kind == "own input":
            inner = self.node("own input", children, unit=unit)
            return self.node("fresh", (inner,))
        if kind == "echo":
            # The backward calls a child outside of the forward of the units around it.
            inner = self.node("seq", children, unit=True)
            return self.node("echo", (inner,), how=self.random.choice(ECHOES), unit=unit)
        if kind == "pack":
            inner = self.node("pack", children, how=self.random.choice(PACKS), unit=unit)
            how = "keywords" if self.chance(0.3) else ""
            return self.node("unpack", (inner,), how=how, unit=self.chance(0.2))
        how, size = "", 0
        if kind == "repeat":
            size = self.random.choice([2, 2, 3])
            how = "uneven" if self.chance(0.3) else ""
        elif kind == "checkpoint":
            how = self.random.choice(["reentrant", ""])
        elif kind == "branch":
            how = self.random.choice(["step", "rank", "rank"])
        elif kind == "in place":
            how = self.random.choice(["input", "output", "view"])
            # An activation saves its output, so torch rejects in-place changes of it.
            how = "input" if self._ends_in_activation(children) else how
        return self.node(kind, children, how=how, size=size, unit=unit)

    def _ends_in_activation(self, children: tuple[Node, ...]) -> bool:
        """Whether an activation may produce the output of modules in sequence."""
        for child in reversed(children):
            node = child
            if node.kind == "again":
                node = next(known for known in self.nodes if known.id == child.size)
            if not node.children:
                return node.kind == "act"
            returns_input = node.kind == "dead"
            if not returns_input and self._ends_in_activation(node.children):
                return True
            if not returns_input and node.kind != "branch":
                return False
            # The child returns its input, always or if it is skipped.
        return False

    def tree(self) -> Node:
        """Draw the whole tree."""
        children = tuple(
            self.any(self.random.randint(1, 3)) for _ in range(self.random.randint(1, 4))
        )
        return self.node("seq", children)

    def ties(self) -> tuple[tuple[int, int], ...]:
        """Draw pairs of layers that share a weight."""
        found = []
        for kind in ("linear", "embed"):
            alike = [node.id for node in self.nodes if node.kind == kind]
            while len(alike) > 1 and self.chance(0.3):
                first, second = sorted(self.random.sample(alike, 2))
                found.append((first, second))
        return tuple(found)

    def shared(self, tree: Node) -> int:
        """Draw the id of a node that two roots share; -1 if there is none."""
        found = [node for node in tree.walk()[1:] if node.kind != "again"]
        # Modules that are no units are rejected.
        units = [node for node in found if node.unit and self.chance(0.9)] or found
        return self.random.choice(units).id if units else -1

    # -- sharding ------------------------------------------------------------------------------

    def options(self) -> Options:
        """Draw the options of sharding and of the optimizer."""
        mesh = self.random.choice(MESHES[self.world_size])
        strategy = self.random.choice([*STRATEGIES, ZERO_3])
        outer = "no_shard"
        if len(mesh) == 2 and strategy != "no_shard" and self.chance(0.5):
            outer = "optim"
        return Options(
            strategy=strategy,
            outer=outer,
            mesh=mesh,
            reshard=self.chance(0.75),
            granularity=self.random.choice(GRANULARITIES),
            scale=self.random.choice([None, None, None, 1.0, 0.37]),
            prefetch=self.random.choice([0, 1, 1, 1, 2]),
            # No limit in bytes; the next unit; a few units.
            ahead=self.random.choice([None, None, None, 1, 2_000]),
            asynchronous=self.chance(0.8),
            live=self.random.choice([1, 2, 2, 3]),
            pool=self.chance(0.35),
            check=self.random.choice(["once", "once", "once", "never", "always"]),
            meta=self.chance(0.15),
            optimizer=self.random.choice(OPTIMIZERS),
            placement=self.random.choice(["", "", "", "columns", "replicate", "meshes", "meshes"]),
            offload=self.chance(0.15),
            wide=self.chance(0.15),
            hook=self.chance(0.15),
            chosen=self.random.choice([0, 0, 0, 0, 1, 2]),
            keep=self.chance(0.1),
            once=self.chance(0.25),
            replaced=self.chance(0.05),
            compiled=self.random.choice(list(COMPILED)) if self.chance(0.1) else "",
            nccl=self.chance(0.25),
        )

    # -- the program ---------------------------------------------------------------------------

    def data(self) -> int:
        """Draw the seed of a batch."""
        return self.random.randint(0, 50)

    def some_node(self) -> int:
        """Draw the id of a node."""
        return self.random.choice(self.nodes).id

    def interlude(self, others: Sequence[str] = OTHERS) -> list[Event]:
        """Draw events that may occur at any time, most often none."""
        found = []
        while self.chance(0.25):
            do = self.random.choice([*["evaluate"] * 4, *others])
            if do == "write" and self.chance(0.5):
                found.append(Event("evaluate", seed=self.data()))
            found.append(Event(do, seed=self.data(), how=self.how(do)))
            if do == "write" and self.chance(0.5):
                found.append(Event("evaluate", seed=self.data()))
        return found

    def how(self, do: str) -> str:
        """Draw the variant of an event."""
        if do in VARIANTS:
            return self.random.choice(VARIANTS[do])
        return ""

    def micro(self, last: bool) -> list[Event]:
        """Draw the forwards and backwards of one micro-batch."""
        kind = self.random.choice(
            ["plain"] * 7
            + ["two slots", "retain", "input gradient", "penalty", "weights", "head", "head"]
        )
        deferred = "" if last or self.chance(0.5) else self.random.choice(DEFERRED)
        flag = self.chance(0.2)
        if kind in ("input gradient", "penalty", "weights", "head"):
            return [Event(kind, seed=self.data()), *self.simple(deferred, flag)]
        if kind == "retain":
            forward = Event("forward", seed=self.data(), flag=flag)
            first = Event("backward", how=self.random.choice(["retain", "retain no sync"]))
            return [forward, *self.interlude(INSIDE), first, Event("backward", how=deferred)]
        if kind == "two slots":
            order = self.random.choice([(0, 1), (1, 0)])
            return [
                Event("forward", seed=self.data(), slot=0),
                *self.interlude(INSIDE),
                Event("forward", seed=self.data(), slot=1),
                Event("backward", slot=order[0], how=deferred),
                *self.interlude(INSIDE),
                Event("backward", slot=order[1], how=deferred),
            ]
        return self.simple(deferred, flag)

    def simple(self, deferred: str, flag: bool) -> list[Event]:
        """Draw one forward and its backward."""
        return [
            Event("forward", self.data(), how="thread" if self.chance(0.1) else "", flag=flag),
            *(self.interlude(INSIDE) if self.chance(0.3) else []),
            Event("backward", self.data(), how=deferred),
        ]

    def step(self) -> list[Event]:
        """Draw one training step."""
        events = [Event("zero", flag=self.chance(0.7))]
        if self.chance(0.15):
            events.append(Event("freeze", node=self.some_node(), flag=self.chance(0.6)))
        if self.chance(0.2):
            how = self.random.choice(["forward", "backward", "recomputation"])
            flag = self.chance(0.7)
            events.append(Event("fail", self.data(), node=self.some_node(), how=how, flag=flag))
        num_micro = self.random.choice([1, 1, 1, 2, 3])
        for micro in range(num_micro):
            events += self.interlude()
            if micro and self.chance(0.2):
                events.append(Event("freeze", node=self.some_node(), flag=self.chance(0.7)))
            events += self.micro(last=micro == num_micro - 1)
            if self.chance(0.2):
                events.append(Event("grad", seed=self.data(), how=self.how("grad")))
        if self.chance(0.3):
            events.append(Event("clip", seed=self.data(), how=self.how("clip")))
        return [*events, *self.interlude(), Event("step"), *self.interlude()]

    def other_step(self) -> list[Event]:
        """Draw a step with hooks or a scaled loss, or a change of the optimizer."""
        do = self.random.choice(["hooked", "hooked", "scaler", "optimizer", "rate"])
        made = Event(
            do, self.data(), node=self.some_node(), how=self.how(do), flag=self.chance(0.4)
        )
        return [made, Event("step")] if do == "hooked" else [made]

    def program(self) -> tuple[Event, ...]:
        """Draw steps with other events between them."""
        events = self.interlude()
        saved = ""
        for _ in range(self.random.randint(2, 4)):
            events += self.step()
            if self.chance(0.3):
                events += self.other_step()
            if self.chance(0.1):
                how = self.random.choice(["", "assign", "assign sharded"])
                events.append(Event("load", seed=self.data(), how=how))
            if saved and self.chance(0.5):
                options = self.options() if self.chance(0.5) else None
                how = "torch" if saved == "torch" else ""
                events.append(Event("restore", how=how, options=options))
            elif self.chance(0.15):
                saved = self.random.choice(["save", "save", "async", "torch"])
                events.append(Event("save", how="" if saved == "save" else saved))
        return tuple(events)

    def case(self) -> Case:
        """Draw the case."""
        dtype = self.random.choice(["float64", "float64", "float64", "float32"])
        policy = "" if self.chance(NO_POLICY) else self.random.choice(list(POLICIES))
        dtype = POLICIES[policy].given or dtype
        tree = self.tree()
        roots = self.random.choice([1, 1, 1, 2])
        return Case(
            seed=self.seed,
            width=self.random.choice([3, 4, 5, 8]),
            dtype=dtype,
            autocast=self.random.choice(AUTOCAST) if dtype == "float32" and not policy else "",
            policy=policy,
            tree=tree,
            ties=self.ties(),
            ends=self.random.choice(["root", "root", "units"]),
            output=self.random.choice(OUTPUTS),
            roots=roots,
            shared=self.shared(tree) if roots > 1 and self.chance(0.4) else -1,
            options=self.options(),
            program=self.program(),
        )


def generate(seed: int, world_size: int | None = None) -> Case:
    """Generate the case of a seed; the world size is drawn unless given."""
    for attempt in range(1000):
        case = Generator(seed + 1_000_003 * attempt, world_size).case()
        if not broken_rule(case):
            case = replace(case, seed=seed, program=_with_calls(case.program, seed))
            mixed = replace(case, options=_with_second(case.options, seed))
            return case if case.roots == 1 or broken_rule(mixed) else mixed
    raise RuntimeError(f"no allowed case for seed {seed}")


def _with_second(options: Options, seed: int) -> Options:
    """Draw a strategy of the second root, if there is one, in half of the cases."""
    draw = random.Random(f"second root of {seed}")
    return replace(options, second=draw.choice(STRATEGIES)) if draw.random() < 0.5 else options


def _with_calls(program: tuple[Event, ...], seed: int) -> tuple[Event, ...]:
    """Insert calls of methods, in half of the programs, each before any event with a chance."""
    draw = random.Random(f"calls of {seed}")
    # Torch's own calls look for parameters where gathered ones stand.
    chance = 0.0 if any(event.how == "torch" for event in program) else draw.choice([0.0, 0.3])
    found: list[Event] = []
    for event in program:
        while draw.random() < chance:
            found.append(Event("call", seed=draw.randint(0, 1000), how=draw.choice(list(CALLS))))
        found.append(event)
    return tuple(found)
