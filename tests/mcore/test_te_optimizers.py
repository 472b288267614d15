"""Transformer Engine's FusedAdam steps sharded main weights, whatever its state is kept in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cpu_rehearsal import RehearsalError
from megatron_cpu_rehearsal.flags import with_cpu_flags
from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2_mcore.flags.arguments import supported_on_cpu
from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore import fused_adam
from tests.mcore.flags import LOCAL, NO_SHARD, PP2, TP2, ZERO1, ZERO3, fsdp, loading, saving, words
from tests.mcore.session import Training, distance
from tests.mcore.trained import assert_equal, on_te, saved_and_resumed, trained
from tests.ranks import RankPools

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
AWARE = "--use-precision-aware-optimizer"
TE = words(f.TRANSFORMER_ENGINE, "--global-batch-size 8 --train-iters 4")
LOW = f"--bf16 {AWARE} --main-grads-dtype bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
BF16_STATE = f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


def _trained(megatron_te: RankPools, *flags: Any, world_size: int = 2, **options: Any) -> Training:
    return trained(megatron_te, world_size, TE, *flags, **options)


# ------------------------------------------------------------------------------------ arithmetic

MIXED = {
    "fp32 gradients of bf16": MixedPrecisionPolicy(main_params_dtype=BF16, main_grads_dtype=FP32),
    "bf16 gradients of fp32": MixedPrecisionPolicy(main_grads_dtype=BF16),
}


@pytest.mark.parametrize("states", [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP8, FP8)], ids=str)
@on_te(2)
def test_steps_are_those_of_fp64_with_moments_rounded_as_they_are_kept(
    states: tuple[torch.dtype, torch.dtype],
) -> None:
    """With a parameter that one rank has nothing of, and one whose gradients are all zero."""
    difference, names, _ = fused_adam.distance_from_fp64(*states, None, True)
    # A moment in fp32 may lie on the other side of the middle of two numbers that it is rounded to.
    kept = {FP32: 0.0, FP8: torch.finfo(torch.float8_e4m3fn).eps}
    step = max(kept[s] if s in kept else torch.finfo(s).eps for s in states)
    assert difference < 2e-6 + fused_adam.LR * step
    assert names == {"exp_avg", "exp_avg_sq"}


@on_te(2, kind=MIXED, decoupled=[False, True])
def test_gradients_of_another_dtype_are_stepped_under_either_name(
    kind: str, decoupled: bool
) -> None:
    policy = MIXED[kind]
    difference, _, dtypes = fused_adam.distance_from_fp64(FP32, FP32, policy, decoupled)
    # A sum of fp32 may lie on the other side of the middle of two bf16 numbers.
    assert difference < (1e-2 if policy.main_params_dtype is BF16 else 2e-6)
    assert dtypes == {"torch.float32", "torch.bfloat16"}


@pytest.mark.parametrize("states", [(FP16, FP16), (FP8, FP16), (FP8, FP8)], ids=str)
@on_te(2)
def test_state_is_the_same_to_the_bit_after_loading(
    states: tuple[torch.dtype, torch.dtype],
) -> None:
    assert fused_adam.reloaded(*states) == (True, True)


# --------------------------------------------------------------------------------- under Megatron


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    """What an optimizer keeps of the elements that this rank steps."""
    inner = optimizer.optimizer
    values = [value for state in inner.state.values() for value in state.values()]
    return {
        "class": type(inner).__name__,
        "names": {name for state in inner.state.values() for name in state},
        "elements": sum(local_of(param).numel() for param in inner.state),
        "bytes": sum(_nbytes(local_of(value)) for value in values),
        "gradients": {str(param.grad_dtype) for param in inner.state},
    }


def _nbytes(value: torch.Tensor) -> int:
    payload = getattr(value, "_data", value)
    return payload.numel() * payload.element_size()


@pytest.mark.parametrize("strategy", [*map(longer, f.STRATEGIES[:3]), ZERO3])
def test_it_trains_as_under_megatrons_distributed_optimizer(
    megatron_te: RankPools, strategy: str
) -> None:
    theirs = _trained(megatron_te, "--use-distributed-optimizer", BF16_STATE, once=True)
    mine = _trained(megatron_te, BF16_STATE, fsdp(strategy), probe=_state)
    assert distance(mine.losses, theirs.losses) <= 1e-6
    assert distance(mine.grad_norms, theirs.grad_norms) <= 1e-6
    plain = _trained(megatron_te, fsdp(strategy), once=True)
    assert mine.losses != plain.losses
    for seen in mine.extras:
        assert seen["class"] == "FusedAdam" and seen["names"] == {"exp_avg", "exp_avg_sq"}
        assert seen["bytes"] == 4 * seen["elements"]


@pytest.mark.functional
@pytest.mark.parametrize("state", ["fp16 fp16", "fp8 fp16", "fp8 fp8"])
def test_scaled_state_trains_as_under_megatrons_distributed_optimizer(
    megatron_te: RankPools, state: str
) -> None:
    """On one rank, where both have the same tensors, and so the same scales."""
    first, second = state.split()
    flags = f"{AWARE} --exp-avg-dtype {first} --exp-avg-sq-dtype {second}"
    theirs = _trained(megatron_te, "--use-distributed-optimizer", flags, world_size=1)
    mine = _trained(megatron_te, flags, fsdp(), world_size=1)
    assert distance(mine.losses, theirs.losses) <= 1e-6


def test_a_run_with_scaled_state_goes_on_as_if_it_had_not_stopped(
    megatron_te: RankPools, tmp_path: Path
) -> None:
    whole = _trained(megatron_te, LOW, fsdp(), saving(tmp_path, 2), probe=_state)
    assert_equal(_trained(megatron_te, LOW, fsdp(), loading(tmp_path, 2)), whole, after=2)
    for seen in whole.extras:
        assert seen["bytes"] == 3 * seen["elements"]
        assert seen["gradients"] == {"torch.bfloat16"}


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(2, ZERO3), longer(4, NO_SHARD), longer(4, ZERO1)]
)
def test_state_of_tensor_parallel_ranks_goes_on(
    megatron_te: RankPools, tmp_path: Path, world_size: int, strategy: str
) -> None:
    """Of one data-parallel rank, or not sharded over them: weights are split by tensor ranks."""
    flags = [TE, TP2, fsdp(strategy)]
    whole, resumed = saved_and_resumed(megatron_te, tmp_path, *flags, at=2, world_size=world_size)
    assert_equal(resumed, whole, after=2)


@pytest.mark.functional
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(1, LOW), (3, LOW), (2, f"{LOW} {PP2}"), (2, "--bf16"), (2, f"--bf16 {BF16_STATE}")],
)
def test_scaled_state_is_loaded_by_other_ranks_and_into_other_dtypes(
    megatron_te: RankPools, tmp_path: Path, world_size: int, flags: str
) -> None:
    batch = "--global-batch-size 12"
    whole = _trained(megatron_te, LOW, batch, fsdp(), saving(tmp_path, 2))
    resumed = _trained(
        megatron_te, flags, batch, fsdp(ZERO1), loading(tmp_path, 2), world_size=world_size
    )
    difference = distance(resumed.losses, whole.losses[2:])
    assert difference < 1e-4
    # Every run went on from the same iteration.
    assert distance(resumed.losses, whole.losses[:2]) > 10 * difference


@pytest.mark.functional
@pytest.mark.parametrize("world_size", [1, 3])
def test_state_in_bf16_is_loaded_without_a_rounding(
    megatron_te: RankPools, tmp_path: Path, world_size: int
) -> None:
    flags = [BF16_STATE, "--global-batch-size 12"]
    whole = _trained(megatron_te, *flags, fsdp(), saving(tmp_path, 2))
    resumed = _trained(megatron_te, *flags, fsdp(), loading(tmp_path, 2), world_size=world_size)
    assert distance(resumed.losses, whole.losses[2:]) < 1e-6


@pytest.mark.parametrize(
    "flags",
    [
        longer("--megatron-fsdp-main-params-dtype bf16"),
        longer("--megatron-fsdp-main-params-dtype bf16 --megatron-fsdp-main-grads-dtype bf16"),
        longer("--megatron-fsdp-main-grads-dtype bf16"),
        longer("--megatron-fsdp-main-params-dtype bf16 --optimizer muon"),
        longer("--megatron-fsdp-main-grads-dtype bf16 --optimizer adaptive_muon"),
        longer("--megatron-fsdp-main-params-dtype bf16 --optimizer-cpu-offload"),
    ],
)
def test_main_weights_and_gradients_in_bf16_train(megatron_te: RankPools, flags: str) -> None:
    optimizer = [word for word in flags.split() if "muon" in word]
    same = ["--optimizer", *optimizer] if optimizer else []
    plain = _trained(megatron_te, "--bf16", same, fsdp(), once=True)
    other = _trained(megatron_te, "--bf16", flags, fsdp())
    # What Newton-Schulz makes of nearly singular gradients hangs on their last bits.
    assert 0 < distance(other.losses, plain.losses) < (1e-2 if same else 1e-3)


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--bf16 --megatron-fsdp-main-params-dtype bf16",
            "AdamW cannot step main weights in bfloat16 with gradients in float32.*"
            "--megatron-fsdp-main-grads-dtype bf16",
        ),
        (
            "--bf16 --megatron-fsdp-main-grads-dtype bf16 --optimizer lion",
            "cannot step main weights in float32 with gradients in bfloat16",
        ),
        (
            "--fp16 --megatron-fsdp-main-params-dtype fp16 --megatron-fsdp-main-grads-dtype fp16",
            "--clip-grad 1.0 cannot be used with gradients in float16",
        ),
    ],
)
def test_dtypes_that_an_optimizer_cannot_step_are_rejected_before_the_first_step(
    megatron: RankPools, flags: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        trained(megatron, 2, "--train-iters 1", flags, fsdp())


def test_megatrons_own_layers_leave_no_adam_for_it() -> None:
    with pytest.raises(RehearsalError, match=f"{AWARE} cannot be used on a CPU: it is part of Tra"):
        with_cpu_flags([*LOCAL, AWARE, *fsdp()])
    flags = [*LOCAL, AWARE, "--optimizer-cpu-offload", *fsdp()]
    with_cpu_flags(flags, supported_on_cpu(flags))
