"""What `pretrain_gpt` and `run` do around a training: device check, rehearsal, install, exit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from megatron_fsdp_v2_mcore import FlagError, install
from megatron_fsdp_v2_mcore.rehearsal import VERBOSE_FLAG, check_device, is_requested, rehearse


@contextlib.contextmanager
def launch(argv: Sequence[str]) -> Iterator[list[str]]:
    """Set Megatron up for a training and clean up after it.

    Args:
        argv: The user's flags.

    Yields:
        The flags to give to Megatron.

    Raises:
        SystemExit: A flag cannot be honoured, or there is no device to run on; one sentence.
    """
    check_device(argv)
    with contextlib.ExitStack() as stack:
        flags = list(argv)
        if is_requested(argv):
            flags = stack.enter_context(rehearse(argv, verbose=VERBOSE_FLAG in argv))
        install()
        try:
            yield flags
        except FlagError as error:
            raise SystemExit(str(error)) from None
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
