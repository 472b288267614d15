"""NVFP4 weights: transposition of payloads, and quantization of sharded weights.

A weight `(h, w)` has a scale per 16 x 16 elements. A shard is a range of the flattened weight that
begins at `start_offset`. Between the computation of amaxes and the cast, Transformer Engine's
Python code reduces the amaxes over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_cpu_rehearsal.te import fp4, numbers

__all__ = [
    "nvfp4_2d_multi_tensor_transpose",
    "nvfp4_2d_scale_transpose",
    "nvfp4_compute_global_scale",
    "nvfp4_data_transpose",
    "nvfp4_multi_tensor_2d_partial_cast",
    "nvfp4_multi_tensor_compute_partial_amax",
    "nvfp4_multi_tensor_fused_scale",
]


def nvfp4_data_transpose(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Transpose a packed matrix: `(M, K / 2)` bytes to `(K, M / 2)`."""
    turned = fp4.transpose_packed(input.reshape(-1, input.shape[-1]))
    return turned if out is None else out.copy_(turned.view(out.shape))


def nvfp4_2d_scale_transpose(
    input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int
) -> None:
    """Transpose the scales of 16 x 16 blocks, which are stored once per row.

    Args:
        input: Bytes, `(16 * M_tiles, K_tiles)` or wider.
        output: Bytes, `(16 * K_tiles, M_tiles)` or wider; padding becomes zero.
        M_tiles: Blocks in a column of the weight.
        K_tiles: Blocks in a row.
    """
    tiles = input[: M_tiles * fp4.BLOCK : fp4.BLOCK, :K_tiles].t()
    numbers.copy_into_corner(output, tiles.repeat_interleave(fp4.BLOCK, 0))


def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[torch.Tensor],
    columnwise_data_list: Sequence[torch.Tensor],
    rowwise_scale_inv_list: Sequence[torch.Tensor],
    columnwise_scale_inv_list: Sequence[torch.Tensor],
    M_list: Sequence[int],
    K_list: Sequence[int],
) -> None:
    """Compute the column-wise payloads and scales of weights `(M, K)` from the row-wise ones."""
    for data, turned, scales, turned_scales, rows, columns in zip(
        rowwise_data_list,
        columnwise_data_list,
        rowwise_scale_inv_list,
        columnwise_scale_inv_list,
        M_list,
        K_list,
        strict=True,
    ):
        nvfp4_data_transpose(data, out=turned)
        tiles = (math.ceil(size / fp4.BLOCK) for size in (rows, columns))
        nvfp4_2d_scale_transpose(scales, turned_scales, *tiles)


def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list: Sequence[torch.Tensor],
    partial_amax_list: Sequence[torch.Tensor],
    global_amax_list: Sequence[torch.Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int,
) -> None:
    """Compute the amaxes of blocks and of whole weights over the elements of shards.

    Args:
        master_weight_list: Shards of weights.
        partial_amax_list: Per weight, fp32, `(ceil(h / 16), ceil(w / 16))`.
        global_amax_list: Per weight, one fp32 element.
        h_list: Rows of the weights.
        w_list: Columns of the weights.
        start_offset_list: Start of each shard.
        block_len: 16.
    """
    for part, blocks, amax, height, width, start in zip(
        master_weight_list,
        partial_amax_list,
        global_amax_list,
        h_list,
        w_list,
        start_offset_list,
        strict=True,
    ):
        whole = numbers.in_place_of_whole(part, height, width, start)
        blocks.copy_(numbers.block_amax(whole, block_len, block_len))
        amax.copy_(blocks.amax())


def nvfp4_compute_global_scale(global_amax: torch.Tensor, global_scale: torch.Tensor) -> None:
    """Compute the global scales of weights from their amaxes; see `fp4.global_scale`."""
    global_scale.copy_(fp4.global_scale(global_amax))


def nvfp4_multi_tensor_fused_scale(
    block_amax_list: Sequence[torch.Tensor],
    global_amax_list: Sequence[torch.Tensor],
    per_block_scale_list: Sequence[torch.Tensor],
    target_scale_list: Sequence[torch.Tensor],
    target_amax_list: Sequence[torch.Tensor],
    tile_rows_list: Sequence[int],
    tile_cols_list: Sequence[int],
    rows_padded_list: Sequence[int],
    block_len: int,
) -> None:
    """Compute the scales of weights from amaxes, and store them in the format of a tensor.

    Args:
        block_amax_list: fp32, `(tile_rows, tile_cols)`.
        global_amax_list: One fp32 element each.
        per_block_scale_list: fp32, `(tile_rows, tile_cols)`: unrounded scales.
        target_scale_list: E4M3, `(rows_padded, tile_cols)` or wider: rounded scales, each repeated
            for all rows of its block.
        target_amax_list: One fp32 element each.
        tile_rows_list: Blocks in a column of the weights.
        tile_cols_list: Blocks in a row of the weights.
        rows_padded_list: Rows of the scales. This list and both lists of blocks are ignored, since
            the tensors have these shapes.
        block_len: 16.
    """
    del tile_rows_list, tile_cols_list, rows_padded_list
    for blocks, amax, scales, target, target_amax in zip(
        block_amax_list,
        global_amax_list,
        per_block_scale_list,
        target_scale_list,
        target_amax_list,
        strict=True,
    ):
        scales.copy_(fp4.block_scales(blocks, fp4.global_scale(amax)))
        stored = numbers.to_fp8(scales, torch.float8_e4m3fn).repeat_interleave(block_len, 0)
        numbers.copy_into_corner(target, stored[: target.shape[0]])
        target_amax.copy_(amax.view_as(target_amax))


def nvfp4_multi_tensor_2d_partial_cast(
    inp_list: Sequence[torch.Tensor],
    out_list: Sequence[torch.Tensor],
    scale_list: Sequence[torch.Tensor],
    global_scale_list: Sequence[torch.Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int,
) -> None:
    """Cast shards of weights with the scales of their blocks.

    Args:
        inp_list: Shards.
        out_list: Bytes, half the number of elements.
        scale_list: fp32, `(ceil(h / 16), ceil(w / 16))`, unrounded.
        global_scale_list: One fp32 element each.
        h_list: Rows of the weights.
        w_list: Columns of the weights.
        start_offset_list: Start of each shard.
        block_len: 16.

    Raises:
        NotImplementedError: A shard begins or ends within a byte.
    """
    for part, out, scales, scale, height, width, start in zip(
        inp_list,
        out_list,
        scale_list,
        global_scale_list,
        h_list,
        w_list,
        start_offset_list,
        strict=True,
    ):
        if start % 2 or part.numel() % 2:
            raise NotImplementedError("the CPU rehearsal does not cast half a byte of NVFP4")
        rounded = numbers.from_fp8(numbers.to_fp8(scales, torch.float8_e4m3fn), torch.float8_e4m3fn)
        factors = fp4.element_factors(rounded, scale)
        wide = numbers.expand_blocks(factors, block_len, block_len, (height, width))
        own = wide.reshape(-1)[start : start + part.numel()]
        data = fp4.to_e2m1(part.reshape(-1).float() * own)
        out.copy_(fp4.pack(data).view(out.shape))
