"""Transformer Engine's quantized tensors: creation, quantization and dequantization.

A tensor has a row-wise payload, with blocks along its last dimension, a column-wise payload, with
blocks along the other dimensions, or both. `M` is the product of all dimensions but the last, `K`
is the last dimension. FP8 with one scale and blockwise FP8 store the column-wise payload
transposed, `(K, ...)`; MXFP8 does not. NVFP4 is in `nvfp4.py`.

Scales are stored in row-major order, never swizzled for a tensor core; padding is zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_cpu_rehearsal.devices import on_cpu
from megatron_cpu_rehearsal.te import numbers, nvfp4
from megatron_cpu_rehearsal.te.enums import TORCH_DTYPES

__all__ = [
    "BLOCK",
    "MX_BLOCK",
    "create",
    "dequantized",
    "fill",
    "is_quantized",
    "is_transformed",
    "shape_of",
]

BLOCK = 128
"""Elements that share a scale in blockwise FP8: 1 x 128 or 128 x 128."""

MX_BLOCK = 32
"""Elements that share a scale in MXFP8."""

_EMULATED = "FP8 with delayed, current and blockwise scaling, MXFP8 and NVFP4"


@functools.cache
def _classes() -> Any:
    """Return Transformer Engine's tensor package, whose import needs the reference kernels."""
    import transformer_engine.pytorch.tensor as tensors

    return tensors


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is a quantized tensor of Transformer Engine."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    return isinstance(tensor, QuantizedTensorStorage)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a plain or quantized tensor."""
    if is_quantized(tensor) and isinstance(tensor, _classes().NVFP4TensorStorage):
        return nvfp4.shape_of(tensor)
    return tuple(tensor.size())


def is_transformed(tensor: Any, way: str) -> bool:
    """Return whether a payload is a transform of the tensor's values."""
    has_transform = is_quantized(tensor) and isinstance(tensor, _classes().NVFP4TensorStorage)
    return has_transform and nvfp4.is_transformed(tensor, way)


def _kind(quantizer: Any) -> str:
    """Return the format of a quantizer; raise `NotImplementedError` if it is not emulated."""
    tensors = _classes()
    for kind, name in (
        ("delayed", "Float8Quantizer"),
        ("current", "Float8CurrentScalingQuantizer"),
        ("blockwise", "Float8BlockQuantizer"),
        ("mxfp8", "MXFP8Quantizer"),
        ("nvfp4", "NVFP4Quantizer"),
    ):
        if isinstance(quantizer, getattr(tensors, name)):
            return kind
    raise NotImplementedError(
        f"the CPU rehearsal has no kernels for {type(quantizer).__name__}: it emulates {_EMULATED}"
    )


