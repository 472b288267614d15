"""Megatron's local attention under context parallelism, which Megatron supports only on a GPU.

Keys and values are gathered over the context-parallel group and put in the order of the sequence.
Each rank then computes attention for its own queries, as on a single rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def without_rejection(construct: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DotProductAttention.__init__` to accept a context-parallel size above 1."""

    def construct_attention(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.context_parallel_size == 1:
            construct(self, config, *args, **kwargs)
            return
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        construct(self, alone, *args, **kwargs)
        self.config = config
        softmax = self.scale_mask_softmax
        # Megatron would compute the sliding window from local positions. `forward` computes the
        # mask for the whole sequence instead.
        self.rehearsal_window, softmax.window_size = softmax.window_size, None

    return construct_attention


def over_the_whole_sequence(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DotProductAttention.forward` to gather keys and values over the group."""

    def attend_to_all(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.config.context_parallel_size == 1:
            return attend(self, query, key, value, attention_mask, *args, **kwargs)
        from megatron.core.transformer.enums import AttnMaskType

        group = _group(self.pg_collection)
        window = self.rehearsal_window
        if window is not None or (
            attention_mask is None and self.attn_mask_type == AttnMaskType.causal
        ):
            attention_mask = _causal_mask(query.shape[0], group, window)
        key, value = (_whole_sequence(part, group) for part in (key, value))
        return attend(self, query, key, value, attention_mask, *args, **kwargs)

    return attend_to_all


def chunks_of_rank(rank: int, size: int) -> tuple[int, int]:
    """Return the two chunks, of `2 * size` chunks of a sequence, that Megatron assigns to a rank.

    One early and one late chunk give every rank the same cost under a causal mask.
    """
    return rank, 2 * size - 1 - rank


def _group(pg_collection: Any) -> Any:
    from megatron.core import parallel_state

    group = getattr(pg_collection, "cp", None)
    return parallel_state.get_context_parallel_group() if group is None else group


def _whole_sequence(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather `(sequence / size, ...)` to `(sequence, ...)`; the backward is a reduce-scatter."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    size = group.size()
    gathered: torch.Tensor = gather_from_sequence_parallel_region(part.contiguous(), group=group)
    chunks = gathered.view(2 * size, -1, *part.shape[1:])
    held = [chunk for rank in range(size) for chunk in chunks_of_rank(rank, size)]
    order = torch.tensor(held).argsort()
    return chunks.index_select(0, order).flatten(0, 1)


def _causal_mask(length: int, group: Any, window: Any) -> torch.Tensor:
    """Return this rank's rows of the whole sequence's mask: `(1, 1, length, sequence)`."""
    from megatron.core.transformer import utils

    size = group.size()
    whole = length * size
    mask: torch.Tensor = (
        utils.get_default_causal_mask(whole)
        if window is None
        else utils.get_sliding_window_causal_mask(whole, whole, window)
    )
    rows = mask.view(2 * size, -1, whole)[list(chunks_of_rank(group.rank(), size))]
    return rows.reshape(1, 1, length, whole)
