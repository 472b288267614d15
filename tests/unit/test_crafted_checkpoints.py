"""Malicious checkpoint files: readers raise a short error, and the process does not change."""

from __future__ import annotations

import collections
import copy
import copyreg
import enum
import io
import json
import math
import os
import pathlib
import pickle
import random
import resource
import shutil
import struct
import tracemalloc
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import torch._dynamo  # The first optimizer imports it, and it changes torch.
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # Allows its classes in torch.load.
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import convert, export, open_source
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.foreign import load_object
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, METADATA, dumps
from megatron_fsdp_v2.checkpoint.saving import pack
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2_cli.ckpt.inspecting import inspect
from tests.cases import longer
from tests.unit.checkpoints import FIRST, changed_metadata, same_bits


class Color(enum.Enum):
    """A class with shared members."""

    RED = 1


SHARED = (
    *(pathlib.PosixPath, collections.OrderedDict, torch, torch.serialization._get_layout),
    *(vars(dcp_metadata)[name] for name in dcp_metadata.__all__),
    *(dcp_metadata._MEM_FORMAT_ENCODING, Color, Color.RED),
)
"""Objects that crafted files try to change."""


def attributes(shared: Any) -> dict[str, Any]:
    """Return the attributes of an object, without the cache that copyreg adds to a class."""
    return {name: value for name, value in vars(shared).items() if name != "__slotnames__"}


@pytest.fixture(autouse=True)
def _unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that a test changes neither shared objects nor files outside the checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/keep").write_text("keep")
    before = [attributes(shared) for shared in SHARED]
    allowed = set(torch.serialization.get_safe_globals())
    yield
    for shared, old in zip(SHARED, before, strict=True):
        now = attributes(shared)
        # A module may have gained a lazily imported submodule.
        assert now.keys() == old.keys() or isinstance(shared, types.ModuleType), shared
        assert all(now[name] is old[name] for name in old), shared
    assert set(torch.serialization.get_safe_globals()) == allowed
    assert (tmp_path / "mine/keep").read_text() == "keep"
    assert not (tmp_path / "made").exists()
    assert isinstance(Path("x"), pathlib.PosixPath)


def save_valid(path: Path, *, has_manifest: bool = False) -> Path:
    """Save a checkpoint of a linear layer, with torch or with this package; return its path."""
    model = nn.Linear(4, 6)
    if has_manifest:
        checkpoint.save(path, model, extra={"step": 3, "name": "x"})
    else:
        state = {"model": model.state_dict(), "extra": {"step": 3, "name": "x"}}
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def assert_rejected(path: Path, said: str | None = None, *, inspected: bool = True) -> None:
    """Assert that every reader of a folder raises `CheckpointError`, and that `said` matches."""
    out = path.with_name("out.safetensors")
    assert not verify(path).is_good
    if inspected:
        with pytest.raises(CheckpointError, match=said):
            inspect(path)
    with pytest.raises(CheckpointError, match=said):
        export(path, out)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(path, nn.Linear(4, 6))
    assert not out.exists()


def name(module: str, of: str) -> bytes:
    return b"c" + module.encode() + b"\n" + of.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


PATH, EVIL = name("pathlib", "PosixPath"), b"}" + text("exists") + b"Ns"
SLOTS = b"N" + EVIL + b"\x86b0"
SYSTEM, TOUCH = name("os", "system"), text("touch made")
METADATA_CLASS = name(dcp_metadata.__name__, "Metadata")
CODE = 0x81
"""A code that a test registers with copyreg."""

