"""The CPU rehearsal is of use to a program that has nothing else of this repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_in
from tests.mcore.command_line import (
    PRINTED,
    environment_of,
    launcher,
    printed_losses,
    run_each,
    torchrun,
)
from tests.mcore.flags import MODEL_FLAGS
from tests.mcore.trained import trained
from tests.ranks import RankPools

PAGE = ROOT / "adapters" / "megatron_cpu_rehearsal" / "README.md"
REHEARSAL = "megatron_cpu_rehearsal"
SCRIPT = str(ROOT / "tests" / "mcore" / "pretrain_as_megatron_does.py")
# To Python a module that is None cannot be imported.
ALONE = "import sys\nsys.modules.update(megatron_fsdp_v2=None, megatron_fsdp_v2_mcore=None)\n"


def _losses_of_the_page(num_ranks: int, path: Path) -> list[float]:
    done = subprocess.run(
        [*launcher(num_ranks), str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=path.parent,
        env=environment_of(PYTHONPATH=str(ROOT / "adapters")),
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"iteration (\d): loss ([\d.]+)", done.stdout)
    assert [number for number, _ in losses] == list("12345")
    return [float(loss) for _, loss in losses]


def test_the_program_of_the_page_trains(tmp_path: Path) -> None:
    (program,) = [b for b in blocks_in(PAGE.name, PAGE.read_text()) if b.language == "python"]
    path = tmp_path / "train.py"
    path.write_text(ALONE + program.code)
    on_two, on_one = _losses_of_the_page(2, path), _losses_of_the_page(1, path)
    # Both see the same eight sequences in an iteration.
    assert on_two == pytest.approx(on_one, abs=5e-6)
    assert on_two[-1] < on_two[0] - 0.1


def test_a_script_of_megatrons_trains_as_under_the_adapter(
    megatron: RankPools, tmp_path: Path
) -> None:
    assert REHEARSAL in PAGE.read_text(), "README.md says how the script is started"
    script = tmp_path / "script.py"
    script.write_text(f"{ALONE}import runpy\nrunpy.run_path({SCRIPT!r}, run_name='__main__')\n")
    run = torchrun(2, REHEARSAL, [str(script), *MODEL_FLAGS, "--train-iters", "4"])
    assert run.code == 0, run.output
    losses = printed_losses(trained(megatron, 2, "--train-iters 4").losses)
    assert run.losses == pytest.approx(losses, rel=1e-6 + PRINTED)


def test_what_cannot_run_on_a_cpu_is_one_sentence() -> None:
    command_lines = [[SCRIPT, *MODEL_FLAGS, "--profile"], ["--profile"], ["no_such_script.py"]]
    rejected, unnamed, missing = run_each(REHEARSAL, command_lines)
    assert rejected.code == 2
    said = "--profile cannot be used on a CPU: it records CUDA activity; leave it out"
    assert rejected.output.splitlines()[-1] == said
    assert unnamed.code == missing.code == 1
