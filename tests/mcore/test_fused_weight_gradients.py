"""Kernels of Megatron that add weight gradients to the flat gradient buffer by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import longer
from tests.mcore.flags import OVERLAP_GRADS, PP2, STRATEGIES, TP2_SP, UNTIED, ZERO3, fsdp
from tests.mcore.session import Training, enter_rehearsal, train
from tests.mcore.trained import assert_close, assert_equal, trained
from tests.ranks import RankPools

STEPS = "--global-batch-size 8 --train-iters 5"
TENSOR = f"{TP2_SP} --swiglu"
# The embedding is tied to the output layer, which is on another stage then.
VIRTUAL = f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"
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

    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(gpt, "core_transformer_config_from_args", with_fusion),
    ):
        yield


def _train_fused(flags: Sequence[str]) -> Training:
    CALLS.clear()
    with _fused(enter_rehearsal()["gpt"]):
        result = train(flags)
    result.extras = list(CALLS)
    return result


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        (ZERO3, ""),
        longer(ZERO3, f"{OVERLAP_GRADS} {TENSOR}"),
        longer("optim", OVERLAP_GRADS),
        longer("no_shard", TENSOR),
        *(longer(strategy, PP2) for strategy in STRATEGIES),
        longer("optim_grads", f"{OVERLAP_GRADS} {VIRTUAL}"),
    ],
)
def test_gradients_from_a_fused_kernel_are_neither_doubled_nor_lost(
    megatron: RankPools, strategy: str, flags: str
) -> None:
    ranks = 4 if "parallel-size" in flags else 2
    ddp = trained(megatron, ranks, STEPS, flags, once=True)
    plain = trained(megatron, ranks, STEPS, flags, fsdp(strategy))
    fused = trained(megatron, ranks, STEPS, flags, fsdp(strategy), by=_train_fused)
    # Two micro-batches and more: each has to add to the one before.
    assert all(set(calls) == {"fp32"} for calls in fused.extras)
    for reference in (plain, ddp):
        assert_close(fused, reference)


@pytest.mark.functional
@pytest.mark.parametrize(
    ("comm", "kernel"), [("fp32", "fp32"), ("bf16", "fp16")], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_in_bf16_the_kernel_of_the_gradient_buffers_dtype_changes_no_bit(
    megatron: RankPools, strategy: str, comm: str, kernel: str
) -> None:
    # Autograd adds up the gradients of a tied weight in bf16, and kernels in the buffer's dtype.
    flags = f"--bf16 {UNTIED} --megatron-fsdp-grad-comm-dtype {comm}"
    plain = trained(megatron, 2, STEPS, flags, fsdp(strategy))
    fused = trained(megatron, 2, STEPS, flags, fsdp(strategy), by=_train_fused)
    assert all(set(calls) == {kernel} for calls in fused.extras)
    assert_equal(fused, plain)
