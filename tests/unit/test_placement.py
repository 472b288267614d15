"""Strategies resolve to placements, and placements determine the slices of each rank."""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.layout.placement import AxisPlacements, Placement, resolve_placements

R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL


@pytest.mark.parametrize(
    ("strategy", "outer", "sizes", "expected"),
    [
        ("no_shard", "no_shard", [4], [(R, R, P)]),
        ("optim", "no_shard", [4], [(R, S, P)]),
        ("optim_grads", "no_shard", [4], [(R, S, S)]),
        ("optim_grads_params", "no_shard", [4], [(S, S, S)]),
        # The outer axis comes first and replicates model weights, as an axis of one rank does.
        ("optim_grads_params", "optim", [2, 4], [(R, S, P), (S, S, S)]),
        ("optim_grads_params", "no_shard", [1], [(R, S, S)]),
    ],
)
def test_strategies_resolve_to_placements_of_each_axis(
    strategy: str, outer: str, sizes: list[int], expected: list[tuple[Placement, ...]]
) -> None:
    found = resolve_placements(strategy, outer, sizes)
    assert found == tuple(AxisPlacements(*placements) for placements in expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("optim", "optim_grads", [2, 2]), "unknown outer_dp_sharding_strategy"),
        (("no_shard", "optim", [2, 2]), "it needs sharding_strategy"),
    ],
)
def test_impossible_outer_strategies_are_rejected(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_placements(*arguments)


def test_a_policy_takes_floating_dtypes_only() -> None:
    with pytest.raises(ValueError, match=r"MixedPrecisionPolicy\.param_dtype"):
        MixedPrecisionPolicy(param_dtype=torch.int32)
    assert MixedPrecisionPolicy(param_dtype=torch.bfloat16).resolve(torch.int64).model_weight == (
        torch.int64
    )
