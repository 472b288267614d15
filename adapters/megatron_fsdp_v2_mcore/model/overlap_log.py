"""`--fsdp-log-overlap`: what the step that Megatron logs waited for, and why."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.diagnostics import TrackedOverlap, overlap_tracker
from megatron_fsdp_v2_mcore.flags.errors import FlagError
from megatron_fsdp_v2_mcore.training_log import around_training_log, training_globals

__all__ = ["OverlapLog", "log_overlap"]

FLAG = "--fsdp-log-overlap"


class OverlapLog:
    """Tracks the steps of one model chunk that are to be logged.

    Args:
        chunk: The sharded model, without its wrapper.
        device_type: Where it is.

    Raises:
        FlagError: The host waits for nothing there.
    """

    def __init__(self, chunk: nn.Module, device_type: str) -> None:
        if device_type != "cpu":
            raise FlagError(
                f"{FLAG} measures where the host waits, and on a GPU streams do; see what is "
                "exposed with `megatron-fsdp-v2 plan --overlap`, or log it in a rehearsal "
                "(--cpu-rehearsal)"
            )
        self._chunk = weakref.ref(chunk)
        self._undo = contextlib.ExitStack()
        self._tracked: TrackedOverlap | None = None
        self.is_due = False
        _LOGS.append(weakref.ref(self))

    def begin_step(self) -> None:
        """A step begins: track it, if it is to be logged."""
        chunk = self._chunk()
        if self.is_due and self._tracked is None and chunk is not None:
            self._tracked = self._undo.enter_context(overlap_tracker(chunk))

    def end_step(self) -> TrackedOverlap | None:
        """It is over; return what was tracked of it."""
        self._undo.close()
        tracked, self._tracked = self._tracked, None
        return tracked


_LOGS: list[weakref.ref[OverlapLog]] = []


def _logs() -> Iterator[OverlapLog]:
    """Those of all chunks, in the order they were made."""
    for ref in [*_LOGS]:
        log = ref()
        if log is None:
            _LOGS.remove(ref)
        else:
            yield log


def log_overlap(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's logging of an iteration.

    Args:
        original: `training_log`.
    """

    def end_steps() -> list[tuple[OverlapLog, TrackedOverlap | None]]:
        return [(log, log.end_step()) for log in _logs()]

    def write(iteration: int, ended: list[tuple[OverlapLog, TrackedOverlap | None]]) -> None:
        interval = training_globals().get_args().log_interval
        for number, (log, tracked) in enumerate(ended):
            log.is_due = (iteration + 1) % interval == 0
            if tracked is not None and dist.get_rank() == 0:
                chunk = f", model chunk {number}" if len(ended) > 1 else ""
                sys.stdout.write(f" overlap at iteration {iteration}{chunk}:\n{tracked.report()}\n")
                sys.stdout.flush()

    return around_training_log(original, end_steps, write)
