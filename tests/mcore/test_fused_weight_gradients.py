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
OVERLAP = ["--overlap-grad-reduce"]
# The embedding is tied to the output layer, which is on another stage then.
PIPELINE = ["--pipeline-model-parallel-size", "2"]
VIRTUAL = [*PIPELINE, "--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CALLS: list[str] = []


def _adding(name: str) -> Any:
    """What the CUDA extension does, under one of its names."""

    def add(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        CALLS.append(name)
        main_grad.add_(grad_output.t() @ inputs)

    return add


@contextlib.contextmanager
def _fused(gpt: Any) -> Iterator[None]:
    """Have linear layers use the extension, which a CPU has none of."""
    from megatron.core.tensor_parallel import layers

    names = ("fp32", "fp16")
    kernels = SimpleNamespace(**{f"wgrad_gemm_accum_{name}": _adding(name) for name in names})
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
    CALLS.clear()
    with _fused(enter_rehearsal()["gpt"]):
        result = train(flags)
    result.extras = list(CALLS)
    return result


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("optim_grads_params", []),
        pytest.param("optim_grads_params", [*OVERLAP, *TENSOR], marks=pytest.mark.functional),
        pytest.param("optim", OVERLAP, marks=pytest.mark.functional),
        pytest.param("no_shard", TENSOR, marks=pytest.mark.functional),
        *(pytest.param(one, PIPELINE, marks=pytest.mark.functional) for one in STRATEGIES),
        pytest.param("optim_grads", [*OVERLAP, *VIRTUAL], marks=pytest.mark.functional),
    ],
)
def test_gradients_from_a_fused_kernel_are_neither_doubled_nor_lost(
    megatron: RankPools, strategy: str, flags: list[str]
) -> None:
    pool = megatron(4 if "parallel-size" in " ".join(flags) else 2)
    ddp = curves(pool.run(train, [*FLAGS, *flags]))
    words = [*FLAGS, *fsdp(strategy, *flags)]
    plain = curves(pool.run(train, words))
    fused = curves(pool.run(_train_fused, words))
    # Two micro-batches and more: each has to add to the one before.
    assert all(set(calls) == {"fp32"} for calls in fused.extras)
    for reference in (plain, ddp):
        assert distance(fused.losses, reference.losses) < 1e-6
        assert distance(fused.grad_norms, reference.grad_norms) < 1e-6


@pytest.mark.functional
@pytest.mark.parametrize(
    ("comm", "kernel"), [("fp32", "fp32"), ("bf16", "fp16")], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_in_bf16_the_kernel_of_the_gradient_buffers_dtype_changes_no_bit(
    megatron: RankPools, strategy: str, comm: str, kernel: str
) -> None:
    # Autograd adds up the gradients of a tied weight in bf16, and kernels in the buffer's dtype.
    flags = ["--bf16", "--untie-embeddings-and-output-weights"]
    flags += ["--megatron-fsdp-grad-comm-dtype", comm]
    words = [*FLAGS, *fsdp(strategy, *flags)]
    plain = curves(megatron(2).run(train, words))
    fused = curves(megatron(2).run(_train_fused, words))
    assert all(set(calls) == {kernel} for calls in fused.extras)
    assert fused.losses == plain.losses
    assert fused.grad_norms == plain.grad_norms
