"""The benchmarks measure every contender, and the host time of a unit stays well under FSDP2's."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import memory
from tests.distributed.on_ranks import on_ranks


def _run(module: str, *words: str) -> str:
    """Standard output of a benchmark."""
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _measured(tmp_path: Path, module: str, file: str, width: int) -> tuple[Any, str]:
    """What a small run of a benchmark records, and what it prints."""
    sizes = ["--layers", "2", "--width", str(width), "--rounds", "1", "--out", str(tmp_path)]
    shown = _run(module, *sizes)
    return json.loads((tmp_path / file).read_text()), shown


@pytest.mark.functional
def test_the_benchmark_reports_a_ratio_for_every_contender(tmp_path: Path) -> None:
    record, shown = _measured(tmp_path, "benchmarks", "bench.json", 8)
    ratios = record["ratio"]
    assert ratios["FSDP2"] == 1.0
    assert len(ratios) == 6
    assert all(name in shown for name in ratios)
    assert (tmp_path / "bench.png").stat().st_size > 1000


@pytest.mark.functional
def test_muon_is_measured_beside_adamw_and_beside_repeating_the_work(tmp_path: Path) -> None:
    record, shown = _measured(tmp_path, "benchmarks.muon", "muon_2.json", 16)
    assert record["step_ratio"]["AdamW, ZeRO-3"] == 1.0
    assert record["optimizer_ratio"]["Muon, ZeRO-3"] == 1.0
    assert all(name in shown for name in record["step_s"])


@pytest.mark.functional
def test_saves_are_measured_beside_a_step(tmp_path: Path) -> None:
    record, shown = _measured(tmp_path, "benchmarks.checkpoint", "checkpoint.json", 32)
    assert record["over_step"].keys() == {"step", "save", "stall", "in_all"}
    assert record["state_bytes"] == 3 * 4 * 2 * (2 * 4 * 32 * 32 + 5 * 32)
    assert "peak memory of an export" in shown


@on_ranks(2, dtype=["fp32", "bf16"])
def test_at_rest_zero_3_holds_what_fsdp2_does_and_builds_with_no_more(dtype: str) -> None:
    args = argparse.Namespace(layers=3, width=64, batch=1, length=4, steps=2)
    mesh = init_device_mesh("cpu", (2,))
    shards = memory.contenders(dtype == "bf16")
    theirs, ours = (memory.measure(shards[n], mesh, args) for n in ("FSDP2", "ours, ZeRO-3"))
    assert ours["at rest"] <= 1.01 * theirs["at rest"]
    assert ours["building"] <= 1.01 * theirs["building"]
    assert ours["at rest"] < ours["peak"] < 1.2 * theirs["peak"]


def test_host_time_of_a_unit_is_at_most_two_thirds_of_fsdp2s() -> None:
    # The least of 15 rounds each, interleaved in one process: 0.45 to 0.56 on a quiet machine, of
    # which a fifth makes the tensors of gradients that the step before gave back. Other programs
    # can only make it look worse, so the best of a few tries counts.
    ratios = {}
    for _ in range(4):
        found = json.loads(_run("benchmarks.host_time", "--json"))
        for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
            ratio = found[f"ours, {strategy}"] / found["FSDP2"]
            ratios[strategy] = min(ratio, ratios.get(strategy, ratio))
        if max(ratios.values()) <= 0.67:
            break
    assert max(ratios.values()) <= 0.67, ratios


@pytest.mark.functional
def test_an_attribute_takes_at_most_twice_what_it_takes_of_a_dtensor() -> None:
    found = json.loads(_run("benchmarks.optimizer_time", "--json", "--params", "40"))
    for what, by_model in found.items():
        # A step and clipping: about 0.9 and 0.5 on a quiet machine.
        most = 2.0 if what.startswith("param.") else 1.5
        if "loop" not in what:
            assert by_model["ours"] <= most * by_model["FSDP2"], what
