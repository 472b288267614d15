"""What the benchmark found is shown, drawn, and written into its page of the documentation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from tests.processes import ROOT


def _engine(step_s: float, **changed: Any) -> dict[str, Any]:
    found = {
        "step_s": step_s,
        "optimizer_s": step_s / 4,
        "over_baseline": step_s / 0.2,
        "limit_s": 0.1,
        "over_limit": step_s / 0.1,
        "loss_difference": 1e-7,
        "losses_agree": True,
        "disturbed": False,
    }
    return found | changed


RECORD: dict[str, Any] = {
    "machine": "2 cores",
    "minutes": 3.2,
    "settings": [
        {
            "name": "deep, fp32, 2 ranks",
            "engines": {
                "FSDP2": _engine(0.2),
                "ours, optim": _engine(0.15, disturbed=True),
                "other": _engine(0.3, losses_agree=False, loss_difference=0.25),
                "infinite": _engine(0.3, losses_agree=False, loss_difference=None),
            },
            "failed": {"v1": "RuntimeError: no"},
            "pieces_s": {"compute": 0.05, "all-gather": 0.01},
            "pieces_disturbed": ["all-gather"],
        }
    ],
    "memory": {
        "fp32": {
            "FSDP2": {"building": 2_000_000, "at rest": 4_000_000, "peak": 8_000_000},
            "ours": {"building": 2_000_000, "at rest": 3_000_000, "peak": 10_000_000},
        }
    },
    "host_time_ms": {64: {"FSDP2": 2.0, "ours": 0.5}, 128: {"FSDP2": 2.5, "ours": 0.75}},
}


def test_a_table_says_what_was_disturbed_what_differs_and_what_failed() -> None:
    table = report.steps(RECORD["settings"][0])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["FSDP2"] == ("200.0", "50.0", "1.00", "2.00", "agree")
    assert rows["ours, optim (*)"] == ("150.0", "37.5", "0.75", "1.50", "agree")
    assert rows["other"][-1] == "DIFFER by 2e-01"
    assert rows["infinite"][-1] == "not finite"
    assert "v1 failed: RuntimeError: no" in table.remarks
    assert "compute 50.0, all-gather 10.0 (*)" in table.remarks[-1]


def test_results_are_written_between_the_marks_of_their_page(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    shutil.copy(ROOT / report.PAGE, page)
    (tmp_path / "images").mkdir()
    for minutes in (3.2, 5.1):
        report.write_page(RECORD | {"minutes": minutes}, str(page))
    text, original = page.read_text(), (ROOT / report.PAGE).read_text()
    mark = "<!-- results: begin -->"
    assert text.partition(mark)[0] == original.partition(mark)[0]
    assert text.endswith("<!-- results: end -->\n")
    assert "5 minutes on 2 cores" in text
    assert "3 minutes" not in text
    assert text.count("| ours, optim (*) | 150.0 | 37.5 | 0.75 | 1.50 | agree |") == 1
    assert "| ours | 2.0 (1.00) | 3.0 (0.75) | 10.0 (1.25) |" in text
    assert "| ours | 0.500 | 0.750 | 0.25 |" in text
    assert (tmp_path / "images" / "benchmarks.png").stat().st_size > 1000


def test_tables_are_shown_in_full(capfd: pytest.CaptureFixture[str]) -> None:
    report.show([report.steps(RECORD["settings"][0]), *report.rest(RECORD)])
    shown = capfd.readouterr().out
    for words in ("ours, optim (*)", "DIFFER by 2e-01", "v1 failed: RuntimeError: no", "at rest"):
        assert words in shown
