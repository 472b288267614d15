"""A checkpoint's names are those of the whole model, however it is spread over ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.mcore.session import MODEL_FLAGS, fsdp, train
from tests.ranks import RankPools

_MOE = "--num-experts 4 --disable-bias-linear --swiglu --expert-model-parallel-size"
_VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
_MTP = "--mtp-num-layers 1 --position-embedding-type rope"


def names(model: list[Any], optimizer: Any) -> list[tuple[str, bool]]:
    """What this rank's parameters are called, and which of them are copies."""
    del optimizer
    from megatron_fsdp_v2_mcore.checkpoint.names import canonical_parameter_names

    found = [name for name in canonical_parameter_names(model).values() if not name.is_unused]
    return [(key, name.is_copy) for name in found for key in name.keys]


def _longer(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.functional)


@pytest.mark.parametrize(
    ("world_size", "spread", "model"),
    [
        (2, "--pipeline-model-parallel-size 2", "--num-layers 4"),
        _longer(2, _VIRTUAL, "--num-layers 4"),
        _longer(2, _VIRTUAL, "--num-layers 4 --untie-embeddings-and-output-weights --swiglu"),
        _longer(2, f"{_MOE} 2", "--num-experts 4 --disable-bias-linear --swiglu"),
        _longer(2, "--pipeline-model-parallel-size 2", _MTP),
        (2, f"{_VIRTUAL} {_MOE} 1 --micro-batch-size 1", f"{_MOE} 1 --num-layers 4"),
    ],
    ids=["pipeline", "virtual", "virtual-untied", "experts", "mtp", "virtual-moe"],
)
def test_names_over_all_ranks_are_those_of_the_model_in_one_piece(
    megatron: RankPools, world_size: int, spread: str, model: str
) -> None:
    flags = [*MODEL_FLAGS, "--train-iters", "1", *fsdp("optim_grads_params"), *model.split()]
    whole = [key for key, _ in megatron(1).run(train, flags, names)[0].extras]
    assert max(Counter(whole).values()) == 1
    ranks = [r.extras for r in megatron(world_size).run(train, [*flags, *spread.split()], names)]
    owned = [key for rank in ranks for key, is_copy in rank if not is_copy]
    assert set(owned) == set(whole)
    if "--expert" not in spread:
        assert len(owned) == len(whole)
    copies = {key for rank in ranks for key, is_copy in rank if is_copy}
    assert copies <= {"embedding.word_embeddings.weight"}
    assert bool(copies) == ("--untie" not in model and "--pipeline" in spread)
