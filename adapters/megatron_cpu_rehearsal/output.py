"""Suppresses the parts of Megatron's output that do not apply to a run on a CPU."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from megatron_fsdp_v2_patching import Patches

_LOGGERS = (None, "megatron", "torch.distributed", "torch.distributed.checkpoint")


@contextlib.contextmanager
def quiet(patches: Patches) -> Iterator[None]:
    """Suppress output that does not apply to a run on a CPU.

    Suppressed are Megatron's table of arguments, warnings about packages that need a GPU, reports
    of device memory, and timestamps of startup steps. Output about iterations, evaluations,
    checkpoints and errors is not suppressed.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        _quiet_training(patches)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _quiet_training(patches: Patches) -> None:
    try:
        # Most warnings come from this import.
        from megatron.training import arguments, training
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron.training"):
            raise
        return
    patches.set(arguments, "_print_args", nothing)
    patches.set(training, "report_theoretical_memory", nothing)
    patches.set(training, "report_memory", nothing)
    patches.set(training, "print_datetime", _meet)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Take any arguments and do nothing."""
    del args, kwargs


def _meet(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
    # Megatron's function is also a barrier, which later steps may rely on.
    dist.barrier()
