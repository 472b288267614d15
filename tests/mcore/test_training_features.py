"""Features of Megatron's training loop do with this package what they do with Megatron's DDP."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import longer, quick_only
from tests.mcore import flags as f
from tests.mcore import session
from tests.mcore.session import distance, train
from tests.mcore.trained import assert_close, assert_equal, on_megatron, run_of_ranks, trained
from tests.mcore.writers import Scalars, scalars_of, train_recorded
from tests.ranks import RankPools

SIX = "--train-iters 6"


@pytest.mark.parametrize(
    ("flags", "num_logged"),
    [
        ("--decoupled-lr 5e-3 --decoupled-min-lr 1e-3", 6),
        ("--iterations-to-skip 3 5", 4),
        ("--train-sync-interval 2 --empty-unused-memory-level 2", 6),
        ("--rerun-mode disabled", 6),
        ("--check-for-spiky-loss", 6),
        ("--use-mup --mup-base-hidden-size 32", 6),
        ("--use-cpu-initialization", 6),
        ("--timing-log-level 2 --log-throughput --log-memory-interval 2", 6),
        ("--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2", 6),
        ("--dataloader-type cyclic", 6),
        ("--deterministic-mode", 6),
    ],
)
@pytest.mark.functional
def test_a_feature_trains_like_ddp(megatron: RankPools, flags: str, num_logged: int) -> None:
    reference = trained(megatron, 2, SIX, flags)
    assert len(reference.losses) == num_logged
    assert_close(trained(megatron, 2, SIX, flags, f.fsdp()), reference)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, "--eval-interval 2 --eval-iters 1", id="evaluation"),
        longer(4, f"{f.PP2} --num-layers 4", id="pipeline"),
        longer(4, f.FULL_RECOMPUTE, id="recompute"),
        longer(4, f"{f.ALLTOALL} {f.EP2}", id="experts"),
        longer(4, "--bf16 --accumulate-allreduce-grads-in-fp32", id="bf16"),
    ],
)
def test_the_trace_pool_changes_no_bit_of_a_training(
    megatron: RankPools, ranks: int, flags: str
) -> None:
    overlap = f.OVERLAP if "--eval" in flags else ""
    common = [SIX, f.fsdp(), overlap, "--global-batch-size 16", flags]
    pooled = trained(megatron, ranks, *common, "--fsdp-trace-pool")
    assert_equal(pooled, trained(megatron, ranks, *common))


def _scalars(pools: RankPools, world_size: int, *flags: f.Flags) -> Scalars:
    """What a training hands to TensorBoard."""
    words = f.words(f.MODEL_FLAGS, *flags)
    return scalars_of(pools(world_size).run(train_recorded, words))


def test_iterations_skipped_by_the_loss_scale_are_those_of_ddp(megatron: RankPools) -> None:
    # Megatron adds micro-batches up in fp16 otherwise, and overflows where ours do not yet.
    flags = "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 16777216"
    more = "--hysteresis 1 --loss-scale-window 3 --train-iters 12 --tensorboard-dir unused"
    ddp, ours = (_scalars(megatron, 2, flags, more, which) for which in ("", f.fsdp()))
    scales = _series(ddp, "loss-scale")
    assert _series(ours, "loss-scale") == scales
    assert len(set(scales)) > 2, "the scale should have fallen and risen"
    assert distance(_series(ours, "lm loss"), _series(ddp, "lm loss")) < 2e-3


# -- what is logged -------------------------------------------------------------------------------

LOGGED = """
--log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard
--log-world-size-to-tensorboard --eval-interval 3 --eval-iters 2 --eval-micro-batch-size 1
--eval-global-batch-size 4 --decoupled-lr 2e-3 --decoupled-min-lr 0 --tensorboard-dir unused
--manual-gc --manual-gc-interval 2 --clip-grad 0.5
--vocab-size 2048 --untie-embeddings-and-output-weights
"""


def _series(scalars: Scalars, name: str) -> list[float]:
    return [value for (key, _), value in sorted(scalars.items()) if key == name]


@pytest.fixture(scope="module")
def logged_by_ddp(megatron: RankPools) -> Scalars:
    scalars = _scalars(megatron, 2, SIX, LOGGED)
    for name in ("params-norm", "num-zeros", "grad-norm", "lm loss", "learning-rate"):
        assert len(_series(scalars, name)) == 6, name
    assert len(_series(scalars, "lm loss validation")) == 2
    # Tokens that do not occur have rows of zeros.
    assert min(_series(scalars, "num-zeros")) > 10_000
    return scalars


@pytest.mark.parametrize("strategy", f.STRATEGIES)
@pytest.mark.functional
def test_tensorboard_gets_the_scalars_it_gets_from_ddp(
    megatron: RankPools, logged_by_ddp: Scalars, strategy: str
) -> None:
    ours = _scalars(megatron, 2, SIX, LOGGED, f.fsdp(strategy))
    assert ours.keys() == logged_by_ddp.keys()
    for key, value in logged_by_ddp.items():
        # Added up in another order, a few numbers come out as zero, or no longer do.
        tolerance = {"abs": 3} if key[0].startswith("num-zeros") else {"rel": 1e-6}
        assert ours[key] == pytest.approx(value, **tolerance), key


def test_tensorboard_files_hold_what_was_logged(megatron: RankPools, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = f"--train-iters 3 --tensorboard-dir {tmp_path} --log-per-param-norm"
    losses = trained(megatron, 2, f.fsdp(), flags).losses
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("lm loss")] == pytest.approx(losses)
    assert len(events.Scalars("param-norm/decoder.final_layernorm.weight")) == 3


def norms_of_ddp(model: Any, optimizer: Any) -> dict[str, tuple[float, float]]:
    """Norms of weights and of gradients that were not clipped, by name without wrappers."""
    del optimizer
    return {
        re.sub(r"^(module\.)+", "", name): (float(param.norm()), float(param.main_grad.norm()))
        for name, param in model[0].named_parameters()
    }


PER_PARAMETER = "--log-per-param-norm --log-params-norm --clip-grad 0.5"
# DDP's gradients are looked at after its step: they must not be clipped there.
UNCLIPPED = "--train-iters 4 --clip-grad 1000"


@pytest.fixture(scope="module")
def expected_norms(megatron: RankPools) -> dict[str, tuple[float, float]]:
    """Norms of every weight and gradient under DDP, at iteration 4."""
    norms: dict[str, tuple[float, float]]
    norms, _ = trained(megatron, 2, UNCLIPPED, probe=norms_of_ddp).extras
    return norms


@pytest.mark.parametrize("strategy", quick_only(f.STRATEGIES, f.NO_SHARD, f.ZERO3))
def test_norms_of_every_parameter_are_those_of_ddp(
    megatron: RankPools, expected_norms: dict[str, tuple[float, float]], strategy: str
) -> None:
    ours = _scalars(megatron, 2, f.fsdp(strategy), UNCLIPPED, "--log-per-param-norm")
    names = {name.partition("/")[2] for name, _ in ours if name.startswith("param-norm/")}
    assert names == expected_norms.keys()
    for name, (weight, grad) in expected_norms.items():
        assert ours[f"param-norm/{name}", 4] == pytest.approx(weight, rel=1e-5), name
        assert ours[f"param-grad-norm/{name}", 4] == pytest.approx(grad, rel=1e-4), name


@pytest.mark.parametrize(
    ("flags", "num_parameters"),
    [
        (f.TP2, 28),
        (f.PP2, 28),
        (f.VPP2, 52),
        (f"{f.ALLTOALL} {f.EP2}", 34),
        (f.HSDP, 28),
    ],
    ids=["TP2", "PP2", "VPP2", "EP2", "HSDP"],
)
@pytest.mark.functional
def test_norms_of_every_parameter_add_up_to_the_norms_of_the_model(
    megatron: RankPools, flags: str, num_parameters: int
) -> None:
    common = f"--global-batch-size 8 --train-iters 2 {PER_PARAMETER}"
    scalars = _scalars(megatron, 4, common, f.fsdp(), flags)
    for kind, total in (("param-norm", "params-norm"), ("param-grad-norm", "grad-norm")):
        each = {
            name: norm for (name, step), norm in scalars.items() if step == 2 and f"{kind}/" in name
        }
        assert len(each) == num_parameters
        assert math.hypot(*each.values()) == pytest.approx(scalars[total, 2], rel=1e-5)


def test_norms_are_logged_at_the_interval_only(megatron: RankPools) -> None:
    flags = "--train-iters 5 --log-interval 2 --log-per-param-norm"
    scalars = _scalars(megatron, 2, f.fsdp(), flags)
    steps = {step for name, step in scalars if name.startswith("param-norm/")}
    assert steps == {2, 4}


# -- numbers that are not finite ------------------------------------------------------------------


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.like = weight.shape
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.new_full(ctx.like, math.inf)


def train_with_infinite_gradients(*flags: f.Flags) -> None:
    """Run a training in which the gradient of the last norm's bias is infinite."""
    gpt = session.enter_rehearsal()["gpt"]
    build = gpt.build_model

    def build_model(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model: torch.nn.Module = build(*args, **kwargs)
        model.get_submodule("decoder.final_layernorm").register_forward_hook(
            lambda module, _, output: output + _InfiniteGradient.apply(module.bias)
        )
        return model

    with mock.patch.object(gpt, "build_model", build_model):
        train(f.words(f.MODEL_FLAGS, *flags))


@on_megatron(2)
def test_a_gradient_that_is_not_finite_is_found_and_named() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"gradient of decoder\.final_layernorm\.bias is not finite on rank \d "
        r"\(--no-check-for-nan-in-loss-and-grad turns this check off\)",
    ):
        train_with_infinite_gradients(SIX, f.fsdp(f.NO_SHARD))


