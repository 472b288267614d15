"""Megatron's Adam on flat tensors: the same losses, norms and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_v2.optim import FlatOptimizer
from tests.mcore.flags import (
    MOE,
    NO_SHARD,
    OVERLAP,
    TRANSFORMER_ENGINE,
    ZERO3,
    fsdp,
    loading,
    saving,
)
from tests.mcore.trained import assert_equal, trained
from tests.ranks import RankPools

FLAT = "--fsdp-flat-optimizer"
COMMON = ["--global-batch-size 8 --train-iters 4 --bf16", OVERLAP]


def _stepped(chunks: Any, optimizer: Any) -> tuple[int, int]:
    """Tensors with elements that Adam stepped, and parameters that it was given with rows here."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    stepped, given = 0, 0
    for inner in (part.optimizer for part in parts):
        groups = [group["params"] for group in inner.param_groups]
        given += sum(_has_elements(param) for group in groups for param in group)
        if isinstance(inner, FlatOptimizer):
            assert inner._plan is not None
            groups = inner._plan.params
        stepped += sum(_has_elements(tensor) for group in groups for tensor in group)
    return stepped, given


def _has_elements(tensor: Any) -> bool:
    return getattr(tensor, "_local_tensor", tensor).numel() > 0


def test_adam_steps_fewer_tensors_and_no_loss_or_checkpoint_depends_on_it(
    megatron: RankPools, tmp_path: Path
) -> None:
    here = [*COMMON, fsdp(NO_SHARD)]
    plain = trained(megatron, 2, *here, saving(tmp_path / "plain", 2), probe=_stepped)
    flat = trained(megatron, 2, *here, FLAT, saving(tmp_path / "flat", 2), probe=_stepped)
    assert_equal(flat, plain)
    assert plain.extras[0][0] == plain.extras[0][1]
    assert flat.extras[0][0] < 0.5 * flat.extras[0][1]
    elsewhere = [*COMMON, fsdp(ZERO3)]
    resumed = trained(megatron, 2, *elsewhere, loading(tmp_path / "flat", 2))
    back = trained(megatron, 2, *elsewhere, FLAT, loading(tmp_path / "plain", 2))
    assert_equal(back, resumed)
    assert len(back.losses) == 2


@pytest.mark.functional
def test_so_does_fused_adam_also_of_experts(megatron_te: RankPools, tmp_path: Path) -> None:
    here = [TRANSFORMER_ENGINE, *COMMON, fsdp(ZERO3), MOE]
    plain = trained(megatron_te, 2, *here, probe=_stepped)
    flat = trained(megatron_te, 2, *here, FLAT, saving(tmp_path, 2), probe=_stepped)
    assert_equal(flat, plain)
    assert flat.extras[0][0] < flat.extras[0][1]
    resumed = trained(megatron_te, 2, *here, loading(tmp_path, 2))
    assert_equal(resumed, flat, after=2)
