"""`--inprocess-restart`: a training that is restarted within its processes after a fault.

NVIDIA's resiliency extension calls the training function again on the ranks that are left. Megatron
0.19 does not support that as it is: the arguments are parsed once, outside of the function, and
destroyed before it is called again; and the process groups of all calls share one store.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import inprocess_restart
from megatron.training.arguments import parse_args
from megatron.training.training import set_startup_timestamps

from megatron_fsdp_v2_mcore.flags.errors import FlagError
from megatron_fsdp_v2_mcore.flags.local_checkpoints import check_resiliency_extension

FLAG = "--inprocess-restart"
_MODULE = "nvidia_resiliency_ext.inprocess"
_TIMEOUT = timedelta(seconds=300)


def restart_within_processes(train: Callable[..., None]) -> None:
    """Train, and train again after a fault, in the same processes.

    Args:
        train: The training. Called with a store and the extension's `CallWrapper`, for Megatron's
            `pretrain`; parses the arguments itself.

    Raises:
        FlagError: The extension is not installed, or a flag is missing.
    """
    check_resiliency_extension(FLAG)
    args = parse_args(ignore_unknown_args=True)
    if args.save is None or args.load is None or not _is_one_folder(args.save, args.load):
        raise FlagError(
            f"{FLAG} needs --save and --load of one folder: a training that is restarted goes on "
            f"from its last checkpoint. They are {args.save} and {args.load}"
        )
    if args.finetune:
        raise FlagError(
            f"{FLAG} cannot be combined with --finetune: a training that is restarted would begin "
            "again at iteration 0; use --pretrained-checkpoint instead"
        )
    wrapper = importlib.import_module(_MODULE).CallWrapper
    port, rank = int(os.environ["MASTER_PORT"]) + 1, int(os.environ["RANK"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        port,
        int(os.environ["WORLD_SIZE"]),
        is_master=rank == 0,
        timeout=_TIMEOUT,
        wait_for_workers=True,
    )

    def call(call_wrapper: Any = None) -> None:
        train(store, call_wrapper)

    # Without times, `pretrain` sums times of earlier calls, which a rank that joins has none of.
    now = time.time()
    set_startup_timestamps(program_start=now, main_entry=now)
    # The extension compares annotations with its class, and passes its wrapper where it finds it.
    call.__annotations__ = {"call_wrapper": wrapper}
    inprocess_restart.inprocess_restart(call, args)()


def _is_one_folder(save: str, load: str) -> bool:
    return Path(save).resolve() == Path(load).resolve()
