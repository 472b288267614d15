"""Both engines on a simulated cluster, and what `plan` says of the same training."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from benchmarks.sim import gloo
from benchmarks.sim.__main__ import main
from benchmarks.sim.engines import ENGINES
from benchmarks.sim.estimate import planned
from benchmarks.sim.models import SHAPES, Shape
from benchmarks.sim.steps import Job, Measured, measure
from megatron_fsdp_v2.plan import find_machine
from tests.cases import longer

MACHINE = find_machine("h100")
SHAPE = Shape(width=4096, hidden=14336, num_layers=2, vocabulary=32_000)


@pytest.fixture(scope="module", params=[2048, longer(16384)])
def job(request: pytest.FixtureRequest) -> Job:
    return Job(SHAPE, request.param, sequence=2048)


@pytest.fixture(scope="module")
def found(job: Job) -> dict[str, Measured]:
    return {engine: measure(engine, job, MACHINE) for engine in ENGINES}


def test_both_engines_run_on_thousands_of_ranks_and_communicate_about_as_much(
    job: Job,
    found: dict[str, Measured],
) -> None:
    ours, theirs = found["ours"], found["fsdp2"]
    assert ours.model == theirs.model > 0
    # Units of more than one flat buffer cost latency here; FSDP2 pads where ranks outnumber rows.
    outnumber = job.num_ranks > SHAPE.hidden
    assert ours.communicating < theirs.communicating * (1.0 if outnumber else 1.1)
    for measured in (ours, theirs):
        assert measured.step == pytest.approx(
            measured.model + measured.optimizer + measured.exposed
        )
        assert 0 < measured.waits < measured.communicating
        assert measured.resting < measured.peak


def test_ours_exposes_less(found: dict[str, Measured]) -> None:
    assert found["ours"].exposed < found["fsdp2"].exposed


def test_times_are_the_same_every_time(job: Job, found: dict[str, Measured]) -> None:
    again = measure("ours", job, MACHINE)
    assert dataclasses.astuple(again) == pytest.approx(dataclasses.astuple(found["ours"]))


@pytest.mark.parametrize(
    "planned_job",
    [
        Job(SHAPE, 64, sequence=1024, products_only=True),
        Job(SHAPE, 1024, sequence=4096, products_only=True, recomputes=True),
        Job(SHAPE, 64, sequence=2048, products_only=True, outer=8),
    ],
    ids=["network decides", "recomputed", "HSDP"],
)
def test_a_plan_has_the_step_time_of_the_simulation(planned_job: Job) -> None:
    measured = measure("ours", planned_job, MACHINE)
    assert planned(planned_job, MACHINE).step.seconds == pytest.approx(measured.step, rel=0.1)


def test_the_page_has_the_step_times_of_both() -> None:
    page = (Path(__file__).parents[2] / "docs/simulation.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) ranks \| ([\d.]+) ms \| ([\d.]+) ms \|$", page, re.MULTILINE)
    assert len(rows) > 2
    for ranks, *times in rows:
        shape = dataclasses.replace(SHAPES["8b"], num_layers=4)
        job = Job(shape, int(ranks.replace(",", "")), sequence=2048, products_only=True)
        seconds = measure("ours", job, MACHINE).step, planned(job, MACHINE).seconds
        assert [f"{each * 1e3:.1f}" for each in seconds] == times, ranks


def test_the_command_compares_both(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "8b", "--layers", "2", "--ranks", "8", "--sequence", "512"])
    said = capsys.readouterr().out
    assert "ours / FSDP2: step " in said
    assert [line.split()[1] for line in said.splitlines()[2:4]] == ["ours", "fsdp2"]


@pytest.mark.functional
@pytest.mark.parametrize("num_ranks", ["2", "4"])
def test_a_step_on_gloo_takes_what_the_simulation_says(num_ranks: str, tmp_path: Path) -> None:
    if os.getloadavg()[0] > 1:
        pytest.skip("others use this machine, and real steps wait for them")
    words = ["--ranks", num_ranks, "--pauses", "5", "20", "--out", str(tmp_path)]
    ratios = gloo.main(words)
    found = json.loads((tmp_path / f"gloo-{num_ranks}.json").read_text())
    if any(each["disturbed"] for each in found.values()):
        pytest.skip("others used this machine meanwhile")
    assert ratios == pytest.approx([1.0] * 4, rel=0.15)
