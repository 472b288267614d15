"""Reading a checkpoint folder: blocks, dtypes, incomplete saves and metadata."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.checkpoint.metadata import MANIFEST, METADATA, read_metadata
from tests.unit.checkpoints import FIRST as DATA_FILE
from tests.unit.checkpoints import flip, same_bits, write_folder

KEY = "model.weight"
OTHER = "model.other"


def whole() -> torch.Tensor:
    return torch.arange(7 * 5, dtype=torch.float32).view(7, 5)


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
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_tensors_of_every_dtype_and_shape_are_read_as_torch_saved_them(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    whole = torch.ones(shape).to(getattr(torch, name))
    saved = {"x": whole, "transposed": whole.transpose(0, -1) if shape else whole}
    dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    folder = CheckpointFolder(tmp_path / "c")
    assert folder.manifest is None
    assert same_bits({key: folder.read_tensor(key) for key in saved}, saved)


def test_only_items_with_requested_elements_are_read(checkpoint: Path) -> None:
    storage = read_metadata(checkpoint).storage_data
    assert storage is not None
    info = storage[MetadataIndex(KEY, torch.Size((3, 0)))]
    flip(checkpoint / DATA_FILE, info.offset + info.length // 2)
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
    (checkpoint / MANIFEST).unlink()
    metadata: Any = read_metadata(checkpoint)
    plan = create_default_local_save_plan({OTHER: torch.ones(3)}, is_coordinator=True)
    assert plan.items
    metadata.all_local_plans = [plan, plan]
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    found = read_metadata(checkpoint)
    assert not hasattr(found, "all_local_plans")
    assert found.storage_data == metadata.storage_data
