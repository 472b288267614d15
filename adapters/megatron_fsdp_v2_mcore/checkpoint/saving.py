"""Names rank, path and cause of a synchronous save that fails, as asynchronous saves do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.saving import failure_reason
from megatron_fsdp_v2_mcore.flags.checkpoint_check import iteration_folder


def with_named_failures(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `save_checkpoint` to raise a `CheckpointError` if a save fails."""

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(iteration, *args, **kwargs)
        except CheckpointException as error:
            # Torch collects the errors of all ranks, and raises it on each of them.
            raise _failed(iteration, failure_reason(error)) from error
        except (OSError, dist.DistError) as error:
            raise _failed(
                iteration, f"on rank {dist.get_rank()}, {failure_reason(error)}"
            ) from error
        except RuntimeError as error:
            # The error of gloo, whose text names the address of the peer.
            if "peer" not in str(error) and "gloo" not in str(error):
                raise
            raise _failed(
                iteration,
                f"rank {dist.get_rank()} lost the connection to another rank, which has ended or "
                f"failed: {failure_reason(error)}",
            ) from error

    return save_checkpoint


def _failed(iteration: int, reason: str) -> CheckpointError:
    args = importlib.import_module("megatron.training.global_vars").get_args()
    return CheckpointError(
        f"saving to {iteration_folder(args.save, iteration)} failed, and it is no checkpoint: "
        f"{reason}"
    )
