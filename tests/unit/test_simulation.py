"""The simulated cluster: clock, networks, collectives and operations."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.sim import gloo
from benchmarks.sim.__main__ import main
from benchmarks.sim.costs import RooflineCosts
from benchmarks.sim.estimate import planned
from benchmarks.sim.measured import AlphaBeta, MeasuredNetwork
from benchmarks.sim.models import SHAPES, Shape
from benchmarks.sim.operations import Operations
from benchmarks.sim.steps import Job, measure
from megatron_fsdp_v2.plan import find_machine
from megatron_fsdp_v2.plan.simulation import (
    HostDevice,
    VirtualStreams,
    run_on_streams,
    simulated_ranks,
)
from tests.cases import longer
from tests.docs.blocks import blocks_in
from tests.processes import ROOT

MACHINE = find_machine("h100")


@pytest.fixture
def streams() -> VirtualStreams:
    return VirtualStreams()


@pytest.fixture
def cluster() -> Iterator[HostDevice]:
    """Simulate 16,384 ranks with this process as rank 3."""
    device = HostDevice()
    with simulated_ranks(16384, device, MACHINE, rank=3):
        yield device


# -- the clock --------------------------------------------------------------------------------


def test_a_host_computes_while_collectives_of_a_communicator_run_one_after_the_other() -> None:
    device = HostDevice()
    first = device.communicate("a", "link", 3.0)
    second = device.communicate("a", "other link", 2.0)
    device.compute(1.0)
    assert device.timeline.now == 1.0
    first.wait()
    assert device.timeline.now == 3.0
    second.wait()
    assert device.timeline.now == 5.0
    second.wait()
    assert device.timeline.now == 5.0


def test_communicators_serialize_on_one_link_and_overlap_on_two() -> None:
    device = HostDevice()
    ends = []
    for communicator, link in (("a", "node"), ("b", "network"), ("c", "node")):
        work = device.communicate(communicator, link, 2.0)
        ends.append(work._done_at)  # type: ignore[attr-defined]
    assert ends == [2.0, 2.0, 4.0]


def test_collective_begins_after_its_stream_without_blocking_the_host(
    streams: VirtualStreams,
) -> None:
    side: Any = streams.new_stream("side")
    streams.compute(1.0)
    side.wait_stream(streams.current_stream())
    with streams.use(side):
        streams.communicate("a", "link", 2.0).wait()
        event = side.record_event()
    streams.compute(1.0)
    compute = streams.current_stream()
    # Computation and communication overlap from 1.0 s on.
    assert (compute.queue.ready, side.queue.ready) == (2.0, 3.0)
    compute.wait_event(event)
    streams.compute(1.0)
    assert (compute.queue.ready, compute.queue.busy) == (4.0, 3.0)
    assert streams.timeline.now == 0.0
    compute.synchronize()
    assert streams.timeline.now == 4.0


# -- networks ---------------------------------------------------------------------------------


def test_fit_of_measured_times_has_their_latency_and_bandwidth() -> None:
    line = AlphaBeta.fitted({n: 1e-4 + n * 2e-9 for n in (1000, 10**6, 10**7)})
    assert line.seconds == pytest.approx(1e-4)
    assert line.seconds_per_byte == pytest.approx(2e-9)
    network = MeasuredNetwork({"all_gather": line})
    assert network.seconds("all_gather", 10**6, (0, 1)) == pytest.approx(2.1e-3)
    assert network.seconds("all_gather", 10**6, (0,)) == 0.0
    # A collective without measurements takes the time of the slowest one.
    assert network.seconds("barrier", 0, (0, 1)) == pytest.approx(1e-4)
    with pytest.raises(ValueError, match=r"two sizes at least, got \[5\]"):
        AlphaBeta.fitted({5: 1.0})


# -- collectives ------------------------------------------------------------------------------


def test_collective_results_are_those_of_identical_ranks(cluster: Any) -> None:
    size = 16384
    gathered = torch.empty(2 * size)
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]))
    assert gathered.view(size, 2).unique(dim=0).tolist() == [[1.0, 2.0]]
    piece = torch.empty(2)
    dist.reduce_scatter_tensor(piece, torch.arange(2.0 * size))
    # The shard of rank 3, summed over all ranks.
    assert piece.tolist() == [6.0 * size, 7.0 * size]
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    assert total.item() == size
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    assert total.item() == size
    assert (dist.get_rank(), dist.get_world_size()) == (3, size)


def test_collective_takes_the_time_of_its_axis(cluster: Any) -> None:
    mesh = init_device_mesh("cpu", (2048, 8), mesh_dim_names=("outer", "inner"))
    for axis, ranks in (("outer", range(0, 16384, 8)), ("inner", range(8))):
        group = mesh.get_group(axis)
        before, full = cluster.timeline.now, torch.empty(group.size() * 100)
        work = dist.all_gather_into_tensor(full, full[:100], group=group, async_op=True)
        assert cluster.timeline.now == before
        work.wait()
        took = cluster.timeline.now - before
        expected = MACHINE.seconds("all_gather", full.nbytes, ranks)
        assert took == pytest.approx(expected)


def test_large_result_takes_no_physical_memory(cluster: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    full = torch.empty(16384 * 100_000)
    dist.all_gather_into_tensor(full, torch.empty(100_000))
    assert full.nbytes > 6 * 10**9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_unsupported_simulations_raise() -> None:
    with pytest.raises(ValueError, match="rank must be from 0 to 7, got 8"):
        simulated_ranks(8, HostDevice(), MACHINE, rank=8).__enter__()
    with simulated_ranks(8, HostDevice(), MACHINE):
        with pytest.raises(RuntimeError, match="needs a process without a process group"):
            simulated_ranks(8, HostDevice(), MACHINE).__enter__()
        with pytest.raises(ValueError, match="Linear holds no unit; call fully_shard"):
            run_on_streams(nn.Linear(2, 2), VirtualStreams())
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="backend 'sim' exists inside simulated_ranks"):
        dist.init_process_group("sim", store=dist.HashStore(), rank=0, world_size=8)


def test_the_example_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "tested.md").read_text()
    (block,) = [b for b in blocks_in("tested.md", page) if "simulated_ranks" in b.code]
    exec(compile(block.code, block.name, "exec"), {"__name__": "page"})
    found = re.fullmatch(r"(\d+\.\d) ms, at most (\d+\.\d\d) GiB\n", capsys.readouterr().out)
    assert found is not None
    # Each of four units of 256 MiB has two gathers, a reduction, and the products of three passes.
    assert float(found[1]) > MACHINE.compute_seconds(3 * 4 * 2 * 4096 * 8192 * 8192) * 1e3
    assert 1 < float(found[2]) < 4


# -- operations -------------------------------------------------------------------------------


def test_operations_take_the_time_of_their_products_or_bytes(streams: VirtualStreams) -> None:
    costs = RooflineCosts(MACHINE, 1e12, memory_efficiency=0.5)
    with Operations(streams, costs) as operations:
        weight = torch.empty(4096, 4096)
        product = torch.empty(8192, 4096) @ weight
        total = product + product
        total.view(-1).add_(1)
    products = MACHINE.compute_seconds(2 * 8192 * 4096 * 4096)
    # A tensor used twice is read once; the out-of-place and the in-place result are written.
    moved = (2 * total.nbytes + total.nbytes) / 0.5e12
    assert streams.current_stream().queue.busy == pytest.approx(products + moved)
    assert set(operations.seconds_of) == {"aten.mm", "aten.add", "aten.add_"}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_takes_two_products_in_forward_and_five_in_backward(
    streams: VirtualStreams, causal: bool
) -> None:
    with Operations(streams, RooflineCosts(MACHINE, float("inf"))) as operations:
        q, k, v = (torch.empty(2, 4, 4096, 64).requires_grad_() for _ in range(3))
        attend = nn.functional.scaled_dot_product_attention
        attend(q, k, v, is_causal=causal).sum().backward()
    forward, backward = (s for n, s in operations.seconds_of.items() if "attention" in n)
    pairs = 2 * 4 * 4096 * 4096 * (0.5 if causal else 1)
    assert forward == pytest.approx(MACHINE.compute_seconds(2 * 2 * pairs * 64))
    assert backward == pytest.approx(2.5 * forward)


def test_operations_compute_nothing_and_take_no_physical_memory(streams: VirtualStreams) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Operations(streams, RooflineCosts(MACHINE, 1e12)) as operations:
        layer = nn.Linear(2**15, 2**15, bias=False)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        for _ in range(2):
            loss = layer(torch.empty(64, 2**15)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not loss.isnan().item()
    one = 4 * 2**30
    # Live at the peak: weight, two moments, gradient.
    assert 4 * one <= operations.live.peak < 4.1 * one
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


SHAPE = Shape(width=4096, hidden=14336, num_layers=2, vocabulary=32_000)


@pytest.mark.parametrize("num_ranks", [2048, longer(16384)])
def test_engines_communicate_similarly_on_thousands_of_ranks_and_ours_exposes_less(
    num_ranks: int,
) -> None:
    job = Job(SHAPE, num_ranks, sequence=2048)
    ours, theirs = (measure(engine, job, MACHINE) for engine in ("ours", "fsdp2"))
    assert ours.model == theirs.model > 0
    # Units with several flat buffers add latency; FSDP2 pads if ranks outnumber rows.
    outnumber = num_ranks > SHAPE.hidden
    assert ours.communicating < theirs.communicating * (1.0 if outnumber else 1.1)
    for measured in (ours, theirs):
        assert measured.step == pytest.approx(
            measured.model + measured.optimizer + measured.exposed
        )
        assert 0 < measured.waits < measured.communicating
        assert measured.resting < measured.peak
    assert ours.exposed < theirs.exposed


@pytest.mark.parametrize(
    "planned_job",
    [
        Job(SHAPE, 64, sequence=1024, products_only=True),
        Job(SHAPE, 1024, sequence=4096, products_only=True, recomputes=True),
        Job(SHAPE, 64, sequence=2048, products_only=True, outer=8),
    ],
    ids=["network decides", "recomputed", "HSDP"],
)
def test_planned_step_time_matches_the_simulation(planned_job: Job) -> None:
    measured = measure("ours", planned_job, MACHINE)
    assert planned(planned_job, MACHINE).step.seconds == pytest.approx(measured.step, rel=0.1)


def test_page_has_the_simulated_and_planned_step_times() -> None:
    page = (ROOT / "docs" / "tested.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) ranks \| ([\d.]+) ms \| ([\d.]+) ms \|$", page, re.MULTILINE)
    assert len(rows) > 2
    for ranks, *times in rows:
        shape = dataclasses.replace(SHAPES["8b"], num_layers=4)
        job = Job(shape, int(ranks.replace(",", "")), sequence=2048, products_only=True)
        seconds = measure("ours", job, MACHINE).step, planned(job, MACHINE).seconds
        assert [f"{each * 1e3:.1f}" for each in seconds] == times, ranks


def test_command_compares_both_engines(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "8b", "--layers", "2", "--ranks", "8", "--sequence", "512"])
    said = capsys.readouterr().out
    assert "ours / FSDP2: step " in said
    assert [line.split()[1] for line in said.splitlines()[2:4]] == ["ours", "fsdp2"]


@pytest.mark.functional
def test_comparison_with_gloo_measures_both_engines_on_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How well they agree depends on the load of the machine: docs/tested.md has a measurement."""
    shape = ["--ranks", "2", "--layers", "2", "--rows", "64", "--pauses", "1"]
    ratios = gloo.main([*shape, "--rounds", "1", "--most", "1", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "gloo-2.json").read_text())
    steps = [
        f"{engine} 1.0 {where}"
        for engine in ("ours", "fsdp2")
        for where in (gloo.REAL, gloo.SIMULATED)
    ]
    assert found.keys() >= {*steps}
    times = [found[step]["seconds"] for step in steps]
    assert ratios == [times[1] / times[0], times[3] / times[2]]
    assert re.findall(r"^2 +(\w+) +1 ms ", capsys.readouterr().out, re.MULTILINE) == [
        "ours",
        "FSDP2",
    ]
