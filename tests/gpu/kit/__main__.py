"""The command line of the kit."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_cpu_rehearsal.te.load import why_not_installed
from tests.gpu.kit import report
from tests.gpu.kit.checks import CHECKS
from tests.gpu.kit.machine import FOR_BITS, describe, num_gpus, requirements
from tests.gpu.kit.running import ROOT, Check, Request, Result, Status, run_checks
from tests.gpu.kit.trainings import has_transformer_engine


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Run checks and write the report.

    Args:
        argv: The arguments; those of the process if None.
        checks: What there is to run.

    Returns:
        0 if no check failed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="default: every GPU; 2 on a CPU")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the report")
    parser.add_argument("--only", action="append", default=[], help="a check's name, or its start")
    parser.add_argument("--small", action="store_true", help="as little as shows that it runs")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    args = parser.parse_args(argv)
    chosen = [c for c in checks if not args.only or any(c.name.startswith(o) for o in args.only)]
    if args.list:
        sys.stdout.write("".join(f"{check.name}: {check.proves}\n" for check in chosen))
        return 0
    if args.device == "cuda":
        needed, can_run = requirements()
        sys.stdout.write("".join(f"{sentence}\n" for sentence in needed))
        if not can_run:
            return 2
        for name, value in FOR_BITS.items():
            os.environ.setdefault(name, value)
    present = num_gpus() if args.device == "cuda" else 0
    ranks = args.ranks or (present if args.device == "cuda" else 2)
    if args.device == "cuda" and not 1 <= ranks <= present:
        parser.error(f"{ranks} ranks need as many GPUs, and there are {present}; or --device cpu")
    if not chosen:
        parser.error(f"no check is called {' or '.join(args.only)}; --list says which there are")
    has_te = has_transformer_engine() if args.device == "cuda" else not why_not_installed()
    request = Request(args.device, ranks, args.out.resolve(), args.small, has_te)
    return _run(chosen, request)


def _run(checks: Sequence[Check], request: Request) -> int:
    machine = describe(request.device, ROOT) | {"ranks": str(request.ranks)}
    results: list[Result] = []
    path = report.write(results, machine, request.folder)
    for result in run_checks(checks, request):
        results.append(result)
        path = report.write(results, machine, request.folder)
        status = result.outcome.status.value
        sys.stdout.write(f"{status:18} {result.check.name} ({result.seconds:.0f} s)\n")
        sys.stdout.flush()
    sys.stdout.write(f"report: {path}\n")
    return int(any(result.outcome.status is Status.FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
