"""Fenced blocks of the documentation, and how each block is run or checked.

A block needs a language. The language, or an HTML comment on the line before the fence, determines
how the block is checked:

    <!-- given: module:function -->    names a python block may use; the function runs on every rank
    <!-- output of: module:function -->    the text is the function's result on rank 0 of two
    <!-- read by: module:function -->    the function takes the path of a file with the block in it
    <!-- checked by: path::test -->    the test reads the page and runs the block
    <!-- not run: reason -->    the reason why the block is not run
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
        page: Path of the page, relative to the root of the tree.
        line: Number of the first line of code, from 1.
        language: First word after the fence.
        code: Text between the fences.
        markers: Comments directly before the block, by key.
    """

    page: str
    line: int
    language: str
    code: str
    markers: dict[str, str]

    @property
    def name(self) -> str:
        """Page and line of the block, for the id of a test."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Use:
    """The check of a block.

    Attributes:
        how: `python`, `program`, `shell`, `flags`, `data`, `read`, `output`, `checked`, `not run`,
            or `unknown`.
        detail: Value of the comment, or the problem.
    """

    how: str
    detail: str = ""


def blocks_in(page: str, text: str) -> list[Block]:
    """Return all fenced blocks of a page.

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
    """Return the blocks of all pages for users."""
    pages = [ROOT / name for name in ("README.md", "design.md", "CONTRIBUTING.md")]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    pages += sorted((ROOT / "adapters").glob("*/README.md"))
    found: list[Block] = []
    for page in pages:
        found += blocks_in(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    return found


def is_program(code: str) -> bool:
    """Return whether python code initializes a process group."""
    calls = [node.func for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    names = {getattr(called, "attr", getattr(called, "id", "")) for called in calls}
    return "init_process_group" in names


def use_of(block: Block) -> Use:
    """Return the check of a block; `unknown`, with advice, if there is none."""
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
