"""Files that pages name exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "design.md", "CONTRIBUTING.md", "NOTICE")),
    *sorted((ROOT / "docs").glob("*.md")),
]
_NAMED = re.compile(r"(?<![\w./*<$-])((?:\w+/)*\w+\.(?:py|toml|sh))(?![\w/*])")

# Of Megatron-LM, and of a user.
OTHERS = {"pretrain_gpt.py", "pretrain_hybrid.py", "gpt_builders.py", "hybrid_layer_specs.py"}
OTHERS |= {"train.py", "your_script.py"}


def _files() -> set[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {f"/{name}" for name in found.splitlines() if (ROOT / name).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    files, text = _files(), re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = {name for name in _NAMED.findall(text) if name.rpartition("/")[2] not in OTHERS}
    missing = [n for n in named if not any(file.endswith(f"/{n}") for file in files)]
    assert not missing, f"{page.name} names files that do not exist: {sorted(missing)}"
