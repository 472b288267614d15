"""Draw timelines: an interactive page by plotly, a picture by matplotlib."""

from __future__ import annotations

import colorsys
import html
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp_v2_trace.timeline import EXPOSED, TRACKS, StepTimeline, busy_seconds

_MIB = 1 << 20
_COLORS = (
    *("#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#ee7733", "#009988", "#997700"),
    *("#44bb99", "#99ddff", "#bbcc33", "#eedd88"),
)
_EXPOSED_COLOR = "#ee3333"
_INK = "#808080"
_STYLE = {
    "savefig.transparent": True,
    "legend.facecolor": "none",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), _INK),
    **dict.fromkeys(("legend.edgecolor", "text.color", "xtick.color", "ytick.color"), _INK),
}
"""Options of matplotlib for pictures that are readable on light and on dark pages."""
_MOST_IN_LEGEND = 48
_PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<body style="margin: 0">
{plot}
"""
_HOVER = "%{customdata[0]}<br>%{customdata[1]}<br>%{x:.3f} ms<extra></extra>"


def draw(timelines: Sequence[StepTimeline], path: Path) -> None:
    """Write a page (`.html`) or a picture (any format of matplotlib).

    Args:
        timelines: One run, or several on one time axis.
        path: The file.

    Raises:
        ValueError: The library is not installed, or does not write such files.
    """
    (_draw_page if path.suffix == ".html" else _draw_picture)(timelines, path)


def library(name: str) -> Any:
    """Import a module of a library that draws.

    Raises:
        ValueError: The library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"drawing needs {name.partition('.')[0]}: install megatron-fsdp-v2[plan]"
        ) from None


def _colors(timelines: Sequence[StepTimeline]) -> dict[str, str]:
    units = dict.fromkeys(unit for timeline in timelines for unit in timeline.by_unit())
    return {unit: _color(index, len(units)) for index, unit in enumerate(units)}


def _color(index: int, number: int) -> str:
    """Return a color that differs from those of other units, most from those of its neighbors."""
    if number <= len(_COLORS):
        return _COLORS[index]
    # Steps of the golden ratio spread hues evenly for any number; red is left to what is exposed.
    hue = 0.05 + 0.9 * (index * 0.618034 % 1)
    parts = colorsys.hls_to_rgb(hue, (0.35, 0.5, 0.68)[index % 3], 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _tracks(timelines: Sequence[StepTimeline]) -> list[str]:
    """Return the tracks that have a span, in their order."""
    found = {span.track for timeline in timelines for span in timeline.spans}
    return [track for track in TRACKS if track in found]


def _heights(timelines: Sequence[StepTimeline]) -> list[float]:
    """Return the relative heights of a run's rows: spans, and memory if any run has it."""
    return [0.7, 0.3] if any(timeline.memory for timeline in timelines) else [1.0]


def _caption(timeline: StepTimeline) -> str:
    exposed = busy_seconds(timeline.spans, EXPOSED)
    return f"{timeline.name}: {1e3 * timeline.end:.1f} ms, {exposed / timeline.end:.0%} exposed"


def _draw_page(timelines: Sequence[StepTimeline], path: Path) -> None:
    plotly, objects = library("plotly.subplots"), library("plotly.graph_objects")
    heights = _heights(timelines)
    captions = [text for t in timelines for text in (_caption(t), "")[: len(heights)]]
    figure = plotly.make_subplots(
        rows=len(heights) * len(timelines),
        cols=1,
        shared_xaxes="all",
        row_heights=heights * len(timelines),
        vertical_spacing=0.06,
        subplot_titles=captions,
    )
    colors, tracks, shown = _colors(timelines), _tracks(timelines), set[str]()
    for number, timeline in enumerate(timelines):
        row = len(heights) * number + 1
        for unit, spans in timeline.by_unit().items():
            figure.add_trace(
                objects.Bar(
                    orientation="h",
                    name=unit,
                    legendgroup=unit,
                    showlegend=unit not in shown,
                    base=[1e3 * span.start for span in spans],
                    x=[1e3 * (span.end - span.start) for span in spans],
                    y=[span.track for span in spans],
                    marker={
                        "color": [
                            _EXPOSED_COLOR if span.track == EXPOSED else colors[unit]
                            for span in spans
                        ],
                        "line": {"width": 0},
                    },
                    customdata=[[span.name or "exposed", unit] for span in spans],
                    hovertemplate=_HOVER,
                ),
                row=row,
                col=1,
            )
            shown.add(unit)
        figure.update_yaxes(
            categoryorder="array", categoryarray=tracks, autorange="reversed", row=row, col=1
        )
        if len(heights) == 1:
            continue
        figure.add_trace(
            objects.Scatter(
                x=[1e3 * time for time, _ in timeline.memory],
                y=[nbytes / _MIB for _, nbytes in timeline.memory],
                line={"shape": "hv", "color": "#555555"},
                showlegend=False,
                hovertemplate="%{y:.1f} MiB<extra></extra>",
            ),
            row=row + 1,
            col=1,
        )
        figure.update_yaxes(title_text="live MiB", rangemode="tozero", row=row + 1, col=1)
    figure.update_xaxes(title_text="ms", row=len(heights) * len(timelines), col=1)
    figure.update_layout(
        barmode="overlay",
        height=440 * len(timelines),
        legend={"orientation": "h", "yref": "container", "y": 0},
        margin={"l": 70, "r": 20, "t": 50, "b": 90},
    )
    plot = figure.to_html(full_html=False, include_plotlyjs=True, config={"responsive": True})
    path.write_text(_PAGE.format(title=html.escape(timelines[0].name), plot=plot), encoding="utf-8")


def _draw_picture(timelines: Sequence[StepTimeline], path: Path) -> None:
    with library("matplotlib").rc_context(_STYLE):
        _draw_figure(timelines, path)


def _draw_figure(timelines: Sequence[StepTimeline], path: Path) -> None:
    module, patches = library("matplotlib.figure"), library("matplotlib.patches")
    figure = module.Figure(figsize=(12, 4.5 * len(timelines)), dpi=120)
    figure.set_layout_engine("constrained")
    heights = _heights(timelines) * len(timelines)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    num_rows = len(heights) // len(timelines)
    colors, tracks = _colors(timelines), _tracks(timelines)
    for number, timeline in enumerate(timelines):
        upper = axes[num_rows * number]
        for height, track in enumerate(tracks):
            spans = [span for span in timeline.spans if span.track == track]
            upper.broken_barh(
                [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in spans],
                (height - 0.4, 0.8),
                facecolors=[
                    _EXPOSED_COLOR if track == EXPOSED else colors[span.unit] for span in spans
                ],
            )
        upper.set_yticks(range(len(tracks)), tracks)
        upper.invert_yaxis()
        upper.set_title(_caption(timeline), fontsize="medium", loc="left")
        if num_rows == 1:
            continue
        lower = axes[num_rows * number + 1]
        lower.step(
            [1e3 * time for time, _ in timeline.memory],
            [nbytes / _MIB for _, nbytes in timeline.memory],
            where="post",
            color=_INK,
        )
        lower.set_ylabel("live MiB")
        lower.set_ylim(bottom=0)
    axes[-1].set_xlabel("ms")
    handles = [patches.Patch(color=color, label=unit) for unit, color in colors.items()]
    del handles[_MOST_IN_LEGEND:]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, fontsize="small")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