def _has_transposed_products() -> bool:
    """Whether the emulated device supports FP8 products in every layout, without transposes."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    return bool(is_non_tn_fp8_gemm_supported())


def create(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = None, pin: bool = False
) -> Any:
    """Make an empty tensor of a quantizer's format.

    Args:
        quantizer: A quantizer of Transformer Engine.
        shape: Shape of the tensor.
        dtype: Nominal dtype of the tensor.
        device: Device of the payload; the CPU for every CUDA device.
        pin: Ignored, since there is no device to copy to.

    Raises:
        NotImplementedError: The format is not emulated.
    """
    del pin
    kind, shape, tensors = _kind(quantizer), tuple(shape), _classes()
    place = torch.device("cpu") if device is None else on_cpu(device)
    if kind == "nvfp4":
        nvfp4.check(quantizer)
        name, parts = "NVFP4Tensor", nvfp4.make_parts(quantizer, shape, place)
    elif kind in ("delayed", "current"):
        name, parts = "Float8Tensor", _float8_parts(quantizer, kind, shape, place)
    else:
        name = "Float8BlockwiseQTensor" if kind == "blockwise" else "MXFP8Tensor"
        parts = _block_parts(quantizer, kind, shape, place)
    parts["quantizer"] = quantizer
    if quantizer.internal:
        return getattr(tensors, f"{name}Storage")(**parts, fake_dtype=dtype)
    return getattr(tensors, name)(**parts, shape=shape, dtype=dtype, device=place)


def _float8_parts(
    quantizer: Any, kind: str, shape: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    anyway = _has_transposed_products()
    data = transpose = None
    if quantizer.rowwise_usage or anyway:
        data = torch.empty(shape, dtype=torch.uint8, device=device)
    if quantizer.columnwise_usage and not anyway:
        transpose = torch.empty(_turned(shape), dtype=torch.uint8, device=device)
    if kind == "delayed":
        scale_inv = quantizer.scale.reciprocal().to(device)
    else:
        scale_inv = torch.zeros(1, dtype=torch.float32, device=device)
    dtype = quantizer.dtype
    return {
        "data": data,
        "data_transpose": transpose,
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": dtype,
    }


def _block_parts(
    quantizer: Any, kind: str, shape: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    scale_dtype = torch.float32 if kind == "blockwise" else torch.uint8
    if kind == "mxfp8" and (shape[-1] % MX_BLOCK or math.prod(shape[:-1]) % MX_BLOCK):
        raise ValueError(
            f"MXFP8 has blocks of {MX_BLOCK} elements in rows and columns: a tensor of shape "
            f"{shape} cannot be divided into them"
        )
    parts: dict[str, Any] = {"fp8_dtype": quantizer.dtype}
    for way in ("rowwise", "columnwise"):
        columnwise = way == "columnwise"
        parts[f"{way}_data"] = parts[f"{way}_scale_inv"] = None
        if getattr(quantizer, f"{way}_usage"):
            stored = _turned(shape) if columnwise and kind == "blockwise" else shape
            scales = quantizer.get_scale_shape(shape, columnwise)
            parts[f"{way}_data"] = torch.empty(stored, dtype=torch.uint8, device=device)
            parts[f"{way}_scale_inv"] = torch.zeros(scales, dtype=scale_dtype, device=device)
    if kind == "blockwise":
        parts["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    else:
        parts["with_gemm_swizzled_scales"] = False
    return parts


def _turned(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a transposed payload: the last dimension comes first."""
    return (*shape[-1:], *shape[:-1])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a matrix `(M, K)`."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def fill(quantizer: Any, values: torch.Tensor, output: Any) -> None:
    """Quantize values into a tensor in place, without reallocating its payloads.

    Args:
        quantizer: A quantizer of Transformer Engine, which determines the written payloads.
        values: A plain tensor of the shape of `output`.
        output: A tensor of the quantizer's format.
    """
    kind = _kind(quantizer)
    if kind in ("delayed", "current"):
        _fill_float8(quantizer, kind, values, output)
    elif kind == "blockwise":
        _fill_blockwise(quantizer, values, output)
    elif kind == "nvfp4":
        nvfp4.fill(quantizer, values, output)
    else:
        _fill_mxfp8(quantizer, values, output)


def _fill_float8(quantizer: Any, kind: str, values: torch.Tensor, output: Any) -> None:
    """Quantize with one scale: `data = fp8(values * scale)`, `scale_inv = 1 / scale`.

    Delayed scaling uses the given scale and records the amax. Current scaling computes the scale
    from the amax, reduced over a group of ranks if the quantizer has one.
    """
    _fit_float8(quantizer, values.shape, output)
    dtype = TORCH_DTYPES[int(quantizer.dtype)]
    if values.numel() == 0 and not (kind == "current" and quantizer.with_amax_reduction):
        return
    amax = _amax(values)
    if kind == "delayed":
        scale = quantizer.scale.reshape(())
        if quantizer.amax.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.view_as(quantizer.amax)))
    else:
        if quantizer.with_amax_reduction:
            group = quantizer._canonicalized_amax_reduction_group()
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
        scale = numbers.scale_of_amax(
            amax,
            numbers.LARGEST[dtype],
            power_of_two=quantizer.force_pow_2_scales,
            epsilon=quantizer.amax_epsilon,
        )
    data = numbers.to_fp8(values.float() * scale, dtype)
    if output._data is not None:
        output._data.view(torch.uint8).copy_(data)
    if output._transpose is not None:
        output._transpose.view(torch.uint8).copy_(_flat(data).t().reshape(_turned(values.shape)))
    output._scale_inv.copy_(scale.reciprocal().view_as(output._scale_inv))


