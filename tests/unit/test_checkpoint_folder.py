"""Reading a checkpoint folder: blocks, dtypes, incomplete saves and metadata."""

from __future__ import annotations

import collections
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, METADATA, Entry
from megatron_fsdp_v2.checkpoint.saving import save, save_nested
from tests.unit.checkpoints import FIRST as DATA_FILE
from tests.unit.checkpoints import changed_metadata, flip, same_bits, write_folder

KEY = "model.weight"
OTHER = "model.other"


def whole() -> torch.Tensor:
    return torch.arange(7 * 5, dtype=torch.float32).view(7, 5)


def without_checksums(folder: CheckpointFolder) -> dict[str, Entry]:
    return {
        key: replace(entry, chunks=[chunk._replace(crc32=None) for chunk in entry.chunks])
        for key, entry in folder.entries.items()
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One tensor in two uneven chunks of rows, another in one, and an object."""
    tensors = {KEY: whole(), OTHER: torch.ones(3, dtype=torch.bfloat16)}
    return write_folder(tmp_path / "checkpoint", tensors, {"step": {"step": 3}}, cut=3)


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 7), (0, 5)), ((2, 6), (0, 5)), ((1, 7), (2, 4)), ((3, 3), (0, 5))]
)
def test_any_block_is_read_into_any_target(
    checkpoint: Path, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    expected = whole()[slice(*rows), slice(*columns)]
    # A target that is a view of a larger tensor.
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
def test_tensors_of_every_dtype_and_shape_are_read_as_torch_saved_them(
    tmp_path: Path, name: str
) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0), (2, 3, 4)]
    saved = {str(shape): torch.ones(shape).to(getattr(torch, name)) for shape in shapes}
    saved["transposed"] = saved["(2, 3, 4)"].transpose(0, -1)
    dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    folder = CheckpointFolder(tmp_path / "c")
    assert folder.manifest is None
    assert same_bits({key: folder.read_tensor(key) for key in saved}, saved)


def test_only_items_with_requested_elements_are_read(checkpoint: Path) -> None:
    _, second = CheckpointFolder(checkpoint).entries[KEY].chunks
    flip(checkpoint / DATA_FILE, second.start + second.length // 2)
    target = torch.empty(3, 5)
    CheckpointFolder(checkpoint).fill([ReadRequest(KEY, (0, 0), target)])
    assert torch.equal(target, whole()[:3])


def test_incomplete_save_is_reported(checkpoint: Path) -> None:
    unfinished = checkpoint.rename(checkpoint.with_name("checkpoint.incomplete"))
    with pytest.raises(CheckpointError, match="the save was cut short; use an older one"):
        CheckpointFolder(unfinished)
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointFolder(checkpoint)
    (unfinished / METADATA).unlink()
    with pytest.raises(CheckpointError, match=r"save was cut short: it has no \.metadata, only"):
        CheckpointFolder(unfinished.rename(checkpoint))


def test_save_plans_in_metadata_are_ignored(checkpoint: Path) -> None:
    """Megatron's metadata has these plans, and torch writes them from 2.15 on."""
    entries = without_checksums(CheckpointFolder(checkpoint))
    plan = create_default_local_save_plan({OTHER: torch.ones(3)}, is_coordinator=True)
    assert plan.items
    with changed_metadata(checkpoint) as metadata:
        vars(metadata)["all_local_plans"] = [plan, plan]
        metadata.planner_data = collections.OrderedDict(a=1)
    assert CheckpointFolder(checkpoint).entries == entries


@pytest.mark.parametrize("is_nested", [False, True])
def test_index_and_metadata_have_the_same_entries(tmp_path: Path, is_nested: bool) -> None:
    state = {"a": [whole(), {"b": torch.ones(())}], "empty": torch.ones(0, 2), "step": 3}
    if is_nested:
        save_nested(tmp_path / "c", state)
    else:
        save(tmp_path / "c", nn.Linear(4, 3), extra=state)
    with_index = CheckpointFolder(tmp_path / "c")
    assert any(entry.path for entry in with_index.entries.values()) == is_nested
    (tmp_path / "c" / MANIFEST).unlink()
    without = CheckpointFolder(tmp_path / "c")
    assert without.entries == without_checksums(with_index)
    assert with_index.identity != without.identity
