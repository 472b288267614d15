"""A plot of plans: bytes by role for every strategy, and the memory of a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp_v2_cli.plan.report import ROLES, PlanReport

_GIB = 1024**3


def draw(report: PlanReport, path: Path) -> None:
    """Plot a report.

    Args:
        report: The report.
        path: File to write, of a format that matplotlib writes.

    Raises:
        ValueError: matplotlib is not installed, or the file has no suffix of a picture.
    """
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    if not path.suffix:
        # matplotlib would write another file, with the suffix .png.
        raise ValueError(f"--plot {path} has no suffix; name a picture, such as {path.name}.png")
    has_times = report.machine is not None
    num_plans = len(report.plans)
    figure = figure_module.Figure(figsize=(10, 1.5 + 0.4 * num_plans), dpi=120)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(1, 2 if has_times else 1, sharey=True, squeeze=False)[0]
    _draw_memory(axes[0], report)
    if has_times:
        _draw_times(axes[1], report)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ValueError(f"--plot {path}: {error}") from None


def _draw_memory(axes: Any, report: PlanReport) -> None:
    sizes = {role.value: [plan.peak[role] / _GIB for plan in report.plans] for role in ROLES}
    most = _stack(axes, report, sizes)
    if report.memory_nbytes is not None:
        memory = report.memory_nbytes / _GIB
        axes.axvline(memory, color="black", linestyle="--", label="memory")
        if most > 8 * memory:
            axes.set_xscale("symlog", linthresh=memory)
    axes.set_xlabel("GiB a rank at the peak")
    axes.invert_yaxis()
    axes.legend(fontsize="x-small")


def _draw_times(axes: Any, report: PlanReport) -> None:
    plans = report.plans
    _stack(
        axes,
        report,
        {
            "computation": [plan.step.compute_seconds for plan in plans],
            "waiting for communication": [plan.exposed_seconds for plan in plans],
            "optimizer of matrices": [plan.optimizer_seconds for plan in plans],
            "idle in the pipeline": [plan.idle_seconds for plan in plans],
        },
    )
    axes.set_xlabel("seconds a step, estimated")
    axes.legend(fontsize="x-small")


def _stack(axes: Any, report: PlanReport, parts: Mapping[str, Sequence[float]]) -> float:
    """Draw a bar for each plan, with parts one after the other; return the longest."""
    names = [plan.strategy.name for plan in report.plans]
    ends = [0.0] * len(names)
    for label, lengths in parts.items():
        if any(lengths):
            axes.barh(names, lengths, left=ends, label=label)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    return max(ends)
