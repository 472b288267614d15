"""Step time, exposed communication and memory of both engines at any number of ranks.

    python -m benchmarks.sim --model 8b --ranks 8 64 1024
    python -m benchmarks.sim --model 405b --ranks 16384 --recompute

One process represents one rank; time is virtual, and tensors have no values. `docs/performance.md`
describes the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.sim.engines import ENGINES
from benchmarks.sim.estimate import planned
from benchmarks.sim.models import SHAPES
from benchmarks.sim.steps import Job, Measured, measure
from megatron_fsdp_v2._text import readable_size, table
from megatron_fsdp_v2.plan import find_machine

HEAD = ["ranks", "engine", "step", "model", "optimizer", "waits", "copies", "exposed"]
HEAD += ["communication", "peak", "resting", "plan"]


def main(words: list[str] | None = None) -> None:
    """Run the command line and print a table."""
    args = _parser().parse_args(words)
    machine = find_machine(args.machine)
    shape = SHAPES[args.model]
    if args.layers:
        shape = dataclasses.replace(shape, num_layers=args.layers)
    rows, records = [HEAD], []
    for num_ranks in args.ranks:
        job = Job(
            shape,
            num_ranks,
            args.batch,
            args.sequence,
            args.recompute,
            args.outer,
            args.products_only,
        )
        found = {engine: measure(engine, job, machine) for engine in args.engines}
        plan = planned(job, machine)
        for engine, measured in found.items():
            estimate = plan.seconds if engine == "ours" else None
            rows.append(_row(num_ranks, engine, measured, estimate))
            records.append(
                {"ranks": num_ranks, "engine": engine, **dataclasses.asdict(measured)}
                | {"exposed": measured.exposed, "waits": measured.waits, "plan": estimate}
            )
        sys.stdout.write("".join(f"{line}\n" for line in table([HEAD, *rows[-len(found) :]])))
        if len(found) == len(ENGINES):
            ours, theirs = found["ours"], found["fsdp2"]
            sys.stdout.write(
                f"ours / FSDP2: step {ours.step / theirs.step:.3f}, "
                f"exposed {ours.exposed / theirs.exposed:.2f}, "
                f"waits {ours.waits / theirs.waits:.2f}, peak {ours.peak / theirs.peak:.2f}\n"
            )
        sys.stdout.flush()
    if args.json:
        path = Path(args.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": vars(args), "found": records}, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim", description=__doc__)
    parser.add_argument("--model", choices=list(SHAPES), default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--outer", type=int, default=1, help="ranks of a replicating axis: HSDP")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step on a rank")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of each")
    parser.add_argument("--recompute", action="store_true", help="layers run twice")
    parser.add_argument("--machine", default="h100", help="h100, h200 or b200")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument(
        "--products-only", action="store_true", help="only matrix products take time"
    )
    parser.add_argument("--json", help="where to write what was found")
    return parser


def _row(num_ranks: int, engine: str, found: Measured, estimate: float | None) -> list[Any]:
    times = (found.step, found.model, found.optimizer, found.waits, found.copies)
    return [
        str(num_ranks),
        engine,
        *(f"{seconds * 1e3:.1f} ms" for seconds in (*times, found.exposed, found.communicating)),
        readable_size(found.peak),
        readable_size(found.resting),
        "-" if estimate is None else f"{estimate * 1e3:.1f} ms",
    ]


if __name__ == "__main__":
    main()
