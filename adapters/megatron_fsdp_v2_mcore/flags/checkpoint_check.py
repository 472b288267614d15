"""Checks at startup that a folder contains a complete `fsdp_dtensor` checkpoint.

Without these checks, Megatron starts from scratch if it finds no checkpoint, and fails inside torch
after building the model if a file is truncated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_fsdp_v2.checkpoint.errors import CheckpointError, NotPlainError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.manifest import read_json
from megatron_fsdp_v2_mcore.flags.errors import FlagError

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "metadata.json"
"""File in which Megatron records the format of a checkpoint."""

_MAX_DIGITS = 18

RELEASE = "release"
"""Content of the tracker, and name of the folder, of a release: weights without an iteration."""


def choose_checkpoint(args: Any) -> None:
    """Load `--pretrained-checkpoint` with `--finetune`, if `--load` has no checkpoint.

    Megatron does so too, but after it has chosen what to read of an `fsdp_dtensor` checkpoint.

    Args:
        args: Megatron's arguments before their validation; `load` and `finetune` may change.

    Raises:
        FlagError: Neither folder has a complete checkpoint.
    """
    pretrained = args.pretrained_checkpoint
    if pretrained is None or (args.load is not None and (Path(args.load) / TRACKER).is_file()):
        return
    check_checkpoint_folder(
        pretrained,
        may_be_empty=False,
        iteration=args.ckpt_step,
        flag="--pretrained-checkpoint",
    )
    args.load, args.finetune = pretrained, True


def check_checkpoint_folder(
    folder: str | Path, *, may_be_empty: bool, iteration: int | None = None, flag: str = "--load"
) -> None:
    """Check that a folder contains a complete `fsdp_dtensor` checkpoint.

    Args:
        folder: The argument of the flag.
        may_be_empty: Whether a folder without checkpoints is accepted: `--load` and `--save` of the
            same folder resume only if it has a checkpoint.
        iteration: The iteration to load; the latest if None.
        flag: The flag that names the folder.

    Raises:
        FlagError: The checkpoint does not exist or is incomplete. The message names the problem.
    """
    root = Path(folder)
    if not (root / TRACKER).is_file():
        if may_be_empty and iteration is None:
            return
        state = "has no checkpoints" if root.is_dir() else "does not exist"
        raise FlagError(
            f"{flag} {folder} {state} (no {TRACKER}); pass the folder that a run named with --save"
        )
    found = find_checkpoint(root, iteration)
    if found is None or found[0].name == RELEASE:
        return
    path, iteration = found
    if not path.is_dir():
        raise FlagError(f"{flag} {folder} has no checkpoint of iteration {iteration} ({path.name})")
    with flag_errors():
        opened = CheckpointFolder(path)
        for name in opened.lengths:
            opened.check_file(name)


def find_checkpoint(folder: str | Path, iteration: int | None = None) -> tuple[Path, int] | None:
    """Find the folder and the iteration of a checkpoint.

    Args:
        folder: The argument of `--load`.
        iteration: The iteration to load; the latest if None.

    Returns:
        The folder of the iteration and its number, which is 0 for a release; None if Megatron
        would not find a checkpoint.

    Raises:
        FlagError: The file that names the latest iteration contains something else.
    """
    root = Path(folder)
    if iteration is None:
        tracker = root / TRACKER
        if not tracker.is_file():
            return None
        text = tracker.read_bytes().decode(errors="replace").strip()
        if text == RELEASE:
            return root / RELEASE, 0
        if not text.isdecimal() or len(text) > _MAX_DIGITS:
            raise FlagError(f"{tracker} must contain an iteration number, got {text[:40]!r}")
        iteration = int(text)
    return iteration_folder(root, iteration), iteration


def is_torch_dist(path: Path) -> bool:
    """Whether a checkpoint was saved with `--ckpt-format torch_dist`."""
    try:
        config = read_json((path / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return config.get("sharded_backend") == "torch_dist"


def iteration_folder(root: str | Path, iteration: int) -> Path:
    """Return the folder in which Megatron saves the checkpoint of an iteration."""
    return Path(root) / f"iter_{iteration:07d}"


def reject_gpt_layers(path: str | Path, layer_maps: object) -> None:
    """Reject a checkpoint of a GPT model for a hybrid model.

    Args:
        path: The checkpoint.
        layer_maps: The renaming of layers that Megatron derived; None if no layer is renamed.

    Raises:
        FlagError: Layers would have to be renamed.
    """
    if layer_maps is not None:
        raise FlagError(
            f"--load {path} contains a GPT model and --hybrid-layer-pattern builds a hybrid one; "
            "convert the checkpoint before loading it"
        )


@contextlib.contextmanager
def flag_errors() -> Iterator[None]:
    """Convert a `CheckpointError` to a `FlagError`, since a flag names the checkpoint."""
    try:
        yield
    except NotPlainError as error:
        raise FlagError(
            f"{error}; if you trust who saved it, add --fsdp-trust-checkpoint, which runs any code "
            "that the checkpoint names"
        ) from error
    except CheckpointError as error:
        raise FlagError(str(error)) from error
