"""Forms of products of bf16 tensors, compared with the same product in fp32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

BF16 = torch.bfloat16
# Variables that torch reads at startup. They disable bf16 instructions in oneDNN, and then also in
# torch's own vectorized kernels.
BF16_MASKED = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
WITHOUT_BF16 = {**BF16_MASKED, "ATEN_CPU_CAPABILITY": "avx2"}

_Multiply = Callable[..., torch.Tensor]


def _into(product: Callable[..., torch.Tensor], *shape: int) -> _Multiply:
    def write(*operands: torch.Tensor) -> torch.Tensor:
        out = operands[0].new_empty(shape)
        product(*operands, out=out)
        return out

    return write


def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    with torch.no_grad():
        out, logarithm = attention(q, k, v)
        out = out.to(BF16).to(q.dtype)
        grads = backward(grad, q, k, v, out, logarithm, 0.0, False)
    return torch.stack(grads)


@dataclass(frozen=True)
class Form:
    """A form of a product.

    Attributes:
        name: Unique name.
        multiply: Takes operands of one dtype, bf16 or fp32.
        shapes: Shapes of the operands. Sums are long enough to show intermediate rounding.
        gradients: Indices of operands whose gradients are compared as well: each gradient is one
            product, which is not multiplied or summed afterwards.
    """

    name: str
    multiply: _Multiply
    shapes: tuple[tuple[int, ...], ...]
    gradients: tuple[int, ...] = ()


_A, _B, _M, _V = (24, 96), (96, 40), (24, 40), (96,)
_AS, _BS, _MS = (3, 24, 96), (3, 96, 40), (3, 24, 40)
_W, _BIAS, _HEADS = (40, 96), (40,), (2, 4, 33, 16)
FORMS = (
    Form("mm", torch.mm, (_A, _B), (0, 1)),
    Form("mm out", _into(torch.mm, *_M), (_A, _B)),
    Form("addmm", torch.addmm, (_M, _A, _B), (1, 2)),
    Form("addmm of a row", torch.addmm, (_BIAS, _A, _B), (1, 2)),
    Form("addmm in place", lambda m, a, b: m.clone().addmm_(a, b, beta=0.5), (_M, _A, _B), (1, 2)),
    Form("addmm out", _into(torch.addmm, *_M), (_M, _A, _B)),
    Form("bmm", torch.bmm, (_AS, _BS), (0, 1)),
    Form("bmm out", _into(torch.bmm, *_MS), (_AS, _BS)),
    Form("baddbmm", torch.baddbmm, (_MS, _AS, _BS), (1, 2)),
    Form(
        "baddbmm scaled, of nothing",
        lambda m, a, b: torch.baddbmm(m, a, b, beta=0.0, alpha=0.2),
        (_MS, _AS, _BS),
    ),
    Form("baddbmm in place", lambda m, a, b: m.clone().baddbmm_(a, b), (_MS, _AS, _BS), (1, 2)),
    Form("baddbmm out", _into(torch.baddbmm, *_MS), (_MS, _AS, _BS)),
    Form("addbmm", torch.addbmm, (_M, _AS, _BS), (1, 2)),
    Form("addbmm in place", lambda m, a, b: m.clone().addbmm_(a, b), (_M, _AS, _BS), (1, 2)),
    Form("addbmm out", _into(torch.addbmm, *_M), (_M, _AS, _BS)),
    Form("matmul of broadcast stacks", torch.matmul, ((2, 1, *_A), _BS)),
    Form("mv", torch.mv, (_A, _V), (1,)),
    Form("addmv", lambda y, a, v: torch.addmv(y, a, v, beta=0.5), ((24,), _A, _V), (2,)),
    Form("addmv in place", lambda y, a, v: y.clone().addmv_(a, v), ((24,), _A, _V), (2,)),
    Form("addmv out", _into(torch.addmv, 24), ((24,), _A, _V)),
    Form("dot", torch.dot, (_V, _V)),
    Form("vdot", torch.vdot, (_V, _V)),
    Form(
        "einsum",
        lambda a, b: torch.einsum("btgn,bsgn->bgts", a, b),
        ((2, 24, 3, 96), (2, 24, 3, 96)),
        (0, 1),
    ),
    Form("linear of a stack", functional.linear, (_AS, _W), (0, 1)),
    Form("linear with a bias, of a stack", functional.linear, (_AS, _W, _BIAS), (0, 1)),
    Form(
        "conv1d of single channels",
        lambda x, w, b: functional.conv1d(x, w, b, groups=8, padding=3),
        ((2, 8, 33), (8, 1, 4), (8,)),
        (0, 1, 2),
    ),
    Form("conv2d", functional.conv2d, ((2, 16, 9, 9), (8, 16, 3, 3)), (0, 1)),
    Form(
        "attention",
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        (_HEADS, _HEADS, _HEADS),
    ),
    Form(
        "attention with a mask",
        functional.scaled_dot_product_attention,
        (_HEADS, _HEADS, _HEADS, (2, 1, 33, 33)),
    ),
    Form("backward of attention", _attention_backward, (_HEADS, _HEADS, _HEADS, _HEADS)),
)


def differing() -> list[str]:
    """Return the forms whose result or gradients differ from those of fp32, rounded once."""
    return [form.name for form in FORMS if not _agrees(form)]


def _agrees(form: Form) -> bool:
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator).to(BF16) for shape in form.shapes]
    given = [operand.clone().requires_grad_(bool(form.gradients)) for operand in operands]
    wide = [operand.float().requires_grad_(bool(form.gradients)) for operand in operands]
    result, expected = form.multiply(*given), form.multiply(*wide)
    if not _is_rounded(result, expected):
        return False
    if form.gradients:
        grad = torch.randn(result.shape, generator=generator).to(BF16)
        result.backward(grad)
        expected.backward(grad.float())
    return all(_is_rounded(given[index].grad, wide[index].grad) for index in form.gradients)


def _is_rounded(narrow: torch.Tensor | None, wide: torch.Tensor | None) -> bool:
    assert narrow is not None and wide is not None
    return narrow.dtype is BF16 and wide.dtype is torch.float32 and narrow.equal(wide.to(BF16))
