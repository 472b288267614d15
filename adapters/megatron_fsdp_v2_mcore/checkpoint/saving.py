"""Makes Megatron's synchronous saves replace earlier checkpoints and name causes of failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.lost_ranks import lost_ranks, next_save
from megatron_fsdp_v2.checkpoint.replacing import remove_own
from megatron_fsdp_v2.checkpoint.saving import failure_reason
from megatron_fsdp_v2_mcore.flags.checkpoint_check import CONFIG, iteration_folder
from megatron_fsdp_v2_mcore.flags.options import training_globals


def with_checked_saves(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `save_checkpoint` to replace an earlier checkpoint of the same iteration.

    The wrapper raises a `CheckpointError` if a save fails.
    """

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        folder = iteration_folder(str(training_globals().get_args().save), iteration)
        save = next_save(folder)
        try:
            _remove_earlier(folder)
            return original(iteration, *args, **kwargs)
        except CheckpointException as error:
            # Torch collects the errors of all ranks, and raises it on each of them.
            raise _failed(folder, failure_reason(error)) from error
        except (OSError, dist.DistError) as error:
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

    return save_checkpoint


def _remove_earlier(folder: Path) -> None:
    """Remove an earlier checkpoint in a folder, unless the save renames a folder over it.

    Torch's writer overwrites the files that it writes itself. The manifest of an asynchronous save
    or Megatron's `metadata.json` would describe files that are not there any more. No rank writes
    before it has planned the save together with the first rank.
    """
    args = training_globals().get_args()
    if args.async_save or dist.get_rank():
        return
    # Without permission to remove them, writing fails too, on all ranks.
    with contextlib.suppress(OSError):
        (folder / CONFIG).unlink(missing_ok=True)
        remove_own(folder)


def _failed(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"saving to {folder} failed, and it is no checkpoint: {reason}")
