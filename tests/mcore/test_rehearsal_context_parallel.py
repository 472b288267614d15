"""Under context parallelism a rehearsal computes what one rank computes of the whole sequence."""

from __future__ import annotations

import pytest

from megatron_fsdp_v2_mcore.rehearsal.context_parallel import chunks_of_rank
from tests.mcore.session import distance
from tests.mcore.test_rehearsal_parallelism import _same, _tensor_parallel, _train
from tests.ranks import RankPools

CP2 = ["--context-parallel-size", "2"]
# The mask is the attention's to make, where Megatron's default is to read it with the data.
NO_MASK = ["--no-create-attention-mask-in-dataloader"]
ROTARY = ["--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"]
GQA = [*ROTARY, "--group-query-attention", "--num-query-groups", "2"]


def test_a_rank_has_an_early_and_a_late_chunk() -> None:
    assert [chunks_of_rank(rank, 2) for rank in range(2)] == [(0, 3), (1, 2)]
    held = [chunk for rank in range(3) for chunk in chunks_of_rank(rank, 3)]
    assert sorted(held) == list(range(6))


@pytest.mark.parametrize(
    "flags",
    [[], GQA, [*NO_MASK, "--window-size", "5,0"], [*NO_MASK, "--recompute-activations"]],
    ids=["learned-positions", "rotary-gqa", "window", "recompute"],
)
@pytest.mark.functional
def test_context_parallel_trains_like_one_rank(megatron: RankPools, flags: list[str]) -> None:
    _same(_train(megatron, 2, *CP2, *flags), _train(megatron, 1, *flags))


@pytest.mark.functional
def test_context_with_data_and_tensor_parallel_trains_like_one_rank(megatron: RankPools) -> None:
    _same(_train(megatron, 4, *CP2, *GQA), _train(megatron, 1, *GQA))
    alone = _train(megatron, 1, *_tensor_parallel(1))
    _same(_train(megatron, 4, *CP2, *_tensor_parallel(2), "--sequence-parallel"), alone)


@pytest.mark.functional
def test_a_predicted_token_is_exchanged_between_parts_of_a_sequence(megatron: RankPools) -> None:
    flags = [*GQA, "--mtp-num-layers", "1"]
    mine, alone = _train(megatron, 2, *CP2, *flags), _train(megatron, 1, *flags)
    assert distance(mine.losses[:1], alone.losses[:1]) < 1e-6
    # Megatron divides by the tokens of a part, and the part with the sequence's end has fewer.
    assert distance(mine.losses, alone.losses) < 1e-4
