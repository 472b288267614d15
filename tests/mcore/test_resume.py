"""A run that loads a checkpoint continues as if it had not stopped."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.cases import longer, quick_only
from tests.mcore import flags as f
from tests.mcore.flags import DROPOUT, NO_SHARD, PP2, TP2, ZERO1, ZERO2, fsdp, loading, saving
from tests.mcore.session import Training, distance, train
from tests.mcore.trained import assert_equal, saved_and_resumed, trained
from tests.ranks import RankPools
from tests.reference.wrapping_adam import WrappingAdam

EIGHT = "--train-iters 8"


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Training]:
    """A checkpoint of iteration 4 at 2 ranks, ZeRO-3, and the run that went on."""
    folder = tmp_path_factory.mktemp("checkpoint")
    flags = [fsdp(), EIGHT, "--swiglu", saving(folder, 4)]
    return folder, trained(megatron, 2, *flags, iterations=8)


def _resumed(
    pools: RankPools, world_size: int, saved: tuple[Path, Training], strategy: str
) -> Training:
    folder, uninterrupted = saved
    flags = [fsdp(strategy), EIGHT, "--swiglu", loading(folder, 4)]
    result = trained(pools, world_size, *flags, iterations=4)
    assert distance(result.losses, uninterrupted.losses[4:]) < 1e-6
    return result


@pytest.mark.parametrize("world_size", quick_only([1, 2, 3], 1, 2))
def test_losses_after_loading_at_another_world_size_equal_the_uninterrupted(
    megatron: RankPools, saved: tuple[Path, Training], world_size: int
) -> None:
    resumed = _resumed(megatron, world_size, saved, f.ZERO3)
    if world_size == 2:
        assert_equal(resumed, saved[1], after=4)


@pytest.mark.parametrize("strategy", [NO_SHARD, ZERO1, ZERO2])
@pytest.mark.functional
def test_a_zero3_checkpoint_loads_under_every_strategy(
    megatron: RankPools, saved: tuple[Path, Training], strategy: str
) -> None:
    _resumed(megatron, 3, saved, strategy)


@pytest.mark.parametrize(
    "sizes", [pytest.param("", id="data"), longer(PP2, id="pipeline"), longer(TP2, id="tensor")]
)
def test_rng_scheduler_and_optimizer_are_restored_exactly(
    megatron: RankPools, tmp_path: Path, sizes: str
) -> None:
    """With dropout and a decaying learning rate, every one of them shows in the losses."""
    decay = "--lr-decay-style cosine --lr-warmup-iters 3"
    flags = [fsdp(), "--train-iters 8 --bf16", DROPOUT, decay, sizes]
    uninterrupted, resumed = saved_and_resumed(megatron, tmp_path, *flags)
    assert_equal(resumed, uninterrupted, after=4)


def test_the_loss_scale_goes_on_where_it_was(megatron: RankPools, tmp_path: Path) -> None:
    flags = [fsdp(), EIGHT, "--fp16 --initial-loss-scale 1024 --loss-scale-window 3"]
    uninterrupted, resumed = saved_and_resumed(megatron, tmp_path, *flags)
    assert_equal(resumed, uninterrupted, after=4)
    assert resumed.loss_scales == uninterrupted.loss_scales[4:]
    # It grew once before the checkpoint, and once after it.
    assert resumed.loss_scales[-1] == 2 * resumed.loss_scales[0] == 4096.0


def train_with_wrapped_state(flags: list[str]) -> Training:
    """A training whose Adam keeps its state as Transformer Engine's does."""
    with mock.patch("torch.optim.AdamW", WrappingAdam):
        return train(flags)


def test_state_that_an_optimizer_wraps_by_itself_is_saved_by_every_rank(
    megatron: RankPools, tmp_path: Path
) -> None:
    flags, by = [fsdp(), "--train-iters 6"], train_with_wrapped_state
    uninterrupted, resumed = saved_and_resumed(megatron, tmp_path, *flags, by=by)
    alone = trained(megatron, 1, *flags, loading(tmp_path, 4), by=by)
    for result in (resumed, alone):
        assert distance(result.losses, uninterrupted.losses[4:]) < 1e-6
