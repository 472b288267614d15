"""Products of bf16 tensors with one definition on every CPU: the fp32 product, rounded once.

CPUs with and without bf16 instructions sum in different orders, and CPUs without them are many
times slower. The number of roundings depends on the kernel that a library selects for the shapes.
Here, operands are cast to fp32, torch's fp32 kernel multiplies them, and the result is rounded to
bf16. The kernel ignores `torch.set_float32_matmul_precision`: at a lower precision, a CPU with bf16
instructions would use these instructions.

The kernels are replaced below autograd, in torch's dispatcher for the CPU: the definition applies
to products in modules, `einsum`, custom autograd functions and recomputation, forward and backward.
Kernels of other dtypes are not changed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["PRODUCTS", "rounded_once"]

BF16 = torch.bfloat16

_Kernel = Callable[..., Any]

_NEW = (
    "_addmm_activation",
    "addbmm",
    "addmm",
    "addmv",
    "baddbmm",
    "bmm",
    "convolution",
    "convolution_backward",
    "dot",
    "mm",
    "vdot",
)
_OVERWRITTEN = {"addbmm_": "addbmm", "addmm_": "addmm", "addmv_": "addmv", "baddbmm_": "baddbmm"}
_INTO_OUT = {
    "_addmm_activation.out": "_addmm_activation",
    "addbmm.out": "addbmm",
    "addmm.out": "addmm",
    "addmv.out": "addmv",
    "baddbmm.out": "baddbmm",
    "bmm.out": "bmm",
    "mm.out": "mm",
}
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
PRODUCTS = (*_NEW, *_OVERWRITTEN, *_INTO_OUT, *_ATTENTION)
"""Operators of torch that multiply matrices on a CPU; other operators are composed of these."""

# Untyped in torch.
_Library: Any = torch.library.Library

_libraries: list[Any] = []


@contextlib.contextmanager
def rounded_once() -> Iterator[None]:
    """Compute products of bf16 tensors in fp32 and round them once, inside this context.

    The context applies to all threads. A nested context has no effect.
    """
    if _libraries:
        yield
        return
    _libraries.append(_Library("aten", "IMPL", "CPU"))
    try:
        _register(_libraries[0])
        yield
    finally:
        # torch unregisters the kernels with their library.
        _libraries.clear()


def _register(library: Any) -> None:
    # Look up all kernels before replacing any of them.
    kernels = {
        name: torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed for name in PRODUCTS
    }
    replacements = {name: _new(kernels[name]) for name in _NEW}
    replacements |= {name: _attention(kernels[name]) for name in _ATTENTION}
    for name, new in _OVERWRITTEN.items():
        replacements[name] = _overwriting(kernels[name], kernels[new])
    for name, new in _INTO_OUT.items():
        replacements[name] = _into_out(kernels[name], kernels[new])
    with warnings.catch_warnings():
        # torch warns about replaced kernels, which is intended here.
        warnings.simplefilter("ignore")
        for name, replacement in replacements.items():
            library.impl(name, replacement, with_keyset=True)


def _new(kernel: _Kernel) -> _Kernel:
    """Make the operator that returns new tensors."""
    precise = _in_full_precision(kernel)

    def product(keys: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # torch handles mixed dtypes, most of which it rejects.
        if first.dtype is not BF16 or not _are_bf16(args):
            return kernel(keys, first, *args, **kwargs)
        return _rounded(precise(keys, *_in_fp32(first, *args), **kwargs))

    return product


def _overwriting(kernel: _Kernel, new: _Kernel) -> _Kernel:
    """Make the operator that writes to its first argument."""
    precise = _in_full_precision(new)

    def product(keys: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.dtype is not BF16 or not _are_bf16(args):
            return kernel(keys, first, *args, **kwargs)
        return first.copy_(precise(keys, *_in_fp32(first, *args), **kwargs))

    return product


def _into_out(kernel: _Kernel, new: _Kernel) -> _Kernel:
    """Make the operator that writes to `out`."""
    precise = _in_full_precision(new)

    def product(
        keys: Any, first: torch.Tensor, *args: Any, out: torch.Tensor, **kwargs: Any
    ) -> Any:
        if first.dtype is not BF16 or not _are_bf16((*args, out)):
            return kernel(keys, first, *args, out=out, **kwargs)
        result = precise(keys, *_in_fp32(first, *args), **kwargs)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return product


def _attention(kernel: _Kernel) -> _Kernel:
    """Make fused attention, whose softmax is also computed in fp32."""
    precise = _in_full_precision(kernel)

    def attend(keys: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.dtype is not BF16:
            return kernel(keys, first, *args, **kwargs)
        mask = kwargs.get("attn_mask")
        if mask is not None:
            kwargs["attn_mask"] = _in_fp32(mask)[0]
        results = precise(keys, *_in_fp32(first, *args), **kwargs)
        # The forward also returns the log-sum-exp for the backward, in fp32 for every dtype.
        with_logarithm = len(results) == 2
        return (_rounded(results[0]), results[1]) if with_logarithm else _rounded(results)

    return attend


def _in_full_precision(kernel: _Kernel) -> _Kernel:
    """Make an fp32 kernel that ignores `torch.set_float32_matmul_precision`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        precision = setting.fp32_precision
        if precision in ("none", "ieee"):
            return kernel(*args, **kwargs)
        setting.fp32_precision = "ieee"
        try:
            return kernel(*args, **kwargs)
        finally:
            setting.fp32_precision = precision

    return call


def _are_bf16(args: tuple[Any, ...]) -> bool:
    return all(arg.dtype is BF16 for arg in args if isinstance(arg, torch.Tensor))


def _in_fp32(*args: Any) -> list[Any]:
    return [
        arg.float() if isinstance(arg, torch.Tensor) and arg.dtype is BF16 else arg for arg in args
    ]


def _rounded(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return tuple(_rounded(part) for part in result)
    return result if result is None else result.to(BF16)
