"""`make bench`: compares this package with its peers on this machine.

    python -m benchmarks                       # a few minutes
    python -m benchmarks --write-docs          # also write docs/performance.md
    python -m benchmarks --settings deep --ranks 2 --engines DDP FSDP2 ours
    python -m benchmarks --full                # the whole product of settings, and every engine

All engines of a setting run in turns in one process group; docs/performance.md has the method.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException

from benchmarks import common, memory, report, step
from benchmarks.cases import CHOSEN, Case, Setting, every_setting
from benchmarks.engines import BASELINE, ENGINES, USUAL
from benchmarks.repeats import Patience

UNITS = (64, 128, 256)
"""Numbers of units for which host time is measured."""


def main(words: list[str] | None = None) -> None:
    """Run the command line; print tables, and write JSON and a picture."""
    args = _parser().parse_args(words)
    start = time.perf_counter()
    settings = _settings(args)
    record: dict[str, Any] = {"options": vars(args).copy(), "settings": []}
    record["machine"] = report.machine(args.device)
    for ranks in sorted({setting.ranks for setting in settings}):
        args.ranks = ranks
        some = [(one, _engines(args, one)) for one in settings if one.ranks == ranks]
        record["settings"] += _in_turns(args, some)
    # `LiveBytes` counts CPU memory only, and host time does not depend on the device.
    if not args.steps_only and args.device == "cpu":
        args.ranks = 2
        (record["memory"],) = _on_ranks(memory.work, args)
        for name, flags in (("host_time_ms", ()), ("host_time_on_streams_ms", ("--streams",))):
            record[name] = {units: _host_time(units, *flags) for units in UNITS}
    record["minutes"] = (time.perf_counter() - start) / 60
    written = common.write(args, "bench.json", **record)
    report.draw(record["settings"], written.with_suffix(".png"))
    report.show(report.rest(record))
    if args.write_docs:
        report.write_page(record, report.PAGE)


def _parser() -> argparse.ArgumentParser:
    patience = Patience()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="every setting and every engine")
    parser.add_argument("--settings", nargs="+", metavar="WORD", help="those with all of these")
    parser.add_argument("--engines", nargs="+", metavar="WORD", help="those with one of these")
    parser.add_argument("--ranks", type=int, help="settings with this number of ranks alone")
    parser.add_argument("--layers", type=int, help="a model of so many layers instead of cases")
    parser.add_argument("--width", type=int, default=256, help="of that model")
    parser.add_argument("--batch", type=int, default=2, help="sequences of it on a rank")
    parser.add_argument("--rounds", type=int, default=patience.rounds, help="undisturbed repeats")
    parser.add_argument("--most", type=int, default=patience.most, help="repeats at most")
    parser.add_argument("--seconds", type=float, default=patience.seconds, help="of a repeat")
    parser.add_argument(
        "--foreign", type=float, default=patience.foreign, help="load of others that disturbs"
    )
    parser.add_argument(
        "--minutes", type=float, default=patience.minutes, help="for a setting, if it is disturbed"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps-only", action="store_true", help="neither memory nor host time")
    parser.add_argument("--write-docs", action="store_true", help=f"also into {report.PAGE}")
    parser.add_argument("--out", default="out/bench")
    return parser


def _settings(args: argparse.Namespace) -> list[Setting]:
    if args.layers:
        shape = Case(args.layers, args.width, batch=args.batch)
        return [Setting("custom", shape, ranks=args.ranks or 2)]
    found = every_setting() if args.full else CHOSEN
    words = [word.lower() for word in args.settings or ()]
    found = [setting for setting in found if all(word in setting.name for word in words)]
    found = [setting for setting in found if args.ranks in (None, setting.ranks)]
    if not found:
        raise SystemExit("python -m benchmarks: no setting has all of these words")
    return found


def _engines(args: argparse.Namespace, setting: Setting) -> list[str]:
    found = list(ENGINES)
    if not args.full:
        found = [name for name in USUAL if _is_usual(name, setting)]
    if args.engines:
        words = [word.lower() for word in args.engines]
        found = [name for name in ENGINES if any(word in name.lower() for word in words)]
    return list(dict.fromkeys([BASELINE, *found]))


def _is_usual(name: str, setting: Setting) -> bool:
    """Whether an engine is timed in a setting by default."""
    is_plain, is_deep = setting == Setting(setting.case, setting.shape), setting.case == "deep"
    if "pool" in name:
        return is_plain and (setting.case == "wide" or name.endswith("params, pool"))
    return "flat" not in name or is_plain or is_deep


def _in_turns(
    args: argparse.Namespace, settings: list[tuple[Setting, list[str]]]
) -> list[dict[str, Any]]:
    """Return the results of settings; mapped engines run in separate processes, with FSDP2.

    The allocator occasionally terminated processes that trained all engines, but never processes
    without mapped engines. Separate processes preserve the results of the other engines.
    """
    own = [(one, [n for n in names if not ENGINES[n].is_mapped]) for one, names in settings]
    found = _on_ranks(step.work, args, own)
    for place, (setting, names) in enumerate(settings):
        mapped = [name for name in names if ENGINES[name].is_mapped]
        if not mapped:
            continue
        try:
            (more,) = _on_ranks(step.work, args, [(setting, [BASELINE, *mapped])])
        except ProcessExitedException as error:
            found[place]["failed"] |= dict.fromkeys(mapped, str(error))
            continue
        found[place]["engines"] |= {n: e for n, e in more["engines"].items() if n in mapped}
        found[place]["failed"] |= more["failed"]
    return found


def _on_ranks(work: common.Work, args: argparse.Namespace, *more: Any) -> list[Any]:
    """Run `work` on all ranks; return the results that rank 0 writes to a file, one per line."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.jsonl")
        common.run_ranks(work, args, str(found), *more, device=args.device)
        return [json.loads(line) for line in found.read_text().splitlines()]


def _host_time(units: int, *flags: str) -> dict[str, float]:
    """Return the milliseconds of host time per unit, measured in a separate process."""
    words = ["-m", "benchmarks.host_time", "--json", "--units", str(units), "--rounds", "7", *flags]
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
