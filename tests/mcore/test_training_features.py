"""Features of Megatron's training loop do with this package what they do with Megatron's DDP."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore import session
from tests.mcore.session import MODEL_FLAGS, distance, fsdp, train
from tests.mcore.writers import Scalars, scalars_of, train_recorded
from tests.ranks import RankFailure, RankPools

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SIX = ["--train-iters", "6"]


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
    reference = megatron(2).run(train, [*MODEL_FLAGS, *SIX, *flags.split()])[0]
    ours = megatron(2).run(train, [*MODEL_FLAGS, *SIX, *fsdp(), *flags.split()])[0]
    assert len(reference.losses) == num_logged
    assert distance(ours.losses, reference.losses) < 1e-6
    assert distance(ours.grad_norms, reference.grad_norms) < 1e-6


OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--global-batch-size", "16"]
EVALUATED = ["--eval-interval", "2", "--eval-iters", "1"]


def test_the_trace_pool_changes_no_bit_of_a_training(megatron: RankPools) -> None:
    flags = [*MODEL_FLAGS, *SIX, *fsdp(), *OVERLAP, *EVALUATED]
    plain = megatron(2).run(train, flags)[0]
    pooled = megatron(2).run(train, [*flags, "--fsdp-trace-pool"])[0]
    assert pooled.losses == plain.losses
    assert pooled.grad_norms == plain.grad_norms


@pytest.mark.functional
@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 2 --num-layers 4",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--disable-bias-linear",
        "--bf16 --accumulate-allreduce-grads-in-fp32",
    ],
)
def test_the_trace_pool_changes_no_bit_of_a_parallel_training(
    megatron: RankPools, flags: str
) -> None:
    common = [*MODEL_FLAGS, *SIX, *fsdp(), *flags.split(), "--global-batch-size", "16"]
    plain = megatron(4).run(train, common)[0]
    pooled = megatron(4).run(train, [*common, "--fsdp-trace-pool"])[0]
    assert pooled.losses == plain.losses
    assert pooled.grad_norms == plain.grad_norms


def test_iterations_skipped_by_the_loss_scale_are_those_of_ddp(megatron: RankPools) -> None:
    # Megatron adds micro-batches up in fp16 otherwise, and overflows where ours do not yet.
    flags = ["--accumulate-allreduce-grads-in-fp32"]
    flags += ["--fp16", "--initial-loss-scale", "16777216", "--hysteresis", "1"]
    flags += ["--loss-scale-window", "3", "--train-iters", "12", "--tensorboard-dir", "unused"]
    runs = {
        name: scalars_of(megatron(2).run(train_recorded, [*MODEL_FLAGS, *which, *flags]))
        for name, which in {"ddp": [], "ours": fsdp()}.items()
    }
    scales = {name: _series(scalars, "loss-scale") for name, scalars in runs.items()}
    assert scales["ours"] == scales["ddp"]
    assert len(set(scales["ddp"])) > 2, "the scale should have fallen and risen"
    assert distance(_series(runs["ours"], "lm loss"), _series(runs["ddp"], "lm loss")) < 2e-3


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
    scalars = scalars_of(megatron(2).run(train_recorded, [*MODEL_FLAGS, *SIX, *LOGGED.split()]))
    for name in ("params-norm", "num-zeros", "grad-norm", "lm loss", "learning-rate"):
        assert len(_series(scalars, name)) == 6, name
    assert len(_series(scalars, "lm loss validation")) == 2
    # Tokens that do not occur have rows of zeros.
    assert min(_series(scalars, "num-zeros")) > 10_000
    return scalars


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.functional
def test_tensorboard_gets_the_scalars_it_gets_from_ddp(
    megatron: RankPools, logged_by_ddp: Scalars, strategy: str
) -> None:
    flags = [*MODEL_FLAGS, *SIX, *fsdp(strategy), *LOGGED.split()]
    ours = scalars_of(megatron(2).run(train_recorded, flags))
    assert ours.keys() == logged_by_ddp.keys()
    for key, value in logged_by_ddp.items():
        # Added up in another order, a few numbers come out as zero, or no longer do.
        tolerance: dict[str, float] = {"rel": 1e-6}
        if key[0].startswith("num-zeros"):
            tolerance = {"abs": 3}
        assert ours[key] == pytest.approx(value, **tolerance), key


def test_tensorboard_files_hold_what_was_logged(megatron: RankPools, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ["--train-iters", "3", "--tensorboard-dir", str(tmp_path), "--log-per-param-norm"]
    losses = megatron(2).run(train, [*MODEL_FLAGS, *fsdp(), *flags])[0].losses
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


PER_PARAMETER = ["--log-per-param-norm", "--log-params-norm", "--clip-grad", "0.5"]


# DDP's gradients are looked at after its step: they must not be clipped there.
UNCLIPPED = ["--train-iters", "4", "--clip-grad", "1000"]


@pytest.fixture(scope="module")
def expected_norms(megatron: RankPools) -> dict[str, tuple[float, float]]:
    """Norms of every weight and gradient under DDP, at iteration 4."""
    trained: Any = megatron(2).run(train, [*MODEL_FLAGS, *UNCLIPPED], norms_of_ddp)[0]
    norms: dict[str, tuple[float, float]] = trained.extras
    return norms


@pytest.mark.parametrize(
    "strategy",
    [
        "no_shard",
        pytest.param("optim", marks=pytest.mark.functional),
        pytest.param("optim_grads", marks=pytest.mark.functional),
        "optim_grads_params",
    ],
)
def test_norms_of_every_parameter_are_those_of_ddp(
    megatron: RankPools, expected_norms: dict[str, tuple[float, float]], strategy: str
) -> None:
    mine = [*MODEL_FLAGS, *fsdp(strategy), *UNCLIPPED, "--log-per-param-norm"]
    ours = scalars_of(megatron(2).run(train_recorded, mine))
    names = {name.partition("/")[2] for name, _ in ours if name.startswith("param-norm/")}
    assert names == expected_norms.keys()
    for name, (weight, grad) in expected_norms.items():
        assert ours[f"param-norm/{name}", 4] == pytest.approx(weight, rel=1e-5), name
        assert ours[f"param-grad-norm/{name}", 4] == pytest.approx(grad, rel=1e-4), name


@pytest.mark.parametrize(
    ("flags", "num_parameters"),
    [
        ("--tensor-model-parallel-size 2", 28),
        ("--pipeline-model-parallel-size 2", 28),
        (
            "--pipeline-model-parallel-size 2 --num-layers 4 "
            "--num-layers-per-virtual-pipeline-stage 1",
            52,
        ),
        (
            "--num-experts 4 --expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01 "
            "--disable-bias-linear",
            34,
        ),
        ("--num-distributed-optimizer-instances 2", 28),
    ],
    ids=["TP2", "PP2", "VPP2", "EP2", "HSDP"],
)
@pytest.mark.functional
def test_norms_of_every_parameter_add_up_to_the_norms_of_the_model(
    megatron: RankPools, flags: str, num_parameters: int
) -> None:
    common = ["--global-batch-size", "8", "--train-iters", "2", *PER_PARAMETER]
    scalars = scalars_of(
        megatron(4).run(train_recorded, [*MODEL_FLAGS, *common, *fsdp(), *flags.split()])
    )
    for kind, total in (("param-norm", "params-norm"), ("param-grad-norm", "grad-norm")):
        each = {
            name: norm for (name, step), norm in scalars.items() if step == 2 and f"{kind}/" in name
        }
        assert len(each) == num_parameters
        assert math.hypot(*each.values()) == pytest.approx(scalars[total, 2], rel=1e-5)


def test_norms_are_logged_at_the_interval_only(megatron: RankPools) -> None:
    flags = ["--train-iters", "5", "--log-interval", "2", "--log-per-param-norm"]
    scalars = scalars_of(megatron(2).run(train_recorded, [*MODEL_FLAGS, *fsdp(), *flags]))
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


def train_with_infinite_gradients(flags: Sequence[str], modules: Sequence[str]) -> None:
    """Run a training in which gradients of the biases of these modules are infinite."""
    gpt = session.enter_rehearsal()["gpt"]
    build = gpt.build_model

    def build_model(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model: torch.nn.Module = build(*args, **kwargs)
        for name in modules:
            model.get_submodule(name).register_forward_hook(
                lambda module, _, output: output + _InfiniteGradient.apply(module.bias)
            )
        return model

    gpt.build_model = build_model
    try:
        train(flags)
    finally:
        gpt.build_model = build


def test_a_gradient_that_is_not_finite_is_found_and_named(megatron: RankPools) -> None:
    flags = [*MODEL_FLAGS, *SIX, *fsdp("no_shard")]
    with pytest.raises(
        RankFailure,
        match=r"gradient of decoder\.final_layernorm\.bias is not finite on rank \d "
        r"\(--no-check-for-nan-in-loss-and-grad turns this check off\)",
    ):
        megatron(2).run(train_with_infinite_gradients, flags, ["decoder.final_layernorm"])


def test_without_the_check_the_training_goes_on(megatron: RankPools) -> None:
    flags = [*MODEL_FLAGS, "--train-iters", "2", *fsdp(), "--no-check-for-nan-in-loss-and-grad"]
    megatron(2).run(train_with_infinite_gradients, flags, ["decoder.final_layernorm"])


class _WithoutParameters(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def train_a_chunk_without_parameters(flags: Sequence[str]) -> None:
    """Run a training whose model has nothing to train."""
    gpt = session.enter_rehearsal()["gpt"]
    build = gpt.build_model
    gpt.build_model = lambda *args, **kwargs: _WithoutParameters(
        gpt.core_transformer_config_from_args(gpt.get_args())
    )
    try:
        train(flags)
    finally:
        gpt.build_model = build


def test_a_chunk_without_parameters_is_rejected_with_advice(megatron: RankPools) -> None:
    with pytest.raises(
        RankFailure,
        match=r"chunk without parameters cannot be sharded; .*--pipeline-model-parallel-size",
    ):
        megatron(2).run(train_a_chunk_without_parameters, [*MODEL_FLAGS, *SIX, *fsdp()])


# -- how a run ends, and what it begins with ------------------------------------------------------


def train_until_it_exits(flags: Sequence[str]) -> tuple[Any, list[str]]:
    """Run a training that began an hour ago; return its exit code and the folders it saved."""
    training = session.enter_rehearsal()["training"]
    loop = training.train

    def train_since_an_hour(*args: Any, **kwargs: Any) -> Any:
        training._TRAIN_START_TIME -= 3600
        return loop(*args, **kwargs)

    training.train = train_since_an_hour
    try:
        train(flags)
    except SystemExit as leaving:
        folder = Path(flags[list(flags).index("--save") + 1])
        return leaving.code, sorted(path.name for path in folder.glob("iter_*"))
    finally:
        training.train = loop
    return "it did not exit", []


@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        (["--exit-interval", "2"], "iter_0000002"),
        (["--exit-duration-in-mins", "30"], "iter_0000001"),
    ],
    ids=["interval", "duration"],
)
@pytest.mark.functional
def test_a_run_that_exits_early_saves_and_is_resumed(
    megatron: RankPools, tmp_path: Path, flags: list[str], saved: str
) -> None:
    common = [*MODEL_FLAGS, *SIX, *fsdp(), "--save", str(tmp_path), "--save-interval", "99"]
    uninterrupted = megatron(2).run(train, [*MODEL_FLAGS, *SIX, *fsdp()])[0].losses
    assert megatron(2).run(train_until_it_exits, [*common, *flags])[0] == (0, [saved])
    resumed = megatron(2).run(train, [*common, "--load", str(tmp_path)])[0].losses
    assert resumed == uninterrupted[int(saved[-1]) :]


def evaluations(flags: Sequence[str]) -> list[dict[str, float]]:
    """Run a training; return the losses of every evaluation."""
    training = session.enter_rehearsal()["training"]
    evaluate, seen = training.evaluate, []

    def evaluate_and_note(*args: Any, **kwargs: Any) -> Any:
        outcome = evaluate(*args, **kwargs)
        seen.append({name: float(loss) for name, loss in outcome[0].items()})
        return outcome

    training.evaluate = evaluate_and_note
    try:
        train(flags)
    finally:
        training.evaluate = evaluate
    return seen


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Checkpoints of iterations 3 and 6, and what evaluations after training found."""
    folder = tmp_path_factory.mktemp("features")
    flags = [*MODEL_FLAGS, *SIX, *fsdp(), "--save", str(folder), "--save-interval", "3"]
    return folder, megatron(2).run(evaluations, [*flags, "--eval-iters", "2"])[0]


