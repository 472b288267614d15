"""Is there a whole `fsdp_dtensor` checkpoint in a folder? Asked before anything is built.

Megatron starts from scratch where it finds nothing, and fails deep inside torch where a file is
cut short. A run that was told to resume should say so in its first second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint import metadata as core
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.metadata import METADATA
from megatron_fsdp_v2.checkpoint.trust import read_json
from megatron_fsdp_v2_mcore.flags.errors import FlagError

__all__ = [
    "CONFIG",
    "RELEASE",
    "TRACKER",
    "check_checkpoint_folder",
    "find_checkpoint",
    "flag_errors",
    "is_torch_dist",
    "read_metadata",
    "reject_gpt_layers",
]

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "metadata.json"
"""Where Megatron says in which format a checkpoint was saved."""

_MAX_DIGITS = 18

RELEASE = "release"
"""What that file says, and the folder is called, where weights are of no iteration."""


def check_checkpoint_folder(
    folder: str | Path, *, may_be_empty: bool, iteration: int | None = None
) -> None:
    """Find out whether a folder holds a complete `fsdp_dtensor` checkpoint.

    Args:
        folder: What `--load` names.
        may_be_empty: Whether nothing at all is fine: `--load` and `--save` of one folder mean
            "resume if there is something".
        iteration: The iteration asked for; the latest when None.

    Raises:
        FlagError: There is none, or it is not complete; says what is wrong.
    """
    root = Path(folder)
    tracker = root / TRACKER
    if not tracker.is_file():
        if may_be_empty and iteration is None:
            return
        state = "is empty of checkpoints" if root.is_dir() else "does not exist"
        raise FlagError(
            f"--load {folder} {state} (no {TRACKER}); name the folder a run saved to with --save"
        )
    if iteration is None:
        iteration = _tracked_iteration(tracker)
    if iteration is None:
        return
    path = iteration_folder(root, iteration)
    if not path.is_dir():
        raise FlagError(f"--load {folder} has no checkpoint of iteration {iteration} ({path.name})")
    _check_dcp_folder(path)


def _tracked_iteration(tracker: Path) -> int | None:
    text = tracker.read_text().strip()
    if text == RELEASE:
        return None
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise FlagError(f"{tracker} should hold an iteration number, it holds {text[:40]!r}")
    return int(text)


def find_checkpoint(folder: str | Path, iteration: int | None = None) -> tuple[Path, int] | None:
    """The folder and the iteration of a checkpoint; None where Megatron would find none.

    Args:
        folder: What `--load` names.
        iteration: The iteration asked for; the latest when None.

    Returns:
        The iteration is 0 for a release, which has none.
    """
    root = Path(folder)
    if iteration is None:
        tracker = root / TRACKER
        if not tracker.is_file():
            return None
        iteration = _tracked_iteration(tracker)
    return (
        (root / RELEASE, 0) if iteration is None else (iteration_folder(root, iteration), iteration)
    )


def is_torch_dist(path: Path) -> bool:
    """Whether a checkpoint was saved with `--ckpt-format torch_dist`."""
    try:
        config = read_json((path / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return config.get("sharded_backend") == "torch_dist"


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where Megatron keeps the checkpoint of an iteration."""
    return root / f"iter_{iteration:07d}"


def read_metadata(path: Path) -> Metadata:
    """Read the metadata of a folder of torch's distributed checkpoint, and run nothing in it.

    Args:
        path: The folder of one iteration.

    Raises:
        FlagError: There is none, it cannot be read, or it refers to anything but metadata.
    """
    if path.is_dir() and not (path / METADATA).is_file():
        found = listed(sorted(p.name for p in path.iterdir()), 4) or "nothing"
        raise FlagError(
            f"{path} is not an fsdp_dtensor checkpoint, or its save was cut short: it has no "
            f"{METADATA}, only {found}"
        )
    with flag_errors():
        return core.read_metadata(path)


def reject_gpt_layers(path: str | Path, layer_maps: object) -> None:
    """Refuse to load the layers of a GPT model into a hybrid one.

    Args:
        path: The checkpoint.
        layer_maps: What Megatron derived to rename them by; None where nothing is to be renamed.

    Raises:
        FlagError: There is something to rename.
    """
    if layer_maps is not None:
        raise FlagError(
            f"--load {path} holds a GPT model and --hybrid-layer-pattern builds a hybrid one; "
            "convert the checkpoint first, it is not done while loading"
        )


@contextlib.contextmanager
def flag_errors() -> Iterator[None]:
    """Say what is wrong with a checkpoint as an error of the command line that names it."""
    try:
        yield
    except CheckpointError as error:
        raise FlagError(str(error)) from error


def _check_dcp_folder(path: Path) -> None:
    needed = core.needed_bytes(read_metadata(path))
    for name, nbytes in needed.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            raise FlagError(f"{path} is incomplete: {name} is missing")
        if size < nbytes:
            raise FlagError(f"{path} is truncated: {name} has {size} of {nbytes} bytes")
