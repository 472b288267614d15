"""A plot of plans: bytes by role for every strategy, and the memory of a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp_v2._picture import INK, picture_style
from megatron_fsdp_v2_cli.plan.report import ROLES, PlanReport

_GIB = 1024**3


def draw(report: PlanReport, path: Path, model: str) -> None:
    """Plot a report.

    Args:
        report: The report.
        path: File to write, of a format that matplotlib writes.
        model: Name of the model, for the title.

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
    with picture_style():
        _draw_figure(figure_module.Figure, report, path, model)


def _draw_figure(figure_type: Any, report: PlanReport, path: Path, model: str) -> None:
    has_times = report.machine is not None
    num_plans = len(report.plans)
    figure = figure_type(figsize=(12, 1.9 + 0.4 * num_plans), dpi=120)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(1, 2 if has_times else 1, sharey=True, squeeze=False)[0]
    figure.suptitle(_title(report, model), fontsize="medium")
    _draw_memory(axes[0], report)
    if has_times:
        _draw_times(axes[1], report)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ValueError(f"--plot {path}: {error}") from None


def _title(report: PlanReport, model: str) -> str:
    """Return what was planned: the model, its ranks, the machine."""
    training, machine = report.training, report.machine
    parts = [model, f"{training.numel:,} parameters in {len(training.units)} units"]
    parts += [text for text in (training.label, f"{report.num_ranks} ranks") if text]
    return ", ".join(parts + ([] if machine is None else [f"machine {machine.name}"]))


def _legend(axes: Any) -> None:
    """Put the legend above the bars, which it would cover."""
    axes.legend(fontsize="x-small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)


def _draw_memory(axes: Any, report: PlanReport) -> None:
    sizes = {role.value: [plan.peak[role] / _GIB for plan in report.plans] for role in ROLES}
    most = _stack(axes, report, sizes)
    if report.memory_nbytes is not None:
        memory = report.memory_nbytes / _GIB
        axes.axvline(memory, color=INK, linestyle="--", label="memory")
        if most > 8 * memory:
            axes.set_xscale("symlog", linthresh=memory)
    axes.set_xlabel("GiB a rank at the peak")
    axes.invert_yaxis()
    _legend(axes)


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
    _legend(axes)


def _stack(axes: Any, report: PlanReport, parts: Mapping[str, Sequence[float]]) -> float:
    """Draw a bar for each plan, with parts one after the other; return the longest."""
    names = [plan.strategy.name for plan in report.plans]
    ends = [0.0] * len(names)
    for label, lengths in parts.items():
        if any(lengths):
            axes.barh(names, lengths, left=ends, label=label)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    return max(ends)
