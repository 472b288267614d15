"""A plot of tracked memory: bytes by role over a step."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp_v2.diagnostics.memory_ledger import Moment, Role
from megatron_fsdp_v2.diagnostics.walk import ROOT
from megatron_fsdp_v2.plan.memory_bound import PeakBytes

__all__ = ["plot_moments"]

MAX_LABELS = 40
_MIB = 1 << 20


def plot_moments(moments: Sequence[Moment], bound: PeakBytes, path: Path) -> None:
    """Stack the roles' bytes over forwards and backwards of units, and draw the bound.

    Args:
        moments: The peak of each interval, in the order of time.
        bound: The bound of their total.
        path: File to write.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        # Not a dependency: trainings on a cluster draw no plots.
        figure_type: Any = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise RuntimeError("a plot needs matplotlib; install it, or print report()") from error
    figure = figure_type(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    roles = [role for role in Role if any(moment.of_role(role) for moment in moments)]
    edges = range(len(moments) + 1)
    below = [0.0] * len(moments)
    colors = importlib.import_module("matplotlib").colormaps["tab10"].colors
    for role in roles:
        heights = [moment.of_role(role) / _MIB for moment in moments]
        top = [low + height for low, height in zip(below, heights, strict=True)]
        color = colors[list(Role).index(role)]
        axes.stairs(top, edges, baseline=below, fill=True, color=color, label=role.value)
        below = top
    axes.axhline(bound.total / _MIB, color="black", linestyle=":", label="bound")
    step = max(1, -(-len(moments) // MAX_LABELS))
    axes.set_xticks(
        [position + 0.5 for position in edges[:-1:step]],
        [_label(moment) for moment in moments[::step]],
        rotation=90,
        fontsize=7,
    )
    axes.set_xlim(0, max(len(moments), 1))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB on this rank, highest of each interval")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", reverse=True)
    figure.savefig(path, dpi=120)


def _label(moment: Moment) -> str:
    if moment.phase in ("forward", "backward"):
        return f"{moment.phase} {moment.unit or ROOT}"
    return moment.phase
