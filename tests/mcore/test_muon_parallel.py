"""Muon with every parallelism, against Megatron's own on whole parameters at equal sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mcore import flags as f
from tests.mcore.flags import ZERO3, fsdp
from tests.mcore.session import Training, distance
from tests.mcore.test_muon import MUON
from tests.mcore.trained import assert_close, trained
from tests.ranks import RankPools

pytestmark = pytest.mark.functional

DUPLICATED = f"{f.TP2_SP} --muon-tp-mode duplicated"
EXPERTS = f"{f.ALLTOALL} {f.EP2}"


def _train(pools: RankPools, *flags: f.Flags, world_size: int = 4, once: bool = False) -> Training:
    steps = "--global-batch-size 8 --train-iters 8"
    return trained(pools, world_size, steps, MUON, *flags, once=once)


@pytest.mark.parametrize("mode", ["blockwise", "duplicated", "distributed"])
def test_every_tensor_parallel_mode(megatron: RankPools, mode: str) -> None:
    flags = f"{f.TP2} --muon-tp-mode {mode}"
    for strategy in (ZERO3, f.ZERO1, f.NO_SHARD):
        assert_close(_train(megatron, flags, fsdp(strategy)), _train(megatron, flags, once=True))


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        ("", f.HSDP),
        ("", f.HFSDP),
        (f.PP2, ""),
        (f.CP2, ""),
        (f"{f.PP2} {DUPLICATED}", ""),
        (f.VPP2, ""),
        (EXPERTS, ""),
        (EXPERTS, "--expert-data-parallel-sharding-strategy no_shard"),
        (f"{EXPERTS} {DUPLICATED}", ""),
        ("--muon-scalar-optimizer lion", ""),
        ("--optimizer lion", ""),
        ("--calculate-per-token-loss --loss-scale 8", ""),
    ],
)
def test_every_parallelism(megatron: RankPools, flags: str, ours: str) -> None:
    mine = _train(megatron, flags, fsdp(ZERO3, ours))
    assert_close(mine, _train(megatron, flags, once=True))


def test_bf16_is_as_close_as_rounding_lets_it(megatron: RankPools) -> None:
    flags = "--muon-fp32-matmul-prec medium --bf16"
    theirs = _train(megatron, flags, world_size=2)
    ours = _train(megatron, flags, fsdp(), world_size=2)
    assert distance(ours.losses, theirs.losses) < 5e-4


@pytest.mark.parametrize("optimizer", ["muon", "adaptive_muon", "lion"])
def test_a_checkpoint_loads_at_any_size(
    megatron: RankPools, tmp_path: Path, optimizer: str
) -> None:
    flags = f"--optimizer {optimizer} --muon-tp-mode duplicated"
    uninterrupted = _train(megatron, flags, f.TP2, fsdp(), f.saving(tmp_path, 4)).losses
    # The first updates after the start are signs in part, where rounding decides.
    tolerance = 1e-6 if optimizer == "muon" else 1e-4
    for world_size, strategy, sizes in (
        (1, f.ZERO1, ""),
        (2, f.NO_SHARD, f.PP2),
        (2, f.ZERO2, f.TP2),
        (4, ZERO3, f.HFSDP),
    ):
        load = fsdp(strategy, sizes, f.loading(tmp_path, 4))
        resumed = _train(megatron, flags, load, world_size=world_size).losses
        assert distance(resumed, uninterrupted[4:]) < tolerance, (world_size, strategy, sizes)


@pytest.mark.parametrize("mode", ["blockwise", "duplicated"])
def test_a_resume_at_another_tensor_parallel_size_differs_as_megatrons_own_does(
    megatron: RankPools, tmp_path: Path, mode: str
) -> None:
    """Blocks of a weight are other matrices than the weight; whole weights stay what they are."""
    vocab = "--make-vocab-size-divisible-by"
    runs = []
    for kind, flags in {"ours": fsdp(), "theirs": ["--ckpt-format", "torch_dist"]}.items():
        common = [f"--muon-tp-mode {mode}", *flags]
        saving, loading = f.saving(tmp_path / kind, 4), f.loading(tmp_path / kind, 4)
        whole = _train(megatron, *common, f"{vocab} 512", saving, world_size=2)
        resumed = _train(megatron, *common, f"{vocab} 256", f.TP2_SP, loading, world_size=2)
        runs.append((resumed.losses, whole.losses[4:]))
    (ours, before), (theirs, _) = runs
    assert distance(ours, theirs) < 1e-6
    if mode == "blockwise":
        assert distance(ours, before) > 1e-5
    else:
        assert distance(ours, before) < 1e-6


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_megatrons_own_checkpoint_is_resumed_from(
    megatron: RankPools, tmp_path: Path, precision: str
) -> None:
    save = ["--ckpt-format torch_dist", f.saving(tmp_path, 4)]
    theirs = _train(megatron, precision, *save, world_size=2).losses
    load = fsdp(ZERO3, f.loading(tmp_path, 4))
    ours = _train(megatron, precision, load, world_size=2).losses
    assert distance(ours, theirs[4:]) < (5e-4 if precision else 1e-6)
