"""Export of a checkpoint folder to one plain file, and conversion between all kinds of files."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_fsdp_v2.checkpoint import plain_files, replacing, writing
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import CheckpointKind, convert, export
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.writing import Blocks
from tests.cases import longer
from tests.processes import ROOT, ran
from tests.unit.checkpoints import FIRST, flip, names_in, same_bits, write_folder

Tensors = dict[str, torch.Tensor]


def model() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    found = {f"layers.{i}.weight": torch.randn(6, 4, generator=generator) for i in (0, 1, 2, 9, 10)}
    return found | {
        "embedding.weight": torch.randn(5, 3, generator=generator).bfloat16(),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "counts": torch.arange(3),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "codes": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(3, generator=generator).half(),
        "quantized": torch.randn(2, 2, generator=generator).to(torch.float8_e4m3fn),
    }


def write(path: Path, tensors: Tensors, cut: int = 1) -> Path:
    """Write a checkpoint folder: rows in two chunks, optimizer state and an object."""
    model = {f"model.{name}": data for name, data in tensors.items()}
    moment = {"optimizer.state.scale.exp_avg": torch.tensor(1.0)}
    return write_folder(path, model | moment, {"extra": {"step": 3}}, cut=cut)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", model())


def load_plainly(file: Path) -> Tensors:
    """Load a file with the libraries of other programs."""
    if file.suffix == ".safetensors":
        return load_file(file)
    loaded: Tensors = torch.load(file, weights_only=True, mmap=True)
    assert all(t.data_ptr() % t.dtype.itemsize == 0 for t in loaded.values())
    return loaded


def load_sharded(index: Path) -> Tensors:
    weight_map = json.loads(index.read_text())["weight_map"]
    found: Tensors = {}
    for file in sorted(set(weight_map.values())):
        tensors = load_file(index.with_name(file))
        assert {name for name, of in weight_map.items() if of == file} == tensors.keys()
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def test_safetensors_file_is_bitwise_identical_to_the_model(folder: Path, tmp_path: Path) -> None:
    done = export(folder, tmp_path / "model.safetensors")
    assert done.files == (tmp_path / "model.safetensors",)
    assert same_bits(load_file(done.files[0]), model())
    assert done.num_tensors == len(model())
    assert done.nbytes == sum(t.nbytes for t in model().values())
    assert done.left_out == ("optimizer.state.scale.exp_avg", "extra")
    with safe_open(done.files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("limit", [2 * 6 * 4 * 4, 1], ids=["several in a file", "too small"])
def test_size_limit_writes_shards_and_an_index_in_hugging_face_format(
    folder: Path, tmp_path: Path, limit: int
) -> None:
    done = export(folder, tmp_path / "out" / "model.safetensors", max_shard_bytes=limit)
    *shards, index = done.files
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert [shard.name for shard in shards] == names
    assert index.name == "model.safetensors.index.json"
    assert names_in(tmp_path / "out") == sorted([*names, index.name])
    assert same_bits(load_sharded(index), model())
    # A tensor that exceeds the limit has a separate file.
    held = [list(load_file(shard).values()) for shard in shards]
    assert all(len(t) == 1 or sum(each.nbytes for each in t) <= limit for t in held)
    assert len(shards) > 2
    assert json.loads(index.read_text())["metadata"] == {"total_size": done.nbytes}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_dtype_converts_only_floating_point_tensors(
    folder: Path, tmp_path: Path, suffix: str
) -> None:
    (file,) = export(folder, tmp_path / f"m{suffix}", dtype=torch.bfloat16).files
    expected = {
        name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in model().items()
    }
    assert same_bits(load_plainly(file), expected)


def test_unsupported_conversions_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.int8; .* float32, bfloat16"):
        export(folder, tmp_path / "m.pt", dtype=torch.int8)
    large = write(tmp_path / "large", {"big.weight": torch.full((2, 2), 1e6)})
    for write_out in (export, convert):
        with pytest.raises(CheckpointError, match=r"big\.weight has elements that are too large f"):
            write_out(large, tmp_path / "m.pt", dtype=torch.float16)
    complex_model = write(tmp_path / "c", {"z": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"z is of torch\.complex128, which \.safetensors"):
        export(complex_model, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="max_shard_bytes is 0"):
        export(folder, tmp_path / "m.safetensors", max_shard_bytes=0)


def test_existing_files_are_not_overwritten(folder: Path, tmp_path: Path) -> None:
    """Files of the same name, another model's shards, and names of unfinished files."""
    out = tmp_path / "out"
    out.mkdir()
    mine = ("m.pt.incomplete", "m.safetensors.incomplete", "m-00001-of-00013.safetensors")
    for name in mine:
        (out / name).write_text(f"mine: {name}")
    (out / "c.incomplete").mkdir()
    (out / "c.incomplete" / "mine").write_text("mine")
    (out / "gone.pt").symlink_to("nowhere")
    export(folder, out / "m.pt")
    convert(folder, out / "c")
    export(folder, out / "n.safetensors", max_shard_bytes=1)
    before = names_in(out)
    for write_out, there, limit in (
        (export, "m.pt", 1 << 30),
        (export, "m-00001-of-00013.safetensors", 1),
        (export, "n.safetensors.index.json", 1 << 30),
        (export, "gone.pt", 1 << 30),
        (convert, "c", 1 << 30),
    ):
        asked = re.sub(r"-\d{5}-of-\d{5}|\.index\.json", "", there)
        with pytest.raises(ValueError, match=rf"{re.escape(there)} already exists"):
            write_out(folder, out / asked, max_shard_bytes=limit)
    assert names_in(out) == before
    assert {(out / name).read_text() for name in mine} == {f"mine: {name}" for name in mine}
    assert (out / "c.incomplete" / "mine").read_text() == "mine"


