"""Fenced blocks of the documentation: where they are, and how each of them is run or checked.

A block needs a language. What is done with it follows from the language, or from a comment on the
line before the fence, which no reader sees:

    <!-- given: module:function -->    names a python block may use; the function runs on every rank
    <!-- output of: module:function -->    the text is what the function returns on rank 0 of two
    <!-- read by: module:function -->    the function takes the path of a file with the block in it
    <!-- checked by: path::test -->    the test reads the page and runs the block
    <!-- not run: reason -->    a reason that a reader would accept
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from tests.processes import ROOT

__all__ = ["ROOT", "Block", "Use", "blocks_in", "documented", "use_of"]


_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})\s*(?P<info>[^`]*)$")
_MARKER = re.compile(r"^\s*<!--\s*(?P<key>[a-z ]+?)\s*:\s*(?P<value>.*?)\s*-->\s*$")
_SHELL = ("bash", "sh", "shell", "console")
_DATA = ("json", "toml")
_HOW = {"not run": "not run", "checked by": "checked", "output of": "output", "read by": "read"}
_KEYS = ("given", *_HOW)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: Path of its page, relative to the root of the tree.
        line: Line of its first line of code, counted from 1.
        language: First word after the fence.
        code: What is between the fences.
        markers: Comments right before the block, by key.
    """

    page: str
    line: int
    language: str
    code: str
    markers: dict[str, str]

    @property
    def name(self) -> str:
        """Where the block is, for the id of a test."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Use:
    """What is done with a block.

    Attributes:
        how: `python`, `program`, `shell`, `flags`, `data`, `read`, `output`, `checked`, `not run`,
            or `unknown`.
        detail: The marker's value, or what is wrong.
    """

    how: str
    detail: str = ""


def blocks_in(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page.

    Raises:
        ValueError: A block is not closed.
    """
    found: list[Block] = []
    markers: dict[str, str] = {}
    opened: re.Match[str] | None = None
    lines: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence is not None:
                opened, start, lines = fence, number + 1, []
            elif (marker := _MARKER.match(line)) is not None:
                markers[marker["key"]] = marker["value"]
            elif line.strip():
                markers = {}
            continue
        closes = fence is not None and fence["fence"].startswith(opened["fence"])
        if not closes or (fence is not None and fence["info"].strip()):
            lines.append(line.removeprefix(opened["indent"]))
            continue
        language = (opened["info"].split() or [""])[0]
        code = "".join(f"{kept}\n" for kept in lines)
        found.append(Block(page, start, language, code, markers))
        opened, markers = None, {}
    if opened is not None:
        raise ValueError(f"{page}:{start}: the block is not closed")
    return found


def documented() -> list[Block]:
    """The blocks of everything a user reads."""
    pages = [ROOT / name for name in ("README.md", "design.md", "CONTRIBUTING.md")]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    pages += sorted((ROOT / "adapters").glob("*/README.md"))
    found: list[Block] = []
    for page in pages:
        found += blocks_in(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    return found


def is_program(code: str) -> bool:
    """Whether python code starts its own process group."""
    calls = [node.func for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    names = {getattr(called, "attr", getattr(called, "id", "")) for called in calls}
    return "init_process_group" in names


def use_of(block: Block) -> Use:
    """How a block is run; `unknown`, with what to do about it, where there is no way."""
    wrong = [key for key in block.markers if key not in _KEYS]
    if wrong:
        return Use("unknown", f"no such comment: {wrong[0]!r}; there are {', '.join(_KEYS)}")
    for key in (key for key in _HOW if key in block.markers):
        value = block.markers[key]
        if key == "not run" and len(value.split()) < 3:
            return Use("unknown", f"{value!r} is no reason that a reader would accept")
        return Use(_HOW[key], value)
    if block.language == "python":
        try:
            return Use("program" if is_program(block.code) else "python")
        except SyntaxError as error:
            return Use("unknown", f"not Python: {error}")
    if block.language in _SHELL:
        return Use("flags" if block.code.lstrip().startswith("--") else "shell")
    if block.language in _DATA:
        return Use("data")
    if not block.language:
        return Use("unknown", "name its language after the fence")
    return Use(
        "unknown",
        f"nobody knows how to check a {block.language!r} block: put a comment before it, "
        "such as <!-- output of: module:function --> or <!-- not run: reason -->",
    )
