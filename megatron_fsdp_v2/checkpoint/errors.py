"""Errors of checkpoints, and raising them on all ranks."""

from __future__ import annotations

import contextlib
import errno
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from megatron_fsdp_v2._text import shortened

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not become that long",
}


_MOST_CHARACTERS = 4000


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, damaged, of another model or not to be trusted.

    Args:
        message: What is wrong. A long one, with names of a file, is shortened.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, _MOST_CHARACTERS))


class NotFoundError(CheckpointError):
    """There is nothing at a path, a folder of checkpoints, or no checkpoint at all."""


class NotPlainError(CheckpointError):
    """An object in a checkpoint is not plain data: to load it could run code."""


class ReplacedError(CheckpointError):
    """Raised when another save replaces a checkpoint while a reader has it open."""


def warn(message: str) -> None:
    """Issue a warning that names the first line of the call stack outside this folder."""
    warnings.warn(message, skip_file_prefixes=(str(Path(__file__).parent),))


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Raise an error that names a full disk if that is the cause of an error.

    `torch.save` raises "unexpected pos 704 vs 598" where a write fails, and hides the cause.

    Args:
        path: The file or folder that is written.

    Raises:
        OSError: The disk is full, or a limit on the length of files is reached.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            number = os_error_number(cause)
            if number in _FULL:
                raise OSError(number, _FULL[number], str(path)) from error
            cause = cause.__cause__ or cause.__context__
        raise


def os_error_number(error: BaseException) -> int | None:
    """Return the number of an error of the operating system; None for another error."""
    if isinstance(error, OSError):
        return error.errno
    # Errors of safetensors, a library in Rust, have the number in their text only.
    said = re.search(r"os error (\d+)", str(error))
    return None if said is None else int(said[1])


def all_ranks_or_raise[T](
    what: str,
    do: Callable[[], T],
    undo: Callable[[], object] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Call a function on every rank; if it raises on one, raise on all. Collective.

    Args:
        what: What it does, for the sentence "rank 3 could not ...".
        do: The function; it may raise on some ranks only.
        undo: Called on every rank if it raised on one.
        group: The ranks; None for all.

    Returns:
        The value of `do` on this rank.

    Raises:
        Exception: What `do` raised on this rank.
        CheckpointError: `do` raised on another rank.
    """
    result: Any = None
    problem: Exception | None = None
    try:
        result = do()
    except Exception as error:
        problem = error
    said = everyones(None if problem is None else f"{type(problem).__name__}: {problem}", group)
    failed = next((rank for rank, text in enumerate(said) if text is not None), None)
    if failed is None:
        return cast(T, result)
    if undo is not None:
        undo()
    if problem is not None:
        raise problem
    rank = dist.get_process_group_ranks(group)[failed]
    raise CheckpointError(f"rank {rank} could not {what}: {said[failed]}")


def everyones[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather a value from every rank of a group (None: of the job), in its order. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
