"""The research trainer: sharded runs equal DDP's, resume anywhere, and export plain models."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.train_hf.__main__ import build_parser, main
from examples.train_hf.setup import SMALL_MODELS, build_model, decoder_layers, load_text
from tests.docs.blocks import ROOT
from tests.processes import ran
from tests.ranks import RankPools

TEXT = ["--text", str(ROOT / "megatron_fsdp_v2" / "layout")]
TINY = {"steps": "3", "batch-size": "6", "seq-length": "32", "eval-every": "3", "dtype": "fp32"}
SMALL = [*TEXT, *(word for name, value in TINY.items() for word in (f"--{name}", value))]


def trained(out: Path, *words: str) -> list[dict[str, Any]]:
    """Train on every rank of a pool; returns the records of a rank."""
    # Imported by the rank.
    from examples.train_hf.loop import train

    return train(build_parser().parse_args([*SMALL, "--out", str(out), *words]))


def run(pools: RankPools, ranks: int, out: Path, *words: str) -> list[list[dict[str, Any]]]:
    """Train on ranks; returns the records of each."""
    return pools(ranks).run(trained, out, *words, timeout_s=300.0)


def check_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], rtol: float) -> None:
    """Compare losses, gradient norms and generated text of two runs."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["step"] == other["step"]
        for name in {"loss", "grad_norm", "eval_loss"} & mine.keys():
            torch.testing.assert_close(mine[name], other[name], rtol=rtol, atol=0.0)
    assert ours[-1]["sample"] == theirs[-1]["sample"]


SHARDED = [
    ["--optimizer", "adamw"],
    ["--optimizer", "muon", "--sharding-strategy", "optim"],
    ["--gradient-checkpointing", "--micro-batch-size", "1", "--sharding-strategy", "optim_grads"],
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "rows"),
    [
        ("llama", 2, SHARDED[1:2]),
        *(
            pytest.param(model, ranks, SHARDED, marks=pytest.mark.functional)
            for model in SMALL_MODELS
            for ranks in (1, 2, 3)
        ),
    ],
    ids=lambda value: f"{len(value)}-strategies" if isinstance(value, list) else str(value),
)
def test_sharded_runs_equal_ddp(
    model: str, ranks: int, rows: list[list[str]], pools: RankPools, tmp_path: Path
) -> None:
    of_ddp: dict[str, list[dict[str, Any]]] = {}
    for number, words in enumerate(rows):
        kind = "muon" if "muon" in words else "adamw"
        options = ["--model", model, "--optimizer", kind]
        if kind not in of_ddp:
            ddp = [*options, "--parallel-strategy", "ddp"]
            of_ddp[kind] = run(pools, ranks, tmp_path / f"ddp-{kind}", *ddp)[0]
        found = run(pools, ranks, tmp_path / str(number), *options, *words)
        check_equal(found[0], of_ddp[kind], rtol=1e-6 if kind == "adamw" else 1e-5)
        assert all(each == found[0] for each in found)


@pytest.mark.functional
@pytest.mark.parametrize(
    ("ranks", "words"),
    [(4, ["--mesh", "2x2"]), (2, ["--compile", "aot_eager"]), (2, ["--dtype", "bf16"])],
    ids=["mesh", "compile", "bf16"],
)
def test_meshes_compilation_and_bf16(
    ranks: int, words: list[str], pools: RankPools, tmp_path: Path
) -> None:
    dtype = words if "bf16" in words else []
    size = ["--batch-size", "4", *dtype]
    theirs = run(pools, ranks, tmp_path / "ddp", *size, "--parallel-strategy", "ddp")[0]
    ours = run(pools, ranks, tmp_path / "ours", *size, *words)[0]
    # Autocast leaves norms and softmax in fp32.
    check_equal(ours, theirs, rtol=1e-2 if dtype else 1e-6)


@pytest.mark.functional
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumes_elsewhere_and_exports(
    optimizer: str, pools: RankPools, tmp_path: Path
) -> None:
    words = ["--optimizer", optimizer, "--steps", "4", "--eval-every", "2"]
    whole = run(pools, 2, tmp_path / "a", *words, "--save-every", "2")[0]
    middle = str(tmp_path / "a" / "checkpoints" / "step_000002")
    for ranks, strategy in ((3, "fsdp"), (1, "ddp")):
        out, export = tmp_path / strategy, str(tmp_path / f"{strategy}-export")
        resuming = ["--resume", middle, "--export", export, "--parallel-strategy", strategy]
        resumed = run(pools, ranks, out, *words, *resuming)[0]
        check_equal(resumed, whole, rtol=1e-5)
        settings = build_parser().parse_args([*SMALL, "--model", export, "--tokenizer", export])
        text = load_text(settings)
        model = build_model(settings, len(text.tokenizer))
        with torch.no_grad():
            loss = model(input_ids=text.held_out, labels=text.held_out).loss
        torch.testing.assert_close(float(loss), resumed[-1]["eval_loss"], rtol=1e-6, atol=0.0)


@pytest.mark.functional
def test_the_command_trains_under_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*SMALL, "--out", str(tmp_path / "out"), "--export", str(tmp_path / "model")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = ran(
        sys.executable, *launcher, "-m", "examples.train_hf", *words, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert (tmp_path / "out" / "loss.png").stat().st_size > 1000
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "model").iterdir()
    }


BAD = {
    "--batch-size 4 --micro-batch-size 3": "must be a multiple of the 1 ranks",
    "--steps 0": "--steps must be at least 1",
    "--parallel-strategy ddp --mesh 1x1": "--mesh is for --parallel-strategy fsdp",
    "--parallel-strategy ddp --sharding-strategy optim": "--sharding-strategy is for",
    "--mesh 2x1": "--mesh 2x1 must be RxS",
    "--mesh ²x1": "--mesh ²x1 must be RxS",
    "--lr 0": "--lr 0.0 must be a positive number",
    "--save-every 0": "--save-every must be at least 1",
    "--compile nothing": "--compile nothing is none of",
    "--out /dev/null": "/dev/null",
    "--model elsewhere": "--model elsewhere is neither a model's folder",
    "--export .": "--export . exists already",
    "--resume nowhere": "nowhere",
    "--batch-size 10000": "give more text",
    "--text nowhere": "nowhere does not exist",
}


def test_bad_arguments_are_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, message in BAD.items():
        assert main([*SMALL, "--out", str(tmp_path), *words.split()]) == 2
        assert message in capsys.readouterr().err


def test_a_tokenizer_that_does_not_fit_the_model_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = '{"model_type": "llama", "vocab_size": 100}'
    (tmp_path / "config.json").write_text(config)
    words = [*SMALL, "--out", str(tmp_path / "out"), "--model"]
    for model in (tmp_path, tmp_path / "config.json"):
        assert main([*words, str(model)]) == 2
        assert "has 100 tokens, and the tokenizer 257" in capsys.readouterr().err


def test_the_layers_are_the_outermost_list_with_most_parameters() -> None:
    def layer() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])})

    heads = nn.ModuleList([nn.Linear(2, 2) for _ in range(5)])
    layers = nn.ModuleList([layer(), layer()])
    model = nn.ModuleDict({"heads": heads, "model": nn.ModuleDict({"layers": layers})})
    assert decoder_layers(model) is layers
