"""NVFP4 tensors: creation, quantization and dequantization.

A row-wise payload has `(..., K / 2)` bytes and an E4M3 scale per 16 elements of a row. The
column-wise payload has the same format for the transposed matrix, `(K, M / 2)`. Weights have a
scale per 16 x 16 elements, so that their column-wise payload is the transposed row-wise payload.
For inputs and gradients, the column-wise payload contains a random Hadamard transform along `M`:
the product of two such payloads equals the product of the original values.

Stochastic rounding uses the CPU's default generator; the random numbers of a GPU are not emulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_cpu_rehearsal.te import fp4, numbers

__all__ = [
    "check",
    "dequantized",
    "fill",
    "is_transformed",
    "make_parts",
    "shape_of",
]

_E4M3 = torch.float8_e4m3fn
_WAYS = ("rowwise", "columnwise")


def check(quantizer: Any) -> None:
    """Check that a quantizer's options are emulated.

    Raises:
        NotImplementedError: An option is not emulated; the message names it.
    """
    for name, what in (
        ("row_scaled_nvfp4", "NVFP4 with an amax for each row"),
        ("nvfp4_use_4over6", "NVFP4 that chooses between 4 and 6 (4over6)"),
    ):
        if getattr(quantizer, name):
            raise NotImplementedError(f"the CPU rehearsal does not emulate {what} ({name})")


def make_parts(quantizer: Any, shape: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return constructor arguments for an empty tensor of a quantizer's format.

    Raises:
        ValueError: The shape cannot be divided into blocks.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if rows % fp4.BLOCK or columns % fp4.BLOCK:
        raise ValueError(
            f"NVFP4 has blocks of {fp4.BLOCK} elements in rows and columns: a tensor of shape "
            f"{tuple(shape)} cannot be divided into them"
        )
    stored = {"rowwise": (*shape[:-1], columns // 2), "columnwise": (columns, rows // 2)}
    parts: dict[str, Any] = {}
    for way in _WAYS:
        parts |= {f"{way}_data": None, f"{way}_scale_inv": None, f"amax_{way}": None}
        if getattr(quantizer, f"{way}_usage"):
            scales = quantizer.get_scale_shape(shape, way == "columnwise")
            parts[f"{way}_data"] = torch.empty(stored[way], dtype=torch.uint8, device=device)
            parts[f"{way}_scale_inv"] = torch.zeros(scales, dtype=torch.uint8, device=device)
            parts[f"amax_{way}"] = torch.zeros(1, dtype=torch.float32, device=device)
    return {
        **parts,
        "fp4_dtype": quantizer.dtype,
        "with_gemm_swizzled_scales": False,
        "row_scaled_nvfp4": quantizer.row_scaled_nvfp4,
        "nvfp4_use_4over6": quantizer.nvfp4_use_4over6,
        "nvfp4_e4m3_max": quantizer.nvfp4_e4m3_max,
    }


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of an NVFP4 tensor: `(M, K)` if it has only a column-wise payload."""
    if tensor._rowwise_data is not None:
        *first, packed = tensor._rowwise_data.shape
        return (*first, 2 * packed)
    columns, packed = tensor._columnwise_data.shape
    return 2 * packed, columns


def is_transformed(tensor: Any, way: str) -> bool:
    """Whether a payload contains a Hadamard transform."""
    return way == "columnwise" and getattr(tensor._quantizer, "with_rht", False)


