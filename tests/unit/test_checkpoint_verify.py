"""Problems and notes of `verify` for every kind of checkpoint, and shared tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import convert, export
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, METADATA
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2_cli.ckpt.inspecting import inspect
from tests.unit.checkpoints import FIRST, changed_metadata, ckpt, flip, same_bits, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {f"model.{name}": torch.arange(150.0).repeat(2) for name in "abcd"}
    extra = {"extra": {"step": 3}}
    return write_folder(tmp_path / "checkpoint", tensors, extra, cut=150)


@pytest.fixture
def torch_folder(tmp_path: Path) -> Path:
    """A folder that torch saved, without a manifest."""
    state = {"model": {"weight": torch.arange(3000.0)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    return tmp_path / "torch"


def test_every_byte_is_compared_and_damage_found_with_its_file_and_tensor(folder: Path) -> None:
    file = folder / FIRST
    for position in range(0, file.stat().st_size, 211):
        flip(file, position)
        (problem,) = verify(folder).problems
        assert problem.startswith(f"{FIRST}: ")
        assert "model." in problem or "extra" in problem
        assert "checksum" in problem
        flip(file, position)
    report = verify(folder)
    assert report.is_good
    assert report.problems == report.notes == []
    files = [path for path in folder.iterdir() if path.name != MANIFEST]
    assert report.num_files == len(files)
    assert report.nbytes == sum(path.stat().st_size for path in files)
    for name in (METADATA, MANIFEST):
        content = (folder / name).read_bytes()
        for position in range(0, len(content), 17):
            flip(folder / name, position)
            assert name in verify(folder).problems[0]
            flip(folder / name, position)
    for position in (10, 9000):
        flip(file, position)
    assert len(verify(folder).problems) == 2


@pytest.mark.parametrize("kind", ["folder", "torch_folder"])
def test_missing_truncated_and_extended_files_are_found(
    request: pytest.FixtureRequest, kind: str
) -> None:
    path = request.getfixturevalue(kind)
    content = (path / FIRST).read_bytes()
    more = [(content + b"x", "should have")] if kind == "folder" else []
    for changed, problem in ((content[:-7], "truncated"), *more):
        (path / FIRST).write_bytes(changed)
        assert any(problem in found for found in verify(path).problems)
    (path / FIRST).unlink()
    assert any(f"{FIRST} is missing" in problem for problem in verify(path).problems)


def test_foreign_files_are_noted(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    report = verify(folder)
    assert report.is_good
    assert report.notes == ["not in the manifest, and not looked at: notes.txt"]


def test_inconsistent_metadata_is_found(folder: Path) -> None:
    more = ChunkStorageMetadata(torch.Size([200]), torch.Size([150]))
    with changed_metadata(folder) as metadata:
        entries: Any = metadata.state_dict_metadata
        entries["model.a"].chunks.pop()
        entries["model.b"].chunks.append(more)
        entries["model.d"].chunks[1].offsets = torch.Size([75])
        storage = metadata.storage_data
        moved = storage.pop(MetadataIndex("model.d", torch.Size([150])))
        storage[MetadataIndex("model.d", torch.Size([75]))] = moved
        storage[MetadataIndex("model.b", more.offsets)] = next(iter(storage.values()))
    problems = "\n".join(verify(folder).problems)
    assert "model.a has 300 elements, and its chunks 150" in problems
    assert "model.b has a chunk at (200,) that reaches out of it" in problems
    assert "model.d has chunks that overlap, and elements that are in none" in problems
    with pytest.raises(CheckpointError, match="overlap"):
        CheckpointFolder(folder).read_tensor("model.d")
    with changed_metadata(folder) as metadata:
        del metadata.storage_data[MetadataIndex("model.c", torch.Size([0]))]
    (problem,) = verify(folder).problems
    assert "model.c has a chunk at (0,) that is in no file" in problem


def test_missing_checksums_are_noted(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"weight": torch.ones(10)}, checkpoint_id=tmp_path / "c", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path / "c")
    assert report.is_good
    assert "1 items have no checksums at all" in report.notes
    assert report.nbytes == 0


# -- every kind of checkpoint, and shared tensors -------------------------------------------------


class Tied(nn.Module):
    """An embedding that the head shares, and a buffer with two names."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 512, bias=False)
        self.register_buffer("scale", torch.rand(16))
        self.inner.register_buffer("scale", self.scale if is_tied else torch.rand(16))
        if is_tied:
            self.head.weight = self.embed.weight


@pytest.fixture
def sharded(folder: Path, tmp_path: Path) -> Path:
    """A folder of several safetensors files with an index, as in Hugging Face's format."""
    export(folder, tmp_path / "sharded" / "model.safetensors", max_shard_bytes=2400)
    return tmp_path / "sharded"


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def test_damaged_and_missing_files_of_an_index_are_found(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    report = verify(sharded)
    assert report.problems == []
    assert report.num_files == len(files) == 2
    assert any("no checksums" in note for note in report.notes)
    content = files[-1].read_bytes()
    for damaged in (content[:-4], content + b"0000", content[:8] + b"[" + content[9:]):
        files[-1].write_bytes(damaged)
        assert not verify(sharded).is_good
    files[-1].unlink()
    assert ckpt("verify", sharded) == 1


def test_an_index_and_its_files_have_to_agree(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, file = next(iter(content["weight_map"].items()))
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"other.weight": file}}))
    assert "does not hold other.weight" in verify(sharded).problems[0]
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    assert any(f"holds {name}, which the index" in note for note in verify(sharded).notes)


