"""Lists of ranks in words; without torch, which `megatron_fsdp_v2` imports."""

from __future__ import annotations

from collections.abc import Sequence


def listed(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1 and 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
