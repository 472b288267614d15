"""The tables of docs/errors.md: every error message of the packages, read from their sources.

    python -m tools.error_index          # write them
    python -m tools.error_index --check  # exit code 1 if the page is out of date

Parts of a message that depend on the program are names in braces.
"""

from __future__ import annotations

import ast
import keyword
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tools.page_parts import with_part

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"

PACKAGES = {
    "megatron_fsdp_v2": "core",
    "adapters/megatron_fsdp_v2_mcore": "Megatron-Core",
    "adapters/megatron_fsdp_v2_for": "other frameworks",
    "adapters/megatron_fsdp_v2_cli": "command line",
    "adapters/megatron_fsdp_v2_patching": "patching",
    "adapters/megatron_fsdp_v2_trace": "timelines",
    "adapters/megatron_cpu_rehearsal": "CPU rehearsal",
}
"""Packages by folder, and what the page calls them."""


def messages(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Return the classes and messages of all errors that a module raises."""
    every = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    functions = {function.name: function for function in every}
    for function in every:
        for node in ast.walk(function):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                names, args = re.findall(r"\w+Error", ast.unparse(node.exc.func)), node.exc.args
                text = _text(args[-1], function, functions) if args else ""
                # Without its values, an error that passes on another one has hardly a word left.
                if names and len(re.sub(r"\{.*?\}", "", text)) > 12:
                    yield " or ".join(names), " ".join(text.split())


def _text(node: ast.expr, within: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> str:
    """Return the template of a message: values are names in braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, within, functions) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, within, functions) + _text(right, within, functions)
        case ast.Call(func=ast.Name(id=name)) if name in functions and name != within.name:
            called = functions[name]
            returned = [n.value for n in ast.walk(called) if isinstance(n, ast.Return)]
            texts = [_text(value, called, functions) for value in returned if value is not None]
            return max(texts, key=len, default=f"{{{name}}}")
        case ast.Name(id=name):
            for assigned in ast.walk(within):
                if isinstance(assigned, ast.Assign) and ast.unparse(assigned.targets[0]) == name:
                    value = assigned.value
                    if isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp):
                        return _text(value, within, functions) or f"{{{name}}}"
            return f"{{{name}}}"
        case ast.FormattedValue(value=value):
            return _text(value, within, functions)
    return _hole(node)


def _hole(node: ast.expr) -> str:
    """Return the last name of an expression, in braces."""
    text = ast.unparse(node)
    if "__name__" in text:
        return "{type}"
    names = [name for name in re.findall(r"[A-Za-z]\w*", text) if not keyword.iskeyword(name)]
    return f"{{{names[-1] if names else 'value'}}}"


def tables() -> str:
    """Return the tables, one for each room of the packages."""
    parts: list[str] = []
    for folder, title in PACKAGES.items():
        rooms: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT / folder)
            for found in messages(ast.parse(path.read_text())):
                files = rooms[_room(where)][found]
                if str(where) not in files:
                    files.append(str(where))
        for room, rows in sorted(rooms.items()):
            parts.append(f"### {title}: {room}\n\n| error | message | file |\n|---|---|---|")
            parts += [
                f"| {name} | {_cell(text)} | {', '.join(f'`{file}`' for file in files)} |"
                for (name, text), files in sorted(rows.items(), key=lambda row: row[0][::-1])
            ]
            parts[-1] += "\n"
    return "\n".join(parts)


def _room(path: Path) -> str:
    name = path.parts[0].removesuffix(".py").strip("_")
    return "package" if name == "init" else name


def _cell(text: str) -> str:
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)


def page() -> str:
    """Return the page with the current tables."""
    return with_part(PAGE.read_text(), "errors", tables())


def main(words: list[str]) -> int:
    """Write or check the page."""
    if words == ["--check"]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
