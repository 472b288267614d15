"""`make lint` proves the layering: a forbidden import in a copy of the tree is reported."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path):
    """The linters' configuration, an almost empty core and an almost empty adapter."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    core, adapter = tmp_path / "megatron_fsdp_v2", tmp_path / "adapters" / "megatron_fsdp_v2_mcore"
    for package in (core, adapter, adapter / "formats", adapter / "rehearsal"):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    for module in ("placement", "layout", "mixed_precision", "memory_plan", "comm", "dp_buffer"):
        (core / f"{module}.py").touch()
    shutil.copy(ROOT / "adapters" / "ruff.toml", tmp_path / "adapters")
    return tmp_path


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [script, "--no-logo", "--no-cache"],
        cwd=tree,
        env={"PYTHONPATH": f"{tree}:{tree / 'adapters'}", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def ruff_check(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251,PLC0415", "."],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_tree_that_keeps_the_rules_passes(tree):
    core, adapter = tree / "megatron_fsdp_v2", tree / "adapters" / "megatron_fsdp_v2_mcore"
    (core / "layout.py").write_text("import megatron_fsdp_v2.layout.placement\n")
    (core / "dp_buffer.py").write_text(
        "import torch\n\nimport megatron_fsdp_v2.layout.buffer_layout\n"
    )
    (adapter / "seams.py").write_text(
        "import megatron.core\n\nimport megatron_fsdp_v2.comm.backends\n"
    )
    (adapter / "formats" / "fp8.py").write_text("import transformer_engine\n")
    (adapter / "pretrain_gpt").mkdir(exist_ok=True)
    (adapter / "pretrain_gpt" / "gpt.py").write_text("import megatron.training\n")
    (adapter / "rehearsal" / "patches.py").write_text("import megatron.training\n")
    imports, style = lint_imports(tree), ruff_check(tree)
    assert imports.returncode == 0, imports.stdout
    assert style.returncode == 0, style.stdout


@pytest.mark.parametrize(
    ("file", "imported", "complaint"),
    [
        (
            "layout.py",
            "megatron_fsdp_v2.comm.backends",
            "not allowed to import megatron_fsdp_v2.comm.backends",
        ),
        ("memory_plan.py", "megatron_fsdp_v2.layout.placement", "not allowed to import"),
        ("layout.py", "megatron_fsdp_v2.layout.mixed_precision", "not allowed to import"),
        ("comm.py", "megatron.core", "not allowed to import megatron"),
        ("comm.py", "transformer_engine", "not allowed to import transformer_engine"),
        ("comm.py", "megatron_fsdp_v2_mcore", "not allowed to import megatron_fsdp_v2_mcore"),
        ("a_new_file.py", "torch", "not listed as layers"),
    ],
)
def test_an_import_against_the_levels_is_reported(tree, file, imported, complaint):
    (tree / "megatron_fsdp_v2" / file).write_text(f"import {imported}\n")
    done = lint_imports(tree)
    assert done.returncode != 0
    assert complaint in done.stdout


def test_siblings_of_the_top_level_may_not_import_one_another(tree):
    for name in ("checkpoint", "optim"):
        (tree / "megatron_fsdp_v2" / name).mkdir()
        (tree / "megatron_fsdp_v2" / name / "__init__.py").touch()
    (tree / "megatron_fsdp_v2" / "optim" / "muon.py").write_text(
        "import megatron_fsdp_v2.checkpoint\n"
    )
    done = lint_imports(tree)
    assert done.returncode != 0
    assert "megatron_fsdp_v2.optim is not allowed to import" in done.stdout


def test_transformer_engine_outside_of_formats_is_reported(tree):
    seams = tree / "adapters" / "megatron_fsdp_v2_mcore" / "seams.py"
    seams.write_text("import transformer_engine.pytorch\n")
    assert "not allowed to import transformer_engine" in lint_imports(tree).stdout
    assert "TID251" in ruff_check(tree).stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("megatron_fsdp_v2/comm/backends.py", "import megatron.core"),
        ("megatron_fsdp_v2/comm/backends.py", "from megatron_fsdp_v2_mcore import seams"),
        ("megatron_fsdp_v2/comm/backends.py", "def f():\n    import json"),
        ("adapters/megatron_fsdp_v2_mcore/patches.py", "import megatron.training"),
        ("adapters/megatron_fsdp_v2_mcore/patches.py", "from megatron.training import get_args"),
        ("adapters/megatron_fsdp_v2_mcore/patches.py", "import apex"),
    ],
)
def test_a_banned_import_is_reported_on_its_line(tree, file, line):
    (tree / file).write_text(line + "\n")
    done = ruff_check(tree)
    assert done.returncode != 0
    assert file in done.stdout
