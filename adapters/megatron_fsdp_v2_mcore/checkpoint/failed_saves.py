"""Failed saves: reported on every rank, and tried again at the next interval.

A full disk or a removed folder is no reason to end a training: its state is in memory. The last
save of a training, and with `--fsdp-exit-on-failed-save` every save, is one whose failure ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.comm.interface import is_connection_error
from megatron_fsdp_v2_mcore.flags.checkpoint_check import iteration_folder
from megatron_fsdp_v2_mcore.flags.options import active_options, training_globals

_failed: list[CheckpointError] = []
"""The error of the latest save, if it failed."""


def report_or_raise(folder: Path | None, error: CheckpointError) -> None:
    """Report the failed save of an iteration, which failed on all ranks, and let training go on.

    Args:
        folder: Folder of the iteration; None for a local checkpoint, after which Megatron saves to
            `--save` where the training ends.
        error: What went wrong.

    Raises:
        CheckpointError: `error`, if no save follows, a process has ended, or failed saves end the
            training.
    """
    args = training_globals().get_args()
    if (
        active_options().exits_on_failed_save
        or (folder is not None and folder == iteration_folder(args.save, args.train_iters))
        or _names_an_ended_process(error)
    ):
        raise error
    if folder is not None:
        _failed[:] = [error]
    report(str(error))
    report(
        "training continues without this checkpoint until the next save; "
        "--fsdp-exit-on-failed-save ends it instead"
    )


def report(text: str) -> None:
    """Write a line to the log of this rank."""
    sys.stderr.write(f"rank {dist.get_rank()}: {text}\n")


def note_success() -> None:
    """Note that the latest save succeeded."""
    _failed.clear()


def raising_at_the_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `maybe_finalize_async_save` to raise if a training ends after a failed save.

    Megatron calls it last, also where a signal, a time limit or an interval ends the training.
    """

    def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> Any:
        result = original(blocking, terminate=terminate)
        args = training_globals().get_args()
        # After the last iteration, `report_or_raise` has raised, or one more save follows.
        if terminate and _failed and getattr(args, "curr_iteration", 0) + 1 < args.train_iters:
            raise _failed[0]
        return result

    return maybe_finalize_async_save


def _names_an_ended_process(error: BaseException) -> bool:
    cause = error.__cause__
    return cause is not None and (is_connection_error(cause) or _names_an_ended_process(cause))
