"""Makes Megatron's synchronous saves replace earlier checkpoints and name causes of failures."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fsdp_v2.checkpoint.errors import CheckpointError, everyones
from megatron_fsdp_v2.checkpoint.lost_ranks import lost_ranks, next_save
from megatron_fsdp_v2.checkpoint.replacing import remove_own
from megatron_fsdp_v2.checkpoint.saving import failure_reason
from megatron_fsdp_v2_mcore.checkpoint.failed_saves import note_success, report_or_raise
from megatron_fsdp_v2_mcore.checkpoint.local import LocalSaveError, find_manager
from megatron_fsdp_v2_mcore.flags.checkpoint_check import CONFIG, iteration_folder
from megatron_fsdp_v2_mcore.flags.options import training_globals


def with_checked_saves(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `save_checkpoint` to replace an earlier checkpoint of the same iteration.

    A save that fails on any rank fails on all of them; see `failed_saves.report_or_raise`. Local
    checkpoints are not in the folder of `--save`.
    """
    parameters = inspect.signature(original)

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("non_persistent_ckpt"):
            given = parameters.bind(iteration, *args, **kwargs).arguments
            find_manager(given.get("checkpointing_context"))
            try:
                return original(iteration, *args, **kwargs)
            except LocalSaveError as error:
                report_or_raise(None, error)
                return None
        settings = training_globals().get_args()
        folder = iteration_folder(str(settings.save), iteration)
        try:
            result = _save(folder, lambda: original(iteration, *args, **kwargs))
        except CheckpointError as error:
            if not settings.async_save and not dist.get_rank():
                # What was written takes room that the next save may need.
                with contextlib.suppress(OSError):
                    remove_own(folder)
            report_or_raise(folder, error)
            return None
        if not settings.async_save:
            note_success()
        return result

    return save_checkpoint


def _save(folder: Path, original: Callable[[], Any]) -> Any:
    """Call Megatron's function; raise a CheckpointError on all ranks if it fails on any."""
    save, result, problem = next_save(folder), None, ""
    try:
        _raise_any(folder, _prepare(folder))
        result = original()
    except CheckpointException as error:
        # Torch collects the errors of all ranks, and raises it on each of them.
        raise _failed(folder, failure_reason(error)) from error
    except OSError as error:
        # Of a file that one rank writes when all data is written, or of a log. The other ranks wait
        # in the barrier at the end of the save.
        problem = failure_reason(error)
        if not training_globals().get_args().async_save:
            dist.barrier()
    except dist.DistError as error:
        raise _failed(folder, f"on rank {dist.get_rank()}, {failure_reason(error)}") from error
    except RuntimeError as error:
        # The error of gloo, whose text names the address of the peer.
        if "peer" not in str(error) and "gloo" not in str(error):
            raise
        reason = lost_ranks(save, None) or (
            f"rank {dist.get_rank()} lost the connection to another rank, which has ended or "
            "failed: "
        )
        raise _failed(folder, reason + failure_reason(error)) from error
    _raise_any(folder, problem)
    return result


def _prepare(folder: Path) -> str:
    """Make the folder of a save, without an earlier checkpoint; return why that failed, or "".

    Torch's writer overwrites the files that it writes itself. The manifest of an asynchronous save
    or Megatron's `metadata.json` would describe files that are not there any more. An asynchronous
    save renames another folder over this one.
    """
    args = training_globals().get_args()
    if dist.get_rank():
        return ""
    try:
        if not args.async_save:
            # If this rank may not remove the files, the save fails on all ranks.
            with contextlib.suppress(OSError):
                (folder / CONFIG).unlink(missing_ok=True)
                remove_own(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return failure_reason(error)
    return ""


def _raise_any(folder: Path, problem: str) -> None:
    """Raise a CheckpointError on all ranks if any of them has a problem. Collective."""
    found = [f"on rank {rank}, {text}" for rank, text in enumerate(everyones(problem)) if text]
    if found:
        raise _failed(folder, found[0])


def _failed(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"saving to {folder} failed, and it is no checkpoint: {reason}")
