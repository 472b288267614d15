"""What a rehearsal prints: what the run says about itself, without the dump of every argument."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from megatron_fsdp_v2_mcore.rehearsal.patches import Patches


def quieten(patches: Patches) -> None:
    """Leave out Megatron's table of arguments and warnings about packages that need a GPU.

    Iteration lines, evaluation, checkpoints and errors are printed as ever.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    for name in ("megatron", "torch.distributed", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import megatron.training.arguments as arguments  # noqa: PLC0415 - megatron after the devices

    patches.set(arguments, "_print_args", _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
