"""Output and exit codes of `megatron-fsdp-v2 ckpt`."""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_fsdp_v2.checkpoint import exporting
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2_cli import progress as cli_progress
from megatron_fsdp_v2_cli.ckpt import command as converters
from tests.processes import ROOT
from tests.unit.checkpoints import FIRST, flip, names_in, no_file_longer_than, write_folder
from tests.unit.commands import called

type OutputOf = Callable[..., str]


def declared(group: str) -> dict[str, EntryPoint]:
    """Return the entry points that pyproject.toml declares, whether installed or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        name: EntryPoint(name, value, group)
        for name, value in project["entry-points"][group].items()
    }


@pytest.fixture(autouse=True)
def declared_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exporting, converters):
        monkeypatch.setattr(module, "entry_points", lambda group: tuple(declared(group).values()))


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> OutputOf:
    """Run a command; return its output, or its error for status 2: `output_of("verify", path)`."""

    def call(*words: object, status: int = 0) -> str:
        found, out, err = called(capsys, "ckpt", *words)
        assert found == status
        return err if status == 2 else out

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {f"model.layers.{i}.weight": torch.full((4, 256), float(i)) for i in (0, 10, 2)}
    tensors["model.embedding.table.weight"] = torch.ones(2, 3).bfloat16()
    tensors["optimizer.state.exp_avg"] = torch.ones(2)
    return write_folder(tmp_path / "checkpoint", tensors, {"extra": {"step": 3}})


def test_inspect_summarizes_and_lists_names_in_natural_order(
    folder: Path, output_of: OutputOf
) -> None:
    folder = folder.rename(folder.with_name("iter_0000020"))
    head, _, text = output_of("inspect", folder).partition("\n\n")
    path, saved, *parts = head.splitlines()
    assert path == f"{folder}, iteration 20"
    assert saved.startswith("saved by 1 ranks with torch ")
    assert [" ".join(line.split()) for line in parts] == [
        "model 3,078 elements 4 tensors 12.0 KiB bfloat16, float32",
        "optimizer 2 elements 1 tensors 8 B float32",
    ]
    lines = [line.split() for line in text.splitlines()]
    layers = [f"model.layers.{number}.weight" for number in (0, 2, 10)]
    names = ["extra", "model.embedding.table.weight", *layers, "optimizer.state.exp_avg"]
    assert [line[0] for line in lines] == [*names, "total"]
    assert lines[2] == [layers[0], "(4,", "256)", "float32", "4.0", "KiB"]
    assert lines[1] == [names[1], "(2,", "3)", "bfloat16", "12", "B"]
    assert lines[-1] == ["total", "5", "tensors", "12.0", "KiB"]


def test_inspect_selects_sorts_and_adds_up(folder: Path, output_of: OutputOf) -> None:
    def listed(*words: str) -> list[str]:
        text = output_of("inspect", folder, *words).partition("\n\n")[2]
        return [" ".join(line.split()) for line in text.splitlines()]

    first, second, *_ = listed("--depth", "1")
    assert first.startswith("extra object")
    assert second == "model 4 tensors 12.0 KiB"
    assert listed("--depth", "1", "--sizes")[0] == second
    assert listed("--filter", "*.embedding.*") == [
        "model.embedding.table.weight (2, 3) bfloat16 12 B",
        "total 1 tensors 12 B",
    ]


def test_json_is_selected_sorted_and_added_up(folder: Path, output_of: OutputOf) -> None:
    def found(*words: str) -> dict[str, Any]:
        return dict(json.loads(output_of("inspect", folder, "--json", *words)))

    some = found("--filter", "*.embedding.*")
    assert [*some["tensors"]] == ["model.embedding.table.weight"]
    assert (some["objects"], some["num_tensors"], some["nbytes"]) == ({}, 1, 12)
    sizes = [tensor["nbytes"] for tensor in found("--sizes")["tensors"].values()]
    assert sizes == [4096, 4096, 4096, 12, 8]
    grouped = found("--depth", "1", "--sizes")
    assert grouped["groups"]["model"] == {"num_tensors": 4, "num_objects": 0, "nbytes": 12300}
    assert grouped["groups"]["extra"]["num_objects"] == 1
    assert next(iter(grouped["groups"])) == "model"
    assert "tensors" not in grouped


def test_inspect_writes_json(folder: Path, output_of: OutputOf) -> None:
    found = json.loads(output_of("inspect", folder, "--json"))
    expected = {"shape": [4, 256], "dtype": "float32", "nbytes": 4096, "chunks": 1}
    assert found["tensors"]["model.layers.10.weight"] == expected
    assert list(found["objects"]) == ["extra"]
    assert (found["num_tensors"], found["nbytes"]) == (5, 3 * 4096 + 12 + 8)
    assert found["manifest"]["world_size"] == 1


def test_verify_returns_0_for_a_good_checkpoint_and_1_for_a_damaged_one(
    folder: Path, output_of: OutputOf
) -> None:
    assert "undamaged; 2 files" in output_of("verify", folder)
    content = (folder / FIRST).read_bytes()
    flip(folder / FIRST, content.index(struct.pack("<2f", 10.0, 10.0)))
    out = output_of("verify", folder, status=1)
    assert "DAMAGED (1 problem); 2 files" in out
    assert "model.layers.10.weight" in out


def test_export_prints_written_and_omitted_tensors(
    folder: Path, tmp_path: Path, output_of: OutputOf
) -> None:
    out = tmp_path / "model.safetensors"
    written = output_of("export", folder, out, "--dtype", "bfloat16", "--max-shard-size", "5MB")
    assert f"{out}: 4 tensors, 6.0 KiB\n" in written
    assert "left out: optimizer, extra" in written
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(out).values())
    written = output_of(
        "export", folder, tmp_path / "sharded.safetensors", "--max-shard-size", "5KB"
    )
    assert "sharded.safetensors.index.json and 3 files beside it: 4 tensors" in written


@pytest.mark.parametrize("target", ["m", "m.pt", "m.safetensors"])
def test_conversion_on_a_full_disk_reports_it_and_leaves_no_files(
    folder: Path, tmp_path: Path, output_of: OutputOf, target: str
) -> None:
    with no_file_longer_than(2000):
        said = output_of("convert", folder, tmp_path / target, status=2)
    assert said == f"{tmp_path / target}: a file may not become that long\n"
    assert names_in(tmp_path) == ["checkpoint"]
    output_of("convert", folder, tmp_path / target)


def test_adapters_are_found_by_their_declared_entry_points() -> None:
    (layout,) = exporting.find_layouts()
    from megatron_fsdp_v2_mcore.checkpoint.layout import model_tensors as of_megatron

    assert layout is of_megatron
    converter = converters.find_converter("torch_dist")
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.converter import to_torch_dist

    assert converter is to_torch_dist


class OneOption:
    """A converter with a separate option."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--iteration", type=int)

    def run(self, source: Path, target: Path, args: argparse.Namespace) -> int:
        sys.stdout.write(f"{source} to {target} at {args.iteration}")
        return 3