@on_megatron(2)
def test_without_the_check_the_training_goes_on() -> None:
    unchecked = "--train-iters 2 --no-check-for-nan-in-loss-and-grad"
    train_with_infinite_gradients(f.fsdp(), unchecked)


class _WithoutParameters(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


@on_megatron(2)
def test_a_chunk_without_parameters_is_rejected_with_advice() -> None:
    gpt = session.enter_rehearsal()["gpt"]

    def build(*args: Any, **kwargs: Any) -> torch.nn.Module:
        return _WithoutParameters(gpt.core_transformer_config_from_args(gpt.get_args()))

    message = r"chunk without parameters cannot be sharded; .*--pipeline-model-parallel-size"
    with mock.patch.object(gpt, "build_model", build), pytest.raises(ValueError, match=message):
        train(f.words(f.MODEL_FLAGS, SIX, f.fsdp()))


# -- how a run ends, and what it begins with ------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "saved"),
    [("--exit-interval 2", "iter_0000002"), ("--exit-duration-in-mins 30", "iter_0000001")],
    ids=["interval", "duration"],
)
@pytest.mark.functional
@on_megatron(2)
def test_a_run_that_exits_early_saves_and_is_resumed(
    tmp_path: Path, flags: str, saved: str
) -> None:
    """Of a training that began an hour ago."""
    training = session.enter_rehearsal()["training"]
    loop = training.train

    def train_since_an_hour(*args: Any, **kwargs: Any) -> Any:
        training._TRAIN_START_TIME -= 3600
        return loop(*args, **kwargs)

    uninterrupted = train(f.words(f.MODEL_FLAGS, SIX, f.fsdp()))
    common = f.words(f.MODEL_FLAGS, SIX, f.fsdp(), f.saving(tmp_path, 99))
    with (
        mock.patch.object(training, "train", train_since_an_hour),
        pytest.raises(SystemExit) as leaving,
    ):
        train([*common, *flags.split()])
    folders = sorted(path.name for path in tmp_path.glob("iter_*"))
    resumed = train([*common, *f.loading(tmp_path)])
    assert (leaving.value.code, folders) == (0, [saved])
    assert_equal(resumed, uninterrupted, after=int(saved[-1]))


