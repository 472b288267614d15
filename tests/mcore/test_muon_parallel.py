"""Muon with every parallelism, against Megatron's own on whole parameters at equal sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mcore.session import MODEL_FLAGS, Training, curves, distance, fsdp, train
from tests.mcore.test_muon import MUON, ZERO3
from tests.ranks import RankPools

pytestmark = pytest.mark.functional

MODEL = [*MODEL_FLAGS, "--global-batch-size", "8", "--train-iters", "8"]
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --swiglu --moe-ffn-hidden-size 64 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall"
)
HSDP = "--num-distributed-optimizer-instances 2"
HFSDP = f"{HSDP} --outer-dp-sharding-strategy optim"
UNSHARDED_EXPERTS = "--expert-data-parallel-sharding-strategy no_shard"
# Megatron imports on every rank, and compiles what experts share, in the first training.
TIMEOUT_S = 240.0


def _train(pools: RankPools, *flags: str, world_size: int = 4) -> Training:
    return curves(pools(world_size).run(train, [*MODEL, *flags], timeout_s=TIMEOUT_S))


def _equal(mine: Training, theirs: Training) -> None:
    assert distance(mine.losses, theirs.losses) < 1e-6
    assert distance(mine.grad_norms, theirs.grad_norms) < 1e-6


@pytest.mark.parametrize("mode", ["blockwise", "duplicated", "distributed"])
def test_every_tensor_parallel_mode(megatron: RankPools, mode: str) -> None:
    flags = [*MUON, *TP2.split(), "--muon-tp-mode", mode]
    theirs = _train(megatron, *flags)
    for strategy in (ZERO3, "optim", "no_shard"):
        _equal(_train(megatron, *flags, *fsdp(strategy)), theirs)


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        ("", HSDP),
        ("", HFSDP),
        (PP2, ""),
        (CP2, ""),
        (f"{PP2} {TP2} --sequence-parallel --muon-tp-mode duplicated", ""),
        (f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", ""),
        (f"{MOE} {EP2}", ""),
        (f"{MOE} {EP2}", UNSHARDED_EXPERTS),
        (f"{MOE} {EP2} {TP2} --sequence-parallel --muon-tp-mode duplicated", ""),
        ("--muon-scalar-optimizer lion", ""),
        ("--optimizer lion", ""),
        ("--calculate-per-token-loss --loss-scale 8", ""),
    ],
)
def test_every_parallelism(megatron: RankPools, flags: str, ours: str) -> None:
    words = [*MUON, *flags.split()]
    _equal(_train(megatron, *words, *fsdp(ZERO3, *ours.split())), _train(megatron, *words))


def test_bf16_is_as_close_as_rounding_lets_it(megatron: RankPools) -> None:
    flags = [*MUON, "--muon-fp32-matmul-prec", "medium", "--bf16"]
    theirs = _train(megatron, *flags, world_size=2)
    ours = _train(megatron, *flags, *fsdp(), world_size=2)
    assert distance(ours.losses, theirs.losses) < 5e-4


@pytest.mark.parametrize("optimizer", ["muon", "adaptive_muon", "lion"])
def test_a_checkpoint_loads_at_any_size(
    megatron: RankPools, tmp_path: Path, optimizer: str
) -> None:
    flags = [*MUON, "--optimizer", optimizer, "--muon-tp-mode", "duplicated"]
    save = ["--save", str(tmp_path), "--save-interval", "4"]
    uninterrupted = _train(megatron, *flags, *TP2.split(), *fsdp(ZERO3, *save)).losses
    load = ["--load", str(tmp_path), "--ckpt-step", "4"]
    # The first updates after the start are signs in part, where rounding decides.
    tolerance = 1e-6 if optimizer == "muon" else 1e-4
    for world_size, strategy, sizes in (
        (1, "optim", ""),
        (2, "no_shard", PP2),
        (2, "optim_grads", TP2),
        (4, ZERO3, HFSDP),
    ):
        words = [*flags, *fsdp(strategy, *load, *sizes.split())]
        resumed = _train(megatron, *words, world_size=world_size).losses
        assert distance(resumed, uninterrupted[4:]) < tolerance, (world_size, strategy, sizes)


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_megatrons_own_checkpoint_is_resumed_from(
    megatron: RankPools, tmp_path: Path, precision: str
) -> None:
    flags = [*MUON, *precision.split()]
    save = ["--ckpt-format", "torch_dist", "--save", str(tmp_path), "--save-interval", "4"]
    theirs = _train(megatron, *flags, *save, world_size=2).losses
    load = ["--load", str(tmp_path), "--ckpt-step", "4"]
    ours = _train(megatron, *flags, *fsdp(ZERO3, *load), world_size=2).losses
    assert distance(ours, theirs[4:]) < (5e-4 if precision else 1e-6)
