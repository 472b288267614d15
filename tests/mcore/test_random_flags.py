"""Random combinations of Megatron's flags train as DDP does, or are rejected by name."""

from __future__ import annotations

import pytest

from tests.mcore.flags import HFSDP, HSDP, MAMBA, PP2, TP2
from tests.mcore.random_flags import EQUAL, REJECTED, combination, outcome
from tests.mcore.te_pools import pools_for

SEEDS = (36, 56, 159, 561, 576, 839, 1070, 1347)
FLAGS = (
    *(HSDP, HFSDP, MAMBA, "--optimizer muon", "--optimizer lion", "--optimizer-cpu-offload"),
    *("--fp8-format", "--fp16", "--rampup-batch-size", "--decoupled-lr", "--use-mup"),
    *("--fsdp-trace-pool", "--expert-data-parallel-sharding-strategy", "--rerun-mode"),
    *("--num-layers-per-virtual-pipeline-stage", "--init-model-with-meta-device", "freezes"),
    *("--pipeline-model-parallel-layout", "--account-for-embedding-in-pipeline-split"),
    *("--expert-tensor-parallel-size 2", "--train-samples", "--init-method-std"),
)


def test_the_sample_has_every_kind() -> None:
    sample = [combination(seed) for seed in SEEDS]
    kinds = {"train", "evaluate", "resume", "override", "from file", "from Megatron"}
    kinds |= {"twice", "finetune", "no optimizer"}
    changed = {"strategy", "world_size", "parallel"}
    assert set().union(*(case.kinds for case in sample)) == kinds | changed
    for flag, parallel in (("--mtp-detach-heads", PP2), ("--softmax-type", TP2)):
        assert any(flag in case.flags and case.first.parallel == parallel for case in sample)
    assert not [flag for flag in FLAGS if not any(flag in str(case) for case in sample)]
    assert {case.first.world_size for case in sample} == {2, 4}


@pytest.mark.functional
@pytest.mark.parametrize("seed", SEEDS)
def test_a_combination_trains_as_ddp_or_is_rejected_by_name(
    request: pytest.FixtureRequest, seed: int
) -> None:
    found = outcome(lambda flags: pools_for(request, flags), combination(seed))
    assert found.startswith((EQUAL, REJECTED))
