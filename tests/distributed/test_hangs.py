"""Reports of hangs name the rank that differs and the unit that it is at."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import struct
import time
from pathlib import Path
from unittest import mock

import pytest

from megatron_fsdp_v2.comm.interface import CollectiveKind
from megatron_fsdp_v2.comm.record import SIZE, CollectiveRecord
from megatron_fsdp_v2.diagnostics import watch_collectives
from megatron_fsdp_v2_cli.hang.report import listed
from tests.cases import longer
from tests.distributed import hanging
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import error_message
from tests.processes import ROOT
from tests.ranks import forked_from
from tests.unit.commands import called

RANKS = 3


def _reports(how: str, folder: Path) -> Path:
    """Run the training, and return the folder of its reports."""
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=hanging.main, args=(rank, RANKS, how, folder), daemon=True)
        for rank in range(RANKS)
    ]
    try:
        with forked_from(()):
            for process in ranks:
                process.start()
        for rank, process in enumerate(ranks):
            if how != "loads" or rank != hanging.FAULTY:
                process.join(timeout=100)
                assert process.exitcode is not None
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return folder / "reports"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("skips", "rank 1 issued the all-gather of layers.1"),
        ("skips a larger layer", "rank 1 issued the all-gather of layers.1"),
        longer("dies", "if rank 1 ended, the first error in the log is the cause"),
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
    ring = path.with_suffix(".ring").read_bytes()
    watch_collectives(tmp_path)()
    assert not path.exists()
    previous = tmp_path / "previous"
    assert json.loads((previous / path.name).read_text()) == report
    assert (previous / f"{path.stem}.ring").read_bytes() == ring


def _record(folder: Path, rank: int, *names: str, world_size: int = 4, stack: str = "") -> None:
    """Write the files of a rank that issued all-gathers, with a report if there is a stack."""
    record, group = CollectiveRecord(), mock.Mock(group_name="0")
    record.open(folder / f"rank_{rank}.ring", rank, world_size)
    record.begin("forward")
    times = (float(number) for number in itertools.count(1))
    with (
        mock.patch("torch.distributed.get_process_group_ranks", lambda group: [*range(world_size)]),
        mock.patch("time.time", lambda: next(times)),
    ):
        for name in names:
            record.add(name, CollectiveKind.ALL_GATHER, 8, group)
    record.close()
    if stack:
        report = {"reason": f"failed on rank {rank}", "at": 9.0, "stack": ["a.py:1 main", stack]}
        (folder / f"rank_{rank}.json").write_text(json.dumps(report))


def test_ranks_that_agree_are_said_to_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        _record(tmp_path, rank, "a/0", "b/0")
    assert called(capsys, "hang", tmp_path)[1].startswith("No rank differs")


def test_a_new_watch_numbers_collectives_from_the_beginning(tmp_path: Path) -> None:
    """As on a rank that joins a training which was restarted within its processes."""
    record, group = CollectiveRecord(), mock.Mock(group_name="0")
    with mock.patch("torch.distributed.get_process_group_ranks", lambda group: [0]):
        for name in ("first", "second"):
            record.open(tmp_path / f"{name}.ring", 0, 1)
            record.add("a/0", CollectiveKind.ALL_GATHER, 8, group)
            record.close()
    numbers = [
        struct.unpack_from("<I", (tmp_path / f"{name}.ring").read_bytes(), 1 << 12)[0]
        for name in ("first", "second")
    ]
    assert numbers == [1, 1]


def test_a_rank_in_another_branch_is_named_with_both_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        _record(tmp_path, rank, "a/0", "c/0" if rank == 2 else "b/0", "d/0")
    assert called(capsys, "hang", tmp_path)[1].startswith(
        "rank 2 issued the all-gather of c (8 bytes, pass 1 (forward)), where ranks 0, 1 and 3 "
        "issued the all-gather of b (8 bytes, pass 1 (forward)) (number 2 of process group 0)."
    )


def test_the_rank_behind_and_those_without_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _record(tmp_path, 0, "a/0", "b/0")
    _record(tmp_path, 1, "a/0", stack="data.py:2 next")
    said = called(capsys, "hang", tmp_path)[1]
    assert said.startswith("rank 1 has not issued the all-gather of b (8 bytes, pass 1 (forward))")
    assert "rank 1 is at data.py:2 next. Others wrote a report and rank 0 did not" in said
    assert "ranks 2 and 3 have no file" in said


def test_the_latest_entries_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{number}/0" for number in range(SIZE + 7)]
    for rank in range(2):
        _record(tmp_path, rank, *names[: len(names) - rank], world_size=2)
    said = called(capsys, "hang", tmp_path)[1]
    assert f"rank 1 has not issued the all-gather of {SIZE + 6} (8 bytes" in said
    assert f"(number {SIZE + 7} of process group 0)" in said
    assert f"rank 1 issued last: the all-gather of {SIZE + 5} (" in said


def test_thousands_of_ranks_are_listed_by_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks, faulty = 4096, 1234
    template = tmp_path / "template"
    template.mkdir()
    for rank in (0, 1):
        _record(template, rank, "a/0", *["b/0"][rank:], world_size=ranks)
    reports = [(template / f"rank_{rank}.ring").read_bytes() for rank in (0, 1)]
    for rank in range(ranks):
        header, _, rest = reports[rank == faulty].partition(b"\n")
        padded = json.dumps(json.loads(header) | {"rank": rank}).encode().ljust(len(header))
        (tmp_path / f"rank_{rank}.ring").write_bytes(padded + b"\n" + rest)
        # Every rank of the second half is in another line.
        line = 0 if rank < ranks // 2 else rank
        report = {"reason": f"failed on rank {rank}", "at": 9.0, "stack": [f"a.py:{line} main"]}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(report))
    _, said, _ = called(capsys, "hang", tmp_path)
    verdict, _, *places = said.splitlines()
    assert f"rank {faulty} has not issued the all-gather of b (8 bytes" in verdict
    assert f"in which ranks 0-{faulty - 1} and {faulty + 1}-{ranks - 1} wait" in verdict
    assert len(places) < 50
    assert places[0].startswith(f"rank {faulty} issued last: the all-gather of a")
    assert places[-1] == "and 2,038 more places of 4,084 ranks; --all prints them"
    _, everything, _ = called(capsys, "hang", tmp_path, "--all")
    assert len(everything.splitlines()) == 2 + 3 * (ranks // 2 + 2)
    assert f"ranks 0-{faulty - 1} and {faulty + 1}-{ranks // 2 - 1} issued last" in everything


def test_lists_of_ranks_are_bounded() -> None:
    assert listed([3], 8) == "rank 3"
    assert listed([0, 1], 8) == "ranks 0 and 1"
    assert listed([0, 1, 3, 4, 5, 9], 8) == "ranks 0, 1, 3-5 and 9"
    assert listed(range(0, 4096, 2), 3) == "ranks 0, 2, 4 and 2,045 others"
    assert listed(range(4096), 1) == "ranks 0-4095"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nonsense", "is no record of a rank"),
        ("{}", "is no record of a rank"),
        ("[]", "is no record of a rank"),
        (None, "has no file rank_<rank>.ring"),
    ],
)
def test_other_files_are_errors(
    text: str | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "rank_0.ring").write_text(text)
    status, _, errors = called(capsys, "hang", tmp_path)
    assert status == 2
    assert expected in errors


def test_two_files_of_one_rank_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    _record(tmp_path, 0, "a/0")
    _record(tmp_path / "other", 0, "a/0")
    status, _, errors = called(capsys, "hang", tmp_path, tmp_path / "other")
    assert (status, "of the same rank" in errors) == (2, True)
    # The two files of a rank count once, also if both are given.
    both = (tmp_path / f"rank_0.{kind}" for kind in ("ring", "json"))
    assert called(capsys, "hang", *both)[0] == 0


def test_bad_arguments_of_a_watch_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stalled_after_s must be above 0"):
        watch_collectives(tmp_path, stalled_after_s=0)
