"""Placements of the tensors of a parameter group along each data-parallel mesh axis.

Buffers, groups and units use placements only, never the names of strategies. A new strategy is a
new row of these tables. Supported placements shard model weights along the innermost axis only.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


class Placement(enum.Enum):
    """Placement of one tensor along one mesh axis."""

    REPLICATE = "replicate"
    """Every rank holds the whole tensor."""
    SHARD = "shard"
    """Every rank holds one contiguous slice of the flat buffer."""
    PARTIAL = "partial"
    """Every rank holds a summand of the whole tensor; a reduction is pending."""

    # Faster than the `__hash__` of enums, which is written in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class AxisPlacements:
    """Placements of a group's tensors along one mesh axis.

    Attributes:
        model_weight: Weight that the forward computes with; its placement while the unit is idle.
        main_weight: Weight that the optimizer steps, and reduced gradient that it reads.
        unreduced_grad: Gradient between micro-batches, before the synchronized backward.
    """

    model_weight: Placement
    main_weight: Placement
    unreduced_grad: Placement


type ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""Name of a strategy along the inner (or only) axis."""

type OuterShardingStrategy = Literal["no_shard", "optim"]
"""Name of a strategy along the outer axis."""

_R, _S, _P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL

STRATEGIES: dict[ShardingStrategy, AxisPlacements] = {
    "no_shard": AxisPlacements(_R, _R, _P),
    "optim": AxisPlacements(_R, _S, _P),
    "optim_grads": AxisPlacements(_R, _S, _S),
    "optim_grads_params": AxisPlacements(_S, _S, _S),
}
"""Inner (or only) axis: DDP, ZeRO-1, ZeRO-2 and ZeRO-3."""

OUTER_NAMES: dict[OuterShardingStrategy, str] = {"no_shard": "HSDP", "optim": "HFSDP"}
"""Common name of a 2-D mesh with each outer strategy."""

OUTER_STRATEGIES: dict[OuterShardingStrategy, AxisPlacements] = {
    strategy: STRATEGIES[strategy] for strategy in OUTER_NAMES
}
"""Outer axis of a 2-D mesh. Its gradient is always reduced once a step."""


def resolve_placements(
    sharding_strategy: ShardingStrategy,
    outer_dp_sharding_strategy: OuterShardingStrategy,
    axis_sizes: Sequence[int],
) -> tuple[AxisPlacements, ...]:
    """Convert strategy names into placements per mesh axis, outermost axis first.

    Along an axis of size 1 a sharded model weight is the full weight. Its placement is then
    replicated, so that a rank does not gather its own weight into a second buffer.

    Args:
        sharding_strategy: A key of `STRATEGIES`; applies to the innermost axis.
        outer_dp_sharding_strategy: A key of `OUTER_STRATEGIES`; applies to the outer axis.
        axis_sizes: Sizes of the data-parallel mesh axes, 1 or 2 of them.

    Raises:
        ValueError: A name is unknown, the mesh has another number of axes, an outer strategy is
            given without an outer axis, or the two strategies cannot be combined.
    """
    for option, strategy, known in (
        ("sharding_strategy", sharding_strategy, STRATEGIES),
        ("outer_dp_sharding_strategy", outer_dp_sharding_strategy, OUTER_STRATEGIES),
    ):
        if strategy not in known:
            raise ValueError(f"unknown {option} {strategy!r}; choose one of {', '.join(known)}")
    if len(axis_sizes) not in (1, 2):
        raise ValueError(
            f"a data-parallel mesh has 1 axis (dp) or 2 (outer dp, inner dp), got {len(axis_sizes)}"
        )
    if len(axis_sizes) == 1 and outer_dp_sharding_strategy != "no_shard":
        raise ValueError(
            f"outer_dp_sharding_strategy={outer_dp_sharding_strategy!r} needs a 2-D mesh "
            "(outer dp, inner dp); got a 1-D mesh"
        )
    if outer_dp_sharding_strategy == "optim" and sharding_strategy == "no_shard":
        raise ValueError(
            "outer_dp_sharding_strategy='optim' shards the optimizer further than the inner axis; "
            "it needs sharding_strategy 'optim', 'optim_grads' or 'optim_grads_params', "
            "got 'no_shard'"
        )
    rows = [STRATEGIES[sharding_strategy]]
    if len(axis_sizes) == 2:
        rows.insert(0, OUTER_STRATEGIES[outer_dp_sharding_strategy])
    return tuple(
        row if size > 1 else AxisPlacements(_R, row.main_weight, row.unreduced_grad)
        for row, size in zip(rows, axis_sizes, strict=True)
    )
