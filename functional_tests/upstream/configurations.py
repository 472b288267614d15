"""Megatron-LM's functional configurations, as written by `take_over`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("configurations.txt")
EXAMPLES = Path(__file__).with_name("examples.txt")
"""Megatron-LM's examples of its own FSDP."""
_OTHERS = "other programs:"

PATH = "PATH"
"""Placeholder of a file name."""


@dataclass(frozen=True)
class Configuration:
    """The configuration of one or several of Megatron-LM's functional tests.

    Attributes:
        names: Folder and name of each test.
        flags: Values of each flag; empty for a switch.
    """

    names: tuple[str, ...]
    flags: Mapping[str, tuple[str, ...]]


def _blocks(file: Path) -> list[tuple[list[str], list[str]]]:
    """Return the unindented and the indented lines of each block."""
    blocks: list[tuple[list[str], list[str]]] = []
    for block in file.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        indented = [line.strip() for line in lines if line.startswith(" ")]
        blocks.append(([line for line in lines if not line.startswith(" ")], indented))
    return [block for block in blocks if block[0]]


def read(file: Path = FILE) -> list[Configuration]:
    """Return the distinct configurations of the functional tests or of `EXAMPLES`, in order."""
    return [
        Configuration(tuple(names), _flags(" ".join(lines)))
        for names, lines in _blocks(file)
        if names != [_OTHERS]
    ]


def _flags(text: str) -> dict[str, tuple[str, ...]]:
    flags: dict[str, tuple[str, ...]] = {}
    for word in shlex.split(text):
        if word.startswith("--"):
            name, flags[word] = word, ()
        else:
            flags[name] = (*flags[name], word)
    return flags
