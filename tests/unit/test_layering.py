"""`make lint` proves the layering: a forbidden import in a copy of the tree is reported."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.processes import ROOT, ran

LEVELS = {
    contract["containers"][0]: [
        name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")
    ]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    if contract["type"] == "layers"
}


MCORE = "megatron_fsdp_v2_mcore"
ADAPTER = f"../adapters/{MCORE}"
REHEARSAL = "adapters/megatron_cpu_rehearsal"
WRAPPER = f"adapters/{MCORE}/model/wrapper.py"


@pytest.fixture
def tree(tmp_path):
    """The linters' configuration, and a core and an adapter of empty rooms."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package, rooms in LEVELS.items():
        place = tmp_path if package == "megatron_fsdp_v2" else tmp_path / "adapters"
        for room in ("", *rooms):
            folder = place / package / room
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
    shutil.copy(ROOT / "adapters" / "ruff.toml", tmp_path / "adapters")
    return tmp_path


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("lint-imports")
    environment = {"PYTHONPATH": f"{tree}:{tree / 'adapters'}", "COLUMNS": "200"}
    return ran(script, "--no-logo", "--no-cache", cwd=tree, env=environment)


def ruff_check(tree: Path) -> subprocess.CompletedProcess[str]:
    words = ("check", "--no-cache", "--select", "TID251,PLC0415", ".")
    return ran(sys.executable, "-m", "ruff", *words, cwd=tree)


def test_a_tree_that_keeps_the_rules_passes(tree):
    core, adapter = tree / "megatron_fsdp_v2", tree / "adapters" / "megatron_fsdp_v2_mcore"
    (core / "layout" / "split.py").write_text("import megatron_fsdp_v2.layout\n")
    (core / "runtime" / "unit.py").write_text("import torch\n\nimport megatron_fsdp_v2.comm\n")
    (adapter / "model" / "units.py").write_text("import megatron.core\n\nimport megatron_fsdp_v2\n")
    (adapter / "formats" / "fp8.py").write_text("import transformer_engine\n")
    (adapter / "pretrain_gpt" / "gpt.py").write_text("import megatron.training\n")
    (tree / REHEARSAL / "flags" / "names.py").write_text("import megatron.training\n")
    (tree / REHEARSAL / "te" / "load.py").write_text("import transformer_engine\n")
    (adapter / "plan" / "flags.py").write_text("import megatron_cpu_rehearsal.te.load\n")
    imports, style = lint_imports(tree), ruff_check(tree)
    assert imports.returncode == 0, imports.stdout
    assert style.returncode == 0, style.stdout


@pytest.mark.parametrize(
    ("file", "imported", "complaint"),
    [
        ("layout/split.py", "megatron_fsdp_v2.comm", "layout is not allowed to import"),
        ("memory/arena.py", "megatron_fsdp_v2.dtensor", "memory is not allowed to import"),
        ("params/group.py", "megatron_fsdp_v2.runtime", "params is not allowed to import"),
        ("optim/muon.py", "megatron_fsdp_v2.runtime", "optim is not allowed to import"),
        ("comm/backends.py", "megatron.core", "not allowed to import megatron"),
        ("comm/backends.py", "transformer_engine", "not allowed to import transformer_engine"),
        ("comm/backends.py", "megatron_fsdp_v2_mcore", "not allowed to import"),
        ("a_new_file.py", "torch", "not listed as layers"),
        ("a_new_room/__init__.py", "torch", "not listed as layers"),
        (f"{ADAPTER}/flags/settings.py", f"{MCORE}.model", "flags is not allowed to import"),
        (f"{ADAPTER}/model/wrapper.py", "transformer_engine.pytorch", "not allowed to import tra"),
        (f"../{REHEARSAL}/te/load.py", "megatron_fsdp_v2", "Rehearsal: imports neither"),
        (f"../{REHEARSAL}/te/load.py", MCORE, "Rehearsal: imports neither"),
        (f"../{REHEARSAL}/norms/rms.py", "megatron_cpu_rehearsal.te", "norms is not allowed"),
        (f"../{REHEARSAL}/a_new_file.py", "torch", "not listed as layers"),
        ("comm/backends.py", "megatron_cpu_rehearsal", "not allowed to import megatron_cpu"),
    ],
)
def test_an_import_against_the_levels_is_reported(tree, file, imported, complaint):
    path = tree / "megatron_fsdp_v2" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import {imported}\n")
    done = lint_imports(tree)
    assert done.returncode != 0
    assert complaint in done.stdout


def test_a_cycle_inside_of_a_room_is_reported(tree):
    room = tree / "megatron_fsdp_v2" / "params"
    (room / "group.py").write_text("import megatron_fsdp_v2.params.grads\n")
    (room / "grads.py").write_text("import megatron_fsdp_v2.params.group\n")
    assert "No cycles are allowed in megatron_fsdp_v2.params" in lint_imports(tree).stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("megatron_fsdp_v2/comm/backends.py", "import megatron.core"),
        ("megatron_fsdp_v2/comm/backends.py", "from megatron_fsdp_v2_mcore import patches"),
        ("megatron_fsdp_v2/comm/backends.py", "def f():\n    import json"),
        (WRAPPER, "import megatron.training"),
        (WRAPPER, "from megatron.training import get_args"),
        (WRAPPER, "import apex"),
        (WRAPPER, "import transformer_engine.pytorch"),
    ],
)
def test_a_banned_import_is_reported_on_its_line(tree, file, line):
    (tree / file).write_text(line + "\n")
    done = ruff_check(tree)
    assert done.returncode != 0
    assert file in done.stdout
