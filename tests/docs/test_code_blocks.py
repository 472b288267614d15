"""Code blocks of all pages are run, checked, or state why not; files that pages name exist."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, documented, use_of
from tests.docs.running import load, run_page
from tests.docs.shell import check, check_flags, commands_of, typed_lines
from tests.processes import ran
from tests.ranks import RankPools

BLOCKS = documented()


def _blocks_by_use(*how: str) -> list[Block]:
    return [block for block in BLOCKS if use_of(block).how in how]


def test_every_block_is_run_or_checked() -> None:
    unknown = [f"{block.name}: {use_of(block).detail}" for block in _blocks_by_use("unknown")]
    assert not unknown, "\n".join(unknown)
    assert len(BLOCKS) > 30


PYTHON = _blocks_by_use("python")


@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in PYTHON))
def test_python_blocks_of_a_page_run_in_order(page: str, pools: RankPools, tmp_path: Path) -> None:
    blocks = [block for block in PYTHON if block.page == page]
    run = [(b.page, b.line, b.code, b.markers.get("given", "")) for b in blocks]
    pools(2).run(run_page, run, str(tmp_path))


@pytest.mark.functional
@pytest.mark.parametrize("block", _blocks_by_use("program"), ids=lambda block: block.name)
def test_complete_programs_train_under_torchrun(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(block.code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = ran(sys.executable, *launcher, path, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses[-1] < losses[0] / 3


@pytest.mark.parametrize("block", _blocks_by_use("shell"), ids=lambda block: block.name)
def test_programs_accept_documented_commands(block: Block) -> None:
    typed = typed_lines(block.language, block.code)
    is_all = len(typed.splitlines()) == len(block.code.splitlines())
    assert is_all, "a comment must name what checks the output that the block shows"
    commands = commands_of(typed)
    assert commands, "nothing is called"
    for command in commands:
        check(command)


@pytest.mark.parametrize("block", _blocks_by_use("flags"), ids=lambda block: block.name)
def test_flag_blocks_are_accepted_by_megatron(block: Block) -> None:
    (command,) = commands_of(f"torchrun {block.code.lstrip()}")
    check_flags(command[1:])


@pytest.mark.parametrize("block", _blocks_by_use("output"), ids=lambda block: block.name)
def test_output_blocks_match_the_output_of_their_functions(block: Block, pools: RankPools) -> None:
    written = pools(2).run(load(use_of(block).detail))[0]
    assert block.code.strip("\n") == written.strip("\n")


@pytest.mark.parametrize("block", _blocks_by_use("data", "read"), ids=lambda block: block.name)
def test_file_blocks_can_be_read(block: Block, tmp_path: Path) -> None:
    path = tmp_path / f"shown.{block.language}"
    path.write_text(block.code)
    if "read by" in block.markers:
        load(block.markers["read by"])(str(path))
    else:
        {"json": json.loads, "toml": tomllib.loads}[block.language](block.code)


@pytest.mark.parametrize("block", _blocks_by_use("checked"), ids=lambda block: block.name)
def test_tests_that_blocks_name_exist_and_read_the_page(block: Block) -> None:
    file, _, test = use_of(block).detail.partition("::")
    code = (ROOT / file).read_text()
    assert re.search(rf"^def {re.escape(test)}\(", code, re.MULTILINE)
    assert Path(block.page).name in code


# -- files that pages name ------------------------------------------------------------------------

PAGES = [
    *(ROOT / name for name in ("README.md", "design.md", "CONTRIBUTING.md", "NOTICE")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "adapters").glob("*/README.md")),
]
_NAMED = re.compile(r"(?<![\w./*<$-])((?:\w+/)*\w+\.(?:py|toml|sh))(?![\w/*])")

# Files of Megatron-LM and of users.
EXTERNAL = {"pretrain_gpt.py", "pretrain_hybrid.py", "gpt_builders.py", "hybrid_layer_specs.py"}
EXTERNAL |= {"train.py", "your_script.py"}


@functools.cache
def _files() -> set[str]:
    found = ran("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout
    return {f"/{name}" for name in found.splitlines() if (ROOT / name).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    files, text = _files(), re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = {name for name in _NAMED.findall(text) if name.rpartition("/")[2] not in EXTERNAL}
    missing = [n for n in named if not any(file.endswith(f"/{n}") for file in files)]
    assert not missing, f"{page.name} names files that do not exist: {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z][\w-]*)", page.read_text()))
    assert named <= targets, f"{page.name} names commands that do not exist"
