"""Ledger of bytes: total peak, peaks by role and by unit, and live accounts at the peak."""

from __future__ import annotations

import builtins
import importlib
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_v2.diagnostics.memory import TrackedMemory
from megatron_fsdp_v2.diagnostics.memory_ledger import Account, Ledger, Role

FIRST = Account(Role.GATHERED, "first")
SECOND = Account(Role.GATHERED, "second")
BUFFER = Account(Role.GRAD_BUFFER, "first")


def booked() -> Ledger:
    ledger = Ledger()
    ledger.add(FIRST, 10)
    ledger.enter("forward", "first")
    ledger.add(SECOND, 20)
    ledger.remove(FIRST, 10)
    ledger.enter("backward", "second")
    ledger.add(BUFFER, 5)
    ledger.add(FIRST, 3)
    ledger.remove(SECOND, 20)
    return ledger


def test_peak_is_the_moment_with_most_bytes_and_has_its_live_accounts() -> None:
    peak = booked().peak
    assert (peak.total, peak.phase, peak.unit) == (30, "forward", "first")
    assert dict(peak.accounts) == {FIRST: 10, SECOND: 20}
    assert peak.of_role(Role.GATHERED) == 30
    assert peak.of_unit("second") == {Role.GATHERED: 20}


def test_roles_and_units_have_separate_peaks() -> None:
    ledger = booked()
    assert ledger.role_peaks[Role.GATHERED] == 30
    assert ledger.role_peaks[Role.GRAD_BUFFER] == 5
    assert dict(ledger.unit_peaks) == {"first": 10, "second": 20}
    assert ledger.total == 8


def test_each_interval_has_its_own_peak() -> None:
    found = [(moment.phase, moment.unit, moment.total) for moment in booked().intervals]
    assert found == [("start", "", 10), ("forward", "first", 30), ("backward", "second", 28)]


def test_plot_writes_a_file_and_needs_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    tracked = TrackedMemory(booked(), Ledger())
    tracked.plot(tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert text.count("<path") > 10
    real = importlib.import_module

    def absent(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise builtins.ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(RuntimeError, match="needs matplotlib"):
        tracked.plot(tmp_path / "none.png")
