"""Planned exposed communication and its reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2.plan import (
    Machine,
    MeshDescription,
    Strategy,
    TrainingDescription,
    describe_module,
    plan_one,
)
from megatron_fsdp_v2.plan.description import ModelTraits
from megatron_fsdp_v2.plan.exposure import Exposure, OverlapReport, Reason
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from megatron_fsdp_v2_cli.plan.overlap import overlap_as_dict, overlap_lines

NUM_RANKS = 8
WIDTH = 16
# An all-gather of 1 KiB, a unit of one layer, takes a second: 7/8 of it is sent among 8 ranks.
MACHINE = Machine(
    "slow",
    gpus_per_node=NUM_RANKS,
    node_bandwidth=7 / 8 * 1024,
    network_bandwidth=1.0,
    node_latency=0.0,
    network_latency=0.0,
    flops=1.0,
    efficiency=1.0,
    bandwidth_efficiency=1.0,
)
FULL = Strategy("optim_grads_params")


def planned(
    sizes: tuple[int, ...], seconds: float, strategy: Strategy = FULL, **options: Any
) -> OverlapReport:
    """Return the planned overlap of a step.

    Args:
        sizes: Number of layers of each unit; a gather or reduction takes one second per layer.
        seconds: Time of each unit's forward; its backward takes twice as long.
        strategy: Sharding strategy.
        options: Options of the root.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, size * WIDTH, bias=False) for size in sizes))
    rules = ModelTraits(flops_of=lambda name, params: seconds if name else 0.0)
    units, _ = describe_module(model, list(model), rules)
    training = TrainingDescription(
        units, {"dp": MeshDescription(NUM_RANKS)}, tokens=1, options=RuntimeOptions(**options)
    )
    plan = plan_one(training, strategy, MACHINE)
    assert plan.overlap.exposed_seconds == pytest.approx(plan.exposed_seconds)
    return plan.overlap


def waits(report: OverlapReport, purpose: str = "unshard") -> list[tuple[str, float, Any]]:
    """Return unit, seconds and reason of each exposed collective, in the order of issue."""
    return [
        (each.unit, round(each.seconds, 6), each.reason)
        for each in report.exposures
        if each.purpose == purpose and each.reason is not None
    ]


def test_long_collectives_and_first_collectives_of_a_pass_have_different_reasons() -> None:
    found = planned((1, 1, 1, 1), 0.4)
    assert waits(found) == [
        # The first gather of the forward overlaps no computation.
        ("0", 1.0, Reason.FIRST),
        *((unit, 0.6, Reason.COMPUTE) for unit in "123"),
        # The same holds for the backward.
        ("3", 1.0, Reason.FIRST),
        # Backward computation takes twice as long, but reductions precede the next two gathers.
        ("2", 0.2, Reason.COMPUTE),
        *((unit, 1.2, Reason.COMPUTE) for unit in "10"),
    ]
    every = [*waits(found), *waits(found, "reduce")]
    assert found.exposed_seconds == pytest.approx(sum(seconds for _, seconds, _ in every))


def test_prefetch_limit_is_the_reason_of_a_wait_and_more_bytes_remove_it() -> None:
    # The gather of the large unit overlaps one unit of 3 seconds; the link was idle for 2 before.
    one = planned((1, 1, 4), 3.0)
    assert waits(one)[:2] == [("0", 1.0, Reason.FIRST), ("2", 1.0, Reason.LIMIT)]
    ahead = planned((1, 1, 4), 3.0, unshard_prefetch_bytes=5 * 1024)
    assert waits(ahead)[:2] == [("0", 1.0, Reason.FIRST), ("2", 4.0, Reason.FIRST)]
    assert Reason.LIMIT not in ahead.by_reason


def test_gathers_without_prefetch_do_not_overlap() -> None:
    off = planned((1, 1, 1), 3.0, enable_unshard_prefetch=False)
    assert [reason for *_, reason in waits(off)[1:3]] == [Reason.AT_ONCE] * 2


def test_gathers_along_the_outer_axis_overlap_computation() -> None:
    found = planned((1, 1, 1, 1), 3.0, Strategy("optim_grads_params", "optim", outer_size=2))
    assert {unit for unit, *_ in waits(found, "refresh")} == {"0"}


def test_reductions_wait_for_buffers_or_at_the_end_or_at_once() -> None:
    found = planned((4, 4, 4), 0.5, max_live_grad_buffers=1)
    reasons = [(unit, reason) for unit, _, reason in waits(found, "reduce")]
    # The last one is the flags of all groups.
    assert reasons == [("2", Reason.BUFFERS), ("1", Reason.BUFFERS), *[("0", Reason.LAST)] * 2]
    more = planned((4, 4, 4), 0.5, max_live_grad_buffers=3)
    assert {reason for *_, reason in waits(more, "reduce")} == {Reason.LAST}
    waiting = planned((4, 4, 4), 0.5, enable_async_reduce_grad=False)
    assert {reason for *_, reason in waits(waiting, "reduce")} == {Reason.AT_ONCE}


def test_a_report_has_totals_by_reason_and_the_longest_waits() -> None:
    def exposure(unit: str, seconds: float, reason: Reason | None, times: int = 1) -> Exposure:
        return Exposure(
            unit, "all_gather", "unshard", "inner", 2048, 0.5, 1.0, seconds, reason, times
        )

    report = OverlapReport(
        (
            exposure("", 0.001, Reason.FIRST),
            exposure("a", 0.003, Reason.COMPUTE, 2),
            exposure("b", 0.0, None),
        ),
        0.02,
    )
    assert report.by_reason == {Reason.COMPUTE: 0.006, Reason.FIRST: 0.001}
    text = "\n".join(overlap_lines(report, most=1))
    assert text.startswith("7.00 ms of 20.00 ms exposed: 3 of 4 collectives were waited for\n")
    assert "longer than computation            2  6.00 ms   86%" in text
    assert "The 1 that were exposed longest, of 2:" in text
    assert "(root)" not in text
    data = json.loads(json.dumps(overlap_as_dict(report)))
    assert data["by_reason"] == {"longer than computation": 0.006, "first of a pass": 0.001}
    assert data["collectives"][2]["reason"] is None
    assert "".join(overlap_lines(OverlapReport(()))).startswith("0.00 ms exposed: 0 of 0")
