"""Name the ranks that ended during a save, for the errors of the others."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_v2._text import listed_ranks
from megatron_fsdp_v2.comm.groups import default_store

_MOST_SECONDS = 5.0
_TAG = 0x5AFE
"""Of messages that no rank receives."""

_num_saves: Counter[str] = Counter()


def next_save(path: Path) -> str:
    """Return a name of the next save to a path: the same on all of its ranks, and used once."""
    _num_saves[str(path)] += 1
    return f"megatron_fsdp_v2: save {_num_saves[str(path)]} to {path}"


def lost_ranks(save: str, group: dist.ProcessGroup | None) -> str:
    """Name the ranks that ended during a save, after its collective failed on this rank.

    The error of gloo has the address of one neighbor in the collective, and that rank may have
    ended because the save failed on it, too. Therefore each rank first records in the store of the
    default process group that the save failed on it. Ranks whose connection is closed, and that
    recorded nothing, ended first.

    Args:
        save: What `next_save` returned.
        group: Process group of the save; None for all ranks.

    Returns:
        The start of a sentence; empty if all ranks are connected or recorded a failure, or if the
        backend of the group cannot tell (NCCL).
    """
    found: list[str] = []

    def look() -> None:
        try:
            found.append(_described(save, group))
        except Exception:
            # The process group was destroyed: the original error says so.
            found.append("")

    # In a thread, since a host that does not respond must not delay the original error.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_MOST_SECONDS)
    return found[0] if found else ""


def _described(save: str, group: dist.ProcessGroup | None) -> str:
    own = dist.get_rank()
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != own]
    try:
        store = default_store()
        store.set(f"{save}, failed on rank {own}", "")
        closed = [rank for rank in others if _is_closed(rank, group)]
        ended = [rank for rank in closed if not store.check([f"{save}, failed on rank {rank}"])]
    except dist.DistError:
        # The host of the store has ended.
        closed = [rank for rank in others if _is_closed(rank, group)]
        return f"lost the connection to {listed_ranks(closed)}: " if closed else ""
    if not ended:
        return ""
    whose = "their" if len(ended) > 1 else "its"
    return (
        f"{listed_ranks(ended)} ended, or destroyed {whose} process group, before the save was "
        "complete: "
    )


def _is_closed(rank: int, group: dist.ProcessGroup | None) -> bool:
    """Whether the connection to a rank is closed. It does not wait for that rank."""
    found: Any = group or dist.group.WORLD
    if found._get_backend(torch.device("cpu")).name() != "gloo":
        return False
    try:
        dist.isend(torch.zeros(1, device="cpu"), rank, group=group, tag=_TAG)
    except RuntimeError:
        return True
    return False
