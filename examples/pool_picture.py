"""A picture of the traced pool: lifetime and address of each buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from torch import nn

from megatron_fsdp_v2._picture import INK
from megatron_fsdp_v2.diagnostics.walk import units_below
from megatron_fsdp_v2.memory.address_plan import Trace, keys_of
from megatron_fsdp_v2.memory.trace_pool import PoolReport, TracePoolAllocator

__all__ = ["pool_picture"]

WIDTH, HEIGHT = 1000, 360
LEFT, TOP, GAP = 130, 40, 90
COLORS = ("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#b279a2", "#9d9da1")


@dataclass(frozen=True, slots=True)
class _Life:
    """Lifetime of a buffer in a trace."""

    key: int
    first: int
    last: int


def pool_picture(module: nn.Module, path: str | Path) -> None:
    """Draw the plans of a model's traced pool as an SVG.

    The picture has one panel for every traced pattern and kind of buffer. The horizontal axis is
    time, in allocations and frees of buffers; the vertical axis is the address, in MiB. A rectangle
    is one lifetime of a buffer, with the buffer's name as a tooltip. The dashed line is the lower
    bound of the pool's size.

    Args:
        module: A sharded model with `enable_trace_pool=True`, after its first steps.
        path: File to write.

    Raises:
        ValueError: The module contains no sharded module.
        RuntimeError: The module has no traced pool, or the pool has no plan yet.
    """
    allocator = units_below(module)[0][1].context.allocator
    if not isinstance(allocator, TracePoolAllocator):
        raise RuntimeError(
            f"{type(module).__name__} has no trace pool; shard it with enable_trace_pool=True"
        )
    panels = [
        (report, f"{number}. {program.name}", program.trace)
        for report in allocator.reports()
        if report.plan is not None
        for number, program in enumerate(report.programs, start=1)
    ]
    if not panels:
        raise RuntimeError("the trace pool has no plan yet; run a few steps first")
    kinds = sorted({_kind(name) for report, _, _ in panels for name in report.names})
    colors = {kind: COLORS[min(n, len(COLORS) - 1)] for n, kind in enumerate(kinds)}
    height = TOP + len(panels) * (HEIGHT + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="13" '
        # Readable on a light and on a dark page, without a ground.
        f'fill="{INK}">',
        *_legend(colors),
    ]
    for number, (report, name, trace) in enumerate(panels):
        lines += _panel(report, name, trace, TOP + number * (HEIGHT + GAP) + 20, colors)
    Path(path).write_text("\n".join([*lines, "</svg>"]) + "\n")


def _kind(label: str) -> str:
    """Return what a buffer holds, the last part of its name."""
    return label.rpartition("/")[2]


def _legend(colors: Mapping[str, str]) -> Iterator[str]:
    for number, (kind, color) in enumerate(colors.items()):
        x = LEFT + 140 * number
        yield f'<rect x="{x}" y="10" width="14" height="14" fill="{color}"/>'
        yield f'<text x="{x + 20}" y="22">{kind}</text>'


def _panel(
    report: PoolReport, name: str, trace: Trace, top: float, colors: Mapping[str, str]
) -> Iterator[str]:
    plan = report.plan
    assert plan is not None
    scale = HEIGHT / max(plan.nbytes, 1)
    step = WIDTH / max(len(trace.events) + 1, 1)
    title = (
        f"{name}, {report.kind}: {plan.nbytes / 2**20:,.2f} MiB, {plan.excess:.1%} above the lower "
        f"bound; {len(trace.events)} allocations and frees"
    )
    yield f'<text x="{LEFT}" y="{top - 6:.1f}">{escape(title)}</text>'
    yield (
        f'<rect x="{LEFT}" y="{top:.1f}" width="{WIDTH}" height="{HEIGHT}" fill="none" '
        f'stroke="{INK}"/>'
    )
    for life in _lives(trace):
        offset = plan.offsets[life.key]
        if offset is None:
            continue
        label = report.names[life.key]
        color = colors[_kind(label)]
        height = plan.sizes[life.key] * scale
        y = top + HEIGHT - offset * scale - height
        yield (
            f'<rect x="{LEFT + life.first * step:.2f}" y="{y:.2f}" '
            f'width="{(life.last - life.first) * step:.2f}" height="{height:.2f}" '
            f'fill="{color}" stroke="white" stroke-width="0.5">'
            f"<title>{escape(label)}: {plan.sizes[life.key]:,} bytes at {offset:,}</title></rect>"
        )
    y = top + HEIGHT - plan.lower_bound * scale
    yield (
        f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.2f}" y2="{y:.2f}" stroke="{INK}" '
        'stroke-dasharray="6 4"/>'
    )
    yield f'<text x="4" y="{y + 12:.1f}">lower bound</text>'
    for part in range(5):
        y = top + HEIGHT * (1 - part / 4)
        yield (
            f'<text x="{LEFT - 8}" y="{y + (0 if part else -2):.1f}" text-anchor="end" '
            f'font-size="11">{plan.nbytes * part / 4 / 2**20:.2f}</text>'
        )
        moment = round(len(trace.events) * part / 4)
        yield (
            f'<text x="{LEFT + moment * step:.1f}" y="{top + HEIGHT + 16}" text-anchor="middle" '
            f'font-size="11">{moment}</text>'
        )
    yield (
        f'<text x="{LEFT + WIDTH / 2}" y="{top + HEIGHT + 34}" text-anchor="middle">time, in '
        "allocations and frees of buffers</text>"
    )
    yield (
        f'<text transform="translate(60 {top + HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        "address, MiB</text>"
    )


def _lives(trace: Trace) -> Iterator[_Life]:
    """Yield the lifetimes of all buffers in a trace, in numbers of events."""
    since = dict.fromkeys(keys_of(trace.live_before), 0)
    for moment, event in enumerate(trace.events, start=1):
        if event >= 0:
            since.setdefault(event, moment)
        elif ~event in since:
            yield _Life(~event, since.pop(~event), moment)
    for key, first in since.items():
        yield _Life(key, first, len(trace.events) + 1)
