"""Queries of Transformer Engine about the device, and small helpers around its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_cpu_rehearsal.devices import on_cpu

__all__ = [
    "bulk_allocate",
    "device_supports_multicast",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_grouped_gemm_setup_workspace_size",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "nvte_built_with_cublasmp",
    "ubuf_built_with_mpi",
]


def get_cudnn_version() -> int:
    """Return version 9.12.0, the lowest that Transformer Engine 2.20 accepts."""
    return 91200


def get_cublasLt_version() -> int:
    """Return version 13.1, which supports products of all emulated formats."""
    return 130100


def get_num_cublas_streams() -> int:
    """Return 1: products do not overlap."""
    return 1


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """Return the lowest and highest priority, which are equal."""
    del device_id
    return 0, 0


def device_supports_multicast(device_id: int = -1) -> bool:
    """Return False."""
    del device_id
    return False


def ubuf_built_with_mpi() -> bool:
    """Return False: there are no user buffers."""
    return False


def nvte_built_with_cublasmp() -> bool:
    """Return False."""
    return False


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """Return 0: no workspace is needed."""
    del num_tensors
    return 0


def fused_multi_row_padding(
    input: torch.Tensor,
    output: torch.Tensor,
    input_row_list: Sequence[int],
    padded_input_row_list: Sequence[int],
) -> None:
    """Copy groups of rows to the starts of padded groups; padding rows become zero.

    Args:
        input: `(sum of input_row_list, K)`.
        output: `(sum of padded_input_row_list, K)`.
        input_row_list: Rows of each group.
        padded_input_row_list: Rows of each padded group.
    """
    groups = torch.split(output, list(padded_input_row_list))
    for source, target in zip(torch.split(input, list(input_row_list)), groups, strict=True):
        target[: len(source)].copy_(source)
        target[len(source) :].zero_()


def fused_multi_row_unpadding(
    input: torch.Tensor,
    output: torch.Tensor,
    input_row_list: Sequence[int],
    unpadded_input_row_list: Sequence[int],
) -> None:
    """Copy the first rows of each group; the inverse of `fused_multi_row_padding`.

    Args:
        input: `(sum of input_row_list, K)`.
        output: `(sum of unpadded_input_row_list, K)`.
        input_row_list: Rows of each padded group.
        unpadded_input_row_list: Rows of each group.
    """
    groups = torch.split(output, list(unpadded_input_row_list))
    for source, target in zip(torch.split(input, list(input_row_list)), groups, strict=True):
        target.copy_(source[: len(target)])


def bulk_allocate(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: Any = None,
    alignments: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Make empty tensors; the GPU kernel allocates them in one buffer.

    Args:
        shapes: Shapes of the tensors.
        dtypes: Dtypes of the tensors.
        device: Device of the tensors; the CPU for None and for every CUDA device.
        alignments: Ignored.
    """
    del alignments
    place = torch.device("cpu") if device is None else on_cpu(device)
    return [
        torch.empty(tuple(shape), dtype=dtype, device=place)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
