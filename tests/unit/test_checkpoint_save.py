"""Saves beside foreign files, through links, to a full disk, and killed at any moment."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, naming_full_disk
from tests.unit.checkpoints import names_in, no_file_longer_than

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:This process"),
]

TOKEN = "0123456789abcdef" * 2


def model(value: float) -> nn.Module:
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        for param in made.parameters():
            param.fill_(value)
    return made


def save(path: Path, value: int) -> None:
    checkpoint.save(path, model(value), extra=value)


def load(path: Path) -> int:
    """Load a checkpoint, assert that all values are of one save, and return its number."""
    found = model(-1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extra = checkpoint.load(path, found)
    values = {value for param in found.parameters() for value in param.unique().tolist()}
    assert values == {float(extra)}
    return int(extra)


# -- foreign files --------------------------------------------------------------------------------


def test_saves_do_not_change_foreign_folders(tmp_path: Path) -> None:
    path = tmp_path / "k"
    for name in ("k.previous", "k.incomplete", f"k.{TOKEN}.incomplete", f"k.{TOKEN}.previous"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    save(tmp_path / "k.previous.backup", 9)
    (tmp_path / "k.lock").write_text("mine")
    before = names_in(tmp_path)
    for value in (1, 2, 3):
        save(path, value)
    assert names_in(tmp_path) == sorted([*before, "k"])
    assert load(path) == 3


def test_foreign_file_in_a_replaced_checkpoint_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "k"
    save(path, 1)
    (path / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"notes\.txt in it belong to no checkpoint"):
        save(path, 2)
    save(path, 3)
    assert load(path) == 3
    (kept,) = tmp_path.glob("k.*.previous/notes.txt")
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("name", ["a\nb", "a\u3000b", "a" * 70_000], ids=["line", "space", "long"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_names_that_a_load_rejects_are_rejected_by_a_save(
    tmp_path: Path, name: str, is_tied: bool
) -> None:
    named = model(1.0)
    named.register_parameter(name, named[0].bias if is_tied else nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="is too long, or cannot be shown"):
        checkpoint.save(tmp_path / "k", named)
    assert names_in(tmp_path) == []


def test_save_through_a_link_replaces_the_target_and_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "latest"
    link.symlink_to(Path("disk") / "step_1")
    for value in (1, 2, 3):
        save(link, value)
        assert link.is_symlink()
        assert load(link) == load(tmp_path / "disk" / "step_1") == value
    assert names_in(tmp_path / "disk") == ["step_1"]
    assert names_in(tmp_path) == ["disk", "latest"]


def test_save_accepts_an_empty_folder_and_rejects_a_folder_with_other_files(tmp_path: Path) -> None:
    path = tmp_path / "k"
    path.mkdir()
    save(path, 1)
    assert load(path) == 1
    assert names_in(tmp_path) == ["k"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not a checkpoint"):
        save(tmp_path / "mine", 1)


# -- a full disk ----------------------------------------------------------------------------------


def test_save_on_a_full_disk_reports_it_and_leaves_no_files(tmp_path: Path) -> None:
    path, limits = tmp_path / "k", itertools.count(0, 150)
    save(path, 1)
    num_failed, value = 0, 1
    while value == 1:
        try:
            with no_file_longer_than(next(limits)):
                save(path, 2)
            value = 2
        except CheckpointError as error:
            num_failed += 1
            assert "a file may not become that long" in str(error)
        assert names_in(tmp_path) == ["k"]
        assert load(path) == value
    # Writes of the lock, the data and the metadata failed.
    assert num_failed > 5
    with no_file_longer_than(0), pytest.raises(CheckpointError):
        save(path, 3)
    save(path, 3)
    assert load(path) == 3


def test_full_disk_is_reported_where_torch_hides_it() -> None:
    with (
        pytest.raises(OSError, match="the disk is full: 'somewhere'"),
        naming_full_disk(Path("somewhere")),
        Path("/dev/full").open("wb", buffering=0) as file,
    ):
        torch.save(torch.ones(10_000), file)


# -- concurrent readers, and kills ----------------------------------------------------------------


def test_load_finds_a_folder_that_is_replaced_between_two_accesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k"
    aside, new = tmp_path / f"k.{TOKEN}.previous", tmp_path / f"k.{TOKEN}.incomplete"
    accesses = [0]

    def watched(access: Callable[..., Any], away: int) -> Callable[..., Any]:
        # Remove the old folder before access number `away`; move the new one there before the next.
        def call(name: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(name, str | Path) and Path(name) in (path, tmp_path):
                accesses[0] += 1
                if accesses[0] == away:
                    path.rename(aside)
                elif accesses[0] == away + 1:
                    new.rename(path)
            return access(name, *args, **kwargs)

        return call

    save(path, 1)
    shutil.copytree(path, tmp_path / "copy")
    for away in range(1, 9):
        shutil.copytree(tmp_path / "copy", new)
        accesses[0] = 0
        with monkeypatch.context() as patch:
            for name in ("stat", "listdir", "open"):
                patch.setattr(os, name, watched(getattr(os, name), away))
            assert load(path) == 1
        for folder in (aside, new):
            shutil.rmtree(folder, ignore_errors=True)
        if not path.exists():
            shutil.copytree(tmp_path / "copy", path)
    assert accesses[0] >= 3


EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime")


def kill_at(folder: Path, number: int) -> None:
    """Kill this process at the given file operation on a folder."""
    left = [number]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and str(folder) in str(args[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def saved_in_a_child(path: Path, value: int, kill_number: int) -> bool:
    """Save in a forked process and kill it; return whether the save finished before."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            kill_at(path.parent, kill_number)
            save(path, value)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0


def test_kill_at_any_file_operation_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "k"
    save(path, 1)
    outcomes = []
    for number in range(1, 200):
        value = 2 * number
        is_done = saved_in_a_child(path, value, number)
        found = load(path)
        assert found in (value - 1, value)
        outcomes.append(found == value)
        if is_done:
            break
        save(path, value + 1)
        assert load(path) == value + 1
        assert names_in(path.parent) == ["k"]
    assert is_done
    # Once the new checkpoint exists, a later kill does not remove it.
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) > 10
    assert outcomes.count(True) > 5
