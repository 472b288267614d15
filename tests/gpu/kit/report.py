"""One report of all checks: Markdown for an issue, JSON for programs, pictures for both."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tests.gpu.kit.running import Result, Status, folder_name

_COLORS = {
    Status.PASSED: "tab:green",
    Status.FAILED: "tab:red",
    Status.NEEDS_GPU: "tab:gray",
    Status.NEEDS_RANKS: "lightgrey",
    Status.NEEDS_LAYERS: "lightgrey",
    Status.NEEDS_TOOL: "lightgrey",
}
_SHOWN = 300


def write(results: Sequence[Result], machine: Mapping[str, str], out: Path) -> Path:
    """Write `report.md`, `report.json` and pictures; return the Markdown file.

    Written after every check, so that a machine that goes down leaves what is known.
    """
    out.mkdir(parents=True, exist_ok=True)
    pictures = _draw(results, out)
    record = {
        "machine": dict(machine),
        "summary": _summary(results),
        "checks": [_record(result) for result in results],
        "pictures": pictures,
    }
    (out / "report.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    path = out / "report.md"
    path.write_text(_markdown(results, machine, pictures), encoding="utf-8")
    return path


def _record(result: Result) -> dict[str, object]:
    check, outcome = result.check, result.outcome
    return {
        "name": check.name,
        "proves": check.proves,
        "status": outcome.status.value,
        "seconds": round(result.seconds, 1),
        "text": outcome.text,
        "numbers": outcome.numbers,
    }


def _summary(results: Sequence[Result]) -> dict[str, int]:
    counted = Counter(result.outcome.status for result in results)
    return {status.value: counted[status] for status in Status}


def _markdown(
    results: Sequence[Result], machine: Mapping[str, str], pictures: Sequence[str]
) -> str:
    counts = ", ".join(f"{n} {name}" for name, n in _summary(results).items() if n)
    lines = [f"# Checks on {machine.get('device', '')}", "", counts or "no checks", ""]
    lines += ["| check | result | s | it proves | found |", "|---|---|---|---|---|"]
    for result in results:
        outcome = result.outcome
        first = _cell(outcome.text.strip().splitlines()[-1] if outcome.text else "")
        lines.append(
            f"| {_cell(result.check.name)} | {outcome.status.value} | {result.seconds:.0f} | "
            f"{_cell(result.check.proves)} | {first} |"
        )
    lines += ["", "## Machine", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in machine.items() if value]
    failed = [result for result in results if result.outcome.status is Status.FAILED]
    for result in failed:
        lines += ["", f"## Failed: {result.check.name}", "", "```text"]
        lines += [result.outcome.text.strip()[-4000:].replace("```", "'''"), "```"]
    for picture in pictures:
        lines += ["", f"![{Path(picture).stem}]({picture})"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN]} ..."


def _draw(results: Sequence[Result], out: Path) -> list[str]:
    pictures = []
    if results:
        _bars(
            [r.check.name for r in results],
            [max(r.seconds, 0.1) for r in results],
            [_COLORS[r.outcome.status] for r in results],
            "seconds; green passed, red failed, gray needs something",
            out / "checks.png",
        )
        pictures.append("checks.png")
    errors = {
        f"{r.check.name}: {s}": max(by[s] for by in r.outcome.numbers["errors"].values() if s in by)
        for r in results
        if r.check.name.startswith("parity") and "errors" in r.outcome.numbers
        for s in next(iter(r.outcome.numbers["errors"].values()))
    }
    if errors:
        values = [max(error, 1e-9) for error in errors.values()]
        _bars(
            list(errors), values, ["tab:blue"] * len(errors), "relative error", out / "parity.png"
        )
        pictures.append("parity.png")
    for result in results:
        steps = result.outcome.numbers.get("memory")
        if steps:
            names = [f"{s}: {kind}" for s, step in steps.items() for kind in step]
            sizes = [nbytes / 2**20 for step in steps.values() for nbytes in step.values()]
            _bars(names, sizes, ["tab:blue"] * len(names), "MiB of a step", out / "memory.png")
            pictures.append("memory.png")
        for name in result.outcome.pictures:
            shutil.copyfile(out / folder_name(result.check.name) / name, out / name)
            pictures.append(name)
    return pictures


def _bars(
    names: Sequence[str], values: Sequence[float], colors: Sequence[str], label: str, path: Path
) -> None:
    figure = Figure(figsize=(8, 0.8 + 0.28 * len(names)), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(names)), values, color=list(colors))
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlabel(label)
    figure.savefig(path)
