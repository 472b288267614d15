"""The benchmarks measure every engine, and the host time of a unit stays well below FSDP2's."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import memory, report, step
from benchmarks.cases import Case, Setting
from benchmarks.engines import ENGINES, Engine, Training, adamw
from benchmarks.limit import limit_seconds
from benchmarks.live_bytes import LiveBytes
from benchmarks.model import Model
from benchmarks.repeats import Patience
from tests.cases import longer
from tests.distributed.on_ranks import on_ranks
from tests.pictures import has_clear_ground
from tests.processes import ran


def _run(module: str, *words: str) -> str:
    """Standard output of a benchmark."""
    done = ran(sys.executable, "-m", module, *words, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _measured(tmp_path: Path, module: str, file: str, width: int) -> tuple[Any, str]:
    """The record and the output of a small run of a benchmark."""
    sizes = ["--layers", "2", "--width", str(width), "--rounds", "1", "--out", str(tmp_path)]
    shown = _run(module, *sizes)
    return json.loads((tmp_path / file).read_text()), shown


QUICK = Patience(rounds=1, most=1, seconds=0.0)
TINY = Case(layers=3, width=32, length=8)
FEW = ["DDP", "FSDP2", "ours, no_shard", "ours, optim_grads", "ours, optim_grads_params, pool"]


@pytest.mark.functional
def test_every_engine_trains_like_the_plain_loop(tmp_path: Path) -> None:
    words = ["--layers", "2", "--width", "64", "--rounds", "1", "--most", "1", "--seconds", "0"]
    shown = _run("benchmarks", "--full", *words, "--steps-only", "--out", str(tmp_path))
    (found,) = json.loads((tmp_path / "bench.json").read_text())["settings"]
    assert found["failed"] == {}
    assert found["engines"].keys() == ENGINES.keys()
    assert all(engine["losses_agree"] for engine in found["engines"].values())
    assert all(name in shown for name in ENGINES)
    assert has_clear_ground(tmp_path / "bench.png")


@on_ranks(
    2,
    changed=[
        longer({"shape": replace(TINY, vocabulary=64, experts=4), "micro_batches": 2}),
        longer({"dtype": "bf16", "recomputes": True}),
    ],
)
def test_engines_measured_together_train_like_the_plain_loop(changed: dict[str, Any]) -> None:
    setting = replace(Setting("tiny", TINY), **changed)
    engines = FEW if "shape" in changed else list(ENGINES)
    found = step.measure(setting, engines, init_device_mesh("cpu", (2,)), QUICK)
    assert found["failed"] == {}
    assert found["engines"].keys() == {"plain loop", *engines}
    assert all(engine["losses_agree"] for engine in found["engines"].values())
    assert all(len(engine["samples"]) == 1 for engine in found["engines"].values())


def _without_reduction(model: Model, mesh: DeviceMesh, setting: Setting) -> Training:
    """An engine that does not reduce gradients."""
    return Training(model, adamw(model.parameters(), setting))


def _raises(model: Model, mesh: DeviceMesh, setting: Setting) -> Training:
    raise RuntimeError("there is no such engine")


@pytest.mark.slow
@on_ranks(2)
def test_losses_that_differ_and_engines_that_fail_are_reported() -> None:
    added = {
        "forgetful": Engine(_without_reduction, "no_shard"),
        "missing": Engine(_raises, "no_shard"),
    }
    ENGINES.update(added)
    try:
        mesh = init_device_mesh("cpu", (2,))
        found = step.measure(Setting("tiny", TINY), ["DDP", *added], mesh, QUICK)
    finally:
        for name in added:
            del ENGINES[name]
    shown = report.markdown(report.steps(found))
    losses = {row[0].removesuffix(" (*)"): row[-1] for row in report.steps(found).rows}
    assert losses["DDP"] == losses["plain loop"] == "agree"
    assert losses["forgetful"].startswith("DIFFER by ")
    assert "missing failed: RuntimeError: there is no such engine" in shown


@pytest.mark.functional
@pytest.mark.mcore
def test_megatron_iterations_are_measured_and_losses_agree() -> None:
    words = ["--rounds", "1", "--iters", "12", "--rows", "DDP", "no_shard"]
    shown = _run("benchmarks.megatron", *words)
    assert shown.count("agree") == 2
    assert "ours, no_shard" in shown and "DIFFER" not in shown


@pytest.mark.functional
def test_muon_benchmark_includes_adamw_and_repeated_work(tmp_path: Path) -> None:
    record, shown = _measured(tmp_path, "benchmarks.muon", "muon_2.json", 16)
    assert record["step_ratio"]["AdamW, ZeRO-3"] == 1.0
    assert record["optimizer_ratio"]["Muon, ZeRO-3"] == 1.0
    assert all(name in shown for name in record["step_s"])


@pytest.mark.functional
def test_saves_are_measured_relative_to_a_step(tmp_path: Path) -> None:
    record, shown = _measured(tmp_path, "benchmarks.checkpoint", "checkpoint.json", 32)
    assert record["over_step"].keys() == {"step", "save", "stall", "in_all"}
    assert record["state_bytes"] == 3 * 4 * 2 * (2 * 4 * 32 * 32 + 5 * 32)
    assert "stall of an asynchronous one" in shown


UNGROUPED = Case(layers=3, width=448, vocabulary=512, length=4)
"""Layers that are large enough to be separate units, as with FSDP2."""


@pytest.mark.functional
@on_ranks(2)
def test_zero_3_takes_no_more_steady_and_build_memory_than_fsdp2() -> None:
    setting = Setting("small", UNGROUPED, "bf16")
    mesh = init_device_mesh("cpu", (2,))
    names = ("FSDP2", "ours, optim_grads_params")
    theirs, ours = (memory.measure(name, setting, mesh) for name in names)
    assert ours["at rest"] <= 1.01 * theirs["at rest"]
    assert ours["building"] <= 1.01 * theirs["building"]
    assert ours["at rest"] < ours["peak"] < 1.2 * theirs["peak"]


def test_live_bytes_exclude_fake_tensors() -> None:
    with LiveBytes() as meter:
        made = torch.empty(16)
        with FakeTensorMode():
            fake = torch.empty(1 << 20)
        assert meter.now == made.nbytes
    del fake


@pytest.mark.slow
@on_ranks(2)
def test_live_bytes_count_a_trace_pool_once() -> None:
    setting = Setting("small", UNGROUPED)
    mesh = init_device_mesh("cpu", (2,))
    names = ("ours, optim_grads_params", "ours, optim_grads_params, pool")
    plain, pooled = (memory.measure(name, setting, mesh) for name in names)
    # The pool holds the weights of two layers and of the root, and as many gradients.
    model = Model(setting.shape)
    whole, layer = (sum(4 * p.numel() for p in m.parameters()) for m in (model, model.layers[0]))
    assert pooled["at rest"] - plain["at rest"] == pytest.approx(2 * (whole - layer), rel=0.01)


@pytest.mark.functional
@pytest.mark.parametrize("flags", [[], ["--streams"]], ids=["", "with streams"])
def test_host_time_of_a_unit_is_at_most_two_thirds_of_fsdp2s(flags: list[str]) -> None:
    # test_host_budget.py counts the calls of a step. The minimum of 15 rounds each, interleaved in
    # one process, gives 0.27 to 0.40 on a quiet machine. Other programs only increase the ratio, so
    # the best of a few tries counts.
    ratios = {}
    for _ in range(4):
        found = json.loads(_run("benchmarks.host_time", "--json", *flags))
        for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
            ratio = found[f"ours, {strategy}"] / found["FSDP2"]
            ratios[strategy] = min(ratio, ratios.get(strategy, ratio))
        if max(ratios.values()) <= 0.67:
            break
    assert max(ratios.values()) <= 0.67, ratios


@pytest.mark.functional
def test_attributes_and_steps_take_at_most_a_fixed_multiple_of_fsdp2s_time() -> None:
    found = json.loads(_run("benchmarks.optimizer_time", "--json", "--params", "40"))
    for what, by_model in found.items():
        # A step and clipping: about 0.9 and 0.5 on a quiet machine.
        most = 2.5 if what.startswith("param.") else 1.5
        if "loop" not in what:
            assert by_model["ours"] <= most * by_model["FSDP2"], what


TOOK = {
    "compute": 100.0,
    "all-gather": 10.0,
    "reduce-scatter": 7.0,
    "all-to-all and sum": 5.0,
    "all-reduce": 20.0,
    "AdamW, whole": 4.0,
    "AdamW, share": 2.0,
}


def test_limit_adds_the_times_of_each_strategy() -> None:
    expected = {
        "no_shard": 100 + 20 + 4,
        "optim": 100 + 5 + 10 + 2,
        "optim_grads": 100 + 4 * 5 + 10 + 2,
        "optim_grads_params": 100 + 4 * 5 + 4 * 1.5 * 10 + 2,
    }
    assert {name: limit_seconds(TOOK, name, 4, gathers=1.5) for name in expected} == expected
