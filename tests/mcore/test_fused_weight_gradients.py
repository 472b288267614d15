"""Kernels of Megatron that add weight gradients to the flat gradient buffer by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.mcore.session import (
    MODEL_FLAGS,
    Training,
    curves,
    distance,
    enter_rehearsal,
    fsdp,
    train,
)
from tests.ranks import RankPools

FLAGS = [*MODEL_FLAGS, "--global-batch-size", "8", "--train-iters", "5"]
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--swiglu"]
CALLS: list[int] = [0]


def _add(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """What the CUDA extension does."""
    CALLS[0] += 1
    main_grad.add_(grad_output.t() @ inputs)


@contextlib.contextmanager
def _fused(gpt: Any) -> Iterator[None]:
    """Have linear layers use the extension, which a CPU has none of."""
    from megatron.core.tensor_parallel import layers

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=_add, wgrad_gemm_accum_fp16=_add)
    make_config = gpt.core_transformer_config_from_args

    def with_fusion(args: Any) -> Any:
        config = make_config(args)
        config.gradient_accumulation_fusion = True
        return config

    layers.fused_weight_gradient_mlp_cuda = kernels
    layers._grad_accum_fusion_available = True
    gpt.core_transformer_config_from_args = with_fusion
    try:
        yield
    finally:
        del layers.fused_weight_gradient_mlp_cuda
        layers._grad_accum_fusion_available = False
        gpt.core_transformer_config_from_args = make_config


def _train_fused(flags: Sequence[str]) -> Training:
    CALLS[0] = 0
    with _fused(enter_rehearsal()["gpt"]):
        result = train(flags)
    result.extras = CALLS[0]
    return result


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("optim_grads_params", []),
        pytest.param(
            "optim_grads_params",
            ["--overlap-grad-reduce", *TENSOR],
            marks=pytest.mark.functional,
        ),
        pytest.param("optim", ["--overlap-grad-reduce"], marks=pytest.mark.functional),
        pytest.param("no_shard", TENSOR, marks=pytest.mark.functional),
    ],
)
def test_gradients_from_a_fused_kernel_are_neither_doubled_nor_lost(
    megatron: RankPools, strategy: str, flags: list[str]
) -> None:
    pool = megatron(4 if TENSOR[0] in flags else 2)
    words = [*FLAGS, *fsdp(strategy, *flags)]
    plain = curves(pool.run(train, words))
    fused = curves(pool.run(_train_fused, words))
    # Two micro-batches and more: each has to add to the one before.
    assert all(calls > 0 for calls in fused.extras)
    assert distance(fused.losses, plain.losses) < 1e-6
    assert distance(fused.grad_norms, plain.grad_norms) < 1e-6
