"""Number formats: 8-bit floats, their scales, and blocks that share a scale.

These are pure functions of tensors, independent of Transformer Engine's classes. Bytes are `uint8`.
"""

from __future__ import annotations

import torch

__all__ = [
    "LARGEST",
    "block_amax",
    "copy_into_corner",
    "e8m0_of",
    "expand_blocks",
    "from_fp8",
    "in_place_of_whole",
    "power_of_e8m0",
    "reciprocal_of_e8m0",
    "scale_of_amax",
    "to_fp8",
]

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite value of each 8-bit float."""

_FP32_MANTISSA_BITS = 23
_E8M0_BIAS = 127
_E8M0_NAN = 255


def to_fp8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to an 8-bit float: to nearest, ties to even, saturating.

    Infinity and values beyond the largest finite value become the largest finite value, with their
    sign, as in CUDA's conversion; torch's conversion returns NaN or infinity. A NaN stays NaN.

    Args:
        values: A tensor of any floating dtype and shape.
        dtype: `float8_e4m3fn` (4 bits of exponent, 3 of mantissa) or `float8_e5m2`.

    Returns:
        Bytes, of the same shape.
    """
    limit = LARGEST[dtype]
    return values.float().clamp(-limit, limit).to(dtype).view(torch.uint8)


def from_fp8(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert bytes of an 8-bit float to fp32 exactly."""
    return data.view(dtype).float()


def scale_of_amax(
    amax: torch.Tensor,
    largest: float,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    largest_scale: float = torch.finfo(torch.float32).max,
) -> torch.Tensor:
    """Return the factor of values before rounding to an 8-bit float.

    `scale = largest / max(amax, epsilon)` in fp32. A quotient that overflows becomes
    `largest_scale`. A power-of-two scale is rounded down by keeping only the exponent. For an amax
    of zero, infinity or NaN, the scale is 1.

    Args:
        amax: Largest absolute value of the elements that share a scale, fp32.
        largest: Largest finite value of the 8-bit float.
        power_of_two: Whether scales are powers of two.
        epsilon: Minimum of the amax.
        largest_scale: Scale in case of an overflow.

    Returns:
        fp32, of the shape of `amax`.
    """
    amax = torch.where(amax < epsilon, epsilon, amax.float())
    usable = amax.isfinite() & (amax != 0)
    scale = torch.full_like(amax, largest) / torch.where(usable, amax, 1.0)
    scale = torch.where(scale.isinf(), largest_scale, scale)
    if power_of_two:
        bits = scale.view(torch.int32) & ~((1 << _FP32_MANTISSA_BITS) - 1)
        scale = bits.view(torch.float32)
    return torch.where(usable, scale, 1.0)


def e8m0_of(values: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two not below a value, as an E8M0 byte `e`: `2 ** (e - 127)`.

    Args:
        values: fp32, not negative.

    Returns:
        Bytes: 0 for values of at most `2 ** -127`, 254 for values above `2 ** 127` and infinity,
        255 for a NaN.
    """
    bits = values.contiguous().view(torch.int32)
    exponent = bits >> _FP32_MANTISSA_BITS
    mantissa = bits & ((1 << _FP32_MANTISSA_BITS) - 1)
    # A subnormal in the lower half of its range is at most 2 ** -127, the smallest power.
    least = (exponent == 0) & (mantissa <= 1 << (_FP32_MANTISSA_BITS - 1))
    exponent = exponent + ((mantissa > 0) & ~least).int()
    exponent = exponent.clamp(max=_E8M0_NAN - 1)
    return torch.where(values.isnan(), _E8M0_NAN, exponent).to(torch.uint8)


def power_of_e8m0(data: torch.Tensor) -> torch.Tensor:
    """Decode an E8M0 byte to its power of two, in fp32."""
    return _power(data.int())


def reciprocal_of_e8m0(data: torch.Tensor) -> torch.Tensor:
    """Decode an E8M0 byte to the reciprocal of its power of two, in fp32."""
    exponent = data.int()
    return _power(torch.where(exponent == _E8M0_NAN, _E8M0_NAN, 2 * _E8M0_BIAS - exponent))


def _power(exponent: torch.Tensor) -> torch.Tensor:
    bits = exponent << _FP32_MANTISSA_BITS
    # 2 ** -127 is subnormal in fp32: its exponent is zero and the mantissa's first bit is set.
    bits = torch.where(exponent == 0, 1 << (_FP32_MANTISSA_BITS - 1), bits)
    power = bits.view(torch.float32)
    return torch.where(exponent == _E8M0_NAN, torch.nan, power)


def block_amax(values: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Return the largest absolute value of each block of a matrix.

    Args:
        values: `(M, K)`.
        rows: Rows of a block; blocks at the end may have fewer.
        cols: Columns of a block; blocks at the end may have fewer.

    Returns:
        fp32, `(ceil(M / rows), ceil(K / cols))`.
    """
    height, width = values.shape
    down, across = -height % rows, -width % cols
    padded = torch.nn.functional.pad(values.float().abs(), (0, across, 0, down))
    blocks = padded.view((height + down) // rows, rows, (width + across) // cols, cols)
    return blocks.amax((1, 3))


def expand_blocks(
    per_block: torch.Tensor, rows: int, cols: int, shape: tuple[int, int]
) -> torch.Tensor:
    """Expand values per block to the elements of a matrix.

    Args:
        per_block: One value per block; values of padding blocks are ignored.
        rows: Rows of a block.
        cols: Columns of a block.
        shape: Shape of the matrix, `(M, K)`.

    Returns:
        `(M, K)`.
    """
    wide = per_block.repeat_interleave(rows, 0)[: shape[0]]
    return wide.repeat_interleave(cols, 1)[:, : shape[1]]


def copy_into_corner(padded: torch.Tensor, values: torch.Tensor) -> None:
    """Write a matrix to the first rows and columns of a larger one, and zero its other elements."""
    padded.zero_()
    padded[: values.shape[0], : values.shape[1]].copy_(values)


def in_place_of_whole(part: torch.Tensor, h: int, w: int, start_offset: int) -> torch.Tensor:
    """Return an fp32 matrix `(h, w)` with the values of a shard and zeros elsewhere."""
    whole = torch.zeros(h * w, dtype=torch.float32)
    whole[start_offset : start_offset + part.numel()] = part.reshape(-1).float()
    return whole.view(h, w)
