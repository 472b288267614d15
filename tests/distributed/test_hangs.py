"""Reports of hangs name the rank that differs and the unit that it is at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_v2.diagnostics import watch_collectives
from tests.cases import longer
from tests.distributed import hanging
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import error_message
from tests.processes import ROOT
from tests.unit.commands import called

RANKS = 3


def _reports(how: str, folder: Path) -> Path:
    """Run the training, and return the folder of its reports."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, hanging.__file__, how, str(folder)],
            env={**environment, "RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank, process in enumerate(ranks):
            if how != "loads" or rank != hanging.FAULTY:
                process.wait(timeout=100)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return folder / "reports"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("skips", "rank 1 issued the all-gather of layers.1"),
        longer("dies", "rank 1 wrote no file, and has ended"),
        longer("loads", "rank 1 has not issued the all-gather of layers.0"),
        longer("is slow", "rank 1 has not issued the all-gather of layers.0"),
    ],
)
def test_the_command_names_the_rank_and_the_unit(
    how: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said, errors = called(capsys, "hang", _reports(how, tmp_path))
    assert (status, errors) == (0, "")
    verdict = said.splitlines()[0]
    assert expected in verdict, said
    if how == "skips":
        assert verdict in " ".join((ROOT / "docs/cluster.md").read_text().split())
    if how in ("loads", "is slow"):
        assert "next_batch" in said


@on_ranks(2)
def test_a_signal_writes_a_report(tmp_path: Path) -> None:
    end = watch_collectives(tmp_path)
    assert "has a handler already" in error_message(ValueError, lambda: watch_collectives(tmp_path))
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + 60
    path = tmp_path / f"rank_{os.environ['RANK']}.json"
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    report = json.loads(path.read_text())
    assert report["reason"] == "signal SIGUSR1"
    assert any("test_a_signal_writes_a_report" in frame for frame in report["stack"])
    end()
    end()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def _report(rank: int, *names: str, **changes: Any) -> dict[str, Any]:
    entries = [
        {"number": n, "group": "0", "name": name, "kind": "all_gather", "nbytes": 8}
        | {"passed": [1, "forward"], "at": float(n)}
        for n, name in enumerate(names, start=1)
    ]
    ranks = {"0": [0, 1, 2, 3]}
    data = {"rank": rank, "world_size": 4, "reason": "signal", "stack": ["a.py:1 main"]}
    return data | {"ranks": ranks, "entries": entries} | changes


def _written(folder: Path, *reports: dict[str, Any]) -> Path:
    for report in reports:
        (folder / f"rank_{report['rank']}.json").write_text(json.dumps(report))
    return folder


def test_ranks_that_agree_are_said_to_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _written(tmp_path, *(_report(rank, "a/0", "b/0") for rank in range(4)))
    assert called(capsys, "hang", folder)[1].startswith("No rank differs")


def test_a_rank_in_another_branch_is_named_with_both_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    units = {rank: ("a/0", "c/0" if rank == 2 else "b/0", "d/0") for rank in range(4)}
    folder = _written(tmp_path, *(_report(rank, *names) for rank, names in units.items()))
    assert called(capsys, "hang", folder)[1].startswith(
        "rank 2 issued the all-gather of c (8 bytes, pass 1 (forward)), where ranks 0, 1 and 3 "
        "issued the all-gather of b (8 bytes, pass 1 (forward)) (number 2 of process group 0)."
    )


def test_the_rank_behind_and_those_that_wrote_nothing_are_both_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _written(tmp_path, _report(0, "a/0", "b/0"), _report(1, "a/0"))
    said = called(capsys, "hang", folder)[1]
    assert said.startswith("rank 1 has not issued the all-gather of b (8 bytes, pass 1 (forward))")
    assert "ranks 2 and 3 wrote no file, and have ended" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nonsense", "is no report of a rank"),
        ("{}", "is no report of a rank"),
        ("[]", "is no report of a rank"),
        (None, "has no file rank_<rank>.json"),
    ],
)
def test_other_files_are_errors(
    text: str | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "rank_0.json").write_text(text)
    status, _, errors = called(capsys, "hang", tmp_path)
    assert status == 2
    assert expected in errors


def test_two_files_of_one_rank_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _written(tmp_path, _report(0, "a/0"))
    status, _, errors = called(capsys, "hang", folder, folder / "rank_0.json")
    assert (status, "of the same rank" in errors) == (2, True)


def test_bad_arguments_of_a_watch_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stalled_after_s must be above 0"):
        watch_collectives(tmp_path, stalled_after_s=0)
