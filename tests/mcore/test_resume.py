"""A run that loads a checkpoint continues as if it had not stopped."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.mcore.session import MODEL_FLAGS, Training, curves, distance, fsdp, train
from tests.ranks import RankPools
from tests.reference.wrapping_adam import WrappingAdam


def _losses(pools: RankPools, world_size: int, flags: list[str]) -> list[float]:
    return curves(pools(world_size).run(train, [*MODEL_FLAGS, *flags])).losses


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """A checkpoint of iteration 5 at 2 ranks, ZeRO-3, and the losses of the run that went on."""
    folder = tmp_path_factory.mktemp("checkpoint")
    flags = ["--train-iters", "12", "--save", str(folder), "--save-interval", "5", "--swiglu"]
    return folder, _losses(megatron, 2, fsdp("optim_grads_params", *flags))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.functional), 2, 3])
def test_losses_after_loading_at_another_world_size_equal_the_uninterrupted(
    megatron: RankPools, saved: tuple[Path, list], world_size: int
) -> None:
    folder, uninterrupted = saved
    flags = ["--train-iters", "12", "--load", str(folder), "--ckpt-step", "5", "--swiglu"]
    resumed = _losses(megatron, world_size, fsdp("optim_grads_params", *flags))
    assert len(resumed) == 7
    assert distance(resumed, uninterrupted[5:]) < 1e-6
    if world_size == 2:
        assert resumed == uninterrupted[5:]


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.functional
def test_a_zero3_checkpoint_loads_under_every_strategy(
    megatron: RankPools, saved: tuple[Path, list], strategy: str
) -> None:
    folder, uninterrupted = saved
    flags = ["--train-iters", "12", "--load", str(folder), "--ckpt-step", "5", "--swiglu"]
    resumed = _losses(megatron, 3, fsdp(strategy, *flags))
    assert distance(resumed, uninterrupted[5:]) < 1e-6


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param("", id="data"),
        pytest.param(
            "--pipeline-model-parallel-size 2", id="pipeline", marks=pytest.mark.functional
        ),
        pytest.param("--tensor-model-parallel-size 2", id="tensor", marks=pytest.mark.functional),
    ],
)
def test_rng_scheduler_and_optimizer_are_restored_exactly(
    megatron: RankPools, tmp_path: Path, sizes: str
) -> None:
    """With dropout and a decaying learning rate, every one of them shows in the losses."""
    common = ["--train-iters", "10", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
    common += ["--lr-decay-style", "cosine", "--lr-warmup-iters", "3", "--bf16", *sizes.split()]
    save = ["--save", str(tmp_path), "--save-interval", "4"]
    uninterrupted = _losses(megatron, 2, fsdp("optim_grads_params", *common, *save))
    load = ["--load", str(tmp_path), "--ckpt-step", "4"]
    resumed = _losses(megatron, 2, fsdp("optim_grads_params", *common, *load))
    assert resumed == uninterrupted[4:]


def test_the_loss_scale_goes_on_where_it_was(megatron: RankPools, tmp_path: Path) -> None:
    common = ["--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"]
    flags = [*MODEL_FLAGS, *fsdp("optim_grads_params", *common), "--train-iters", "8"]
    save = ["--save", str(tmp_path), "--save-interval", "4"]
    uninterrupted = megatron(2).run(train, [*flags, *save])[0]
    load = ["--load", str(tmp_path), "--ckpt-step", "4"]
    resumed = megatron(2).run(train, [*flags, *load])[0]
    assert resumed.losses == uninterrupted.losses[4:]
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
    common = [*MODEL_FLAGS, *fsdp("optim_grads_params"), "--train-iters", "8"]
    save = ["--save", str(tmp_path), "--save-interval", "4"]
    load = ["--load", str(tmp_path), "--ckpt-step", "4"]
    uninterrupted = curves(megatron(2).run(train_with_wrapped_state, [*common, *save])).losses
    for size in (2, 3):
        resumed = curves(megatron(size).run(train_with_wrapped_state, [*common, *load])).losses
        assert distance(resumed, uninterrupted[4:]) < 1e-6
