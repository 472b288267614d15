"""`megatron-fsdp-v2 trace`: what it finds in traces of a CPU and of a GPU, and what it draws."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.diagnostics import profile_ranges
from megatron_fsdp_v2_trace.drawing import draw
from megatron_fsdp_v2_trace.timeline import (
    COMPUTE,
    EXPOSED,
    GATHER,
    NO_UNIT,
    OTHER,
    REDUCE,
    StepTimeline,
    TimeSpan,
    busy_seconds,
    merged,
    read,
    without,
)
from tests.pictures import has_clear_ground
from tests.ranks import RankPools
from tests.unit.commands import called


def event(category: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    """Return one event of a trace, with times in milliseconds."""
    args = {"args": more.pop("args", {})}
    times = {"ts": 1e3 * start + 5e6, "dur": 1e3 * (end - start)}
    return {"ph": "X", "cat": category, "name": name, "tid": 1, **times, **args, **more}


def host(phase: str, unit: str, start: float, end: float) -> dict[str, Any]:
    return event("user_annotation", f"fsdp::{phase} {unit}", start, end)


ON_HOST = [
    host("unshard", "layers.0", 0, 1),
    host("pre_forward", "layers.0", 0, 1),
    host("unshard", "layers.1", 2, 3),
    host("post_forward", "layers.0", 5, 6),
    host("pre_forward", "layers.1", 6, 6.5),
    host("post_forward", "layers.1", 9, 9.5),
    host("reduce_grad", "layers.1", 10, 11),
]
ON_CPU = [
    *ON_HOST,
    event("cpu_op", "c10d::_allgather_base_", 0.1, 0.2),
    event("cpu_op", "c10d::_allgather_base_", 2.1, 2.2),
    event("cpu_op", "c10d::reduce_scatter_", 10.1, 10.2),
    event("cpu_op", "c10d::broadcast_", 10.3, 10.4),
    event("user_annotation", "gloo:all_gather", 0.5, 4, tid=2),
    event("user_annotation", "gloo:all_gather", 4, 7, tid=2),
    event("user_annotation", "gloo:reduce_scatter", 10.2, 12, tid=2),
    event("user_annotation", "gloo:broadcast", 12, 13, tid=2),
    event("cpu_op", "aten::linear", 2, 5),
    event("cpu_op", "aten::addmm", 2.5, 4.5),
    event("cpu_op", "aten::linear", 7, 8),
    {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 5e6 + 2e3,
     "args": {"Total Allocated": 4096, "Device Type": 0}},
]  # fmt: skip
ON_GPU = [
    *ON_HOST,
    event("cuda_runtime", "cudaLaunchKernel", 0.2, 0.3, args={"correlation": 1}),
    event("cuda_runtime", "cudaLaunchKernel", 1.5, 1.6, args={"correlation": 2}),
    event("cuda_runtime", "cudaLaunchKernel", 2.5, 2.6, args={"correlation": 3}),
    event("kernel", "ncclDevKernel_AllGather_RING", 1, 5, args={"correlation": 1}),
    event("kernel", "ampere_sgemm", 5, 8, args={"correlation": 2}),
    event("kernel", "ncclDevKernel_AllGather_RING", 5, 9, args={"correlation": 3}),
    event("cpu_op", "aten::linear", 1.4, 1.7),
]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    text = json.dumps({"traceEvents": events})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def in_ms(path: Path, *columns: str) -> dict[str, list[float]]:
    """Return milliseconds of tracks by unit."""
    timeline = read(path)
    return {
        unit: [round(1e3 * busy_seconds(spans, track), 3) for track in columns]
        for unit, spans in timeline.by_unit().items()
    }


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_trace_of_a_cpu_is_read_by_unit(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, ON_CPU)
    found = in_ms(path, COMPUTE, GATHER, REDUCE, OTHER, EXPOSED)
    assert found == {
        "layers.0": [3.0, 3.5, 0.0, 0.0, 1.5],
        "layers.1": [1.0, 3.0, 1.8, 1.0, 2.0 + 1.8 + 1.0],
    }
    assert read(path).memory == [(pytest.approx(1.5e-3), 4096)]


def test_kernels_belong_to_the_unit_that_launched_them(tmp_path: Path) -> None:
    found = in_ms(write(tmp_path / "run.json", ON_GPU), COMPUTE, GATHER, EXPOSED)
    assert found == {"layers.0": [3.0, 4.0, 4.0], "layers.1": [0.0, 4.0, 1.0]}


SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))),
    max_size=6,
)


@given(SPANS, SPANS)
def test_unions_and_differences_are_those_of_sets(
    intervals: list[tuple[int, int]], taken: list[tuple[int, int]]
) -> None:
    def points(spans: Any) -> set[int]:
        return {point for start, end in spans for point in range(int(start), int(end))}

    assert points(merged(intervals)) == points(intervals)
    found = list(without(merged(intervals), merged(taken)))
    assert points(found) == points(intervals) - points(taken)
    assert sum(end - start for start, end in found) == len(points(found))


def test_the_command_prints_a_table_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write(tmp_path / "a.json", ON_CPU), write(tmp_path / "b.json", ON_GPU)]
    status, out, err = called(capsys, "trace", *runs)
    assert (status, err) == (0, "")
    assert "layers.1" in out and "a.json, 12.5 ms" in out
    assert has_clear_ground(tmp_path / "a.png")
    page = (tmp_path / "a.html").read_text()
    assert "ncclDevKernel_AllGather_RING" in page and "aten::linear" in page


def test_a_page_tells_33_units_apart_and_has_no_empty_row(tmp_path: Path) -> None:
    spans = [TimeSpan(COMPUTE, f"layers.{n}", "kernel", n, n + 1) for n in range(33)]
    draw([StepTimeline("step", spans, ())], tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text()
    # Every unit has one trace, whose spans have one color.
    colors = re.findall(r'"marker":\{"color":\["(#[0-9a-f]{6})"\]', page)
    assert len(colors) == len(set(colors)) == 33
    assert f'"categoryarray":["{COMPUTE}"]' in page


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is empty"),
        ("{", "it is not JSON (Expecting property name"),
        ("text", "it is not JSON (Expecting value: line 1"),
        ('{"traceEvents": []}', "neither operators nor kernels"),
        ('{"events": []}', "it has no list of events (traceEvents)"),
        ("7", "it has no list of events (traceEvents)"),
        ("[1, 2]", "it has no list of events (traceEvents)"),
        ('{"traceEvents": [{"ph": "X", "dur": 1, "ts": "now"}]}', "an event has no 'name'"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "dur": 1}]}', "an event has no 'ts'"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "dur": 1, "ts": "now"}]}',
            "an event has a value of another type",
        ),
        ("[" * 100_000, "it is nested too deeply"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "dur": 1, "ts": 1e999}]}',
            "a time is not finite",
        ),
        ("\udcff" * 100, "it is not text"),
    ],
)
def test_other_files_are_errors(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(content, errors="surrogateescape")
    status, _, err = called(capsys, "trace", tmp_path / "run.json")
    assert status == 2 and message in err and err.count("\n") == 1
    assert "Error" not in err
    status, _, err = called(capsys, "trace", tmp_path / "absent.json")
    assert status == 2 and "absent.json" in err
    (tmp_path / "run.json.gz").write_text(content, errors="surrogateescape")
    status, _, err = called(capsys, "trace", tmp_path / "run.json.gz")
    assert status == 2 and ("gzip cannot decompress it" in err or not content)
    write(tmp_path / "run.json", ON_CPU)
    status, _, err = called(capsys, "trace", tmp_path / "run.json", "--out", tmp_path / "a.txt")
    assert status == 2 and "a.txt" in err


def profiled(path: str, width: int) -> None:
    """Profile a step of a sharded model on every rank; the first rank writes its trace."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    profile_ranges(model)
    with torch.profiler.profile(profile_memory=True) as profile:
        model(torch.randn(8, width)).square().mean().backward()
        sent = torch.ones(4)
        torch.distributed.broadcast(sent, src=0)
    if torch.distributed.get_rank() == 0:
        profile.export_chrome_trace(path)


# gloo gathers a unit of 512 KiB by broadcasts.
@pytest.mark.parametrize("width", [64, 384])
def test_a_profiled_step_has_computation_and_gathers_of_every_unit(
    pools: RankPools, tmp_path: Path, width: int
) -> None:
    pools(2).run(profiled, str(tmp_path / "run.json"), width)
    timeline = read(tmp_path / "run.json")
    spans = timeline.by_unit()
    for unit in ("0", "1"):
        for track in (COMPUTE, GATHER, REDUCE):
            assert busy_seconds(spans[unit], track) > 0, (unit, track)
        assert not busy_seconds(spans[unit], OTHER)
    # A broadcast of the program.
    assert [span.unit for span in timeline.spans if span.track == OTHER] == [NO_UNIT]
    assert timeline.memory
    assert busy_seconds(timeline.spans, EXPOSED) <= timeline.end
