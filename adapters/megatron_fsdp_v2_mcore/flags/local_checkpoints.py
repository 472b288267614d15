"""Checks of the flags of local checkpoints, which NVIDIA's resiliency extension keeps."""

from __future__ import annotations

import importlib.util
from typing import Any

from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of

_EXTENSION = "nvidia_resiliency_ext"
_LOCAL = "--non-persistent-ckpt-type local"
_OTHER_ITERATIONS = ("ckpt_step", "pretrained_checkpoint", "finetune", "override_ckpt_iteration")
"""Arguments with which a run does not continue after its newest checkpoint."""


def check_resiliency_extension(flag: str) -> None:
    """Check that NVIDIA's resiliency extension, which a flag needs, is installed.

    Raises:
        FlagError: The extension is not installed. The message names the flag.
    """
    if importlib.util.find_spec(_EXTENSION) is None:
        raise FlagError(
            f"{flag} needs NVIDIA's resiliency extension; install nvidia-resiliency-ext, or omit "
            "the flag"
        )


def check_local_checkpoints(args: Any) -> None:
    """Check the flags of local checkpoints.

    Args:
        args: Megatron's arguments.

    Raises:
        FlagError: A flag is missing or cannot be combined with others, or the extension is not
            installed. The message names it.
    """
    if args.non_persistent_ckpt_type != "local":
        for name in ("non_persistent_save_interval", "replication"):
            if getattr(args, name):
                raise FlagError(f"{flag_of(name)} needs {_LOCAL}; add it, or leave both out")
        return
    check_resiliency_extension(_LOCAL)
    if args.non_persistent_local_ckpt_dir is None:
        raise FlagError(f"{_LOCAL} needs --non-persistent-local-ckpt-dir, a folder on every node")
    if args.save is None or args.load is None:
        raise FlagError(
            f"{_LOCAL} needs --save and --load, such as of one folder: without them Megatron "
            "neither saves nor loads local checkpoints"
        )
    for name in _OTHER_ITERATIONS:
        if getattr(args, name, None):
            raise FlagError(
                f"{flag_of(name)} cannot be used with {_LOCAL}, which resumes after the newest "
                "iteration; omit one of them"
            )
    if args.replication:
        _check_replication(args)


def _check_replication(args: Any) -> None:
    jump, factor = args.replication_jump, args.replication_factor
    if jump is None:
        raise FlagError("--replication needs --replication-jump, such as the ranks of a node")
    if jump < 1 or factor < 2 or args.world_size % (jump * factor):
        raise FlagError(
            f"{args.world_size} ranks cannot be divided by --replication-jump {jump} x "
            f"--replication-factor {factor}, of which the factor must be at least 2"
        )
    if args.optimizer_cpu_offload:
        raise FlagError(
            "--replication cannot be used with --optimizer-cpu-offload: the extension sends device "
            "memory, and the optimizer's state is in host memory; omit one of them"
        )
