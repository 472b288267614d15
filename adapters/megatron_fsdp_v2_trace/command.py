"""`megatron-fsdp-v2 trace`: the timeline of a step, from a trace of torch's profiler."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_fsdp_v2_trace.drawing import draw
from megatron_fsdp_v2_trace.files import check_writable
from megatron_fsdp_v2_trace.timeline import (
    COMPUTE,
    EXPOSED,
    GATHER,
    REDUCE,
    StepTimeline,
    busy_seconds,
    read,
)

_COLUMNS = (COMPUTE, GATHER, REDUCE, EXPOSED)


class _TraceCommand:
    """`megatron-fsdp-v2 trace`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument(
            "runs",
            nargs="+",
            metavar="run.json",
            help="a trace of torch.profiler (export_chrome_trace), with profile_ranges on; several "
            "are drawn on one time axis",
        )
        parser.add_argument(
            "--out",
            type=Path,
            action="append",
            metavar="FILE",
            help="a page (.html) or picture (.png, .svg, .pdf) to write; may be repeated; default: "
            "the first run's name with .html and .png",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print a table of every run, and draw them."""
        first = Path(args.runs[0])
        outs = args.out or [first.with_suffix(".html"), first.with_suffix(".png")]
        timelines = [read(path) for path in args.runs]
        for out in outs:
            check_writable(out)
        for timeline in timelines:
            sys.stdout.writelines(f"{line}\n" for line in lines(timeline))
        for out in outs:
            draw(timelines, out)
            sys.stdout.write(f"{out}\n")
        return 0


def lines(timeline: StepTimeline) -> Iterator[str]:
    """Format the time of every unit, in milliseconds, line by line."""
    yield f"{timeline.name}, {1e3 * timeline.end:.1f} ms"
    rows = [("unit", *(f"{column} ms" for column in _COLUMNS))]
    for unit, spans in (*timeline.by_unit().items(), ("all", timeline.spans)):
        times = [f"{1e3 * busy_seconds(spans, column):.2f}" for column in _COLUMNS]
        rows.append((unit, *times))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *numbers])
    if timeline.memory:
        yield f"largest live memory: {max(n for _, n in timeline.memory) / 2**20:.1f} MiB"


command = _TraceCommand()
