"""Softmax of attention scores, scaled and masked, and layouts of packed sequences.

Scores are `(batch, heads, queries, keys)`, or `(batch * heads, queries, keys)` under the square
causal mask. All functions compute in fp32 and round once.
"""

from __future__ import annotations

from itertools import pairwise

import torch

__all__ = [
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "get_fused_attn_backend",
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]

_MASKED = -10000.0


def get_fused_attn_backend(*params: object) -> tuple[int, str]:
    """Report that no fused attention exists: cuDNN's kernels are not emulated."""
    del params
    return -1, "the CPU rehearsal has no fused attention"


def convert_thd_to_bshd(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int
) -> torch.Tensor:
    """Return packed sequences as a batch, padded with zeros: `(b, max_seq_len, ...)`.

    Args:
        tensor: `(tokens, ...)`, the sequences one after the other.
        cu_seqlens: Start of each sequence, and the end of the last one.
        b: Number of sequences.
        max_seq_len: Length of the longest sequence, or more.
    """
    batch = tensor.new_zeros((b, max_seq_len, *tensor.shape[1:]))
    for row, (first, last) in zip(batch, pairwise(cu_seqlens.tolist()), strict=True):
        row[: last - first] = tensor[first:last]
    return batch


def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """Return the inverse of `convert_thd_to_bshd`: `(t, ...)`; tokens of no sequence are zero."""
    packed = tensor.new_zeros((t, *tensor.shape[2:]))
    for row, (first, last) in zip(tensor, pairwise(cu_seqlens.tolist()), strict=True):
        packed[first:last] = row[: last - first]
    return packed


def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """`softmax(scale_factor * input)` over the keys."""
    return torch.softmax(input.float() * scale_factor, -1).to(input.dtype)


def scaled_masked_softmax_forward(
    input: torch.Tensor, mask: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """As `scaled_softmax_forward`; masked scores become -10000, fully masked rows become zero.

    Args:
        input: Scores.
        mask: `(batch or 1, 1, queries, keys)`; 1 for masked scores.
        scale_factor: Factor of the scores.
    """
    is_masked = mask.bool().expand(input.shape)
    scores = (input.float() * scale_factor).masked_fill(is_masked, _MASKED)
    probabilities = torch.softmax(scores, -1).masked_fill(is_masked.all(-1, keepdim=True), 0.0)
    return probabilities.to(input.dtype)


def _causal(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """Causal softmax, aligned so that the last query attends to all keys."""
    queries, keys = input.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    scores = (input.float() * scale_factor).masked_fill(later, -torch.inf)
    # Probabilities of a query without keys are zero.
    return torch.softmax(scores, -1).nan_to_num(nan=0.0).to(input.dtype)


def scaled_upper_triang_masked_softmax_forward(
    input: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """As `scaled_softmax_forward`, over keys that are not later than the query: `(b, n, n)`."""
    return _causal(input, scale_factor)


def scaled_aligned_causal_masked_softmax_forward(
    input: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Causal softmax for `q` queries and `k` keys, aligned at the last ones: `(..., q, k)`."""
    return _causal(input, scale_factor)


def scaled_softmax_backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Backward of all softmaxes: `scale_factor * p * (grad - sum(grad * p))` of probabilities."""
    p, grad = softmax_results.float(), output_grads.float()
    values = scale_factor * p * (grad - (grad * p).sum(-1, keepdim=True))
    return values.to(output_grads.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward
