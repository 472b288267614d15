"""Setup and cleanup of `pretrain_gpt` and `run`: device check, rehearsal, install, exit."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from megatron_cpu_rehearsal import VERBOSE_FLAG, check_device, is_requested, rehearse
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.memory.registered_memory import deregister_all
from megatron_fsdp_v2_mcore import FlagError, install
from megatron_fsdp_v2_mcore.flags.arguments import supported_on_cpu

_EXIT_DELAY_S = 10.0


@contextlib.contextmanager
def launch(argv: Sequence[str], *, own_parser: bool = False) -> Iterator[list[str]]:
    """Set Megatron up for a training and clean up after it.

    Args:
        argv: The user's flags.
        own_parser: Whether the script may parse the flags with a parser other than Megatron's. If
            True, no flags are added to `argv`.

    Yields:
        The flags to pass to Megatron.

    Raises:
        SystemExit: With code 2 after a one-line message on standard error, if a flag is not
            supported or no device is available; with code 1 if a checkpoint cannot be saved or
            loaded.
    """
    try:
        check_device(argv)
        with contextlib.ExitStack() as stack:
            flags = list(argv)
            if is_requested(argv):
                flags = stack.enter_context(
                    rehearse(
                        argv,
                        verbose=VERBOSE_FLAG in argv,
                        into_parser=own_parser,
                        supported=supported_on_cpu(argv),
                    )
                )
            install()
            stack.enter_context(_process_group_cleanup())
            yield flags
    except FlagError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Every rank raises this error, and only local rank 0 should print it. torchrun kills
            # all ranks when the first one exits, so the other ranks wait for rank 0 to print.
            time.sleep(_EXIT_DELAY_S)
        if VERBOSE_FLAG in argv:
            traceback.print_exception(error)
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except CheckpointError as error:
        # A rank may be the only one that raises it.
        if VERBOSE_FLAG in argv:
            traceback.print_exception(error)
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None


@contextlib.contextmanager
def _process_group_cleanup() -> Iterator[None]:
    try:
        yield
    except SystemExit as leaving:
        # Megatron raises SystemExit on all ranks at --exit-interval.
        if leaving.code in (None, 0):
            _destroy_process_groups()
        raise
    _destroy_process_groups()


def _destroy_process_groups() -> None:
    if dist.is_initialized():
        dist.barrier()
        deregister_all()
        dist.destroy_process_group()
