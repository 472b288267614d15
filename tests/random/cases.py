"""What a case is: a tree of modules, how it is sharded, and what is done to it, as plain data.

A case is frozen and goes through JSON unchanged, so that a failing one can be sent to rank
processes, made smaller, and printed into a script.
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
        id: Names the node in ties and events, also when other nodes are gone.
        kind: What it is; see `models.KINDS`.
        how: Its variant.
        size: Its number: a width, a vocabulary, a repetition, the id of another node.
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
        """This node and all below, parents first."""
        return [self, *(below for child in self.children for below in child.walk())]


@dataclass(frozen=True)
class Options:
    """How a model is sharded and stepped.

    Attributes:
        strategy: `sharding_strategy`.
        outer: `outer_dp_sharding_strategy`.
        mesh: Sizes of the mesh; their product is the world size.
        reshard: `reshard_after_forward`.
        granularity: `shard_granularity`.
        scale: `gradient_scaling_factor`.
        prefetch: `unshard_prefetch_depth`; 0 switches prefetching off.
        ahead: `unshard_prefetch_bytes`, with any depth then.
        early: `enable_unshard_after_step`.
        bucket: `bucket_bytes`.
        asynchronous: `enable_async_reduce_grad`.
        live: `max_live_grad_buffers`.
        pool: `enable_trace_pool`.
        check: `check_ranks`.
        optimizer: A key of `models.OPTIMIZERS`.
    """

    strategy: str = ZERO_3
    outer: str = "no_shard"
    mesh: tuple[int, ...] = (1,)
    reshard: bool = True
    granularity: str = "row"
    scale: float | None = None
    prefetch: int = 1
    ahead: int | None = None
    early: bool = False
    bucket: int | None = None
    asynchronous: bool = True
    live: int = 2
    pool: bool = False
    check: str = "once"
    optimizer: str = "sgd"


@dataclass(frozen=True)
class Event:
    """One thing that is done.

    Attributes:
        do: What; see `program.Run`.
        seed: Of its data, and of what is skipped by it.
        slot: Which of the losses that are kept for a backward.
        node: Which node it is about.
        how: Its variant.
        flag: A yes or no of it.
        options: How the next model is sharded, where it is rebuilt.
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
        seed: Of initial weights.
        width: Features between modules.
        dtype: `float32` or `float64`.
        tree: What stands between the root's input and output layer.
        ties: Pairs of ids of `linear` or `embed` nodes that share a weight.
        ends: Whether input and output layers belong to the `root` or are `units`.
        output: What the root returns; a variant of `struct`.
        options: The first sharding.
        program: What is done, in order.
    """

    seed: int
    width: int = 5
    dtype: str = "float64"
    tree: Node = Node(0, "seq")
    ties: tuple[tuple[int, int], ...] = ()
    ends: str = "root"
    output: str = "tensor"
    options: Options = field(default_factory=Options)
    program: tuple[Event, ...] = ()

    @property
    def differs_by_rank(self) -> bool:
        """Whether ranks may run different modules."""
        return any(node.how in ("rank", "uneven") for node in self.tree.walk())

    @property
    def world_size(self) -> int:
        """Ranks it runs on."""
        return math.prod(self.options.mesh)


def to_json(case: Case) -> str:
    """A case as text; what has its default is left out."""
    return json.dumps(_slim(case))


def _slim(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            f.name: _slim(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
        }
    if isinstance(value, tuple):
        return [_slim(item) for item in value]
    return value


_NESTED: dict[str, Any] = {"tree": Node, "children": Node, "options": Options, "program": Event}


def from_json(text: str) -> Case:
    """The case that `to_json` made a text of."""
    case: Case = _made(Case, json.loads(text))
    return case


def _made(kind: Any, data: dict[str, Any]) -> Any:
    return kind(**{name: _value(value, _NESTED.get(name)) for name, value in data.items()})


def _value(value: Any, kind: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(item, kind) for item in value)
    return _made(kind, value) if isinstance(value, dict) else value
