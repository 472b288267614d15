"""In a rehearsal, products of bf16 tensors are fp32 products, rounded once, on every CPU."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from emerging_optimizers.utils import FP32MatmulPrecT, fp32_matmul_precision

from megatron_cpu_rehearsal.bf16_products import BF16, rounded_once
from tests.mcore import bf16_products
from tests.mcore.bf16_products import BF16_MASKED, WITHOUT_BF16
from tests.mcore.command_line import torchrun
from tests.mcore.flags import MODEL_FLAGS, fsdp
from tests.mcore.session import enter_rehearsal
from tests.mcore.trained import on_megatron

FP32_PRECISIONS = get_args(FP32MatmulPrecT)
PRETRAIN = "megatron_fsdp_v2_mcore.pretrain_gpt"


def _matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(64, 64, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


def test_torchs_own_kernels_are_restored_afterwards() -> None:
    before = bf16_products.differing()
    with rounded_once(), rounded_once():
        pass
    assert bf16_products.differing() == before
    assert before, "torch's own products are rounded once as well: nothing was tested"
    with rounded_once():
        with rounded_once():
            pass
        assert bf16_products.differing() == []


def test_products_do_not_depend_on_the_precision_of_fp32_products() -> None:
    """Muon sets this precision, which lets a CPU use bf16 and sum batches in another order."""
    generator = torch.Generator().manual_seed(0)
    # Enough sums that are long enough to show another order in bf16.
    a, b, m = (
        torch.randn(shape, generator=generator).to(BF16)
        for shape in ((4, 256, 1024), (4, 1024, 256), (4, 256, 256))
    )
    expected = torch.baddbmm(m.float(), a.float(), b.float(), beta=0.3).to(BF16)
    with rounded_once():
        for precision in FP32_PRECISIONS:
            with fp32_matmul_precision(precision):
                stack = torch.baddbmm(m, a, b, beta=0.3)
                alone = [torch.addmm(*parts, beta=0.3) for parts in zip(m, a, b, strict=True)]
                assert torch.get_float32_matmul_precision() == precision
            assert torch.equal(stack, expected)
            assert torch.equal(torch.stack(alone), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_products_of_other_dtypes_are_torchs_own(dtype: torch.dtype) -> None:
    a, b = _matrices(dtype)
    expected = [a @ b, torch.addmm(a, a, b), torch.addmm(a, a, b, out=torch.empty_like(a))]
    with rounded_once():
        found = [a @ b, torch.addmm(a, a, b), torch.addmm(a, a, b, out=torch.empty_like(a))]
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_products_of_mixed_dtypes_are_rejected() -> None:
    a, b = _matrices(BF16)
    with rounded_once():
        for mixed in (
            lambda: torch.mm(a, b.float()),
            lambda: torch.mm(a.float(), b),
            lambda: torch.mm(a, b, out=torch.empty(64, 64)),
        ):
            with pytest.raises(RuntimeError, match="dtype"):
                mixed()


@on_megatron(1)
def test_rehearsal_rounds_products_once() -> None:
    enter_rehearsal()
    assert bf16_products.differing() == []


# The order of other sums (of norms and losses) depends on the vector length of the CPU.
CURVES_APART = 1e-4


@pytest.mark.functional
def test_bf16_training_is_the_same_with_and_without_bf16_instructions() -> None:
    # Not GELU: the last bit of oneDNN's kernel for bf16 depends on the CPU's instructions.
    words = [*MODEL_FLAGS, "--swiglu", "--bf16", "--train-iters", "10", *fsdp(), "--cpu-rehearsal"]
    environments = ({}, BF16_MASKED, WITHOUT_BF16)
    runs = [torchrun(2, PRETRAIN, words, **variables) for variables in environments]
    for run in runs:
        assert run.code == 0, run.output[-3000:]
    native, masked, older = (run.losses for run in runs)
    assert list(native) == list(range(1, 11))
    assert masked == native
    assert older == pytest.approx(native, rel=CURVES_APART)