APPENDED = {
    "state of a class": PATH + EVIL + b"b0",
    "slots of a class": PATH + SLOTS,
    "slots of a function": name("torch.serialization", "_get_layout") + SLOTS,
    "slots of metadata": METADATA_CLASS + SLOTS,
    "state of a member": name("builtins", "getattr")
    + (name(__name__, "Color") + text("RED") + b"\x86R" + EVIL + b"b0"),
    "call of a call": SYSTEM + b")R" + TOUCH + b"\x85R0",
    "call by name": name("builtins", "eval") + text("open('made', 'w')") + b"\x85R0",
    "new": SYSTEM + TOUCH + b"\x85\x810",
    "object": b"(" + SYSTEM + TOUCH + b"o0",
    "instance": b"(" + TOUCH + b"ios\nsystem\n0",
    "extension": bytes([0x82, CODE]) + TOUCH + b"\x85R0",
    "persistent id": b"Pabc\n0",
    "dotted name": text("pathlib") + text("Path.home") + b"\x930",
    "dictionary": name("collections", "defaultdict") + SYSTEM + b"\x85R" + b"K\x01K\x02s0",
    "an unmatched mark": b"(",
    "a pop from an empty stack": b"0",
    "string that is not text": b"X\x01\x00\x00\x00\xff0",
}
"""Operations that are added to a pickle of metadata."""


@pytest.mark.parametrize("what", APPENDED)
def test_a_pickle_of_metadata_neither_runs_nor_changes_anything(tmp_path: Path, what: str) -> None:
    file = save_valid(tmp_path / "c") / METADATA
    expected = CheckpointFolder(file.parent).entries
    content = file.read_bytes()
    assert content[-2:] == b"b."
    file.write_bytes(content[:-1] + APPENDED[what] + b".")
    try:
        assert CheckpointFolder(file.parent).entries == expected
    except CheckpointError as error:
        assert "cannot be read" in str(error)


def test_registered_extensions_are_not_called(tmp_path: Path) -> None:
    file = save_valid(tmp_path / "c") / METADATA
    registry: Any = vars(copyreg)["_extension_cache"]
    copyreg.add_extension("os", "system", CODE)  # type: ignore[arg-type]
    try:
        for cached in (False, True):
            if cached:
                registry[CODE] = os.system
            file.write_bytes(file.read_bytes()[:-1] + APPENDED["extension"] + b".")
            assert_rejected(file.parent, "registered with copyreg")
            assert registry.get(CODE) is (os.system if cached else None)
    finally:
        copyreg.remove_extension("os", "system", CODE)  # type: ignore[arg-type]


def pushed(module: str, of: str) -> bytes:
    """Return the operations of pickle protocol 4 for a name."""
    lengths = (bytes([len(part)]) + part.encode() for part in (module, of))
    return b"".join(b"\x8c" + part for part in lengths) + b"\x93"


ALONE = {
    "a function": pushed("os", "system"),
    "a call": SYSTEM + TOUCH + b"\x85R",
    "a dictionary": pickle.dumps({"a": 1})[2:-1],
    "noise": bytes(range(256)),
    "a class": METADATA_CLASS,
    "metadata without fields": METADATA_CLASS + b")\x81",
    "metadata of a list": METADATA_CLASS + b")\x81}" + text("state_dict_metadata") + b"]sb",
}


@pytest.mark.parametrize("what", ALONE)
def test_anything_but_metadata_is_rejected(tmp_path: Path, what: str) -> None:
    file = save_valid(tmp_path / "c") / METADATA
    file.write_bytes(b"\x80\x02" + ALONE[what] + b".")
    assert_rejected(file.parent, "cannot be read")


