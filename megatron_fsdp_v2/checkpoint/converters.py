"""Formats of other programs that `ckpt convert --to NAME` writes; adapters bring them.

An entry point of the group `megatron_fsdp_v2.checkpoint_converters` is named as the format and
resolves to a `Converter`. It is imported when a command line names it and not before.
"""

from __future__ import annotations

import argparse
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol, cast

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

__all__ = ["CONVERTER_GROUP", "Converter", "converter_names", "find_converter"]

CONVERTER_GROUP = "megatron_fsdp_v2.checkpoint_converters"


class Converter(Protocol):
    """Writes checkpoints of one format."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the format; source and target are there."""

    def run(self, source: Path, target: Path, args: argparse.Namespace) -> int:
        """Convert, and say what was done on standard output.

        Args:
            source: What to read.
            target: What to write.
            args: The command line with this format's options.

        Returns:
            The exit status; 2 with one sentence on standard error where it cannot be done.
        """
        ...


def converter_names() -> list[str]:
    """Formats that installed packages offer, without importing any."""
    return sorted(_points())


def find_converter(name: str) -> Converter:
    """Import the converter to a format.

    Args:
        name: One of `converter_names()`.

    Raises:
        CheckpointError: No package offers it, or something that it imports is missing.
    """
    point = _points().get(name)
    if point is None:
        known = ", ".join(converter_names()) or "none: no installed package offers one"
        raise CheckpointError(f"no format is called {name!r}; known are {known}")
    try:
        return cast(Converter, point.load())
    except ImportError as error:
        missing = error.name or str(error)
        raise CheckpointError(
            f"the format {name} needs {missing}, which cannot be imported: install this package "
            "with its extra, megatron-fsdp-v2[megatron]"
        ) from error


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=CONVERTER_GROUP)}
