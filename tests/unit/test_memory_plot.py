"""A plot of tracked memory names the package it needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_fsdp_v2.diagnostics.memory import TrackedMemory
from megatron_fsdp_v2.diagnostics.memory_ledger import Ledger


def test_plot_without_matplotlib_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="needs matplotlib"):
        TrackedMemory(Ledger(), Ledger()).plot(tmp_path / "none.png")