def weight(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["model.weight"]


def all_infos(metadata: Metadata, **changed: Any) -> None:
    for info in metadata.storage_data.values():
        vars(info).update(changed)


def renamed(metadata: Metadata, new: Any) -> None:
    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop("model.weight")


def resized(metadata: Metadata, *shape: int) -> None:
    weight(metadata).size = torch.Size(shape)
    weight(metadata).chunks[0].sizes = torch.Size(shape)


FOUND_BY_INSPECT: dict[str, Callable[[Metadata], Any]] = {
    "a shape beyond 63 bits": lambda m: resized(m, 2**62, 2**62),
    "a negative shape": lambda m: resized(m, -4, 6),
    "a chunk of other dimensions": lambda m: setattr(
        weight(m).chunks[0], "sizes", torch.Size((24,))
    ),
    "a negative offset": lambda m: setattr(weight(m).chunks[0], "offsets", torch.Size((-1, 0))),
    "a shape of strings": lambda m: setattr(weight(m), "size", ("6", "4")),
    "a shape of bools": lambda m: setattr(weight(m), "size", (True, 4)),
    "no chunks": lambda m: setattr(weight(m), "chunks", None),
    "not a dtype": lambda m: setattr(weight(m).properties, "dtype", "float32"),
    "no properties": lambda m: setattr(weight(m), "properties", None),
    "a name with an escape": lambda m: renamed(m, "model.\x1b[2Jweight"),
    "an escape, without paths": lambda m: (
        vars(m).update(planner_data=None),
        m.state_dict_metadata.update({"\x1b[2J": m.state_dict_metadata["extra.step"]}),
    ),
    "a name with a surrogate": lambda m: renamed(m, "model.\udc80"),
    "a name that is a number": lambda m: renamed(m, 3),
    "a path up": lambda m: all_infos(m, relative_path="../mine/keep"),
    "an absolute path": lambda m: all_infos(m, relative_path="/etc/passwd"),
    "an empty path": lambda m: all_infos(m, relative_path=""),
    "a path that is bytes": lambda m: all_infos(m, relative_path=b"a"),
    "a negative offset in a file": lambda m: all_infos(m, offset=-1),
    "a fractional offset in a file": lambda m: all_infos(m, offset=0.5),
    "a transformation": lambda m: all_infos(m, transform_descriptors=["zstd"]),
    "no index": lambda m: setattr(m, "storage_data", {"a": 1}),
    "a list instead of a dictionary": lambda m: setattr(m, "state_dict_metadata", []),
    "nothing stored": lambda m: setattr(m, "storage_data", None),
}

NOT_FOUND_BY_INSPECT: dict[str, Callable[[Metadata], Any]] = {
    "an offset in a file beyond 63 bits": lambda m: all_infos(m, offset=2**63 - 1, length=2),
    "an offset behind the end of a file": lambda m: all_infos(m, offset=10**12),
    "a length of zero": lambda m: all_infos(m, length=0),
    "a file that does not exist": lambda m: all_infos(m, relative_path="nothing"),
    "a shape of terabytes": lambda m: resized(m, 2**40, 6),
    "a chunk outside": lambda m: setattr(weight(m).chunks[0], "offsets", torch.Size((3, 0))),
    "a chunk twice": lambda m: weight(m).chunks.append(weight(m).chunks[0]),
}


@pytest.mark.parametrize("what", [*FOUND_BY_INSPECT, *NOT_FOUND_BY_INSPECT])
def test_numbers_and_names_out_of_range_are_rejected(tmp_path: Path, what: str) -> None:
    path = save_valid(tmp_path / "c")
    with changed_metadata(path) as metadata:
        (FOUND_BY_INSPECT | NOT_FOUND_BY_INSPECT)[what](metadata)
    said = "is not in the same folder" if what.startswith("a path up") else None
    assert_rejected(path, said, inspected=what in FOUND_BY_INSPECT)


@pytest.mark.parametrize(
    "planner_data",
    [{"a": {"b": [1]}}, [1, 2], {"model.weight": ("model", "weight")}],
    ids=["nested", "a list", "torch's"],
)
def test_planner_data_of_another_program_is_ignored(tmp_path: Path, planner_data: Any) -> None:
    path = save_valid(tmp_path / "c")
    with changed_metadata(path) as metadata:
        metadata.planner_data = planner_data
    assert verify(path).is_good
    assert CheckpointFolder(path).read_tensor("model.weight").shape == (6, 4)


def tensor_of(**changed: Any) -> dict[str, Any]:
    """Return entries of a manifest."""
    return {"entries": {"a": {"dtype": "int8", "shape": [1], "chunks": []} | changed}}


def object_of(*numbers: int) -> dict[str, Any]:
    """Return entries of a manifest: an object at a place."""
    return {"entries": {"a": {"object": [*numbers]}}}


MANIFESTS: dict[str, tuple[Any, str | None]] = {
    "infinite": ({"world_size": float("inf")}, None),
    "negative": ({"world_size": -1}, None),
    "not whole": ({"world_size": 1.5}, None),
    "beyond 63 bits": ({"world_size": 2**63}, None),
    "a file that is a number": ({"files": [1]}, None),
    "a path up": ({"files": ["../mine/keep"]}, None),
    "an item of two": (object_of(0, 1), "cannot be read"),
    "a negative item": (object_of(0, -1, 2, 3), None),
    "a negative length": (object_of(0, 1, -2, 3), None),
    "a long checksum": (object_of(0, 1, 2, 2**32), None),
    "metadata without a checksum": ({"metadata": [3]}, "cannot be read"),
    "an entry that is a list": ({"entries": {"a": []}}, None),
    "a name with an escape": ({"entries": {"\x1b[2J": {"object": [0, 0, 1, 1]}}}, None),
    "a file that does not exist": (object_of(9, 0, 1, 1), None),
    "the last file": (object_of(-1, 0, 1, 1), None),
    "an index of another dtype": (tensor_of(dtype="onnx"), None),
    "an index of a negative shape": (tensor_of(shape=[-1]), None),
    "an index of a fraction": (tensor_of(chunks=[[0, 0, 1, 1, 0, 1.0]]), None),
    "an index of a chunk of other dimensions": (tensor_of(chunks=[[0, 0, 1, 1, 0, 0, 1, 1]]), None),
    "another version": ({"version": 2}, "is of version 2 of .*reads version 1"),
    "another format": ({"format": "another"}, "is of version 1 of the format 'another'"),
    "not text": (b"\xff\xfe", None),
}
"""Changed fields of a manifest, or its bytes, and text of the error."""


@pytest.mark.parametrize(("changed", "said"), MANIFESTS.values(), ids=MANIFESTS)
def test_manifests_are_read_strictly(tmp_path: Path, changed: Any, said: str | None) -> None:
    path = save_valid(tmp_path / "c", has_manifest=True)
    if isinstance(changed, dict):
        changed = dumps(json.loads((path / MANIFEST).read_bytes()) | changed)
    (path / MANIFEST).write_bytes(changed)
    assert_rejected(path, said)


@pytest.mark.parametrize("which", [METADATA, MANIFEST, FIRST])
def test_links_out_of_the_folder_are_rejected(tmp_path: Path, which: str) -> None:
    path = save_valid(tmp_path / "c", has_manifest=True)
    file, elsewhere, inside = path / which, tmp_path / "elsewhere", path / "inside"
    shutil.move(file, inside)
    file.symlink_to(inside)
    assert verify(path).problems == []
    shutil.move(inside, elsewhere)
    file.unlink()
    file.symlink_to(elsewhere)
    assert_rejected(path, inspected=which != FIRST)


def test_named_pipes_do_not_block_readers(tmp_path: Path) -> None:
    path = save_valid(tmp_path / "c")
    os.mkfifo(path / MANIFEST)
    checkpoint.load(path, nn.Linear(4, 6))
    (path / FIRST).unlink()
    os.mkfifo(path / FIRST)
    assert_rejected(path, inspected=False)


def header(changed: dict[str, Any] | str) -> bytes:
    content = changed if isinstance(changed, str) else json.dumps(changed)
    return struct.pack("<Q", len(content)) + content.encode() + bytes(48)


A = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
B = {"dtype": "F32", "shape": [9], "data_offsets": [12, 48]}
HEADERS: dict[str, dict[str, Any] | str] = {
    "an overlap": {"a": A, "b": B | {"shape": [10], "data_offsets": [8, 48]}},
    "a gap": {"a": A, "b": B | {"shape": [8], "data_offsets": [16, 48]}},
    "unused bytes at the end": {"a": A},
    "an end behind the file": {"a": A, "b": B | {"shape": [90], "data_offsets": [12, 372]}},
    "negative": {"a": A | {"shape": [-3], "data_offsets": [12, 0]}, "b": B},
    "beyond 63 bits": {"a": A | {"shape": [2**62, 2**62]}, "b": B},
    "not whole": {"a": A | {"shape": [3.0]}, "b": B},
    "infinite": {"a": A | {"shape": [float("inf")]}, "b": B},
    "bools": {"a": A | {"shape": [True, 3]}, "b": B},
    "a dtype that is a list": {"a": A | {"dtype": []}, "b": B},
    "another dtype": {"a": A | {"dtype": "F31"}, "b": B},
    "a name with an escape": {"\x1b[2J": A, "b": B},
    "metadata of numbers": {"a": A, "b": B, "__metadata__": {"x": 1}},
    "deep": '{"a":' + "[" * 20_000 + "]" * 20_000 + "}",
}


@pytest.mark.parametrize("what", [*HEADERS, "a long header", "an empty file"])
def test_headers_of_safetensors_are_read_strictly(tmp_path: Path, what: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(header({"a": A, "b": B}))
    assert verify(file).is_good
    others = {"a long header": b"\xff" * 8 + b"{}", "an empty file": b""}
    file.write_bytes(header(HEADERS[what]) if what in HEADERS else others[what])
    assert not verify(file).is_good
    for read in (inspect, lambda source: convert(source, tmp_path / "out")):
        with pytest.raises(CheckpointError):
            read(file)


@pytest.mark.parametrize("to", ["../mine/keep", "/etc/passwd", "", ".", "a\0b", 3, None, ["x"]])
def test_index_may_only_name_files_in_its_folder(tmp_path: Path, to: Any) -> None:
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": to}}))
    assert not verify(index).is_good
    with pytest.raises(CheckpointError, match="cannot be read"):
        inspect(index)


STORAGE = text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu")
TENSOR = name("torch._utils", "_rebuild_tensor_v2") + b"((" + STORAGE
OBJECTS = {
    "a call": SYSTEM + TOUCH + b"\x85R",
    "a call by name": name("builtins", "eval") + text("open('made', 'w')") + b"\x85R",
    "state of a member": name(__name__, "Color") + b"K\x01\x85R}" + text("_value_") + b"K\x02sb",
    "state of a class": PATH + EVIL + b"b",
    "a call of a dtype": name("torch", "float32") + b")R",
    "a long storage": TENSOR + b"J\x00\x00\x10\x00tQK\x00J\x00\x00\x10\x00\x85K\x01\x85\x89}tR",
    "a negative stride": TENSOR + b"K\x04tQK\x00K\x04\x85J\xff\xff\xff\xff\x85\x89}tR",
    "more than its storage": TENSOR + b"K\x04tQK\x00K\x04\x85K\x02\x85\x89}tR",
    "a storage that does not exist": TENSOR.replace(text("0"), text("9"))
    + b"K\x04tQK\x00K\x04\x85K\x01\x85\x89}tR",
}


def archived(description: bytes, kind: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", kind) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + description + b".")
        for record, of in (("byteorder", b"little"), ("data/0", bytes(16)), ("version", b"3\n")):
            archive.writestr(f"archive/{record}", of)
    return content.getvalue()


@pytest.mark.parametrize("what", OBJECTS)
def test_objects_that_are_not_plain_data_are_rejected(tmp_path: Path, what: str) -> None:
    file = tmp_path / "x.pt"
    file.write_bytes(archived(OBJECTS[what]))
    for source in (file, file.read_bytes()):
        with pytest.raises(CheckpointError, match="cannot be loaded as plain data"):
            load_object(source, "x")
    assert not verify(file).is_good


def nested(depth: int = 26) -> bytes:
    """Return the operations of a tuple whose text doubles `depth` times, and its hash as well."""
    return b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(depth))


CODEC = name("_codecs", "encode")
SIZED = {
    "bytes": name("builtins", "bytearray") + b"J\x00\x00\x00\x7f\x85R",
    "a tensor": name("torch", "FloatTensor") + b"J\x00\x00\x00\x7f\x85R",
    "a storage": name("torch.storage", "UntypedStorage") + b"J\x00\x00\x00\x7f\x85R",
    "a codec that doubles": CODEC + text("a" * 1000) + text("hex") + b"\x86R",
    "an index": b"}r\xff\xff\xff\x7f",
    "an index in text": b"}p99999999999\n",
    "a value of nested tuples": nested(),
    "a key of nested tuples": b"}" + nested(16) + b"K\x00s",
}
"""Pickles of at most a few thousand bytes that took gigabytes: to read, or to print."""


@pytest.mark.parametrize("what", SIZED)
def test_memory_and_messages_are_bounded_by_the_file(tmp_path: Path, what: str) -> None:
    file = tmp_path / "x.pt"
    file.write_bytes(archived(SIZED[what]))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as rejected:
            convert(file, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(rejected.value)) < 1000
    assert peak < 2**20
    assert str(file) in str(rejected.value)


@pytest.mark.parametrize("index", [b"r\xff\xff\xff\x7f", b"p99999999999\n"])
def test_an_index_of_metadata_is_bounded_by_the_file(tmp_path: Path, index: bytes) -> None:
    file = save_valid(tmp_path / "c") / METADATA
    file.write_bytes(file.read_bytes()[:-1] + b"}" + index + b"0.")
    assert_rejected(file.parent, r"cannot be read \(it has the index \d+ and \d+ bytes")


def test_messages_with_names_of_a_file_are_short(tmp_path: Path) -> None:
    path, longest = save_valid(tmp_path / "c"), "model." + "x" * 60_000
    with changed_metadata(path) as metadata:
        renamed(metadata, longest)
    for read in (
        lambda: checkpoint.load(path, nn.Linear(4, 6)),
        lambda: export(path, tmp_path / "out.safetensors"),
    ):
        with pytest.raises(CheckpointError) as rejected:
            read()
        assert len(str(rejected.value)) < 5000
    report = verify(path)
    assert not report.is_good
    assert max(map(len, report.problems)) < 5000


def torch_saved(value: Any, **options: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content, **options)
    return content.getvalue()


def overlapping() -> bytes:
    """Return an archive in which two records share their bytes."""
    content = archived(text("x" * 1000) + b"0}")
    at = content.index(b"PK\1\2")
    length = content.index(b"PK\1\2", at + 1) - at
    end = bytearray(content[-22:])
    end[8:16] = struct.pack("<HHI", 54, 54, len(content) - at - 22 + 50 * length)
    return content[:-22] + content[at : at + length] * 50 + end


ARCHIVES = {
    "compressed records": (archived(b"}", zipfile.ZIP_DEFLATED), "compressed, or overlap"),
    "overlapping records": (overlapping(), "compressed, or overlap"),
    "another format": (
        torch_saved([], _use_new_zipfile_serialization=False),
        r"torch before 1\.6 with torch and save it again",
    ),
    "no archive": (b"PK", "not a zip archive"),
}
"""Archives, and text of the error."""


@pytest.mark.parametrize(("archive", "said"), ARCHIVES.values(), ids=ARCHIVES)
def test_unsupported_archives_are_rejected(tmp_path: Path, archive: bytes, said: str) -> None:
    file = tmp_path / "x.pt"
    file.write_bytes(archived(b"}"))
    assert load_object(file, "x") == load_object(archived(b"}"), "x") == {}
    file.write_bytes(archive)
    for source in (file, archive):
        with pytest.raises(CheckpointError, match=said):
            load_object(source, "x")
    assert not verify(file).is_good


@pytest.mark.parametrize(
    "packed", [torch_saved, lambda value: pack("extra", value)], ids=["by torch", "as extra"]
)
def test_plain_data_of_every_type_is_loaded(packed: Callable[[Any], bytes]) -> None:
    whole = torch.arange(12.0).view(3, 4)
    values = [
        *(None, True, 2**70, -5, 1.5, -math.inf, "a", b"xyz", bytearray(b"abc"), bytearray(), b""),
        *(set(), {1, 2}, [], {}, [1, (2, [3])], {(1, (2, 3)): 3, None: 4}, 1 + 2j),
        *(torch.bfloat16, torch.device("cuda:1"), collections.Counter("abca")),
        *({"b": {"c": (None, 2**63, "ä\0")}, "a": [b"\xff", [[]]]}, {torch.float32: 1}),
        collections.OrderedDict(a=1),
    ]
    tensors = [
        *(whole, whole.t(), whole[:, 1:], whole.expand(2, 3, 4), torch.ones(()), torch.ones(0, 3)),
        *(torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.uint16)),
        *(torch.tensor([True, False]), torch.get_rng_state(), torch.ones(2, dtype=torch.complex64)),
    ]
    if packed is torch_saved:
        values.append(torch.Size([2]))
    for value in values:
        (found,) = load_object(packed([value]), "x")
        assert type(found) is type(value)
        assert found == value
    for tensor in tensors:
        found, same = load_object(packed([tensor, tensor]), "x")
        assert found.dtype == tensor.dtype
        assert torch.equal(found.to(torch.complex128), tensor.to(torch.complex128))
        assert packed is not torch_saved or found.data_ptr() == same.data_ptr()
    assert math.isnan(load_object(packed(math.nan), "x"))
    state = load_object(packed(nn.Linear(2, 2).state_dict()), "x")
    assert list(state) == ["weight", "bias"]


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one random change."""
    at = chance.randrange(len(content))
    many = min(len(content) - at, chance.choice((1, 2, 4, 8, 40)))
    before, piece, after = content[:at], content[at : at + many], content[at + many :]
    changes = {
        "flip": bytes([piece[0] ^ (1 << chance.randrange(8))]) + piece[1:],
        "cut": b"",
        "again": piece * 2,
        "noise": chance.randbytes(many),
        "extreme": chance.choice((b"\0", b"\x7f", b"\xff")) * many,
        "moved": content[chance.randrange(len(content)) :][:many],
    }
    what = chance.choice(("flip", "end", *changes))
    return before if what == "end" else before + changes[what] + after


def written(folder: Path, kind: str) -> Path:
    """Write a valid checkpoint of one kind; return its path."""
    tensors = {"weight": torch.rand(6, 4), "bias": torch.rand(6)}
    if kind in ("ours", "torch"):
        return save_valid(folder / "c", has_manifest=kind == "ours")
    path = folder / f"c.{kind}"
    if kind == "safetensors":
        safetensors.save_file(tensors, path, {"format": "pt"})
    else:
        torch.save(tensors, path)
    return path


def values_of(path: Path) -> dict[str, torch.Tensor]:
    source = open_source(path)
    return {name: source.read(name) for name in source.tensors}


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Let allocations of more than 4 GB fail: a changed index makes C's unpickler try one."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("count", [60, longer(5000)])
@pytest.mark.parametrize("kind", ["ours", "torch", "safetensors", "pt"])
def test_random_changes_have_no_effect_or_raise_checkpoint_error(
    tmp_path: Path, kind: str, count: int
) -> None:
    """Each change is detected, has no effect, or is in data without a checksum."""
    path = written(tmp_path, kind)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    before, good = values_of(path), {file: file.read_bytes() for file in files}
    chance, rejected = random.Random(kind), 0
    is_folder, model, saved = path.is_dir(), nn.Linear(4, 6), nn.Linear(4, 6)
    start = copy.deepcopy(model.state_dict())
    if is_folder:
        checkpoint.load(path, saved)
    for number in range(count):
        file = chance.choice(files)
        file.write_bytes(mutated(good[file], chance))
        model.load_state_dict(start)
        try:
            report = verify(path)
            try:
                inspect(path)
                found = values_of(path)
                if is_folder:
                    checkpoint.load(path, model)
            except CheckpointError:
                rejected += 1
                # A rejected load leaves the model unchanged.
                assert same_bits(model.state_dict(), start)
            else:
                same = found.keys() == before.keys() and all(
                    torch.equal(found[key], before[key]) for key in before
                )
                # Without a manifest, data that is not read in full is not verified.
                assert same or kind != "ours"
                assert same or not report.is_good or file.name != FIRST
                assert kind != "ours" or same_bits(model.state_dict(), saved.state_dict())
        except Exception as error:
            raise AssertionError(f"{kind}, {file.name}, change {number}: {error!r}") from error
        finally:
            file.write_bytes(good[file])
    assert rejected > count // 10
    assert verify(path).is_good
