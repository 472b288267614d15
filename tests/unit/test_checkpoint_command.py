"""`megatron-fsdp-v2 ckpt`: what it prints and returns."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_fsdp_v2 import cli
from megatron_fsdp_v2.checkpoint import converters, model_tensors
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST
from megatron_fsdp_v2.checkpoint.writing import FolderWriter
from tests.unit.test_checkpoint_folder import flip

ROOT = Path(__file__).parents[2]


def declared(group: str) -> dict[str, EntryPoint]:
    """Entry points as the project declares them, installed or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        name: EntryPoint(name, value, group)
        for name, value in project["entry-points"][group].items()
    }


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "discover_commands", lambda: declared(cli.COMMAND_GROUP))
    for module in (model_tensors, converters):
        monkeypatch.setattr(module, "entry_points", lambda group: tuple(declared(group).values()))


def ckpt(*words: object) -> int:
    return cli.main(["ckpt", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = FolderWriter(tmp_path / "checkpoint")
    for layer in (0, 10, 2):
        name = f"model.layers.{layer}.weight"
        writer.add_block(name, (4, 256), (0, 0), torch.full((4, 256), float(layer)))
    writer.add_block("model.embedding.table.weight", (2, 3), (0, 0), torch.ones(2, 3).bfloat16())
    writer.add_block("optimizer.state.exp_avg", (2,), (0,), torch.ones(2))
    writer.add_object("extra", {"step": 3})
    writer.finish()
    return tmp_path / "checkpoint"


def test_inspect_shows_a_tree_in_natural_order(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("inspect", folder) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[:-2]] == [
        *("extra", "model", "embedding.table.weight", "layers"),
        *("0.weight", "2.weight", "10.weight", "optimizer.state.exp_avg"),
    ]
    assert lines[1] == ["model", "4", "tensors", "12.0", "KiB"]
    assert lines[4] == ["0.weight", "(4,", "256)", "float32", "4.0", "KiB"]
    assert lines[2] == ["embedding.table.weight", "(2,", "3)", "bfloat16", "12", "B"]
    assert lines[-2] == ["total", "5", "tensors", "12.0", "KiB"]
    assert " ".join(lines[-1]).startswith("manifest of version 1: saved by 1 ranks")
    assert ckpt("inspect", folder, "--depth", 1) == 0
    assert "layers" not in capsys.readouterr().out


def test_inspect_writes_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("inspect", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"]["model.layers.10.weight"] == {
        "shape": [4, 256],
        "dtype": "float32",
        "nbytes": 4096,
        "chunks": 1,
    }
    assert list(found["objects"]) == ["extra"]
    assert (found["num_tensors"], found["nbytes"]) == (5, 3 * 4096 + 12 + 8)
    assert found["manifest"]["world_size"] == 1


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_inspect_looks_into_files_as_well(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert ckpt("export", folder, tmp_path / name) == 0
    capsys.readouterr()
    assert ckpt("inspect", tmp_path / name) == 0
    out = capsys.readouterr().out
    assert "embedding.table.weight" in out
    assert "manifest" not in out


def test_verify_returns_0_for_a_good_checkpoint_and_1_for_a_damaged_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("verify", folder) == 0
    assert "undamaged; 2 files" in capsys.readouterr().out
    flip(folder / "__0_0.distcp", 6000)
    assert ckpt("verify", folder) == 1
    out = capsys.readouterr().out
    assert "DAMAGED (1 problem); 2 files" in out
    assert "model.layers.10.weight" in out
    assert ckpt("verify", folder / "nothing") == 1
    assert "does not exist" in capsys.readouterr().out


def test_verify_says_what_it_cannot_know_without_a_manifest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / MANIFEST).unlink()
    assert ckpt("verify", folder) == 0
    assert "there is no manifest.json: structure and sizes" in capsys.readouterr().out


def test_progress_is_shown_to_somebody_who_looks(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ckpt("verify", folder) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert ckpt("verify", folder) == 0
    shown = capsys.readouterr().err
    assert shown.startswith("\r")
    assert shown.endswith("read\n")
    assert shown.count("100 %") == 1


def test_export_says_what_it_wrote_and_what_it_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    assert ckpt("export", folder, out, "--dtype", "bfloat16", "--max-shard-size", "5MB") == 0
    written = capsys.readouterr().out
    assert f"{out}: 4 tensors, 6.0 KiB, one at a time (the largest has 4.0 KiB)" in written
    assert "left out: optimizer.state.exp_avg, extra" in written
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(out).values())
    sharded = tmp_path / "sharded.safetensors"
    assert ckpt("export", folder, sharded, "--max-shard-size", "5KB") == 0
    index = "sharded.safetensors.index.json and 3 files beside it: 4 tensors"
    assert index in capsys.readouterr().out


def test_convert_goes_there_and_back(folder: Path, tmp_path: Path) -> None:
    for source, target in (
        (folder, "a.pt"),
        (tmp_path / "a.pt", "b.safetensors"),
        (tmp_path / "b.safetensors", "c"),
        (tmp_path / "c", "d.pt"),
    ):
        assert ckpt("convert", source, tmp_path / target) == 0
    assert ckpt("verify", tmp_path / "c") == 0
    first, last = (torch.load(tmp_path / n, weights_only=True) for n in ("a.pt", "d.pt"))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_what_is_not_possible_is_one_sentence_and_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.pt").touch()
    for words, problem in (
        (("inspect", tmp_path / "nothing"), "does not exist"),
        (("inspect", tmp_path / "nothing.pt"), "does not exist"),
        (("export", folder, tmp_path / "there.pt"), "is there already"),
        (("export", folder, tmp_path / "m.npz"), "name it .safetensors or .pt"),
        (("export", tmp_path, tmp_path / "m.pt"), "name one of checkpoint"),
        (("convert", tmp_path / "there.pt", tmp_path / "m"), "cannot be loaded"),
        (("export", folder, tmp_path / "m.pt", "--prefix", "x."), "no tensors called x.*"),
    ):
        assert ckpt(*words) == 2
        captured = capsys.readouterr()
        assert problem in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""


@pytest.mark.parametrize(
    ("option", "value"), [("--dtype", "int8"), ("--max-shard-size", "5 apples")]
)
def test_an_option_that_makes_no_sense_is_rejected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        ckpt("export", folder, tmp_path / "m.pt", option, value)
    assert stopped.value.code == 2
    assert value in capsys.readouterr().err


def test_adapters_are_found_by_their_declared_entry_points() -> None:
    (layout,) = model_tensors.find_layouts()
    from megatron_fsdp_v2_mcore.checkpoint.layout import model_tensors as of_megatron

    assert layout is of_megatron
    converter = converters.find_converter("torch_dist")
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.export import to_torch_dist

    assert converter is to_torch_dist


class OneOption:
    """A format with an option of its own."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--iteration", type=int)

    def run(self, source: Path, target: Path, args: argparse.Namespace) -> int:
        sys.stdout.write(f"{source} to {target} at {args.iteration}")
        return 3


one_option = OneOption()


def _offer(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = EntryPoint(name, value, converters.CONVERTER_GROUP)
    monkeypatch.setattr(converters, "entry_points", lambda group: [point])


def test_a_format_of_another_program_takes_its_own_options_and_none_of_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _offer(monkeypatch, "other", f"{__name__}:one_option")
    assert ckpt("convert", "--to", "other", "from", "here", "--iteration", "7") == 3
    assert capsys.readouterr().out == "from to here at 7"
    for words, problem in (
        (("--to", "other", "--dtype", "float32"), "--dtype"),
        (("--iteration", "7"), "--iteration"),
        (("--to", "none"), "no format is called 'none'; known are other"),
    ):
        with pytest.raises(SystemExit) as stopped:
            ckpt("convert", "from", "here", *words)
        assert stopped.value.code == 2
        assert problem in capsys.readouterr().err


def test_a_format_whose_package_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _offer(monkeypatch, "other", "no_such_package.at_all:converter")
    with pytest.raises(SystemExit) as stopped:
        ckpt("convert", "--to", "other", "from", "here")
    assert stopped.value.code == 2
    assert "needs no_such_package, which cannot be imported" in capsys.readouterr().err
