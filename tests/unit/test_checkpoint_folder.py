"""Reading a checkpoint folder: blocks into their places, nothing damaged, nothing run."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_fsdp_v2.checkpoint import folder as folder_module
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST
from megatron_fsdp_v2.checkpoint.metadata import METADATA, read_metadata
from megatron_fsdp_v2.checkpoint.torch_files import find_tensor
from tests.unit.checkpoints import FIRST as DATA_FILE
from tests.unit.checkpoints import flip, write_folder

KEY = "model.weight"
OTHER = "model.other"


def whole() -> torch.Tensor:
    return torch.arange(7 * 5, dtype=torch.float32).view(7, 5)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One tensor in two uneven chunks of rows, another in one, and an object."""
    tensors = {KEY: whole(), OTHER: torch.ones(3, dtype=torch.bfloat16)}
    return write_folder(tmp_path / "checkpoint", tensors, {"step": {"step": 3}}, cut=3)


def item(path: Path, key: str, offset: tuple[int, ...] | None = None) -> Any:
    storage = read_metadata(path).storage_data
    assert storage is not None
    return storage[MetadataIndex(key, None if offset is None else torch.Size(offset))]


@pytest.mark.parametrize("scratch", [16 << 20, 24, 8], ids=["at-once", "by-rows", "by-elements"])
@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 7), (0, 5)), ((2, 6), (0, 5)), ((1, 7), (2, 4)), ((3, 3), (0, 5))]
)
def test_any_block_is_read_whatever_room_there_is(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    scratch: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> None:
    monkeypatch.setattr(folder_module, "SCRATCH_BYTES", scratch)
    expected = whole()[slice(*rows), slice(*columns)]
    # A target that is itself a part of something else.
    around = torch.full((expected.shape[0] + 2, expected.shape[1] + 2), -1.0)
    target = around[1:-1, 1:-1]
    offset = (rows[0], columns[0])
    assert CheckpointFolder(checkpoint).fill([ReadRequest(KEY, offset, target)]) == [
        expected.numel()
    ]
    assert torch.equal(target, expected)
    assert int((around == -1).sum()) == around.numel() - expected.numel()


DTYPES = ["float32", "float64", "bfloat16", "float8_e4m3fn", "uint16", "bool", "int64", "complex64"]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_every_dtype_and_shape_is_found_where_torch_save_put_it(
    name: str, shape: tuple[int, ...]
) -> None:
    saved, dtype = io.BytesIO(), getattr(torch, name)
    torch.save(torch.ones(shape).to(dtype), saved)
    found = find_tensor(saved)
    assert found is not None
    assert (found.dtype, found.shape) == (dtype, shape)
    content = torch.ones(shape).to(dtype).flatten().view(torch.uint8) if shape else None
    if content is not None:
        begin, end = found.offset, found.offset + content.numel()
        assert saved.getvalue()[begin:end] == bytes(content.tolist())


def test_a_tensor_that_is_not_simply_there_is_left_to_torch(tmp_path: Path) -> None:
    saved = io.BytesIO()
    torch.save(whole().t(), saved)
    assert find_tensor(saved) is None
    dcp.save({"x": whole().t()}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(CheckpointFolder(tmp_path / "c").read_tensor("x"), whole().t())


def test_values_are_converted_to_the_dtype_of_the_target(checkpoint: Path) -> None:
    target = torch.empty(7, 5, dtype=torch.float64)
    CheckpointFolder(checkpoint).fill([ReadRequest(KEY, (0, 0), target)])
    assert torch.equal(target, whole().double())


def test_what_torch_saved_is_read_without_a_manifest(tmp_path: Path) -> None:
    state = {"model": {"weight": whole(), "bias": torch.zeros(0)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    folder = CheckpointFolder(tmp_path / "c")
    assert folder.manifest is None
    assert torch.equal(folder.read_tensor("model.weight"), whole())
    assert folder.read_tensor("model.bias").shape == (0,)
    assert folder.object("step") == 3


def test_torch_reads_what_the_writer_wrote(checkpoint: Path) -> None:
    state = {KEY: torch.zeros(7, 5)}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    assert torch.equal(state[KEY], whole())


def test_only_items_with_something_wanted_are_read(checkpoint: Path) -> None:
    info = item(checkpoint, KEY, (3, 0))
    flip(checkpoint / DATA_FILE, info.offset + info.length // 2)
    target = torch.empty(3, 5)
    CheckpointFolder(checkpoint).fill([ReadRequest(KEY, (0, 0), target)])
    assert torch.equal(target, whole()[:3])


@pytest.mark.parametrize("scratch", [16 << 20, 64], ids=["at-once", "in-pieces"])
def test_a_flipped_byte_is_found_before_anything_is_filled(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, scratch: int
) -> None:
    monkeypatch.setattr(folder_module, "SCRATCH_BYTES", scratch)
    info = item(checkpoint, KEY, (3, 0))
    for position in range(0, info.length, 37):
        flip(checkpoint / DATA_FILE, info.offset + position)
        target = torch.full((4, 5), -1.0)
        with pytest.raises(CheckpointError) as raised:
            CheckpointFolder(checkpoint).fill([ReadRequest(KEY, (3, 0), target)])
        for word in (str(checkpoint), KEY, DATA_FILE, f"at {info.offset}", "checksum"):
            assert word in str(raised.value)
        assert bool((target == -1).all())
        flip(checkpoint / DATA_FILE, info.offset + position)
    CheckpointFolder(checkpoint).fill([ReadRequest(KEY, (3, 0), torch.empty(4, 5))])


def test_the_bytes_of_an_item_are_checked_as_well(checkpoint: Path) -> None:
    folder, info = CheckpointFolder(checkpoint), item(checkpoint, "step")
    content = folder.read_item(MetadataIndex("step"))
    assert torch.load(io.BytesIO(content), weights_only=True) == {"step": 3}
    flip(checkpoint / DATA_FILE, info.offset + 5)
    with pytest.raises(CheckpointError, match=r"step in __0_0\.distcp.*checksum"):
        folder.read_item(MetadataIndex("step"))
    with pytest.raises(CheckpointError, match="does not hold nothing"):
        folder.read_item(MetadataIndex("nothing"))


def test_a_flipped_byte_of_the_metadata_is_found(checkpoint: Path) -> None:
    flip(checkpoint / METADATA, 200)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        CheckpointFolder(checkpoint)


def test_files_of_another_length_are_named(checkpoint: Path) -> None:
    file, target = checkpoint / DATA_FILE, [ReadRequest(OTHER, (0,), torch.empty(3))]
    content = file.read_bytes()
    folder = CheckpointFolder(checkpoint)
    file.write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match=rf"{len(content) + 1} bytes and should have"):
        folder.fill(target)
    for has_manifest in (True, False):
        file.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match=r"truncated: __0_0\.distcp has \d+ of \d+ bytes"):
            CheckpointFolder(checkpoint).fill(target)
        file.unlink()
        with pytest.raises(CheckpointError, match=r"incomplete: __0_0\.distcp is missing"):
            CheckpointFolder(checkpoint).fill(target)
        if has_manifest:
            (checkpoint / MANIFEST).unlink()


def test_damage_without_a_manifest_is_an_error_where_it_cannot_be_read(tmp_path: Path) -> None:
    dcp.save({"x": whole()}, checkpoint_id=tmp_path / "c", no_dist=True)
    file = tmp_path / "c" / DATA_FILE
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"x in .*cannot be loaded as plain data"):
        CheckpointFolder(tmp_path / "c").read_tensor("x")


def test_a_save_that_was_cut_short_is_called_that(checkpoint: Path) -> None:
    unfinished = checkpoint.rename(checkpoint.with_name("checkpoint.incomplete"))
    with pytest.raises(CheckpointError, match="the save was cut short; use an older one"):
        CheckpointFolder(unfinished)
    with pytest.raises(CheckpointError, match=r"does not exist; checkpoint\.incomplete beside it"):
        CheckpointFolder(checkpoint)
    (unfinished / METADATA).unlink()
    with pytest.raises(CheckpointError, match=r"save was cut short: it has no \.metadata, only"):
        CheckpointFolder(unfinished.rename(checkpoint))


def test_a_folder_of_checkpoints_names_them(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="it holds some: name one of checkpoint"):
        CheckpointFolder(checkpoint.parent)


def test_metadata_may_have_the_plans_of_the_ranks_that_saved(checkpoint: Path) -> None:
    """As Megatron's has, of which torch 2.15 writes what older versions leave out."""
    (checkpoint / MANIFEST).unlink()
    metadata: Any = read_metadata(checkpoint)
    properties, chunk = TensorProperties(), ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    data = TensorWriteData(chunk, properties, torch.Size([3]))
    item = WriteItem(MetadataIndex(OTHER, torch.Size([0])), WriteItemType.SHARD, tensor_data=data)
    metadata.all_local_plans = [SavePlan([item]), SavePlan([])]
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    found = read_metadata(checkpoint)
    assert not hasattr(found, "all_local_plans")
    assert found.storage_data == metadata.storage_data


class MakesFile:
    """Pickles to something that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_code_is_rejected_and_not_run(checkpoint: Path) -> None:
    made = checkpoint.parent / "made"
    evil = pickle.dumps(MakesFile(made))
    pickle.loads(evil)
    assert made.exists()
    made.unlink()
    (checkpoint / MANIFEST).unlink()
    metadata = read_metadata(checkpoint)
    metadata.planner_data = MakesFile(made)
    for content in (evil, pickle.dumps(metadata)):
        (checkpoint / METADATA).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"posix\.system, which is not allowed"):
            CheckpointFolder(checkpoint)
    write_folder(checkpoint, {}, {"args": MakesFile(made)})
    with pytest.raises(CheckpointError, match=r"args in .*cannot be loaded as plain data"):
        CheckpointFolder(checkpoint).object("args")
    assert not made.exists()
