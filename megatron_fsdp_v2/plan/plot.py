"""A plot of plans: bytes by role for every strategy, beside the memory."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from megatron_fsdp_v2.plan.report import ROLES, PlanReport

__all__ = ["draw"]

_LABELS = {
    "model_weight": "model weights",
    "main_weight": "main weights",
    "main_grad": "main gradients",
    "optimizer": "optimizer",
    "gathered": "gathered weights",
    "grad_buffer": "gradient buffers",
    "communication": "communication",
    "activations": "activations",
}
_GIB = 1024**3


def draw(report: PlanReport, path: Path) -> None:
    """Plot a report.

    Args:
        report: The report.
        path: File to write, of a format that matplotlib writes.

    Raises:
        ValueError: matplotlib is not installed, or it does not write such files.
    """
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
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
    names = [plan.strategy.name for plan in report.plans]
    left = [0.0] * len(names)
    for role in ROLES:
        sizes = [getattr(plan.peak, role) / _GIB for plan in report.plans]
        if any(sizes):
            axes.barh(names, sizes, left=left, label=_LABELS[role])
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    if report.memory_nbytes is not None:
        axes.axvline(report.memory_nbytes / _GIB, color="black", linestyle="--", label="memory")
        most = max(left)
        if most > 8 * report.memory_nbytes / _GIB:
            axes.set_xscale("symlog", linthresh=report.memory_nbytes / _GIB)
    axes.set_xlabel("GiB a rank at the peak")
    axes.invert_yaxis()
    axes.legend(fontsize="x-small")


def _draw_times(axes: Any, report: PlanReport) -> None:
    names = [plan.strategy.name for plan in report.plans]
    left = [0.0] * len(names)
    parts = {
        "computation": [plan.step.compute_seconds for plan in report.plans],
        "waiting for communication": [plan.exposed_seconds for plan in report.plans],
        "optimizer of matrices": [plan.optimizer_seconds for plan in report.plans],
        "idle in the pipeline": [plan.idle_seconds for plan in report.plans],
    }
    for label, seconds in parts.items():
        if any(seconds):
            axes.barh(names, seconds, left=left, label=label)
        left = [start + part for start, part in zip(left, seconds, strict=True)]
    axes.set_xlabel("seconds a step, estimated")
    axes.legend(fontsize="x-small")