@pytest.mark.functional
def test_evaluation_without_training_finds_what_training_ended_with(
    megatron: RankPools, saved: tuple[Path, Any]
) -> None:
    folder, losses = saved
    assert len(losses) == 2
    flags = [*MODEL_FLAGS, *SIX, *fsdp(), "--load", str(folder), "--skip-train"]
    assert megatron(2).run(evaluations, [*flags, "--eval-iters", "2"])[0] == losses


@pytest.mark.functional
def test_finetuning_starts_over_with_loaded_weights(
    megatron: RankPools, saved: tuple[Path, Any]
) -> None:
    fresh = megatron(2).run(train, [*MODEL_FLAGS, *SIX, *fsdp()])[0].losses
    flags = [*MODEL_FLAGS, *SIX, "--load", str(saved[0]), "--finetune"]
    tuned = [megatron(2).run(train, [*flags, *fsdp(s)])[0].losses for s in STRATEGIES[::3]]
    assert len(tuned[0]) == 6
    assert tuned[0][0] < fresh[0] - 0.1
    assert distance(tuned[0], tuned[1]) < 1e-6


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
    model = list(MODEL_FLAGS)
    if flags == "--use-checkpoint-args":
        at = model.index("--num-layers")
        del model[at : at + 2]
    load = ["--load", str(saved[0]), "--ckpt-step", "3"]
    plain = megatron(2).run(train, [*MODEL_FLAGS, *SIX, *fsdp(), *load])[0].losses
    assert len(plain) == 3
    assert megatron(2).run(train, [*model, *SIX, *fsdp(), *load, *flags.split()])[0].losses == plain
