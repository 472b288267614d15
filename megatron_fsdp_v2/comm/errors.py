"""What a failed collective says: which one, of what, among whom, and where to look next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_fsdp_v2._text import listed

__all__ = ["Label", "collective_failure", "naming_failures"]

_LOST = ("connection", "closed by peer", "broken pipe", "socket", "reset by peer", "remote process")
_LATE = ("timed out", "timeout")


class Label:
    """What collectives are for, to be said where one fails.

    Attributes:
        name: Of what they communicate; may change.
    """

    __slots__ = ("name",)

    def __init__(self, name: str = "") -> None:
        self.name = name

    @classmethod
    def of_several(cls, labels: Sequence[Label]) -> Label:
        """What a collective is for that is several in one."""
        return cls(listed([label.name for label in labels if label.name], 4))

    def failure(self, kind: str, group: dist.ProcessGroup, error: Exception) -> RuntimeError:
        """The error to raise where a collective raised one.

        Args:
            kind: The collective, such as `all-gather`.
            group: Who took part.
            error: What the process group raised.
        """
        return collective_failure(f"{kind} of {self.name}" if self.name else kind, group, error)


def collective_failure(
    what: str, group: dist.ProcessGroup | None, error: Exception
) -> RuntimeError:
    """Make the error to raise from what a process group raised.

    Args:
        what: The collective and what it was for, such as `all-gather of layers.3/0`.
        group: Who took part; None for all ranks.
        error: What the process group raised.
    """
    ranks, timeout = _members(group)
    own = dist.get_rank() if dist.is_initialized() else 0
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return RuntimeError(
        f"{what} failed on rank {own}: "
        + _explained(lines[0], [rank for rank in ranks if rank != own], timeout)
    )


def _explained(reason: str, others: list[int], timeout: timedelta | None) -> str:
    """What a process group says, led by what it means for the other ranks."""
    several = len(others) != 1
    whose = f"rank{'s' if several else ''} {listed(others, 8)}" if others else "the others"
    who = f"one of {whose}" if several else whose
    lowered = reason.lower()
    if any(word in lowered for word in _LATE):
        within = f"within {timeout.total_seconds():g} s" if timeout else "in time"
        meaning = f"{who} did not take part {within}, the timeout of this process group"
    elif any(word in lowered for word in _LOST):
        meaning = f"the connection to {who} was lost: a process ended"
    else:
        return reason
    return f"{meaning}. The first error in the logs of {whose} is the cause ({reason})"


@contextlib.contextmanager
def naming_failures(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Say which collective it was if one fails here. For what is not done in every step.

    Args:
        what: The collective and what it is for.
        group: Who takes part; None for all ranks.

    Raises:
        RuntimeError: The process group raised; the original is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        raise collective_failure(what, group, error) from error


def _members(group: dist.ProcessGroup | None) -> tuple[list[int], timedelta | None]:
    """Global ranks of a group and its timeout, as far as it still answers."""
    ranks: list[int] = []
    timeout = None
    # A failed group is asked while an error is being made, which must not hide the first one.
    with contextlib.suppress(Exception):
        group = group or dist.group.WORLD
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        timeout = group._get_backend(group._device_types[0]).options._timeout
    return ranks, timeout
