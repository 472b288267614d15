"""The research trainer: sharded runs equal DDP's, resume anywhere, and export plain models."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, LlamaModel

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
    "--seq-length 1": "--seq-length must be at least 2: a token predicts the next one",
    "--tokenizer nowhere": "--tokenizer nowhere: ",
    "--parallel-strategy ddp --mesh 1x1": "--mesh is for --parallel-strategy fsdp",
    "--parallel-strategy ddp --sharding-strategy optim": "--sharding-strategy is for",
    "--mesh 2x1": "--mesh 2x1 must be RxS",
    "--mesh ²x1": "--mesh ²x1 must be RxS",
    "--lr 0": "--lr 0.0 must be a positive number",
    "--save-every 0": "--save-every must be at least 1",
    "--compile nothing": "--compile nothing is none of",
    "--out /dev/null": "--out /dev/null cannot be a folder",
    "--model elsewhere": "--model elsewhere is neither a model's folder",
    "--export .": "--export . exists already",
    "--resume nowhere": "--resume nowhere: nowhere does not exist",
    "--batch-size 10000": "with --batch-size 10000: give more --text, or a smaller --batch-size",
    "--text nowhere": "--text nowhere does not exist",
    "--text /dev/null": "--text /dev/null contains 0 bytes of text",
}


def test_bad_arguments_are_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, message in BAD.items():
        assert main([*SMALL, "--out", str(tmp_path), *words.split()]) == 2
        said = capsys.readouterr().err
        assert message in said and said.startswith("train_hf: rank 0: ") and said.count("\n") == 1


def test_a_tokenizer_that_does_not_fit_the_model_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = '{"model_type": "llama", "vocab_size": 100}'
    (tmp_path / "config.json").write_text(config)
    words = [*SMALL, "--out", str(tmp_path / "out"), "--model"]
    for model in (tmp_path, tmp_path / "config.json"):
        assert main([*words, str(model)]) == 2
        assert "has 100 tokens, and the tokenizer 257" in capsys.readouterr().err


TINY_LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
TINY_LLAMA |= {"num_attention_heads": 2, "vocab_size": 257, "max_position_embeddings": 64}


def tiny(folder: Path, kind: type = LlamaForCausalLM) -> nn.Module:
    """Save a model of random weights."""
    torch.manual_seed(1)
    model = kind(LlamaConfig(**TINY_LLAMA))
    model.save_pretrained(folder)
    return model


def as_bin(folder: Path) -> nn.Module:
    """Save a model as torch's file alone."""
    model = tiny(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return model


def built(folder: Path) -> nn.Module:
    settings = build_parser().parse_args([*SMALL, "--model", str(folder)])
    return build_model(settings, 257)


@pytest.mark.parametrize("save", [tiny, as_bin])
def test_weights_of_a_folder_are_loaded(save: Callable[[Path], nn.Module], tmp_path: Path) -> None:
    model = save(tmp_path)
    found = built(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


def test_random_weights_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**TINY_LLAMA).save_pretrained(tmp_path)
    built(tmp_path)
    assert f"--model {tmp_path}: starts from random weights\n" in capsys.readouterr().out


def without_head(folder: Path) -> None:
    tiny(folder, LlamaModel)


def of_type(kind: str) -> Callable[[Path], None]:
    return lambda folder: AutoConfig.for_model(kind).save_pretrained(folder)


def cut(save: Callable[[Path], object], name: str) -> Callable[[Path], None]:
    def saved(folder: Path) -> None:
        save(folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return saved


def of_another_kind(folder: Path) -> None:
    as_bin(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.pt")


BAD_MODELS = {
    "no head": (without_head, "has no weights for lm_head.weight of LlamaForCausalLM"),
    "no causal model": (of_type("t5"), "of type t5, for which transformers has no causal language"),
    "composite": (of_type("gemma3"), "of type gemma3, composed of text_config, vision_config"),
    "cut safetensors": (
        cut(tiny, "model.safetensors"),
        "/model.safetensors is damaged or cut short",
    ),
    "cut bin": (cut(as_bin, "pytorch_model.bin"), "/pytorch_model.bin is damaged or cut short"),
    "another kind": (of_another_kind, "from_pretrained does not load (model.pt); convert"),
    "too few positions": (tiny, "--seq-length 128 is too long: --model {} has 64 positions"),
    "no configuration": (lambda folder: None, "--model {}: "),
}


@pytest.mark.parametrize(("save", "message"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_bad_models_are_errors_of_one_line(
    save: Callable[[Path], object],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder)
    capsys.readouterr()
    length = ["--seq-length", "128"] if "seq-length" in message else []
    words = [*SMALL, *length, "--out", str(tmp_path / "out"), "--model", str(folder)]
    assert main(words) == 2
    said = capsys.readouterr()
    assert message.format(folder) in said.err
    assert said.err.startswith("train_hf: rank 0: ") and said.err.count("\n") == 1, said.err
    assert said.out == ""


def interrupted(out: Path) -> list[int]:
    """Train until the third evaluation; returns the lines of the log at each of them."""
    from examples.train_hf import loop

    evaluate, lengths = loop._evaluate, list[int]()

    def stopping(*args: Any) -> float:
        lengths.append(len((out / "log.jsonl").read_text().splitlines()))
        if len(lengths) == 3:
            raise InterruptedError
        return evaluate(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(loop, "_evaluate", stopping)
        trained(out, "--eval-every", "1")
    return lengths


def printed(out: Path, *words: str) -> list[str]:
    """Train; returns the printed lines."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        trained(out, *words)
    return said.getvalue().splitlines()


def test_a_run_shows_evaluations_and_logs_every_step(pools: RankPools, tmp_path: Path) -> None:
    """The log has the steps before an interruption; the last line names the checkpoint."""
    assert pools(1).run(interrupted, tmp_path, timeout_s=300.0) == [[0, 1, 2]]
    words = ["--eval-every", "2"]
    first, *lines = pools(1).run(printed, tmp_path, *words, timeout_s=300.0)[0]
    assert first == "--model llama: starts from random weights"
    assert [line.partition(" ")[0] for line in lines] == [*["step"] * 4, "checkpoint:"]
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert lines[0] == f"step 2: eval_loss {records[1]['eval_loss']:.4f}"
    assert lines[1] == f"step 2: sample {records[1]['sample']!r}"
    assert lines[-1] == f"checkpoint: {tmp_path / 'checkpoints' / 'step_000003'}"


def trained_in_fp16(init_scale: float, out: Path, *words: str) -> list[dict[str, Any]]:
    """Train in fp16 from a loss scale on every rank of a pool; returns the records of a rank."""
    from examples.train_hf import loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "GradScaler", partial(loop.GradScaler, init_scale=init_scale))
        return trained(out, *words, "--dtype", "fp16")


@pytest.mark.slow
def test_fp16_skips_steps_that_overflow(pools: RankPools, tmp_path: Path) -> None:
    words = ["--steps", "8", "--eval-every", "8", "--save-every", "2"]
    found: dict[str, list[dict[str, Any]]] = {}
    for strategy in ("ddp", "fsdp"):
        more = [tmp_path / strategy, *words, "--parallel-strategy", strategy]
        each = pools(2).run(trained_in_fp16, 2.0**22, *more, timeout_s=300.0)
        assert each[0] == each[1]
        found[strategy] = each[0]
    for records in found.values():
        skipped = [record["grad_norm"] is None for record in records]
        count = sum(skipped)
        # The scale falls until gradients are finite.
        assert 0 < count < 7 and skipped == [True] * count + [False] * (8 - count)
        assert [r["skipped_steps"] for r in records] == [min(i + 1, count) for i in range(8)]
        assert [r["loss_scale"] for r in records] == [2.0 ** (22 - min(i, count)) for i in range(8)]
        assert all(record["grad_norm"] > 0 for record in records[count:])
        assert all(math.isfinite(record["loss"]) for record in records)
    ours, theirs = (found[strategy][-1] for strategy in ("fsdp", "ddp"))
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-2)
    resuming = ["--resume", str(tmp_path / "fsdp" / "checkpoints" / "step_000004")]
    more = [tmp_path / "resumed", *words, *resuming]
    resumed = pools(1).run(trained_in_fp16, 2.0**22, *more, timeout_s=300.0)[0]
    names = ("step", "loss_scale", "skipped_steps")
    assert [[r[n] for n in names] for r in resumed] == [
        [r[n] for n in names] for r in found["fsdp"]
    ]


def test_the_layers_are_the_outermost_list_with_most_parameters() -> None:
    def layer() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])})

    heads = nn.ModuleList([nn.Linear(2, 2) for _ in range(5)])
    layers = nn.ModuleList([layer(), layer()])
    model = nn.ModuleDict({"heads": heads, "model": nn.ModuleDict({"layers": layers})})
    assert decoder_layers(model) is layers
