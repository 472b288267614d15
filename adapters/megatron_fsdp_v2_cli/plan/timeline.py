"""The step of a plan as a trace, which `megatron-fsdp-v2 trace` and trace viewers show."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_fsdp_v2_cli.plan.report import PlanReport


def write_timeline(report: PlanReport, path: Path) -> None:
    """Write the step of the plan that a report shows, in the format of torch's profiler.

    Args:
        report: The report.
        path: The file.

    Raises:
        ValueError: The plan has no times.
    """
    if report.shown.machine is None:
        raise ValueError("--timeline needs times: add --machine")
    threads = {track: number for number, track in enumerate(("compute", "gather", "reduce"))}
    events = [
        {
            "ph": "X",
            "cat": "fsdp",
            "name": work.name,
            "pid": report.shown.strategy.name,
            "tid": threads[work.track],
            "ts": 1e6 * work.start,
            "dur": 1e6 * (work.end - work.start),
            "args": {"track": work.track, "unit": work.unit or "(root)"},
        }
        for work in report.shown.step.work
    ]
    path.write_text(json.dumps({"traceEvents": events}))
