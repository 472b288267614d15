"""Megatron is hooked at the listed points, and nowhere for good."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from typing import Any

import pytest

from megatron_fsdp_v2_mcore import install, seams, uninstall


@pytest.fixture(autouse=True)
def _leave_megatron_alone() -> Any:
    yield
    uninstall()


def _current() -> dict[str, Any]:
    found = {seam.name: seams.find_target(seam) for seam in seams.SEAMS}
    return {name: getattr(*target) for name, target in found.items() if target is not None}


def test_uninstall_puts_back_what_was_there() -> None:
    before = _current()
    install()
    assert _current()["arguments"] is not before["arguments"]
    uninstall()
    assert _current() == before


def test_without_selection_only_parser_and_validation_are_hooked() -> None:
    before = _current()
    install()
    changed = {name for name, value in _current().items() if value is not before[name]}
    assert changed == {"arguments", "validation"}


def test_installing_twice_is_harmless() -> None:
    install()
    once = _current()
    install()
    assert _current() == once


def test_another_version_is_refused_and_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _current()
    monkeypatch.setattr(seams, "megatron_version", lambda: "0.18.3")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.18\.3 .* supports 0\.19\.x"):
        install()
    assert _current() == before


def test_a_seam_that_does_not_fit_names_itself_and_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _current()
    arguments = importlib.import_module("megatron.training.arguments")
    monkeypatch.setattr(arguments, "validate_args", lambda namespace: namespace)
    with pytest.raises(RuntimeError, match=r"seam 'validation' does not fit.*supported is 0\.19"):
        install()
    assert _current()["arguments"] is before["arguments"]


def test_installing_after_arguments_were_parsed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    global_vars = importlib.import_module("megatron.training.global_vars")
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", object())
    with pytest.raises(RuntimeError, match="parsed its arguments already"):
        install()


def test_the_command_prints_every_seam() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fsdp_v2.cli", "seams", "--json"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["seams"]
    assert [row["name"] for row in rows] == [seam.name for seam in seams.SEAMS]
    assert all(row["check"] == "fits" and row["reason"] for row in rows)