def test_file_created_during_an_export_is_not_overwritten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def create_file(written: Path) -> None:
        (out / "m-00002-of-00013.safetensors").write_text("mine")

    monkeypatch.setattr(replacing, "sync", create_file)
    with pytest.raises(ValueError, match=r"m-00002-of-00013\.safetensors already exists"):
        export(folder, out / "m.safetensors", max_shard_bytes=1)
    assert names_in(out) == ["m-00002-of-00013.safetensors"]
    assert (out / "m-00002-of-00013.safetensors").read_text() == "mine"
    export(folder, out / "n.safetensors")
    assert same_bits(load_file(out / "n.safetensors"), model())


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_failed_export_leaves_no_file(folder: Path, tmp_path: Path, name: str) -> None:
    out, file = tmp_path / "out", folder / FIRST
    flip(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*checksum"):
        export(folder, out / name, max_shard_bytes=100)
    assert list(out.iterdir()) == []


# State dicts with the model under a key, and with the model alone.
NESTED = {"model": {"model.weight": torch.ones(2), "head": torch.zeros(1)}, "optim": torch.ones(3)}
FLAT = {"model.weight": torch.ones(2), "head": torch.zeros(1)}


def test_model_tensors_are_found_in_nested_and_flat_state_dicts(tmp_path: Path) -> None:
    dcp.save(NESTED, checkpoint_id=tmp_path / "nested", no_dist=True)
    dcp.save(FLAT, checkpoint_id=tmp_path / "flat", no_dist=True)
    dcp.save({"app": NESTED}, checkpoint_id=tmp_path / "deep", no_dist=True)
    for number, (source, prefix) in enumerate(
        [("nested", None), ("flat", None), ("deep", "app.model.")]
    ):
        out = tmp_path / f"{number}.safetensors"
        export(tmp_path / source, out, prefix=prefix)
        assert load_file(out).keys() == FLAT.keys()


def saved_as(kind: str, path: Path, tensors: Tensors) -> Path:
    """Save the model as a kind of checkpoint with other libraries; return the path."""
    if kind == "folder":
        dcp.save({"model": tensors, "step": 3}, checkpoint_id=path / "source", no_dist=True)
        return path / "source"
    file = path / f"source.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        save_file(tensors, file)
        return file
    if kind == "pt":
        torch.save(tensors, file)
        return file
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        save_file({n: tensors[n] for n in names}, path / f"part{number}.safetensors")
    weight_map = {name: f"part{i % 2}.safetensors" for i, name in enumerate(tensors)}
    index = path / "source.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return path if kind == "sharded-folder" else index


def read_back(path: Path, like: Tensors) -> Tensors:
    if path.suffix:
        return load_plainly(path)
    expected = {name: torch.zeros_like(t) for name, t in like.items()}
    state = {"model": expected}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return expected


@pytest.mark.parametrize("target", ["target", "target.pt", "target.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "pt", "safetensors", "sharded", "sharded-folder"])
def test_conversions_between_all_kinds_are_bitwise_identical(
    tmp_path: Path, kind: str, target: str
) -> None:
    tensors = model()
    done = convert(saved_as(kind, tmp_path, tensors), tmp_path / target)
    assert done.num_tensors == len(tensors)
    assert same_bits(read_back(tmp_path / target, tensors), tensors)
    if target == "target":
        assert CheckpointFolder(tmp_path / target).manifest is not None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": torch.ones(1), "step": 3}, "holds 'step', which is a int, not a tensor"),
        ({"model": {"a": torch.ones(1)}}, "holds 'model', which is a dict, not a tensor"),
        ([torch.ones(1)], "holds a list"),
        (CheckpointKind.PT, "cannot be loaded as plain data"),
    ],
)
def test_pt_file_with_other_content_is_rejected(
    tmp_path: Path, value: object, problem: str
) -> None:
    torch.save(value, tmp_path / "source.pt")
    with pytest.raises(CheckpointError, match=problem):
        convert(tmp_path / "source.pt", tmp_path / "target")


def test_missing_safetensors_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved_as("folder", tmp_path, model())
    convert(source, tmp_path / "made.safetensors")
    monkeypatch.setattr(plain_files, "safetensors", None)
    for origin, target in ((source, "other.safetensors"), (tmp_path / "made.safetensors", "c")):
        with pytest.raises(CheckpointError, match="needs the library safetensors; install it w"):
            convert(origin, tmp_path / target)


def test_missing_safetensors_files_are_named(tmp_path: Path) -> None:
    index = saved_as("sharded", tmp_path, model())
    (tmp_path / "part1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: part1\.safetensors is missing"):
        convert(index, tmp_path / "target")


PEAKS = """
import sys
from pathlib import Path
import torch
from megatron_fsdp_v2.checkpoint.exporting import convert

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

source, small, out, *kinds = sys.argv[1:]
for number, kind in enumerate(kinds):
    suffix, _, dtype = kind.partition(" ")
    options = {"dtype": getattr(torch, dtype)} if dtype else {}
    # Exclude imports and caches of the first conversion.
    convert(small, f"{out}/small{number}{suffix}", **options)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    convert(source, f"{out}/large{number}{suffix}", max_shard_bytes=20 << 20, **options)
    print(status("VmHWM") - before)
"""

MIB = 1 << 20
LARGEST = 32 * MIB
CHUNK = 8 * MIB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory")
def test_peak_memory_is_one_file_or_one_tensor(tmp_path: Path) -> None:
    """Peak memory is one file, or one tensor of a folder, plus one chunk of a tensor."""
    rows, cut = LARGEST // 4096, CHUNK // 4096
    entries = {f"model.{number}": Blocks((rows, 1024), torch.float32) for number in range(3)}
    for number, blocks in enumerate(entries.values()):
        for start in range(0, rows, cut):
            blocks.add((start, 0), (cut, 1024), partial(torch.full, (cut, 1024), float(number)))
    writing.write_folder(tmp_path / "large", entries)
    small = write(tmp_path / "small", {"weight": torch.ones(3, 3)})
    kinds = [".safetensors", ".safetensors bfloat16", ""]
    # With a fixed threshold, the C library returns freed tensors to the system at once. By default
    # the threshold grows with what is freed, and freed tensors of 16 MiB count as memory in use.
    done = ran(
        *("env", "MALLOC_MMAP_THRESHOLD_=65536"),
        *(sys.executable, "-c", PEAKS, tmp_path / "large", small, tmp_path, *kinds),
    )
    assert done.returncode == 0, done.stderr
    peaks = dict(zip(kinds, map(int, done.stdout.split()), strict=True))
    shown = {kind: f"{peak / MIB:.0f} MiB" for kind, peak in peaks.items()}
    assert min(peaks.values()) > 0.9 * LARGEST, shown
    # During a dtype conversion a tensor exists in both dtypes.
    assert peaks.pop(".safetensors bfloat16") < LARGEST * 3 // 2 + 6 * MIB, shown
    assert max(peaks.values()) < LARGEST + CHUNK + 6 * MIB, shown


MY_MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1 << 30, longer(64)], ids=["one-file", "several"])
def test_documented_script_loads_an_export_without_this_package(tmp_path: Path, limit: int) -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    match = re.search(r"```python\n# load_export\.py\n(.*?)```", text, re.DOTALL)
    assert match is not None
    assert "megatron_fsdp_v2" not in match[1]
    assert len(match[1].splitlines()) <= 25
    scope: dict[str, object] = {}
    exec(MY_MODEL, scope)
    torch.manual_seed(3)
    plain = scope["build_model"]()  # type: ignore[operator]
    saved = write(tmp_path / "checkpoint", plain.state_dict())
    export(saved, tmp_path / "exported" / "model.safetensors", max_shard_bytes=limit)
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    (tmp_path / "load_export.py").write_text(match[1])
    done = ran(sys.executable, "load_export.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == sum(p.double().sum().item() for p in plain.parameters())
