"""What a checkpoint calls the state of FP8's delayed scaling. Needs neither torch nor Megatron.

A module of Transformer Engine that quantizes with the maxima of earlier steps has four tensors:
`<module>.fp8_state.scale_fwd`, `.amax_history_fwd`, `.scale_bwd` and `.amax_history_bwd`. Grouped
experts have four for each expert, with its number at the end, as their weights have.
"""

from __future__ import annotations

import re

__all__ = ["OF_ONE_EXPERT", "expert_suffix", "is_fp8_state", "is_history", "state_name"]

_PREFIX = "fp8_state."
_TENSORS = r"fp8_state\.(?:scale|amax_history)_(?:fwd|bwd)"
_STATE = re.compile(rf"(?:.*\.)?{_TENSORS}\d*")

OF_ONE_EXPERT = re.compile(rf"(weight|bias|{_TENSORS})(\d+)")
"""Names below a grouped layer that end in the number of an expert: what it is, and the number."""


def state_name(tensor: str, expert: int | None) -> str:
    """The name of a tensor of a module's state, below this module.

    Args:
        tensor: `scale_fwd`, `amax_history_fwd`, `scale_bwd` or `amax_history_bwd`.
        expert: Which one of grouped experts; None in any other module.
    """
    return f"{_PREFIX}{tensor}{expert_suffix(expert)}"


def expert_suffix(expert: int | None) -> str:
    """What the names of tensors of one of several grouped experts end in."""
    return "" if expert is None else str(expert)


def is_fp8_state(key: str) -> bool:
    """Whether an entry of a checkpoint is such a tensor, whatever its name begins with."""
    return _STATE.fullmatch(key) is not None


def is_history(key: str) -> bool:
    """Whether such a tensor is a history of maxima, whose first dimension counts steps."""
    return ".amax_history_" in f".{key.rpartition(_PREFIX)[2]}"