def test_every_kind_of_checkpoint_is_verified(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(300, 3), "b": torch.arange(5)}
    safetensors.save_file(tensors, tmp_path / "x.safetensors")
    torch.save(tensors, tmp_path / "x.pt")
    dcp.save(dict(tensors), checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoint.save(tmp_path / "ours", nn.Linear(3, 3))
    for name in ("x.safetensors", "x.pt", "dcp", "ours"):
        report = verify(tmp_path / name)
        assert report.problems == [], name
        assert ckpt("verify", tmp_path / name) == 0
        assert len(inspect(tmp_path / name)["tensors"]) == 2
    (note, *_) = verify(tmp_path / "dcp").notes
    assert note.startswith("there is no manifest.json: structure and sizes were")
    for name in ("x.pt", f"dcp/{FIRST}"):
        file = tmp_path / name
        flip(file, file.read_bytes().find(tensors["a"].numpy().tobytes()) + 40)
    assert not verify(tmp_path / "x.pt").is_good
    (problem,) = verify(tmp_path / "dcp").problems
    assert f"{FIRST}: a" in problem
    assert "CRC-32" in problem


def test_a_shared_tensor_is_saved_once_and_found_under_all_its_names(tmp_path: Path) -> None:
    model, untied = Tied(), Tied(is_tied=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    checkpoint.save(tmp_path / "tied", model)
    checkpoint.save(tmp_path / "untied", untied)
    shared = model.head.weight.nbytes
    saved = bytes_of(tmp_path / "untied") - bytes_of(tmp_path / "tied")
    assert saved >= shared
    assert verify(tmp_path / "tied").problems == []
    state = model.state_dict()
    # Load into a model that shares the weight, into one that does not, and with torch alone.
    for other in (Tied(), Tied(is_tied=False)):
        checkpoint.load(tmp_path / "tied", other)
        assert same_bits(other.state_dict(), state)
    theirs = {"model": {name: torch.zeros_like(value) for name, value in state.items()}}
    dcp.load(theirs, checkpoint_id=tmp_path / "tied", no_dist=True)
    assert same_bits(theirs["model"], state)
    # A checkpoint without sharing loads into a model with sharing, whose last name counts.
    both, source = Tied(), untied.state_dict()
    checkpoint.load(tmp_path / "untied", both)
    lasting = {"embed.weight": source["head.weight"], "scale": source["inner.scale"]}
    assert same_bits(both.state_dict(), {**source, **lasting})
    checkpoint.save(tmp_path / "both", model, optimizer, async_save=True).result()
    checkpoint.load(tmp_path / "both", both, None)
    assert same_bits(both.state_dict(), state)


@pytest.mark.parametrize("dropped", [("head.weight", "scale"), ("embed.weight", "inner.scale")])
def test_one_name_of_a_shared_tensor_is_enough_for_a_model_that_shares_it(
    tmp_path: Path, dropped: tuple[str, str]
) -> None:
    state = Tied().state_dict()
    one_name = {name: value.clone() for name, value in state.items() if name not in dropped}
    safetensors.save_file(one_name, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "folder")
    model = Tied()
    assert checkpoint.compare(tmp_path / "folder", model).fits
    checkpoint.load(tmp_path / "folder", model)
    assert same_bits(model.state_dict(), state)
    with pytest.raises(CheckpointError, match=rf"missing in the checkpoint: .*model\.{dropped[0]}"):
        checkpoint.load(tmp_path / "folder", Tied(is_tied=False))


def test_exports_store_a_shared_tensor_once_and_restore_every_name(tmp_path: Path) -> None:
    model = Tied()
    state = model.state_dict()
    checkpoint.save(tmp_path / "saved", model)
    one = export(tmp_path / "saved", tmp_path / "m.safetensors")
    assert one.num_tensors == len(state)
    once = sum(v.nbytes for k, v in state.items() if k not in ("head.weight", "inner.scale"))
    assert one.nbytes == once
    with safe_open(tmp_path / "m.safetensors", "pt") as opened:
        assert opened.metadata()["head.weight"] == "embed.weight"
        assert "head.weight" not in opened.keys()  # noqa: SIM118
    other = Tied()
    assert safetensors.load_model(other, tmp_path / "m.safetensors") == (set(), [])
    assert same_bits(other.state_dict(), state)

    export(tmp_path / "saved", tmp_path / "m.pt")
    assert (tmp_path / "m.pt").stat().st_size < once + 10_000
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    convert(tmp_path / "saved", tmp_path / "sharded.safetensors", max_shard_bytes=2000)
    sources = ["m.safetensors", "m.pt", "saved", "sharded.safetensors"]
    for number, source in enumerate(sources):
        for suffix in ("", ".pt", ".safetensors"):
            target = tmp_path / f"t{number}{suffix}"
            convert(tmp_path / source, target)
            assert verify(target).problems == []
            assert {t.removeprefix("model.") for t in inspect(target)["tensors"]} == set(state)
        folder = CheckpointFolder(tmp_path / f"t{number}")
        assert bytes_of(folder.path) < once + 10_000
        assert same_bits({n: folder.read_tensor(f"model.{n}") for n in state}, state)
