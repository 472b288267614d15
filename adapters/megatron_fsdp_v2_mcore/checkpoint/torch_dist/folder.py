"""A folder of a checkpoint that Megatron wrote, or that was written for it.

What is not a tensor in it is made of plain data and the few classes that Megatron saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, override

from megatron.core.safe_globals import SAFE_GLOBALS

from megatron_fsdp_v2.checkpoint import torch_files
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2_mcore.flags.checkpoint_check import flag_errors

__all__ = ["MegatronFolder", "ReadRequest", "load_plain"]


class MegatronFolder(CheckpointFolder):
    """A folder of torch's distributed checkpoint, whose errors are those of a command line.

    Args:
        path: The folder; `checkpoint_check` has looked at it.

    Raises:
        FlagError: From any method, what is `CheckpointError` in the core.
    """

    def __init__(self, path: Path) -> None:
        with flag_errors():
            super().__init__(path, SAFE_GLOBALS)

    @override
    def object(self, key: str) -> Any:
        with flag_errors():
            return super().object(key)

    @override
    def read_tensor(self, key: str) -> Any:
        with flag_errors():
            return super().read_tensor(key)

    @override
    def fill(self, wanted: Sequence[ReadRequest]) -> list[int]:
        with flag_errors():
            return super().fill(wanted)


def load_plain(file: Any, what: str) -> Any:
    """Load plain data: numbers, containers, tensors and the few classes Megatron saves.

    Args:
        file: What `torch.save` wrote.
        what: What to call it in an error.

    Raises:
        FlagError: It holds something else.
    """
    with flag_errors():
        return torch_files.load_plain(file, what, SAFE_GLOBALS)
