"""The layer of `make test-clients` over the environment of these tests, made in a small copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.processes import ROOT, ran

FILES = ("tools/setup_clients.sh", "constraints.txt", "tests/clients/requirements.txt")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # What is there already is not looked for anywhere.
    (tmp_path / FILES[-1]).write_text(f"safetensors=={version('safetensors')}\n")
    return tmp_path


def _setup(tree: Path) -> subprocess.CompletedProcess[str]:
    return ran("bash", "tools/setup_clients.sh", cwd=tree)


@pytest.mark.functional
def test_a_layer_has_the_packages_below_and_the_project_and_is_made_once(tree: Path) -> None:
    (tree / ".venv").symlink_to(sys.prefix)
    done = _setup(tree)
    assert done.returncode == 0, done.stderr
    python = tree / ".venv-clients" / "bin" / "python"
    code = (
        "import sys; from importlib.util import find_spec; assert find_spec('torch'); "
        "assert find_spec('megatron_fsdp_v2_mcore'); print(sys.prefix)"
    )
    found = ran(python, "-c", code, cwd=tree, env={})
    assert found.stdout.strip() == str(tree / ".venv-clients"), found.stderr
    assert _setup(tree).stdout == "setup: .venv-clients is up to date\n"
    with (tree / FILES[-1]).open("a") as requirements:
        requirements.write("# changed\n")
    assert "is ready" in _setup(tree).stdout


def test_a_layer_over_nothing_is_one_sentence(tree: Path) -> None:
    done = _setup(tree)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "run 'make setup' first" in done.stderr
