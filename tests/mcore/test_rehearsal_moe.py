"""A rehearsal runs Megatron's mixtures of experts, grouped experts included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mcore.session import Training
from tests.mcore.test_rehearsal_parallelism import _same, _train
from tests.ranks import RankPools

EP2 = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]
GROUPED = ["--moe-grouped-gemm"]
# One expert a rank: its weights are drawn in the same order by grouped and sequential experts.
ONE_EACH = ["--num-experts", "2", "--moe-router-topk", "1", "--moe-router-pre-softmax", *EP2]
FOUR = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear", "--swiglu"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01"),
]
# Every rank of two and of four takes part in every global batch.
BATCH = ["--global-batch-size", "16"]


def _identical(mine: Training, theirs: Training) -> None:
    assert mine.losses == theirs.losses
    assert mine.grad_norms == theirs.grad_norms


@pytest.mark.parametrize("flags", [[], ["--disable-bias-linear", "--swiglu"]], ids=["bias", "glu"])
@pytest.mark.functional
def test_grouped_experts_train_like_sequential_ones(megatron: RankPools, flags: list[str]) -> None:
    sequential = _train(megatron, 2, *ONE_EACH, *flags)
    _identical(_train(megatron, 2, *ONE_EACH, *flags, *GROUPED), sequential)


def _expert_marks(model: list[Any], optimizer: Any) -> dict[str, tuple[Any, ...]]:
    del optimizer
    marks = ("allreduce", "tensor_model_parallel", "partition_dim")
    layer = model[0].module.decoder.layers[0].mlp.experts
    return {
        name: (tuple(param.shape), *(getattr(param, mark, None) for mark in marks))
        for name, param in layer.named_parameters()
    }


def test_grouped_experts_have_transformer_engines_names_and_marks(megatron: RankPools) -> None:
    flags = [*FOUR, *GROUPED, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    flags += ["--expert-tensor-parallel-size", "2", "--moe-ffn-hidden-size", "48"]
    assert _train(megatron, 2, *flags, probe=_expert_marks).extras[0] == {
        **{f"linear_fc1.weight{n}": ((48, 64), True, True, 0) for n in range(4)},
        **{f"linear_fc2.weight{n}": ((64, 24), True, True, 1) for n in range(4)},
    }


@pytest.mark.parametrize("experts", [[], GROUPED], ids=["sequential", "grouped"])
@pytest.mark.functional
def test_expert_and_data_parallel_train_like_expert_parallel(
    megatron: RankPools, experts: list[str]
) -> None:
    flags = [*FOUR, *EP2, *BATCH, *experts, "--moe-shared-expert-intermediate-size", "64"]
    _same(_train(megatron, 4, *flags), _train(megatron, 2, *flags))


@pytest.mark.parametrize("size", ["1", "2"])
@pytest.mark.functional
def test_expert_tensor_parallel_learns(megatron: RankPools, size: str) -> None:
    flags = [*FOUR, *BATCH, *GROUPED, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    flags += ["--expert-tensor-parallel-size", size, "--moe-token-dispatcher-type"]
    by_dispatcher = [
        _train(megatron, 4, *flags, dispatcher, "--expert-model-parallel-size", "2")
        for dispatcher in ("alltoall", "allgather")
    ]
    _same(*by_dispatcher)
    assert by_dispatcher[0].losses[-1] < by_dispatcher[0].losses[0]


@pytest.mark.functional
def test_recompute_of_experts_changes_no_bit(megatron: RankPools) -> None:
    flags = [*FOUR, *EP2, *GROUPED]
    recompute = ["--recompute-granularity", "selective", "--recompute-modules"]
    plain = _train(megatron, 2, *flags)
    _identical(_train(megatron, 2, *flags, *recompute, "moe_act"), plain)


@pytest.mark.functional
def test_sequential_experts_go_on_from_a_checkpoint_of_grouped_ones(
    megatron: RankPools, tmp_path: Path
) -> None:
    flags = [*FOUR, *EP2, "--ckpt-format", "torch_dist"]
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    load = ["--load", str(tmp_path), "--ckpt-step", "3", "--exit-on-missing-checkpoint"]
    whole = _train(megatron, 2, *flags, *GROUPED, *save)
    for experts in (GROUPED, []):
        rest = _train(megatron, 2, *flags, *experts, *load, iterations=2)
        assert rest.losses == whole.losses[3:]
        assert rest.grad_norms == whole.grad_norms[3:]
