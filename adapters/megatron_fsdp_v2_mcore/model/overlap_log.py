"""`--fsdp-log-overlap`: what the step that Megatron logs waited for, and why."""

from __future__ import annotations

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.diagnostics import TrackedOverlap, overlap_tracker
from megatron_fsdp_v2_mcore.flags.errors import FlagError

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

    def training_log(
        loss_dict: Any,
        total_loss_dict: Any,
        learning_rate: Any,
        iteration: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        logs = [*_logs()]
        # Before anything that Megatron does to log it.
        ended = [log.end_step() for log in logs]
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        interval = _training_globals().get_args().log_interval
        for number, (log, tracked) in enumerate(zip(logs, ended, strict=True)):
            log.is_due = (iteration + 1) % interval == 0
            if tracked is not None and dist.get_rank() == 0:
                chunk = f", model chunk {number}" if len(logs) > 1 else ""
                sys.stdout.write(f" overlap at iteration {iteration}{chunk}:\n{tracked.report()}\n")
                sys.stdout.flush()
        return result

    return training_log


def _training_globals() -> Any:
    # By name: whoever uses Megatron-Core alone never comes here.
    return importlib.import_module("megatron.training.global_vars")
