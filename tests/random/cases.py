"""A case as plain data: a tree of modules, its sharding, and a program.

A case is frozen and round-trips through JSON, so that a failing case can be sent to rank processes,
shrunk, and written to a file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ZERO_3 = STRATEGIES[-1]


@dataclass(frozen=True)
class Node:
    """A module of the tree; every module maps `(rows, width)` to the same shape.

    Attributes:
        id: Identifier of the node in ties and events; removal of other nodes does not change it.
        kind: A key of `models.KINDS`.
        how: Its variant.
        size: Its numeric argument: width, vocabulary, repetitions, or id of another node.
        unit: Whether `fully_shard` is called on it.
        frozen: Whether its own parameters require no gradient from the start.
        double: Whether its own parameters are fp64 where the model is fp32.
        children: Modules inside.
    """

    id: int
    kind: str
    how: str = ""
    size: int = 0
    unit: bool = False
    frozen: bool = False
    double: bool = False
    children: tuple[Node, ...] = ()

    def walk(self) -> list[Node]:
        """This node and its descendants, parents first."""
        return [self, *(below for child in self.children for below in child.walk())]


@dataclass(frozen=True)
class Options:
    """Options of sharding and of the optimizer.

    Attributes:
        strategy: `sharding_strategy`.
        second: `sharding_strategy` of the second root; empty if it is that of the first one.
        outer: `outer_dp_sharding_strategy`.
        mesh: Sizes of the mesh; their product is the world size.
        reshard: `reshard_after_forward`.
        granularity: `shard_granularity`.
        scale: `gradient_scaling_factor`.
        prefetch: `unshard_prefetch_depth`; 0 switches prefetching off.
        ahead: `unshard_prefetch_bytes`; if set, the depth is unlimited.
        asynchronous: `enable_async_reduce_grad`.
        live: `max_live_grad_buffers`.
        pool: `enable_trace_pool`.
        check: `check_ranks`.
        meta: Whether the model is built on the meta device, sharded, and then loaded.
        optimizer: The first optimizer; see `by_hand.make_optimizer`.
        placement: Result of `shard_placement_fn`: `columns` and `replicate` for parameters of some
            dimensions, `meshes` for another mesh of the same ranks for some parameters.
        offload: Whether main weights and gradients are in host memory.
        wide: Whether gradients are communicated in fp64.
        hook: Whether reduced gradients are halved by `set_all_reduce_hook`.
        chosen: How many units each unit prefetches, chosen by `set_modules_to_..._prefetch`.
        keep: Whether weights stay gathered after a backward.
        once: `reduces_once`.
        replaced: Whether a layer that is sharded by itself takes the place of the output layer.
        compiled: What `torch.compile` compiles; a key of `sharded.COMPILED`.
        nccl: Whether ranks communicate as on CUDA, in groups that behave like NCCL.
    """

    strategy: str = ZERO_3
    second: str = ""
    outer: str = "no_shard"
    mesh: tuple[int, ...] = (1,)
    reshard: bool = True
    granularity: str = "row"
    scale: float | None = None
    prefetch: int = 1
    ahead: int | None = None
    asynchronous: bool = True
    live: int = 2
    pool: bool = False
    check: str = "once"
    meta: bool = False
    optimizer: str = "sgd"
    placement: str = ""
    offload: bool = False
    wide: bool = False
    hook: bool = False
    chosen: int = 0
    keep: bool = False
    once: bool = False
    replaced: bool = False
    compiled: str = ""
    nccl: bool = False

    @property
    def strategies(self) -> set[str]:
        """Strategies of all roots."""
        return {self.strategy, self.second or self.strategy}


@dataclass(frozen=True)
class Event:
    """One event of a program.

    Attributes:
        do: Name of the event; see `program.Run`.
        seed: Seed of its data and of its skipped nodes.
        slot: Index of a loss that is kept for a backward.
        node: Id of a node.
        how: Its variant.
        flag: Its boolean argument.
        options: Sharding of a rebuilt model.
    """

    do: str
    seed: int = 0
    slot: int = 0
    node: int = -1
    how: str = ""
    flag: bool = False
    options: Options | None = None


@dataclass(frozen=True)
class Case:
    """A model, its sharding and a program.

    Attributes:
        seed: Seed of the initial weights.
        width: Features between modules.
        dtype: Dtype in which the model is built, `float32` or `float64`; with policies that keep
            wider main weights, `bfloat16` or `float16`.
        autocast: `cached` or `uncached` if forwards run under bf16 autocast, by its cache.
        policy: The mixed-precision policy of all units; a key of `precision.POLICIES`.
        tree: The modules between the root's input and output layer.
        ties: Pairs of ids of `linear` or `embed` nodes that share a weight.
        ends: Whether input and output layers belong to the `root` or are `units`.
        output: Structure of the root's output; a variant of `struct`.
        roots: Number of models of this tree in one loss; each is a root of its own.
        shared: Id of a node whose module both roots use; -1 for none.
        options: The initial sharding.
        program: The events in order.
    """

    seed: int
    width: int = 5
    dtype: str = "float64"
    autocast: str = ""
    policy: str = ""
    tree: Node = Node(0, "seq")
    ties: tuple[tuple[int, int], ...] = ()
    ends: str = "root"
    output: str = "tensor"
    roots: int = 1
    shared: int = -1
    options: Options = field(default_factory=Options)
    program: tuple[Event, ...] = ()

    @property
    def differs_by_rank(self) -> bool:
        """Whether ranks may run different modules."""
        return any(node.how in ("rank", "uneven") for node in self.tree.walk())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.options.mesh)

    @property
    def shared_nodes(self) -> list[Node]:
        """The node whose module both roots use and its descendants; empty without one."""
        found = [node for node in self.tree.walk() if node.id == self.shared]
        return found[0].walk() if found and self.roots > 1 else []


def to_json(case: Case) -> str:
    """Convert a case to JSON."""
    return json.dumps(dataclasses.asdict(case), indent=1)


_NESTED: dict[str, Any] = {"tree": Node, "children": Node, "options": Options, "program": Event}


def from_json(text: str) -> Case:
    """Convert the result of `to_json` back to a case."""
    return _made(Case, json.loads(text))


def _made(kind: Any, data: dict[str, Any]) -> Any:
    return kind(**{name: _value(value, _NESTED.get(name)) for name, value in data.items()})


def _value(value: Any, kind: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(item, kind) for item in value)
    return _made(kind, value) if isinstance(value, dict) else value
