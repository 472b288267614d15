"""Quantization of sharded weights: amaxes of shards, then casts of shards.

A shard is a range of the flattened weight `(h, w)` that begins at `start_offset`. Between the two
steps, Transformer Engine's Python code reduces the amaxes over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_cpu_rehearsal.te import numbers
from megatron_cpu_rehearsal.te.enums import TORCH_DTYPES
from megatron_cpu_rehearsal.te.storages import MX_BLOCK

__all__ = [
    "compute_amax",
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "mxfp8_scaling_compute_partial_amax",
    "mxfp8_scaling_partial_cast",
]


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest absolute value of a tensor to the single fp32 element of `amax`."""
    amax.fill_(input.abs().amax().float() if input.numel() else 0.0)


def _part_of(whole: torch.Tensor, start_offset: int, length: int) -> torch.Tensor:
    return whole.reshape(-1)[start_offset : start_offset + length]


def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Compute the amax of each `block_len` x `block_len` block over the elements of a shard.

    Args:
        tensor: The shard.
        amax: fp32, `(ceil(h / block_len), ceil(w / block_len))` or wider; padding is not changed.
        h: Rows of the weight.
        w: Columns of the weight.
        start_offset: Start of the shard.
        block_len: 128.
    """
    blocks = numbers.block_amax(
        numbers.in_place_of_whole(tensor, h, w, start_offset), block_len, block_len
    )
    amax[: blocks.shape[0], : blocks.shape[1]].copy_(blocks)


def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: int,
) -> None:
    """Cast a shard: `out = fp8(inp * scale of its block)`.

    Args:
        inp: The shard.
        out: Bytes, one per element.
        scale: fp32, one per `block_len` x `block_len` block.
        h: Rows of the weight.
        w: Columns of the weight.
        start_offset: Start of the shard.
        block_len: 128.
        out_dtype: A `DType`.
    """
    wide = numbers.expand_blocks(scale, block_len, block_len, (h, w))
    scaled = inp.reshape(-1).float() * _part_of(wide, start_offset, inp.numel())
    data = numbers.to_fp8(scaled, TORCH_DTYPES[int(out_dtype)])
    out.view(torch.uint8).copy_(data.view(out.shape))


def mxfp8_scaling_compute_partial_amax(
    input: torch.Tensor,
    amax_rowwise: torch.Tensor,
    amax_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Compute row-wise and column-wise amaxes per 32 elements over the elements of a shard.

    Args:
        input: The shard.
        amax_rowwise: `(rows, cols / 32)`, padded, of the input's dtype.
        amax_colwise: `(rows / 32, cols)`, padded, of the input's dtype.
        rows: Rows of the weight, a multiple of 32.
        cols: Columns of the weight, a multiple of 32.
        start_offset: Start of the shard.
    """
    whole = numbers.in_place_of_whole(input, rows, cols, start_offset)
    for amax, block in ((amax_rowwise, (1, MX_BLOCK)), (amax_colwise, (MX_BLOCK, 1))):
        amax.zero_()
        blocks = numbers.block_amax(whole, *block)
        amax[: blocks.shape[0], : blocks.shape[1]].copy_(blocks)


def mxfp8_scaling_partial_cast(
    input: torch.Tensor,
    output_rowwise: torch.Tensor,
    output_colwise: torch.Tensor,
    scale_inv_rowwise: torch.Tensor,
    scale_inv_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Cast a shard to E4M3 twice, with row-wise and with column-wise scales.

    Args:
        input: The shard.
        output_rowwise: Bytes, one per element.
        output_colwise: Bytes, one per element.
        scale_inv_rowwise: E8M0, `(rows, cols / 32)`, padded.
        scale_inv_colwise: E8M0, `(rows / 32, cols)`, padded.
        rows: Rows of the weight, a multiple of 32.
        cols: Columns of the weight, a multiple of 32.
        start_offset: Start of the shard.
    """
    values = input.reshape(-1).float()
    for output, scales, block in (
        (output_rowwise, scale_inv_rowwise, (1, MX_BLOCK)),
        (output_colwise, scale_inv_colwise, (MX_BLOCK, 1)),
    ):
        factors = numbers.reciprocal_of_e8m0(scales)
        wide = numbers.expand_blocks(factors, *block, (rows, cols))
        scaled = values * _part_of(wide, start_offset, values.numel())
        data = numbers.to_fp8(scaled, torch.float8_e4m3fn)
        output.view(torch.uint8).copy_(data.view(output.shape))


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Compute scales from amaxes, and their reciprocals; see `numbers.scale_of_amax`.

    Args:
        chunk_size: Ignored.
        noop_flag: Ignored, as in the GPU kernel.
        tensor_lists: Amaxes, scales, inverses of scales: fp32.
        max_fp8: Largest finite value.
        force_pow_2_scales: Whether scales are powers of two.
        epsilon: Minimum of the amax.
    """
    del chunk_size, noop_flag
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        made = numbers.scale_of_amax(
            amax, max_fp8, power_of_two=force_pow_2_scales, epsilon=epsilon
        )
        scale.copy_(made)
        scale_inv.copy_(made.reciprocal())


def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Compute E8M0 inverse scales: the smallest power of two not below `amax / 448`.

    Args:
        chunk_size: Ignored.
        noop_flag: Ignored.
        tensor_lists: Amaxes in bf16, inverses as bytes.
    """
    del chunk_size, noop_flag
    factor = torch.tensor(1 / numbers.LARGEST[torch.float8_e4m3fn])
    for amax, scale_inv in zip(*tensor_lists, strict=True):
        scale_inv.copy_(numbers.e8m0_of(amax.float() * factor))
