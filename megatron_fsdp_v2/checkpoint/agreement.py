"""What every rank does, or none: a failure on one is an error on all, not a hang of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

__all__ = ["all_ranks_or_raise", "everyones"]


def all_ranks_or_raise[T](
    what: str, do: Callable[[], T], undo: Callable[[], None] | None = None
) -> T:
    """Do something on every rank and find out whether all could. Collective over all ranks.

    Args:
        what: What it is, for the sentence "rank 3 could not ...".
        do: The thing itself; it may raise on some ranks only.
        undo: Takes it back where it was done, when another rank could not.

    Returns:
        What `do` returned here.

    Raises:
        Exception: What `do` raised here.
        CheckpointError: It was done here, and raised on another rank.
    """
    if not dist.is_initialized():
        return do()
    try:
        result = do()
    except Exception as error:
        everyones(f"{type(error).__name__}: {error}")
        raise
    for rank, text in enumerate(everyones(None)):
        if text is not None:
            if undo is not None:
                undo()
            raise CheckpointError(f"rank {rank} could not {what}: {text}")
    return result


def everyones[T](value: T) -> list[T]:
    """What every rank has, by rank. Collective over all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
