"""The wheel: complete, and installed elsewhere it trains, saves, resumes and plans."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_in, is_program
from tests.processes import ran
from tests.unit.test_types import checked

pytestmark = pytest.mark.functional

PACKAGES = {
    path.name
    for parent in (ROOT, ROOT / "adapters")
    for path in parent.iterdir()
    if path.name.startswith("megatron_") and path.is_dir()
}

RESUME = """
from megatron_fsdp_v2 import checkpoint, fully_shard
import torch
import torch.distributed as dist
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
fully_shard(model)
checkpoint.load("checkpoints/step_50", model, torch.optim.AdamW(model.parameters()))
x = torch.randn(256, 64)
print(float((model(x) - x.mean(dim=1, keepdim=True)).square().mean()))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what git has, without this tree's build files."""
    folder = tmp_path_factory.mktemp("source")
    archive = folder / "source.tar"
    subprocess.run(
        ["git", "archive", "-o", str(archive), "HEAD"], cwd=ROOT, check=True, capture_output=True
    )
    source = folder / "source"
    source.mkdir()
    subprocess.run(["tar", "xf", str(archive), "-C", str(source)], check=True)
    words = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = ran(sys.executable, *words, source, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_every_module_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    modules = {
        path.removeprefix("adapters/")
        for path in listed
        if path.endswith((".py", "py.typed"))
        and path.removeprefix("adapters/").partition("/")[0] in PACKAGES
    }
    assert modules <= names
    others = {name for name in names - modules if ".dist-info/" not in name}
    assert not {name for name in others if not name.endswith("README.md")}
    metadata = {Path(name).name for name in names if ".dist-info/" in name}
    assert {"METADATA", "LICENSE", "NOTICE", "entry_points.txt"} <= metadata


def test_a_program_is_type_checked_against_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    # An environment of its own: mypy reads the packages of the interpreter, and not PYTHONPATH.
    done = ran(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    others = [path for path in sys.path if path.endswith("site-packages")]
    links = tmp_path / "others"
    links.mkdir()
    for path in (each for other in others for each in Path(other).iterdir()):
        if not path.name.startswith(("megatron_", "__editable__")):
            (links / path.name).symlink_to(path)
    (packages / "others.pth").write_text(str(links))
    assert checked(tmp_path, str(tmp_path / "venv/bin/python")).startswith("Success")


def test_an_installed_wheel_trains_saves_resumes_and_plans(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "installed"
    words = ["-m", "pip", "install", "--no-deps", "--no-index", "--target", str(place)]
    done = ran(sys.executable, *words, wheel)
    assert done.returncode == 0, done.stderr
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(*words: str) -> str:
        done = ran(sys.executable, *words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import megatron_fsdp_v2 as m; print(m.__file__)").startswith(str(place))
    readme = blocks_in("README.md", (ROOT / "README.md").read_text())
    (program,) = (b.code for b in readme if b.language == "python" and is_program(b.code))
    (tmp_path / "train.py").write_text(program)
    losses = [float(line.split()[-1]) for line in run("train.py").splitlines()]
    assert losses[-1] < losses[0] / 3
    assert float(run("-c", RESUME)) < 2 * losses[-1]
    command = "import sys; from megatron_fsdp_v2_cli import main; sys.exit(main(sys.argv[1:]))"
    assert "step_50, iteration 50" in run("-c", command, "ckpt", "inspect", "checkpoints/step_50")
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(64, 64))\n"
    )
    environment["PYTHONPATH"] += f":{tmp_path}"
    table = run("-c", command, "plan", "--ranks", "4", "--model", "own:build")
    assert "optim_grads_params" in table
