"""Quantization, transposition, and the state of delayed scaling.

Names and signatures are those of Transformer Engine's compiled module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_cpu_rehearsal.te import numbers, storages
from megatron_cpu_rehearsal.te.enums import TORCH_DTYPES

__all__ = [
    "bgrad_quantize",
    "create_empty_quantized_tensor",
    "dequantize",
    "finished",
    "fp8_transpose",
    "fused_amax_and_scale_update_after_reduction",
    "multi_tensor_quantize",
    "quantize",
    "split_quantize",
    "swap_first_dims",
]


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """Make a quantized tensor with an uninitialized payload; see `storages.create`."""
    return storages.create(quantizer, shape, dtype, device, pin_memory)


def quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    output: Any = None,
    noop: torch.Tensor | None = None,
) -> Any:
    """Quantize a tensor.

    Args:
        tensor: A tensor in fp32, bf16 or fp16.
        quantizer: A quantizer of Transformer Engine; if None, the tensor is returned unchanged.
        output: A quantized tensor to write into.
        noop: A flag with one fp32 element; if 1, nothing is written.

    Returns:
        `output`, or a new tensor.
    """
    if quantizer is None:
        return tensor
    values = tensor.detach().contiguous()
    if output is None:
        output = storages.create(quantizer, values.shape, values.dtype, values.device)
    if noop is None or float(noop.reshape(-1)[0]) != 1.0:
        storages.fill(quantizer, values, output)
    return output


def finished(values: torch.Tensor, dtype: torch.dtype, quantizer: Any, output: Any = None) -> Any:
    """Return the result of a kernel that computes in fp32 and quantizes its output.

    Delayed scaling is fused and rounds once, from fp32. All other formats are quantized from the
    result rounded to `dtype`, as in the GPU kernels.

    Args:
        values: The result, fp32.
        dtype: Dtype of an unquantized result.
        quantizer: A quantizer of Transformer Engine, or None.
        output: A tensor to write into, plain or quantized.
    """
    if quantizer is None:
        return values.to(dtype) if output is None else output.copy_(values)
    from transformer_engine.pytorch.tensor import Float8Quantizer

    if output is None:
        output = storages.create(quantizer, values.shape, dtype, values.device)
    fused = isinstance(quantizer, Float8Quantizer)
    storages.fill(quantizer, values if fused else values.to(dtype), output)
    return output


def dequantize(input: Any, otype: int) -> torch.Tensor:
    """Dequantize a tensor's row-wise payload or, if it has none, its column-wise payload.

    Args:
        input: A quantized tensor of Transformer Engine.
        otype: A `DType`.
    """
    has_rowwise = getattr(input, "_rowwise_data", getattr(input, "_data", None)) is not None
    values = storages.dequantized(input, "rowwise" if has_rowwise else "columnwise")
    return values.reshape(input.size()).to(TORCH_DTYPES[int(otype)])


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return a gradient's sum over all dimensions but the last, and the quantized gradient.

    The sum is computed in fp32 and rounded once.

    Returns:
        The gradient of the bias `(K,)` in the input's dtype, and the quantized tensor.
    """
    matrix = input.reshape(-1, input.shape[-1])
    return [matrix.float().sum(0).to(input.dtype), quantize(input, quantizer)]


def fp8_transpose(
    input: torch.Tensor, dtype: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Transpose bytes as a matrix `(M, K)`; the result is `(K, ...)`, last dimension first."""
    del dtype
    shape = (*input.shape[-1:], *input.shape[:-1])
    turned = input.reshape(-1, input.shape[-1]).t().reshape(shape)
    return turned.contiguous() if out is None else out.copy_(turned.view(out.shape))


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Swap the first two dimensions: `(A, B, ...)` to `(B, A, ...)`."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


def multi_tensor_quantize(
    tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]
) -> list[Any]:
    """Quantize each tensor with its quantizer."""
    return [quantize(*pair) for pair in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split a tensor along its first dimension and quantize each part with its quantizer."""
    del disable_bulk_allocation
    parts = torch.split(tensor, list(split_sections))
    return multi_tensor_quantize(parts, quantizer_list)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: int,
    margin: float,
) -> None:
    """Compute the next step's scales of delayed scaling, and shift amax histories, in place.

    Row 0 of a history is the amax of the current step; a nonzero value in the buffer, which is
    reduced over ranks, replaces this amax. A history whose latest amax is zero is not changed. All
    other histories are shifted by one: the latest amax becomes the last row, and row 0 becomes
    zero. Then `scale = largest * 2 ** -margin / amax`, with the latest or the largest amax. The
    scale is not changed if this amax is zero or not finite, and is the largest fp32 number after an
    overflow.

    Args:
        amax_reduction_buffer: Reduced amaxes of all histories, concatenated; may be empty.
        amax_histories: Each `(length, number of tensors)`.
        scales: Each `(number of tensors,)`.
        amax_compute_algo: `max` or `most_recent`.
        fp8_dtype: A `DType`.
        margin: Margin, as a power of two.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"amax_compute_algo must be max or most_recent, got {amax_compute_algo!r}")
    largest = numbers.LARGEST[TORCH_DTYPES[int(fp8_dtype)]] * 2.0**-margin
    start = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        latest = history[0].clone()
        if amax_reduction_buffer is not None and amax_reduction_buffer.numel():
            reduced = amax_reduction_buffer[start : start + latest.numel()]
            start += latest.numel()
            latest = torch.where(reduced != 0, reduced.view_as(latest), latest)
        if history.shape[0] > 1:
            shifted = torch.cat([torch.zeros_like(latest)[None], history[2:], latest[None]])
            amax = torch.maximum(history[1:].amax(0), latest)
        else:
            shifted, amax = torch.zeros_like(history), latest
        amax = torch.where(latest != 0, amax, 0.0) if amax_compute_algo == "max" else latest
        history.copy_(torch.where(latest != 0, shifted, history))
        usable = amax.isfinite() & (amax > 0)
        made = torch.where(usable, largest / torch.where(usable, amax, 1.0), scale)
        made = torch.where(made.isinf(), torch.finfo(torch.float32).max, made)
        scale.copy_(made)
