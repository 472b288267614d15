"""Prints a case as a script that stands alone: torch and this package are all it needs."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.random.cases import Case, to_json

PARTS = ("cases.py", "models.py", "program.py")
"""What a case needs to run, in order of imports."""

HEAD = '''"""A failing case of the random differential test.

    torchrun --nproc-per-node {world_size} {name}

It compares a sharded model with a plain one after every event of `CASE`, and ends with status 1
and what it found, or with status 0 when there is nothing to find. {about}
"""

from __future__ import annotations

'''

TAIL = '''

# -- the case, and what runs it --------------------------------------------------------------------

CASE = r"""
{case}
"""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    outcome = run_case(from_json(CASE), folder[0])
    said = f"{{outcome.kind}} at event {{outcome.event}}\\n{{outcome.text}}"
    print(f"rank {{dist.get_rank()}}: {{said}}", flush=True)
    # Not an orderly end: where ranks went different ways there is no such thing.
    os._exit(outcome.kind != "same")


if __name__ == "__main__":
    main()
'''


def script_of(case: Case, name: str = "case.py", about: str = "") -> str:
    """The text of a script that runs a case.

    Args:
        case: The case.
        name: What the file will be called, for its own instructions.
        about: What was seen when it failed.
    """
    imports: dict[str, str] = {"os": "import os", "tempfile": "import tempfile"}
    bodies = []
    for part in PARTS:
        path = Path(__file__).parent / part
        found, body = _split(path.read_text())
        for known, line in found.items():
            if imports.setdefault(known, line) != line:
                raise RuntimeError(f"{path.name} means something else by {known}: {line}")
        bodies.append(f"# -- {path.stem} " + "-" * (93 - len(path.stem)) + "\n\n" + body.strip())
    lines = sorted(set(imports.values()), key=lambda line: (line.startswith("from"), line))
    return (
        HEAD.format(world_size=case.world_size, name=name, about=about)
        + "\n".join(lines)
        + "\n\n"
        + "\n\n\n".join(bodies)
        + TAIL.format(case=to_json(case))
    )


def _split(source: str) -> tuple[dict[str, str], str]:
    """What a module imports, its neighbors aside, by name; and the rest without its docstring."""
    lines = source.splitlines()
    imports = {}
    for number, statement in enumerate(ast.parse(source).body):
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        if is_import and not _is_neighbor(statement):
            for alias in statement.names:  # type: ignore[attr-defined]
                one = ast.parse(ast.unparse(statement)).body[0]
                one.names = [alias]  # type: ignore[attr-defined]
                imports[alias.asname or alias.name] = ast.unparse(one)
        if is_import or (number == 0 and isinstance(statement, ast.Expr)):
            for line in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
                lines[line] = ""
    return imports, "\n".join(lines)


def _is_neighbor(statement: ast.stmt) -> bool:
    module = statement.module if isinstance(statement, ast.ImportFrom) else ""
    return module == "__future__" or (module or "").startswith(str(__package__))
