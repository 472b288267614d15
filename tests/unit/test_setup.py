"""`make setup` in a small copy of the tree, with stubs of Python."""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT, ran

(NEWEST,) = ROOT.glob("constraints-torch-*.txt")
NEWEST_TORCH = NEWEST.stem.removeprefix("constraints-torch-")
DEPENDENCIES = ("pyproject.toml", "constraints.txt", "tools/rehearsal-packages.txt")
_TOOLS = "bash cat cksum cp dirname find mkdir rm sed sleep tail tee wc"
TOOLS = _TOOLS.split()

# Answers the calls of the script to an interpreter, and logs the installations.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
    *sysconfig*) mkdir -p "${{0%/*}}/packages"; echo "${{0%/*}}/packages" ;;
    *print*) echo "{version}" ;;
    *sys.exit*) exit {too_old} ;;
    "-m venv "*) mkdir -p "${{@: -1}}/bin"; cp "{itself}" "${{@: -1}}/bin/python" ;;
    *"pip install"*)
        echo "$*" >>"{calls}"
        echo "Collecting torch==2.11.0"
        exit {pip_status} ;;
esac
"""


class Tree:
    """A copy of the files that setup needs, with a PATH of a few tools and stubs of Python."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bin = home / "bin"
        self.calls = home / "calls"
        (home / "tools").mkdir(parents=True)
        self.bin.mkdir()
        for name in (*DEPENDENCIES, NEWEST.name, "tools/setup.sh"):
            shutil.copy(ROOT / name, home / name)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)

    def add_python(self, name: str, version: str, pip_status: int = 0) -> Path:
        fake = self.bin / name
        too_old = int(tuple(map(int, version.split("."))) < (3, 12))
        asked = {"version": version, "too_old": too_old, "pip_status": pip_status}
        fake.write_text(FAKE_PYTHON.format(itself=fake, calls=self.calls, **asked))
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        return fake

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        home = os.environ.get("HOME", "/")
        environment = {"PATH": str(self.bin), "HOME": home, **environment}
        return ran("bash", "tools/setup.sh", cwd=self.home, env=environment)

    @property
    def num_installs(self) -> int:
        return self.calls.read_text().count("--editable") if self.calls.exists() else 0


@pytest.fixture
def bare(tmp_path):
    """A tree without Python on its PATH."""
    return Tree(tmp_path / "tree")


@pytest.fixture
def tree(bare):
    bare.add_python("python3.12", "3.12.1")
    return bare


@pytest.mark.parametrize(
    ("found", "named", "said"),
    [
        ({}, None, "there is no python3 on PATH"),
        ({"python3": "3.11.7"}, None, r"no Python >= 3.12 was found (python3 is 3.11.7)"),
        ({"python3.12": "3.12.1", "python3.9": "3.9.2"}, "python3.9", "python3.9 is Python 3.9.2"),
    ],
    ids=["no Python", "an old Python", "an old Python is asked for"],
)
def test_without_a_new_enough_python_setup_ends_with_one_sentence(bare, found, named, said):
    for name, number in found.items():
        bare.add_python(name, number)
    asked = {"PYTHON": str(bare.bin / named)} if named else {}
    done = bare.setup(**asked)
    assert done.returncode != 0
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert said in done.stderr
    assert not (bare.home / ".venv").exists()


def _pinned(file: Path) -> dict[str, str]:
    pairs = (line.split("==") for line in file.read_text().splitlines() if "==" in line)
    return {name: version for name, version in pairs if not name.startswith("#")}


@pytest.mark.parametrize("name", DEPENDENCIES)
def test_only_a_changed_dependency_file_causes_another_installation(tree, name):
    tree.setup()
    assert "up to date" in tree.setup().stdout
    assert tree.num_installs == 1
    with (tree.home / name).open("a") as file:
        file.write("# changed\n")
    assert tree.setup().returncode == 0
    assert tree.num_installs == 2