one_option = OneOption()


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer two converters, one of which needs a missing package."""
    values = {"other": f"{__name__}:one_option", "broken": "no_such.at_all:converter"}
    points = [EntryPoint(*item, converters.CONVERTER_GROUP) for item in values.items()]
    monkeypatch.setattr(converters, "entry_points", lambda group: points)


def test_converters_of_other_packages_have_their_own_options(
    offered: None, output_of: OutputOf
) -> None:
    written = output_of("convert", "--to", "other", "from", "here", "--iteration", "7", status=3)
    assert written == "from to here at 7"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("inspect {0}/nothing", "does not exist"),
        ("verify {0}/nothing.pt", "does not exist"),
        ("verify {0}/empty", "has no .metadata"),
        ("export {0}/empty {0}/m.pt", "has no .metadata"),
        ("convert {0}/empty {0}/m", "has no .metadata"),
        ("export {0}/checkpoint {0}/files/there.pt", "already exists"),
        ("export {0}/checkpoint {0}/m.npz", "name it .safetensors or .pt"),
        ("export {0} {0}/m.pt", "name one of checkpoint"),
        ("convert {0}/files/there.pt {0}/m", "cannot be loaded"),
        ("export {0}/checkpoint {0}/m.pt --prefix x.", "no tensors called x.*"),
        ("export {0}/checkpoint {0}/m.pt --prefix model", "leave names such as '."),
        ("convert {0}/files/there.pt {0}/m --prefix x.", "prefix 'x.' selects tensors of a folder"),
        ("export {0}/checkpoint {0}/m.pt --dtype int8", "int8"),
        ("export {0}/checkpoint {0}/m.pt --max-shard-size 5GB", "splits .safetensors files"),
        ("export {0}/checkpoint {0}/m.pt --max-shard-size 5apples", "5apples"),
        ("convert from here --to other --dtype float32", "--dtype"),
        ("convert from here --iteration 7", "--iteration"),
        ("convert from here --to none", "no format is called 'none'; known are broken, other"),
        ("convert from here --to broken", "needs no_such, which cannot be imported"),
    ],
)
def test_impossible_requests_print_one_sentence_and_return_2(
    folder: Path,
    tmp_path: Path,
    offered: None,
    capsys: pytest.CaptureFixture[str],
    words: str,
    problem: str,
) -> None:
    for name in ("files", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "files" / "there.pt").touch()
    status, out, err = called(capsys, "ckpt", *words.format(tmp_path).split())
    assert (status, out) == (2, "")
    # The parser also prints the usage.
    sentence = err.splitlines()[-1] if err.startswith("usage:") else err.removesuffix("\n")
    assert problem in sentence
    assert "\n" not in sentence


def test_long_commands_report_the_bytes_they_have_read(folder: Path, tmp_path: Path) -> None:
    for run in (
        lambda advance: verify(folder, advance=advance),
        lambda advance: exporting.export(folder, tmp_path / "m.pt", advance=advance),
    ):
        calls: list[tuple[int, int]] = []
        run(lambda done, total, calls=calls: calls.append((done, total)))
        assert len(calls) >= 4 and calls == sorted(calls)
        assert {total for _, total in calls} == {calls[-1][0]}


def test_a_bar_is_shown_on_a_terminal_after_some_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for delay, shown in ((0.0, True), (3600.0, False)):
        monkeypatch.setattr(cli_progress, "SILENT_S", delay)
        with cli_progress.progress("verify") as advance:
            advance(1, 2)
            advance(2, 2)
        assert ("verify" in capfd.readouterr().err) == shown