def fill(quantizer: Any, values: torch.Tensor, output: Any) -> None:
    """Quantize values into a tensor in place, without reallocating its payloads.

    Each payload is computed from the values, with its own amax. A scale is
    `e4m3(amax of the block * (global scale / 6))`, an element `e2m1(value / (its scale / global
    scale))`; see `fp4`.

    Raises:
        ValueError: A Hadamard transform is requested for values that are not bf16.
        NotImplementedError: See `check`.
    """
    check(quantizer)
    _fit(quantizer, values.shape, output)
    if values.numel() == 0:
        return
    matrix = values.reshape(-1, values.shape[-1])
    sources = {}
    if quantizer.rowwise_usage:
        sources["rowwise"] = matrix
    if quantizer.columnwise_usage:
        sources["columnwise"] = _transposed(quantizer, matrix)
    amaxes = torch.stack([source.abs().amax().float() for source in sources.values()])
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group=group)
    for (way, source), amax in zip(sources.items(), amaxes, strict=True):
        scale = fp4.global_scale(amax)
        is_square = quantizer.with_2d_quantization
        blocks = numbers.block_amax(source, fp4.BLOCK if is_square else 1, fp4.BLOCK)
        stored = numbers.to_fp8(fp4.block_scales(blocks, scale), _E4M3)
        factors = fp4.element_factors(numbers.from_fp8(stored, _E4M3), scale)
        shape = (source.shape[0], source.shape[1])
        wide = numbers.expand_blocks(factors, fp4.BLOCK if is_square else 1, fp4.BLOCK, shape)
        data = fp4.to_e2m1(source.float() * wide, _random(quantizer, shape))
        payload = getattr(output, f"_{way}_data")
        payload.copy_(fp4.pack(data).view(payload.shape))
        if is_square:
            stored = stored.repeat_interleave(fp4.BLOCK, 0)
        numbers.copy_into_corner(getattr(output, f"_{way}_scale_inv"), stored)
        getattr(output, f"_amax_{way}").copy_(amax)
    output._with_gemm_swizzled_scales = False


def _transposed(quantizer: Any, matrix: torch.Tensor) -> torch.Tensor:
    """Return the values of a column-wise payload before quantization: `(K, M)`."""
    turned = matrix.t().contiguous()
    if not quantizer.with_rht:
        return turned
    if matrix.dtype != torch.bfloat16:
        raise ValueError(f"Transformer Engine transforms only bf16 values, not {matrix.dtype}")
    return fp4.transform(turned, quantizer.rht_matrix)


def _random(quantizer: Any, shape: tuple[int, int]) -> torch.Tensor | None:
    if not quantizer.stochastic_rounding:
        return None
    return torch.randint(0, fp4.RANDOM_VALUES, shape, dtype=torch.uint8)


def _fit(quantizer: Any, shape: Sequence[int], output: Any) -> None:
    """Add the payloads that the quantizer uses to an existing tensor, and remove all others."""
    wanted = [way for way in _WAYS if getattr(quantizer, f"{way}_usage")]
    names = {way: (f"_{way}_data", f"_{way}_scale_inv", f"_amax_{way}") for way in _WAYS}
    if any(getattr(output, name) is None for way in wanted for name in names[way]):
        old = output._rowwise_data if output._rowwise_data is not None else output._columnwise_data
        parts = make_parts(quantizer, shape, old.device)
        for name in (name for way in wanted for name in names[way]):
            if getattr(output, name) is None:
                setattr(output, name, parts[name[1:]])
    for name in (name for way in _WAYS if way not in wanted for name in names[way]):
        setattr(output, name, None)


def dequantized(tensor: Any, way: str) -> torch.Tensor:
    """Dequantize a payload to the matrix `(M, K)`, in fp32.

    Raises:
        RuntimeError: The tensor does not have this payload.
        NotImplementedError: See `check`.
    """
    check(tensor._quantizer)
    data, scales = getattr(tensor, f"_{way}_data"), getattr(tensor, f"_{way}_scale_inv")
    amax = getattr(tensor, f"_amax_{way}")
    if data is None or scales is None or amax is None:
        raise RuntimeError(f"a {type(tensor).__name__} has no {way} payload")
    values = fp4.from_e2m1(fp4.unpack(data.reshape(-1, data.shape[-1])))
    shape = (values.shape[0], values.shape[1])
    factors = fp4.read_factors(numbers.from_fp8(scales, _E4M3), amax)
    values = values * numbers.expand_blocks(factors, 1, fp4.BLOCK, shape)
    return values.t() if way == "columnwise" else values