def test_what_pretrain_needs_is_installed_first_and_the_rest_when_it_is_needed(tree):
    assert tree.setup(PARTS="pretrain").returncode == 0
    assert "mypy" not in (calls := tree.calls.read_text()) and ".[megatron,pretrain]" in calls
    assert "up to date" in tree.setup(PARTS="pretrain").stdout
    assert tree.setup().returncode == 0
    assert ".[megatron,pretrain,test,docs,plan]" in tree.calls.read_text()
    assert "up to date" in tree.setup(PARTS="pretrain").stdout
    assert tree.num_installs == 2
    assert "neither all nor pretrain" in tree.setup(PARTS="some").stderr


def test_an_environment_without_a_stamp_is_kept(tree):
    own = tree.home / ".venv" / "bin"
    own.mkdir(parents=True)
    shutil.copy(tree.bin / "python3.12", own / "python")
    (own / "mine").write_text("kept")
    done = tree.setup()
    assert done.returncode == 0, done.stderr
    assert "using the environment .venv" in done.stdout
    assert (own / "mine").read_text() == "kept"
    assert tree.num_installs == 1


def test_another_torch_has_a_separate_environment_and_pinned_packages(tree):
    assert tree.setup().returncode == 0
    assert tree.setup(TORCH=NEWEST_TORCH).returncode == 0
    default = _pinned(tree.home / ".venv/constraints.txt")
    other = _pinned(tree.home / f".venv-torch-{NEWEST_TORCH}/constraints.txt")
    assert default["torch"] != other["torch"] == NEWEST_TORCH
    # Only torch, triton and the packages of CUDA differ.
    differs = dict(default.items() ^ other.items()).keys()
    assert {name for name in differs if not name.startswith(("nvidia-", "cuda-"))} == {
        "torch",
        "triton",
    }
    assert {name for name in other if name not in default} <= _pinned(NEWEST).keys()
    # Creating one environment does not invalidate the other.
    assert "up to date" in tree.setup().stdout
    assert tree.num_installs == 2


def test_tested_versions_of_torch_are_the_oldest_and_newest_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [name for name in project["dependencies"] if name.startswith("torch")]
    oldest = _pinned(ROOT / "constraints.txt")["torch"].split(".")
    newest = NEWEST_TORCH.split(".")
    assert torch == f"torch>=2.{oldest[1]},<2.{int(newest[1]) + 1}"
    assert f"| PyTorch | 2.{oldest[1]} to 2.{newest[1]}" in (ROOT / "README.md").read_text()
    assert f"NEWEST_TORCH = {NEWEST_TORCH}\n" in (ROOT / "Makefile").read_text()


def test_failed_installation_shows_its_log_and_is_repeated(tree):
    tree.add_python("python3.12", "3.12.1", pip_status=1)
    done = tree.setup()
    assert done.returncode != 0
    assert "Collecting torch==2.11.0" in done.stderr
    tree.add_python("python3.12", "3.12.1")
    shutil.rmtree(tree.home / ".venv")
    assert tree.setup().returncode == 0


# Hides installed packages that are not dependencies from imports.
HIDE_UNDECLARED = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: (
    None if name.partition(".")[0] in {hidden!r} else find(name, *rest)
)
"""


def _name(requirement):
    """Return the normalized name of the package of a requirement."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


@pytest.mark.slow
def test_program_of_the_readme_needs_only_declared_dependencies(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left, needed = list(project["dependencies"]), {_name(project["name"])}
    while left:
        name = _name(left.pop())
        if name not in needed:
            needed.add(name)
            # Requirements of other Python versions or systems are not installed.
            with contextlib.suppress(PackageNotFoundError):
                left += [found for found in requires(name) or () if "extra ==" not in found]
    packages = packages_distributions().items()
    hidden = {package for package, owners in packages if needed.isdisjoint(map(_name, owners))}
    block = re.search(r"```python\n(# train\.py\n.*?)```", (ROOT / "README.md").read_text(), re.S)
    program = tmp_path / "train.py"
    program.write_text(HIDE_UNDECLARED.format(hidden=hidden) + block[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = ran(sys.executable, program, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "step 50: loss" in done.stdout


def test_commits_and_ci_run_the_commands_of_this_project() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    linted = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for tool in ("ruff check", "ruff format", "mypy", "lint-imports"):
        assert tool in linted
        assert any(tool in hook["entry"] for hook in hooks), tool
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["ci"]["steps"] if "run" in step] == [".ci/run"]
