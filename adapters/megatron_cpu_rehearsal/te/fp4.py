"""The 4-bit float of NVFP4, packed in pairs, and NVFP4's scales of blocks and of tensors.

E2M1 has 2 bits of exponent, 1 of mantissa and a sign: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Each block has an
E4M3 scale, and the whole tensor has an fp32 scale computed from its largest absolute value (amax):

    value = element * block scale * amax / (6 * 448)

These are pure functions of tensors, independent of Transformer Engine's classes.
"""

from __future__ import annotations

import itertools

import torch

from megatron_cpu_rehearsal.te import numbers

__all__ = [
    "BLOCK",
    "block_scales",
    "element_factors",
    "from_e2m1",
    "global_scale",
    "pack",
    "read_factors",
    "to_e2m1",
    "transform",
    "transpose_packed",
    "unpack",
]

BLOCK = 16
"""Elements that share a scale, in one direction or in both."""

RANDOM_VALUES = 256
"""Upper bound of the random numbers of stochastic rounding: a device uses 8 bits per element."""

_E4M3 = torch.float8_e4m3fn
_LARGEST = 6.0
_SIGN = 8
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALFWAY = tuple((a + b) / 2 for a, b in itertools.pairwise(_MAGNITUDES))


def to_e2m1(values: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """Round to E2M1, saturating: to nearest with ties to even, or stochastically.

    Stochastic rounding rounds a value between two neighbors to the neighbor of larger magnitude
    with a probability equal to its relative distance from the other neighbor, in 256ths. A NaN
    becomes 6.

    Args:
        values: A tensor of any floating dtype and shape.
        random: For stochastic rounding, integers from 0 to 255 of the same shape.

    Returns:
        4-bit numbers, a byte each, of the same shape: a sign and three bits of magnitude.
    """
    given = values.float()
    size = given.abs()
    if random is None:
        # Ties round to even: a midpoint above an even code rounds down, above an odd code up.
        even, odd = (torch.tensor(_HALFWAY[start::2]) for start in (0, 1))
        code = torch.bucketize(size, even) + torch.bucketize(size, odd, right=True)
    else:
        grid = torch.tensor((*_MAGNITUDES, torch.inf))
        below = torch.bucketize(size, grid[1:-1], right=True)
        step = grid[below + 1] - grid[below]
        rises = (size - grid[below]) / step * RANDOM_VALUES + random >= RANDOM_VALUES
        code = (below + rises).clamp(max=len(_MAGNITUDES) - 1)
    is_number = ~given.isnan()
    code = torch.where(is_number, code, len(_MAGNITUDES) - 1)
    return (code + _SIGN * (given.signbit() & is_number)).to(torch.uint8)


def from_e2m1(data: torch.Tensor) -> torch.Tensor:
    """Convert 4-bit numbers, a byte each, to fp32 exactly."""
    every = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)))
    return every[data.long()]


def pack(data: torch.Tensor) -> torch.Tensor:
    """Pack neighbors of the last dimension into one byte, the first one into its lower half.

    Args:
        data: `(..., K)`, 4-bit numbers, `K` even.

    Returns:
        `(..., K / 2)`.
    """
    return data[..., ::2] | (data[..., 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack`: `(..., K / 2)` to `(..., K)`."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def transpose_packed(data: torch.Tensor) -> torch.Tensor:
    """Transpose a packed matrix: `(M, K / 2)` to `(K, M / 2)`."""
    return pack(unpack(data).t().contiguous())


def global_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return the scale of a tensor, with which the scales of its blocks fit into E4M3.

    The scale is `6 * 448 / amax`, at most the largest fp32 number; 1 for an amax of zero or
    infinity.

    Args:
        amax: Largest absolute value of the tensor, fp32, of any shape.
    """
    most = torch.tensor(_LARGEST * numbers.LARGEST[_E4M3])
    scale = (most / amax.float()).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def read_factors(rounded: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return the factor of elements in dequantization: `scale * amax / (6 * 448)`.

    Args:
        rounded: Scales of blocks, rounded to E4M3, in fp32.
        amax: Largest absolute value of the tensor.
    """
    inverse = torch.tensor(1 / (_LARGEST * numbers.LARGEST[_E4M3]))
    return rounded * amax.float().reshape(()) * inverse


def block_scales(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks before rounding to E4M3: `amax * (scale / 6)`.

    Args:
        amax: Largest absolute value of each block, fp32.
        scale: `global_scale` of the tensor.

    Returns:
        fp32, of the shape of `amax`, at most the largest fp32 number.
    """
    factor = scale.reshape(()) * torch.tensor(1 / _LARGEST)
    return (amax * factor).clamp(max=torch.finfo(torch.float32).max)


def element_factors(rounded: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the factor of elements before rounding: the reciprocal of their scales.

    Args:
        rounded: Scales of blocks, rounded to E4M3, in fp32.
        scale: `global_scale` of the tensor.

    Returns:
        fp32, at most the largest fp32 number, which is the factor of blocks with a zero scale.
    """
    reciprocal = (rounded * scale.reshape(()).reciprocal()).reciprocal()
    return reciprocal.clamp(max=torch.finfo(torch.float32).max)


def transform(values: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply each group of 16 elements of the last dimension by a matrix (Hadamard transform).

    Products are summed in fp64, where their order does not change the result, and rounded once.

    Args:
        values: `(..., K)`, `K` a multiple of 16.
        matrix: `(16, 16)`.

    Returns:
        A tensor of the shape and dtype of `values`.
    """
    products = values.double().reshape(-1, BLOCK) @ matrix.double()
    return products.view(values.shape).to(values.dtype)
