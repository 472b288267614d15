"""Megatron is patched only at the listed targets, and `uninstall` restores them."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_fsdp_v2_cli as cli
from megatron_cpu_rehearsal.patches import PATCHES as ALWAYS
from megatron_cpu_rehearsal.patches import WITHOUT_TRANSFORMER_ENGINE
from megatron_cpu_rehearsal.te.patches import BEFORE_IMPORT
from megatron_fsdp_v2_mcore import Options, install, patches, uninstall
from megatron_fsdp_v2_mcore.patches_command import command

REHEARSAL_PATCHES = (*ALWAYS, *WITHOUT_TRANSFORMER_ENGINE, *BEFORE_IMPORT)


def _expected(target: str) -> str:
    # Only a rehearsal finds Transformer Engine.
    return "target missing" if target.startswith("transformer_engine.") else "fits"


@pytest.fixture(autouse=True)
def _restore_megatron() -> Any:
    yield
    uninstall()


def _current() -> dict[str, Any]:
    found = {patch.name: patch.find() for patch in patches.PATCHES}
    return {name: getattr(*target) for name, target in found.items() if target is not None}


def test_install_without_selection_patches_few_functions() -> None:
    before = _current()
    install()
    changed = {name for name, value in _current().items() if value != before[name]}
    validation = {"validation", "validation-of-files"}
    assert changed == {"arguments", *validation, "load", "layer-patterns", "dataset-helpers"}


def test_compiled_dataset_helpers_of_the_wheel_are_not_compiled_again() -> None:
    install()
    # Megatron's own function exits the process: it runs `make` without a Makefile.
    importlib.import_module("megatron.core.datasets.utils").compile_helpers()


def test_checkout_compiles_its_dataset_helpers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []
    datasets = importlib.import_module("megatron.core.datasets")
    monkeypatch.setattr(datasets, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "Makefile").touch()
    patches._unless_compiled(lambda: calls.append("compiled"))()
    assert calls == ["compiled"]


def test_install_is_idempotent_and_uninstall_restores_all_patched_functions() -> None:
    before = _current()
    install()
    once = _current()
    install()
    assert _current() == once
    patches._apply(patches._SELECTED, Options())
    changed = {name for name, value in _current().items() if value is not before[name]}
    assert changed == set(before) - {"finalize_model_grads", "training_log"}
    for _ in range(2):
        uninstall()
        assert _current() == before
    install()
    assert _current()["validation"] is not before["validation"]


def test_unsupported_version_is_rejected_without_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _current()
    monkeypatch.setattr(patches, "megatron_version", lambda: "0.18.3")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.18\.3 .* supports 0\.19\.x"):
        install()
    assert _current() == before


def test_command_without_megatron_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert command.run(argparse.Namespace(json=False)) == 2
    said = capsys.readouterr()
    assert said.err == "megatron-core is not installed; install megatron-fsdp-v2[megatron]\n"
    assert said.out == ""


@pytest.mark.parametrize("fault", ["other parameters", "missing", "fails to import"])
def test_mismatched_patch_error_names_the_patch_and_versions(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    before = _current()
    training = importlib.import_module("megatron.training.training")
    name, said = "megatron_FSDP", ": .* takes .namespace., expected "
    if fault == "other parameters":
        monkeypatch.setattr(training, "megatron_FSDP", lambda namespace: namespace)
    elif fault == "missing":
        monkeypatch.delattr(training, "megatron_FSDP")
        said = r": there is no megatron\.training\.training:megatron_FSDP"
    else:
        monkeypatch.setitem(sys.modules, "megatron.core.optimizer", None)
        name, said = "DistributedOptimizer", r": megatron\.core\.optimizer cannot be imported: Mod"
    found = re.escape(importlib.metadata.version("megatron-core"))
    message = f"patch '{name}' does not fit{said}.*Installed is .* {found}; supported is 0.19"
    with pytest.raises(RuntimeError, match=message):
        install()
    monkeypatch.undo()
    assert _current() == before


def test_installing_after_arguments_were_parsed_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    global_vars = importlib.import_module("megatron.training.global_vars")
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", object())
    with pytest.raises(RuntimeError, match="parsed its arguments already"):
        install()


def test_the_command_prints_every_patch_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["patches", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["megatron_core"] == importlib.metadata.version("megatron-core")
    assert report["supported"] == "0.19.x"
    rows = report["patches"]
    assert [row["name"] for row in rows] == [patch.name for patch in patches.PATCHES]
    assert [row["target"] for row in rows] == [patch.target for patch in patches.PATCHES]
    rehearsal = report["rehearsal"]
    assert [row["target"] for row in rehearsal] == [patch.target for patch in REHEARSAL_PATCHES]
    for row in (*rows, *rehearsal):
        assert row["check"] == _expected(row["target"]), row
        assert row["reason"] and row["undo"] and row["when"]


def test_command_fails_for_a_mismatched_patch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = importlib.import_module("megatron.training.arguments")
    monkeypatch.setattr(arguments, "validate_args", lambda namespace: namespace)
    assert command.run(argparse.Namespace(json=True)) == 1
    rows = {row["name"]: row["check"] for row in json.loads(capsys.readouterr().out)["patches"]}
    assert rows["validation"].startswith("patch 'validation' does not fit")
    assert rows["arguments"] == "fits"
    assert command.run(argparse.Namespace(json=False)) == 1
    assert "patch 'validation' does not fit" in capsys.readouterr().out


def test_local_states_of_other_state_dicts_are_those_of_megatron() -> None:
    from megatron_fsdp_v2_mcore.checkpoint.local import with_sharded_states

    wrapped = with_sharded_states(lambda state_dict, algo: (state_dict, algo))
    state_dict = {"model": {}}
    assert wrapped(state_dict, algo="atomic") == (state_dict, "atomic")