def evaluations(flags: Sequence[str]) -> list[dict[str, float]]:
    """Run a training; return the losses of every evaluation."""
    training = session.enter_rehearsal()["training"]
    evaluate, seen = training.evaluate, []

    def evaluate_and_note(*args: Any, **kwargs: Any) -> Any:
        outcome = evaluate(*args, **kwargs)
        seen.append({name: float(loss) for name, loss in outcome[0].items()})
        return outcome

    with mock.patch.object(training, "evaluate", evaluate_and_note):
        train(flags)
    return seen


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Checkpoints of iterations 3 and 6, and what evaluations after training found."""
    folder = tmp_path_factory.mktemp("features")
    return folder, _evaluations(megatron, f.saving(folder, 3))


def _evaluations(pools: RankPools, *flags: f.Flags) -> list[dict[str, float]]:
    words = f.words(f.MODEL_FLAGS, SIX, f.fsdp(), "--eval-iters 2", *flags)
    found: list[dict[str, float]] = pools(2).run(evaluations, words)[0]
    return found


@pytest.mark.functional
def test_evaluation_without_training_finds_what_training_ended_with(
    megatron: RankPools, saved: tuple[Path, Any]
) -> None:
    folder, losses = saved
    assert len(losses) == 2
    assert _evaluations(megatron, f.loading(folder), "--skip-train") == losses


@pytest.mark.functional
def test_finetuning_starts_over_with_loaded_weights(
    megatron: RankPools, saved: tuple[Path, Any]
) -> None:
    fresh = trained(megatron, 2, SIX, f.fsdp(), once=True)
    flags = [SIX, f.loading(saved[0]), "--finetune"]
    tuned, whole = (trained(megatron, 2, *flags, f.fsdp(s)) for s in (f.ZERO3, f.NO_SHARD))
    assert len(tuned.losses) == 6
    assert tuned.losses[0] < fresh.losses[0] - 0.1
    assert distance(tuned.losses, whole.losses) < 1e-6


@pytest.mark.parametrize(
    "flags",
    [
        "--use-checkpoint-args",
        "--auto-detect-ckpt-format",
        "--ckpt-assume-constant-structure --ckpt-fully-parallel-load",
        "--exit-on-missing-checkpoint",
    ],
)
@pytest.mark.functional
def test_flags_about_loading_load(megatron: RankPools, saved: tuple[Path, Any], flags: str) -> None:
    model = list(f.MODEL_FLAGS)
    if flags == "--use-checkpoint-args":
        at = model.index("--num-layers")
        del model[at : at + 2]
    load = f.words(SIX, f.fsdp(), f.loading(saved[0], 3))
    plain = trained(megatron, 2, load, once=True)
    assert len(plain.losses) == 3
    assert_equal(run_of_ranks(megatron, 2, f.words(model, load, flags)), plain)


@pytest.mark.functional
@pytest.mark.parametrize("axes", ["", f.HFSDP])
def test_gradients_in_bf16_are_added_up_in_fp32(megatron: RankPools, axes: str) -> None:
    """On a CPU they are in any case, where main gradients are in fp32: the same bits."""
    common = f.words(
        "--bf16 --train-iters 4 --global-batch-size 16 --megatron-fsdp-grad-comm-dtype bf16",
        "--megatron-fsdp-main-params-dtype fp32 --megatron-fsdp-main-grads-dtype fp32",
        axes,
    )
    plain = trained(megatron, 4, common, f.fsdp(f.ZERO3))
    flag = "--ddp-reduce-scatter-with-fp32-accumulation"
    assert_equal(trained(megatron, 4, common, f.fsdp(f.ZERO3), flag), plain)
