"""Reports benchmark results: tables, a picture, and a section of the documentation."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import upstream
from benchmarks.engines import BASELINE
from benchmarks.memory import COLUMNS
from benchmarks.noise import cpus
from megatron_fsdp_v2._picture import picture_style
from tools.page_parts import with_part

__all__ = ["PAGE", "Table", "draw", "hardware", "machine", "markdown", "put_between_marks"]
__all__ += ["rest", "show", "steps", "write_page"]

PAGE = "docs/performance.md"
COMMAND = "make bench"
_PICTURE = "images/benchmarks.png"


@dataclass(frozen=True)
class Table:
    """A table with remarks below it.

    Attributes:
        title: Title.
        head: Names of the columns.
        rows: Cells of each row.
        remarks: Sentences.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()


def steps(found: dict[str, Any]) -> Table:
    """Return the table of one setting."""
    head = ("", "step ms", "optimizer ms", f"over {BASELINE}", "over limit", "losses")
    rows = [_row(name, engine) for name, engine in found["engines"].items()]
    remarks = [f"{name} failed: {text}" for name, text in found["failed"].items()]
    pieces = found["pieces_s"]
    if found["pieces_disturbed"] or any(
        engine["disturbed"] for engine in found["engines"].values()
    ):
        remarks.append("(*) Too few undisturbed repeats: the least disturbed ones count.")
    stars = {name: " (*)" if name in found["pieces_disturbed"] else "" for name in pieces}
    parts = ", ".join(f"{name} {_ms(took)}{stars[name]}" for name, took in pieces.items())
    remarks.append(f"Components of the limits, in ms: {parts}.")
    return Table(found["name"], head, rows, remarks)


def _row(name: str, engine: dict[str, Any]) -> tuple[str, ...]:
    difference = engine["loss_difference"]
    if engine["losses_agree"]:
        losses = "agree"
    else:
        losses = "not finite" if difference is None else f"DIFFER by {difference:.0e}"
    over = engine["over_baseline"]
    return (
        name + (" (*)" if engine["disturbed"] else ""),
        _ms(engine["step_s"]),
        _ms(engine["optimizer_s"]),
        "-" if over is None else f"{over:.2f}",
        f"{engine['over_limit']:.2f}",
        losses,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def rest(record: dict[str, Any]) -> list[Table]:
    """Return the tables of memory and of host time, if measured."""
    found = []
    for dtype, rows in record.get("memory", {}).items():
        base = rows[BASELINE]
        cells = [
            (name, *(f"{row[c] / 1e6:.1f} ({row[c] / base[c]:.2f})" for c in COLUMNS))
            for name, row in rows.items()
        ]
        title = f"Memory: transformer, 8 layers x 512, {dtype}, 2 ranks: MB, and over {BASELINE}'s"
        found.append(Table(title, ("", *COLUMNS), cells))
    for name, where in (("host_time_ms", ""), ("host_time_on_streams_ms", ", with streams")):
        times = record.get(name)
        if not times:
            continue
        head = ("", *(f"{units} units" for units in times), f"over {BASELINE}")
        first = next(iter(times.values()))
        cells = [
            (
                name,
                *(f"{of[name]:.3f}" for of in times.values()),
                f"{first[name] / first[BASELINE]:.2f}",
            )
            for name in first
        ]
        title = f"Host time of a unit and step{where}, ms above the unsharded model's"
        found.append(Table(title, head, cells))
    return found


def machine(device: str) -> str:
    """Return a description of this machine and of the software versions."""
    backend = "NCCL" if device == "cuda" else "gloo"
    return f"{hardware(device)}, {backend}, {upstream.version()}"


def hardware(device: str) -> str:
    """Return a description of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    words = [f"{len(cpus())} cores ({models[0] if models else platform.machine()})"]
    words.append(f"{memory:.0f} GiB of memory")
    if device == "cuda":
        words.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    words.append(f"torch {torch.__version__.partition('+')[0]}")
    return ", ".join(words)


def show(tables: Sequence[Table]) -> None:
    """Print tables."""
    from rich.console import Console
    from rich.table import Table as Shown

    console = Console(width=None if os.isatty(1) else 120)
    for table in tables:
        shown = Shown(title=table.title, title_justify="left")
        for number, column in enumerate(table.head):
            shown.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in table.rows:
            style = "bold" if row[0].startswith("ours") else None
            shown.add_row(*row, style="red" if row[-1].startswith(("DIFFER", "not")) else style)
        console.print(shown)
        for remark in table.remarks:
            console.print(remark, style="dim", highlight=False, markup=False)


def draw(settings: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw step times relative to the baseline's, with a tick at each limit."""
    with picture_style():
        _draw(settings, path)


def _draw(settings: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    columns = min(2, len(settings))
    rows = -(-len(settings) // columns)
    most = max(len(found["engines"]) for found in settings)
    figure = Figure(figsize=(6 * columns, (0.24 * most + 0.5) * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= len(settings):
            axes.set_axis_off()
            continue
        engines = settings[number]["engines"]
        base = engines.get(BASELINE, next(iter(engines.values())))["step_s"]
        # Each setting has its own rows: engines differ between settings.
        for row, (name, engine) in enumerate(engines.items()):
            color = "tab:blue" if name.startswith("ours") else "tab:gray"
            axes.barh(row, engine["step_s"] / base, color=color)
            axes.plot([engine["limit_s"] / base] * 2, [row - 0.4, row + 0.4], color="tab:red")
        axes.axvline(1.0, color="gray", linestyle=":")
        axes.set_title(settings[number]["name"], fontsize=8)
        axes.set_yticks(range(len(engines)), list(engines), fontsize=7)
        axes.invert_yaxis()
    figure.supxlabel(f"step over {BASELINE}'s; red: the limit", fontsize=8)
    figure.savefig(path, dpi=110)


def markdown(table: Table) -> str:
    """Format a table as Markdown."""
    lines = [f"**{table.title}**", ""]
    lines += [f"| {' | '.join(table.head)} |", "|---" * len(table.head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in table.rows]
    for remark in table.remarks:
        lines += ["", remark]
    return "\n".join(lines) + "\n"


def write_page(record: dict[str, Any], page: str) -> None:
    """Write results between the markers of a page, and write the picture next to the page."""
    text = f"`{COMMAND}`, {record['minutes']:.0f} minutes on {record['machine']}.\n\n"
    text += f"![step times]({_PICTURE})\n\n"
    tables = [steps(found) for found in record["settings"]] + rest(record)
    put_between_marks(page, text + "\n".join(map(markdown, tables)))
    draw(record["settings"], Path(page).parent / _PICTURE)


def put_between_marks(page: str, text: str) -> None:
    """Replace the text between the markers of a page."""
    path = Path(page)
    path.write_text(with_part(path.read_text(), "results", text))
