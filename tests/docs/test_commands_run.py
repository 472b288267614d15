"""The commands for a cluster, as printed, run on two ranks of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.blocks import Block, documented, use_of
from tests.docs.shell import commands_of, typed_lines
from tests.mcore.command_line import Run, torchrun
from tests.mcore.session import MODEL_FLAGS
from tests.processes import ROOT, ran

pytestmark = pytest.mark.functional

_SCRIPT = "tests/mcore/pretrain_as_megatron_does.py"
_ADAPTER = "megatron_fsdp_v2_mcore."


# Those that start one of the adapter's modules with torchrun.
LAUNCHES = [b for b in documented() if use_of(b).how == "shell" and f"-m {_ADAPTER}" in b.code]


@pytest.mark.parametrize("block", LAUNCHES, ids=lambda block: block.name)
def test_a_command_for_a_cluster_trains_as_printed(block: Block, tmp_path: Path) -> None:
    folder = tmp_path / "shell"
    folder.mkdir()
    typed = typed_lines(block.language, block.code)
    (command,) = [c for c in commands_of(typed, folder) if c[0] == "torchrun"]
    module = next(word for word in command if word.startswith(_ADAPTER))
    words = [word for word in command[command.index(module) + 1 :] if word != "..."]
    flags = [str(tmp_path / "saved") if w == "/shared/checkpoints" else w for w in words]
    flags = [_SCRIPT if w == "your_script.py" else w for w in flags]
    more = ["--train-iters", "2", "--save-interval", "2", "--cpu-rehearsal"]
    done: Run = torchrun(2, module, [*flags, *MODEL_FLAGS, *more])
    assert done.code == 0, done.output[-3000:]
    assert sorted(done.losses) == [1, 2]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_the_program_of_the_readme_trains_under_torchrun_and_resumes_nothing(
    tmp_path: Path,
) -> None:
    (block,) = [b for b in documented() if b.page == "README.md" and use_of(b).how == "program"]
    path = tmp_path / "train.py"
    path.write_text(block.code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    for start in (launcher, []):
        done = ran(sys.executable, *start, path, cwd=tmp_path, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
        assert len(losses) == 5
        assert losses[-1] < losses[0] / 3
