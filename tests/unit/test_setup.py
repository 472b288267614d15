"""`make setup`, run in a small copy of the tree with stand-ins for Python."""

import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("awk", "bash", "cat", "cksum", "cp", "dirname", "mkdir", "rm", "sed", "tail", "tee")

# Answers what the script asks of an interpreter, and notes what it was asked to install.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
    *print*) echo "{version}" ;;
    *sys.exit*) exit {too_old} ;;
    "-m venv "*) mkdir -p "${{@: -1}}/bin"; cp "{itself}" "${{@: -1}}/bin/python" ;;
    *"pip install"*)
        echo "$*" >>"{calls}"
        echo "Collecting torch==2.11.0"
        echo "  Downloading somewhere/torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl (530.1 MB)"
        echo "  Downloading somewhere/tiny-1.0-py3-none-any.whl (12 kB)"
        echo "Installing collected packages: tiny, torch"
        exit {pip_status} ;;
esac
"""


class Tree:
    """A copy of what set-up needs, with a PATH that holds nothing but stand-ins."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bin = home / "bin"
        self.calls = home / "calls"
        (home / "tools").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("pyproject.toml", "constraints.txt", "tools/setup.sh"):
            shutil.copy(ROOT / name, home / name)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)

    def add_python(self, name: str, version: str, pip_status: int = 0) -> Path:
        fake = self.bin / name
        too_old = int(tuple(map(int, version.split("."))) < (3, 12))
        fake.write_text(
            FAKE_PYTHON.format(
                version=version,
                too_old=too_old,
                itself=fake,
                calls=self.calls,
                pip_status=pip_status,
            )
        )
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        return fake

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "tools/setup.sh"],
            cwd=self.home,
            env={"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/"), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def num_installs(self) -> int:
        return self.calls.read_text().count("--editable") if self.calls.exists() else 0


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "tree")


def test_without_a_new_enough_python_setup_ends_with_one_sentence(tree):
    tree.add_python("python3", "3.11.7")
    done = tree.setup()
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no Python >= 3.12 was found (python3 is 3.11.7)" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (tree.home / ".venv").exists()


def test_without_any_python_setup_ends_with_one_sentence(tree):
    done = tree.setup()
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "there is no python3 on PATH" in done.stderr


def test_a_named_python_that_is_too_old_is_refused_even_if_another_would_do(tree):
    tree.add_python("python3.12", "3.12.4")
    old = tree.add_python("python3.9", "3.9.2")
    done = tree.setup(PYTHON=str(old))
    assert done.returncode != 0
    assert f"PYTHON={old} is Python 3.9.2" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["python3.12", "python3.13", "python3", "python"])
def test_any_new_enough_python_is_found_behind_an_old_one(tree, name):
    tree.add_python("python3", "3.11.7")
    tree.add_python(name, "3.12.1")
    done = tree.setup()
    assert done.returncode == 0, done.stderr
    assert f"creating .venv with {name} (Python 3.12.1)" in done.stdout


def test_a_second_setup_installs_nothing_and_takes_less_than_a_second(tree):
    tree.add_python("python3.12", "3.12.1")
    assert tree.setup().returncode == 0
    assert tree.num_installs == 1
    started = time.monotonic()
    done = tree.setup()
    assert time.monotonic() - started < 1.0
    assert done.returncode == 0
    assert "up to date" in done.stdout
    assert tree.num_installs == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_dependency_file_installs_again(tree, name):
    tree.add_python("python3.12", "3.12.1")
    tree.setup()
    with (tree.home / name).open("a") as file:
        file.write("# changed\n")
    assert tree.setup().returncode == 0
    assert tree.num_installs == 2


def test_an_environment_without_a_stamp_is_adopted_and_not_made_anew(tree):
    fake = tree.add_python("python3.12", "3.12.1")
    own = tree.home / ".venv" / "bin"
    own.mkdir(parents=True)
    shutil.copy(fake, own / "python")
    (own / "mine").write_text("kept")
    done = tree.setup()
    assert done.returncode == 0, done.stderr
    assert "using the environment .venv" in done.stdout
    assert (own / "mine").read_text() == "kept"
    assert tree.num_installs == 1


def test_everything_is_installed_under_the_constraints_with_all_extras(tree):
    tree.add_python("python3.12", "3.12.1")
    tree.setup()
    call = next(line for line in tree.calls.read_text().splitlines() if "--editable" in line)
    assert "--constraint constraints.txt" in call
    assert ".[megatron,test,docs]" in call


def test_progress_names_large_files_and_never_where_they_come_from(tree):
    tree.add_python("python3.12", "3.12.1")
    done = tree.setup()
    assert "setup:   torch-2.11.0 (530.1 MB)\n" in done.stdout
    assert "unpacking 2 packages" in done.stdout
    assert "somewhere" not in done.stdout
    assert "tiny" not in done.stdout


def test_a_failed_installation_shows_its_log_and_is_not_taken_for_done(tree):
    tree.add_python("python3.12", "3.12.1", pip_status=1)
    done = tree.setup()
    assert done.returncode != 0
    assert "Collecting torch==2.11.0" in done.stderr
    tree.add_python("python3.12", "3.12.1")
    shutil.rmtree(tree.home / ".venv")
    assert tree.setup().returncode == 0


def test_another_place_can_be_named(tree):
    tree.add_python("python3.12", "3.12.1")
    assert tree.setup(VENV="elsewhere/venv").returncode == 0
    assert (tree.home / "elsewhere" / "venv" / "bin" / "python").exists()
    assert not (tree.home / ".venv").exists()
