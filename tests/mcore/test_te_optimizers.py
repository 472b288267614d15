"""Transformer Engine's FusedAdam steps sharded main weights, with state in several dtypes.

The functional matrix has trainings and checkpoints with FusedAdam.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2_mcore.optim.optimizer_state import optimizer_like
from tests.mcore.session import enter_rehearsal
from tests.mcore.trained import on_te
from tests.reference.models import Formula

STEPS = 5
LR, BETAS, EPS, DECAY = 0.05, (0.9, 0.99), 1e-6, 0.1
LARGEST = {torch.float16: 32752.0, torch.uint8: 448.0}


def _forward(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ model.weight.T).square().mean() * model.scalar + 0.0 * model.unused.sum()


# Shards are uneven; `scalar` is on one rank only, and `unused` has zero gradients.
SHAPES = {"weight": (7, 5), "scalar": (1,), "unused": (6, 4)}


def make(policy: MixedPrecisionPolicy | None = None, **options: Any) -> tuple[nn.Module, Any]:
    """Return a sharded model, equal on all ranks, and a FusedAdam of its parameters."""
    enter_rehearsal("transformer_engine")
    from transformer_engine.pytorch.optimizers import FusedAdam

    from megatron_fsdp_v2_mcore.optim.optimizer_state import reset_zero_scales_after_steps

    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    model = fully_shard(Formula(_forward, **params), mp_policy=policy or MixedPrecisionPolicy())
    optimizer = FusedAdam(
        list(model.parameters()), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **options
    )
    reset_zero_scales_after_steps(optimizer)
    return model, optimizer


def run(model: nn.Module, optimizer: Any, first: int, steps: int) -> Any:
    """Step the model on inputs that depend on the step number; yield the gradients of each step."""
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(4, 5, generator=generator)).backward()
        yield [None if p.grad is None else local_of(p.grad).double() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp64 values to a dtype in which they are stored, with one scale per tensor."""
    if dtype not in LARGEST:
        return values.to(dtype).double()
    scale = values.abs().max() / LARGEST[dtype]
    if scale == 0:
        return values
    if dtype is torch.float16:
        return (values / scale).half().double() * scale
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale


def distance_from_fp64(
    first: torch.dtype, second: torch.dtype, policy: MixedPrecisionPolicy | None, decoupled: bool
) -> tuple[float, set[str], set[str]]:
    """Train, and make the same steps in fp64 with moments rounded to their dtype.

    Returns:
        The largest difference of a parameter, names of state, dtypes of parameters and gradients.
    """
    model, optimizer = make(
        policy, exp_avg_dtype=first, exp_avg_sq_dtype=second, use_decoupled_grad=decoupled
    )
    params = list(model.parameters())
    values = [local_of(p).detach().double() for p in params]
    moments = [(torch.zeros_like(v), torch.zeros_like(v)) for v in values]
    dtypes: set[str] = set()
    for number, grads in enumerate(run(model, optimizer, 1, STEPS), 1):
        for at, (grad, param) in enumerate(zip(grads, params, strict=True)):
            if not grad.numel():
                continue
            dtypes |= {str(param.dtype), str(param.grad.dtype)}
            mean = BETAS[0] * moments[at][0] + (1 - BETAS[0]) * grad
            square = BETAS[1] * moments[at][1] + (1 - BETAS[1]) * grad * grad
            scale = (square / (1 - BETAS[1] ** number)).sqrt() + EPS
            update = mean / (1 - BETAS[0] ** number) / scale + DECAY * values[at]
            values[at] = (values[at] - LR * update).to(param.dtype).double()
            moments[at] = (_stored(mean, first), _stored(square, second))
    found = [
        (local_of(p).double() - v).abs().max().item() if v.numel() else 0.0
        for p, v in zip(params, values, strict=True)
    ]
    assert not any(math.isnan(value) for value in found), found
    names = {name for state in optimizer.state.values() for name in state}
    return max(found), names, dtypes


FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8

MIXED = {
    "fp32 gradients of bf16": MixedPrecisionPolicy(main_params_dtype=BF16, main_grads_dtype=FP32),
    "bf16 gradients of fp32": MixedPrecisionPolicy(main_grads_dtype=BF16),
}


@pytest.mark.parametrize("states", [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP8, FP8)], ids=str)
@on_te(2)
def test_steps_match_fp64_with_moments_rounded_to_their_dtype(
    states: tuple[torch.dtype, torch.dtype],
) -> None:
    """One rank has no element of one parameter; another parameter has zero gradients."""
    difference, names, _ = distance_from_fp64(*states, None, True)
    # A moment may round to another neighbor in fp32 than in fp64.
    kept = {FP32: 0.0, FP8: torch.finfo(torch.float8_e4m3fn).eps}
    step = max(kept[s] if s in kept else torch.finfo(s).eps for s in states)
    assert difference < 2e-6 + LR * step
    assert names == {"exp_avg", "exp_avg_sq"}


@on_te(2, kind=MIXED, decoupled=[False, True])
def test_gradients_of_another_dtype_are_stepped_as_grad_or_decoupled_grad(
    kind: str, decoupled: bool
) -> None:
    policy = MIXED[kind]
    difference, _, dtypes = distance_from_fp64(FP32, FP32, policy, decoupled)
    # A sum may round to another bf16 neighbor in fp32 than in fp64.
    assert difference < (1e-2 if policy.main_params_dtype is BF16 else 2e-6)
    assert dtypes == {"torch.float32", "torch.bfloat16"}


def test_a_copy_of_a_scheduled_optimizer_does_not_step_the_original() -> None:
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    param.grad = other.grad = torch.ones(2)
    optimizer_like(optimizer, [{"params": [other]}]).step()
    assert (param.tolist(), other.tolist()) == ([1.0, 1.0], [0.5, 0.5])
