"""`make lint` proves the layering: a forbidden import in a copy of the tree is reported."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.processes import ROOT, ran

LAYERS = {
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
PATCHING = "adapters/megatron_fsdp_v2_patching"


@pytest.fixture
def tree(tmp_path):
    """A copy of the linters' configuration, and empty packages of every layer."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package, layers in LAYERS.items():
        is_core = package.partition(".")[0] == "megatron_fsdp_v2"
        place = tmp_path if is_core else tmp_path / "adapters"
        for layer in ("", *layers):
            folder = place / package.replace(".", "/") / layer
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
    for package in ("megatron_fsdp_v2_patching", "megatron_fsdp_v2_trace"):
        (tmp_path / "adapters" / package).mkdir()
        (tmp_path / "adapters" / package / "__init__.py").touch()
    shutil.copy(ROOT / "adapters" / "ruff.toml", tmp_path / "adapters")
    return tmp_path


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("lint-imports")
    environment = {"PYTHONPATH": f"{tree}:{tree / 'adapters'}", "COLUMNS": "200"}
    return ran(script, "--no-logo", "--no-cache", cwd=tree, env=environment)


# A file, relative to the core, a module that it imports, and the text of the violated rule.
FORBIDDEN_IMPORTS = [
    ("layout/split.py", "megatron_fsdp_v2.comm", "layout is not allowed to import"),
    ("comm/backends.py", "megatron", "not allowed to import megatron:"),
    ("comm/backends.py", "transformer_engine", "not allowed to import transformer_engine"),
    ("comm/backends.py", MCORE, "not allowed to import megatron_fsdp_v2_mcore"),
    ("plan/planner.py", "megatron_fsdp_v2_cli", "not allowed to import megatron_fsdp_v2_cli"),
    ("runtime/machine/orders.py", "torch", "not allowed to import torch"),
    ("runtime/machine/weights.py", "megatron_fsdp_v2.runtime.machine.events", "weights is not"),
    (f"{ADAPTER}/flags/settings.py", f"{MCORE}.model", "flags is not allowed to import"),
    (f"{ADAPTER}/model/wrapper.py", "transformer_engine", "not allowed to import transformer_"),
    (f"../{REHEARSAL}/te/load.py", "megatron_fsdp_v2", "Rehearsal: imports neither"),
    (f"../{PATCHING}/__init__.py", "megatron_cpu_rehearsal", "Patching: imports no other package"),
    (f"../{REHEARSAL}/norms/rms.py", "megatron_cpu_rehearsal.te", "norms is not allowed"),
]
NEW = ("megatron_fsdp_v2/a_new_file.py", f"{REHEARSAL}/a_new_file.py")


def test_forbidden_imports_cycles_and_unlisted_modules_are_reported(tree):
    for file, imported, _ in FORBIDDEN_IMPORTS:
        path = tree / "megatron_fsdp_v2" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as source:
            source.write(f"import {imported}\n")
    dtensor = tree / "megatron_fsdp_v2" / "dtensor"
    (dtensor / "norms.py").write_text("import megatron_fsdp_v2.dtensor.foreach\n")
    (dtensor / "foreach.py").write_text("import megatron_fsdp_v2.dtensor.norms\n")
    # For annotations only.
    of_types = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import megatron_fsdp_v2.{}\n"
    )
    for file, imported in (("context", "runtime.unit"), ("unit", "runtime.context")):
        (tree / f"megatron_fsdp_v2/runtime/{file}.py").write_text(of_types.format(imported))
    for file in NEW:
        (tree / file).touch()
    (tree / "megatron_fsdp_v2" / "a_new_package").mkdir()
    (tree / "megatron_fsdp_v2" / "a_new_package" / "__init__.py").touch()
    done = lint_imports(tree)
    assert done.returncode != 0
    for file, imported, rule in FORBIDDEN_IMPORTS:
        path = (tree / "megatron_fsdp_v2" / file).resolve().relative_to(tree.resolve())
        module = ".".join(path.with_suffix("").parts).removeprefix("adapters.")
        module = module.removesuffix(".__init__")
        assert f"{module} -> {imported} (l." in done.stdout, done.stdout
        assert rule in done.stdout, done.stdout
    for package in ("dtensor", "runtime"):
        assert f"No cycles are allowed in megatron_fsdp_v2.{package}" in done.stdout
    unlisted = [line for line in done.stdout.splitlines() if "a_new_" in line]
    for name in (
        "megatron_fsdp_v2.a_new_file",
        "a_new_package",
        "megatron_cpu_rehearsal.a_new_file",
    ):
        assert any(name in line for line in unlisted), done.stdout
    assert "not listed as layers" in done.stdout