def _amax(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value as an fp32 scalar; zero for an empty tensor."""
    return values.abs().amax().float() if values.numel() else torch.zeros(())


def _fit_float8(quantizer: Any, shape: Sequence[int], output: Any) -> None:
    """Add the payloads that the quantizer uses to an existing tensor, and remove all others."""
    anyway = _has_transposed_products()
    wants_data = quantizer.rowwise_usage or anyway
    wants_transpose = quantizer.columnwise_usage and not anyway
    old = output._data if output._data is not None else output._transpose
    if not wants_data:
        output._data = None
    elif output._data is None:
        output._data = torch.empty(tuple(shape), dtype=torch.uint8, device=old.device)
    if not wants_transpose:
        output._transpose = None
    elif output._transpose is None:
        output._transpose = torch.empty(_turned(shape), dtype=torch.uint8, device=old.device)
    output._transpose_invalid = not wants_transpose
    output._fp8_dtype = quantizer.dtype


def _ways(quantizer: Any, output: Any) -> list[str]:
    """Return the payloads to write; allocate missing payloads and remove all others."""
    shape = output.size()
    ways = [way for way in ("rowwise", "columnwise") if getattr(quantizer, f"{way}_usage")]
    if any(getattr(output, f"_{way}_data") is None for way in ways):
        old = output._rowwise_data if output._rowwise_data is not None else output._columnwise_data
        kind = _kind(quantizer)
        parts = _block_parts(quantizer, kind, tuple(shape), old.device)
        for way in ways:
            if getattr(output, f"_{way}_data") is None:
                setattr(output, f"_{way}_data", parts[f"{way}_data"])
                setattr(output, f"_{way}_scale_inv", parts[f"{way}_scale_inv"])
    for way in ("rowwise", "columnwise"):
        if way not in ways:
            setattr(output, f"_{way}_data", None)
            setattr(output, f"_{way}_scale_inv", None)
    return ways


def _fill_blockwise(quantizer: Any, values: torch.Tensor, output: Any) -> None:
    """Quantize with a scale per 128 x 128 block, or per 128 elements of the contracted dimension.

    Scales are fp32. For 128 x 128 blocks, they are `(ceil(M / 128), ceil(K / 128))` row-wise, and
    transposed column-wise. For 1 x 128 blocks, they are `(ceil(K / 128), M)` row-wise and
    `(ceil(M / 128), K)` column-wise. The last dimension is padded to a multiple of 4.
    """
    ways = _ways(quantizer, output)
    if values.numel() == 0:
        return
    matrix, dtype = _flat(values), TORCH_DTYPES[int(quantizer.dtype)]
    for way in ways:
        rows, cols = _block_of(way, quantizer.block_scaling_dim == 2)
        scale = numbers.scale_of_amax(
            numbers.block_amax(matrix, rows, cols),
            numbers.LARGEST[dtype],
            power_of_two=quantizer.force_pow_2_scales,
            epsilon=quantizer.amax_epsilon,
            largest_scale=torch.finfo(values.dtype).max,
        )
        wide = numbers.expand_blocks(scale, rows, cols, (matrix.shape[0], matrix.shape[1]))
        data = numbers.to_fp8(matrix.float() * wide, dtype)
        stored = getattr(output, f"_{way}_data")
        stored.copy_((data.t() if way == "columnwise" else data).reshape(stored.shape))
        inverse = scale.reciprocal()
        # Row-wise scales of 1 x 128 and column-wise scales of 128 x 128 are stored transposed.
        if (way == "rowwise") != (quantizer.block_scaling_dim == 2):
            inverse = inverse.t()
        numbers.copy_into_corner(getattr(output, f"_{way}_scale_inv"), inverse)


def _block_of(way: str, is_square: bool) -> tuple[int, int]:
    if is_square:
        return BLOCK, BLOCK
    return (1, BLOCK) if way == "rowwise" else (BLOCK, 1)


def _fill_mxfp8(quantizer: Any, values: torch.Tensor, output: Any) -> None:
    """Quantize with a power of two (an E8M0 byte) per 32 elements of the contracted dimension.

    `scale_inv` is the smallest power of two not below `amax / largest`, so that no value saturates;
    data is `fp8(values / scale_inv)`. Scales are `(M, K / 32)` row-wise and `(M / 32, K)`
    column-wise, padded to multiples of `(128, 4)` and `(4, 128)`. With 2D quantization, 32 x 32
    elements share a scale.
    """
    ways = _ways(quantizer, output)
    if values.numel() == 0:
        return
    matrix, dtype = _flat(values), TORCH_DTYPES[int(quantizer.dtype)]
    height, width = matrix.shape
    for way in ways:
        rows, cols = (1, MX_BLOCK) if way == "rowwise" else (MX_BLOCK, 1)
        if quantizer.with_2d_quantization:
            amax = numbers.block_amax(matrix, MX_BLOCK, MX_BLOCK)
            amax = numbers.expand_blocks(
                amax,
                MX_BLOCK // rows,
                MX_BLOCK // cols,
                (math.ceil(height / rows), math.ceil(width / cols)),
            )
        else:
            amax = numbers.block_amax(matrix, rows, cols)
        scales = numbers.e8m0_of(amax * torch.tensor(1 / numbers.LARGEST[dtype]))
        wide = numbers.expand_blocks(
            numbers.reciprocal_of_e8m0(scales), rows, cols, (height, width)
        )
        stored = getattr(output, f"_{way}_data")
        stored.copy_(numbers.to_fp8(matrix.float() * wide, dtype).view_as(stored))
        numbers.copy_into_corner(getattr(output, f"_{way}_scale_inv"), scales)
    output._with_gemm_swizzled_scales = False


def dequantized(tensor: Any, way: str) -> torch.Tensor:
    """Dequantize a payload to the matrix `(M, K)` of the tensor's values, in fp32.

    Args:
        tensor: A quantized tensor of Transformer Engine.
        way: The payload: `rowwise` or `columnwise`.

    Raises:
        RuntimeError: The tensor does not have this payload.
        NotImplementedError: The format is not emulated.
    """
    tensors = _classes()
    if isinstance(tensor, tensors.NVFP4TensorStorage):
        return nvfp4.dequantized(tensor, way)
    dtype = TORCH_DTYPES.get(int(getattr(tensor, "_fp8_dtype", -1)))
    if isinstance(tensor, tensors.Float8TensorStorage):
        scale_inv: torch.Tensor = tensor._scale_inv
        return _float8_values(tensor, way) * scale_inv.reshape(())
    if not isinstance(tensor, tensors.Float8BlockwiseQTensorStorage | tensors.MXFP8TensorStorage):
        raise NotImplementedError(
            f"the CPU rehearsal does not read {type(tensor).__name__}: it emulates {_EMULATED}"
        )
    data: torch.Tensor | None = getattr(tensor, f"_{way}_data")
    scales: torch.Tensor | None = getattr(tensor, f"_{way}_scale_inv")
    if data is None or scales is None or dtype is None:
        raise RuntimeError(f"a {type(tensor).__name__} has no {way} payload")
    is_blockwise = isinstance(tensor, tensors.Float8BlockwiseQTensorStorage)
    if is_blockwise:
        turned = way == "columnwise"
        values = data.reshape(data.shape[0], -1).t() if turned else _flat(data)
        rows, cols = _block_of(way, tensor._is_2D_scaled)
        if (way == "rowwise") != tensor._is_2D_scaled:
            scales = scales.t()
    else:
        values = _flat(data)
        rows, cols = (1, MX_BLOCK) if way == "rowwise" else (MX_BLOCK, 1)
        scales = numbers.power_of_e8m0(scales)
    shape = (values.shape[0], values.shape[1])
    wide = numbers.expand_blocks(scales, rows, cols, shape)
    return numbers.from_fp8(values.contiguous(), dtype) * wide


def _float8_values(tensor: Any, way: str) -> torch.Tensor:
    """Convert the data or the transpose of a one-scale FP8 tensor to fp32, without the scale."""
    dtype = TORCH_DTYPES[int(tensor._fp8_dtype)]
    transpose = None if tensor._transpose_invalid else tensor._transpose
    if transpose is not None and (way == "columnwise" or tensor._data is None):
        turned = transpose.view(torch.uint8).reshape(transpose.shape[0], -1)
        return numbers.from_fp8(turned, dtype).t()
    if tensor._data is None:
        raise RuntimeError(f"a {type(tensor).__name__} has no payload")
    return numbers.from_fp8(_flat(tensor._data.view(torch.uint8)), dtype)
