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
    imports, bodies = ["import os", "import tempfile"], []
    for part in PARTS:
        path = Path(__file__).parent / part
        found, body = _split(path.read_text())
        imports += found
        bodies.append(f"# -- {path.stem} " + "-" * (93 - len(path.stem)) + "\n\n" + body.strip())
    plain = sorted({line for line in imports if line.startswith("import ")})
    others = sorted({line for line in imports if line.startswith("from ")})
    head = HEAD.format(world_size=case.world_size, name=name, about=about)
    return (
        head
        + "\n".join([*plain, *others])
        + "\n\n"
        + "\n\n\n".join(bodies)
        + TAIL.format(case=to_json(case))
    )


def _split(source: str) -> tuple[list[str], str]:
    """The imports of a module that are not of its neighbors, and the rest without its docstring."""
    tree = ast.parse(source)
    lines = source.splitlines()
    imports = []
    for number, statement in enumerate(tree.body):
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        if is_import:
            text = ast.unparse(statement)
            if not text.startswith(("from __future__", f"from {__package__}")):
                imports.append(text)
        if is_import or (number == 0 and isinstance(statement, ast.Expr)):
            for line in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
                lines[line] = ""
    return imports, "\n".join(lines)
