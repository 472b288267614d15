"""`--check-weight-hash-across-dp-replicas-interval` finds weights that differ, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_v2.runtime.fsdp_module import named_units
from megatron_fsdp_v2_mcore.model.weight_hashes import compare
from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.session import rank
from tests.mcore.trained import trained
from tests.ranks import RankPools

STEPS = "--check-weight-hash-across-dp-replicas-interval 2 --train-iters 4 --global-batch-size 8"


def _probe(chunks: Any, optimizer: Any) -> list[str]:
    """What is said of weights as they are, and of one that the last rank has changed."""
    del optimizer
    compare(chunks)
    (unit,) = (unit for name, unit in named_units(chunks[0]) if name.endswith("decoder.layers.1"))
    (group,) = unit.groups
    weights, is_last = group.weights, rank() == torch.distributed.get_world_size() - 1
    wait, config = weights.wait, chunks[0].ddp_config

    def wait_for_wrong_ones() -> bool:
        is_new = wait()
        weights.gathered.view(0).view(-1)[0] += 1.0
        return is_new

    if is_last and "no_shard" in (config.data_parallel_sharding_strategy, *_outer(config)):
        index = next(i for i, _ in enumerate(group.names) if weights.main.view(i).numel())
        weights.main.view(index).view(-1)[0] += 1.0
    elif is_last:
        # Nobody has a copy of main weights, so something goes wrong where they are gathered.
        weights.wait = wait_for_wrong_ones
    try:
        compare(chunks)
    except RuntimeError as error:
        return [str(error)]
    return []


def _outer(config: Any) -> list[str]:
    hybrid = config.num_distributed_optimizer_instances > 1
    return [config.outer_dp_sharding_strategy] if hybrid else []


@pytest.mark.parametrize(
    ("strategy", "more", "ranks"),
    [
        (f.ZERO3, "", 2),
        (f.NO_SHARD, "--bf16", 2),
        longer(f.ZERO1, "", 2),
        longer(f.ZERO2, "--bf16", 2),
        longer(f.ZERO3, f.HSDP, 4),
    ],
)
def test_weights_that_differ_are_found_with_every_strategy(
    megatron: RankPools, strategy: str, more: str, ranks: int
) -> None:
    result = trained(megatron, ranks, STEPS, f.fsdp(strategy), more, probe=_probe)
    assert len(result.losses) == 4
    for said in result.extras:
        (message,) = said
        assert "layers.1" in message or message.startswith("other ranks hold weights")
    assert any("weights differ between data-parallel ranks:" in s[0] for s in result.extras)


@pytest.mark.functional
def test_experts_and_stages_are_compared_among_those_who_share_them(megatron: RankPools) -> None:
    trained(megatron, 4, STEPS, f.fsdp(), f.ALLTOALL, f.EP2, f.PP2, iterations=4)
