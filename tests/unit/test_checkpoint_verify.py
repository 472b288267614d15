"""What `verify` finds, and what it says it cannot find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from megatron_fsdp_v2.checkpoint import verifying
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, Manifest
from megatron_fsdp_v2.checkpoint.verifying import verify
from tests.unit.checkpoints import FIRST, SECOND, changed_metadata, flip, write_folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {f"model.{name}": torch.arange(150.0).repeat(2) for name in "abc"}
    extra = {"extra": {"step": 3}}
    path = write_folder(tmp_path / "checkpoint", tensors, extra, cut=150, file_bytes=3000)
    assert (path / SECOND).is_file()
    return path


@pytest.fixture
def of_torch(tmp_path: Path) -> Path:
    """A folder of torch's own calls, which has no manifest."""
    state = {"model": {"weight": torch.arange(3000.0)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    return tmp_path / "torch"


def test_a_good_checkpoint_has_no_problems_and_every_byte_is_compared(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(checkpoint, lambda *now: seen.append(now))
    assert report.is_good
    assert report.problems == report.notes == []
    files = [path for path in checkpoint.iterdir() if path.name != MANIFEST]
    assert report.num_files == len(files)
    assert report.nbytes == sum(path.stat().st_size for path in files)
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert seen == sorted(seen)


def test_any_flipped_byte_is_found_with_its_file_and_tensor(checkpoint: Path) -> None:
    for name in (FIRST, SECOND):
        file = checkpoint / name
        for position in range(0, file.stat().st_size, 211):
            flip(file, position)
            (problem,) = verify(checkpoint).problems
            assert problem.startswith(f"{name}: ")
            assert "model." in problem or "extra" in problem
            assert "checksum" in problem
            flip(file, position)
    assert verify(checkpoint).is_good


def test_long_items_are_compared_piece_by_piece(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "_READ_BYTES", 100)
    assert verify(checkpoint).is_good
    flip(checkpoint / FIRST, 1000)
    assert not verify(checkpoint).is_good


def test_all_problems_are_told_at_once(checkpoint: Path) -> None:
    flip(checkpoint / FIRST, 10)
    (checkpoint / SECOND).unlink()
    problems = verify(checkpoint).problems
    assert len(problems) == 2
    assert any("checksum" in problem for problem in problems)
    assert any(f"{SECOND} is missing" in problem for problem in problems)


def test_a_truncated_file_and_one_with_more_in_it_are_found(checkpoint: Path) -> None:
    file = checkpoint / SECOND
    content = file.read_bytes()
    for changed, problem in ((content[:-7], "truncated"), (content + b"x", "should have")):
        file.write_bytes(changed)
        assert any(problem in found for found in verify(checkpoint).problems)


def test_what_does_not_belong_there_is_noted(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("mine")
    report = verify(checkpoint)
    assert report.is_good
    assert report.notes == ["not in the manifest, and not looked at: notes.txt"]


def test_a_file_that_the_manifest_does_not_know_is_a_problem(checkpoint: Path) -> None:
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    files = {name: file for name, file in manifest.files.items() if name != SECOND}
    Manifest(1, torch.__version__, files=files).write(checkpoint)
    assert verify(checkpoint).problems == [f"not in the manifest: {SECOND}"]


def test_a_checkpoint_that_cannot_be_opened_has_that_problem(tmp_path: Path) -> None:
    (problem,) = verify(tmp_path / "nothing").problems
    assert "does not exist" in problem


def test_metadata_that_contradicts_itself_is_found(checkpoint: Path) -> None:
    more = ChunkStorageMetadata(torch.Size([200]), torch.Size([150]))
    with changed_metadata(checkpoint) as metadata:
        for name, chunks in (("a", 1), ("b", 3)):
            entry = metadata.state_dict_metadata[f"model.{name}"]
            assert isinstance(entry, TensorStorageMetadata)
            entry.chunks = [*entry.chunks, more][:chunks]
        storage = metadata.storage_data
        del storage[next(index for index in storage if index.fqn == "model.c")]
    problems = "\n".join(verify(checkpoint).problems)
    assert "model.a has 300 elements, and its chunks 150" in problems
    assert "model.b has a chunk at (200,) that reaches out of it" in problems
    assert "model.b has a chunk at (200,) that is in no file" in problems
    assert "model.c has a chunk at (0,) that is in no file" in problems


def test_without_a_manifest_torchs_own_checksums_are_compared(of_torch: Path) -> None:
    report = verify(of_torch)
    assert report.is_good
    assert report.notes[0].startswith("there is no manifest.json: structure and sizes were")
    file = of_torch / FIRST
    content = file.read_bytes()
    # An element in the middle, where nothing but a checksum tells.
    position = content.index(torch.arange(1500.0, 1501.0).view(torch.uint8).numpy().tobytes())
    flip(file, position)
    (problem,) = verify(of_torch).problems
    assert f"{FIRST}: model.weight" in problem
    assert "CRC-32" in problem


def test_what_has_no_checksums_at_all_is_said(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"weight": torch.ones(10)}, checkpoint_id=tmp_path / "c", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path / "c")
    assert report.is_good
    assert "1 items have no checksums at all" in report.notes
    assert report.nbytes == 0


def test_without_a_manifest_missing_and_short_files_are_found(of_torch: Path) -> None:
    file = of_torch / FIRST
    file.write_bytes(file.read_bytes()[:-1])
    assert any("truncated" in problem for problem in verify(of_torch).problems)
    file.unlink()
    assert any(f"{FIRST} is missing" in problem for problem in verify(of_torch).problems)
