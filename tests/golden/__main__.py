"""Compare trainings with their golden records, or write the records.

Usage:

    python -m tests.golden               compare all cases; print the first difference of each
    python -m tests.golden --only TEXT   only the cases whose name contains TEXT
    python -m tests.golden --host-time   host time per unit as a ratio to that of FSDP2
    ... --write                          write the result to the record

The exit status is 1 if a case differs from its record and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from benchmarks import host_time
from tests.golden import files
from tests.golden.cases import CASES
from tests.golden.recording import record
from tests.ranks import rank_pools

HOST_TIME = files.FOLDER / "host_time.json"


def _trainings(*, only: str, write: bool) -> int:
    recorded, num_different = files.read(), 0
    with rank_pools() as pools:
        for name, case in CASES.items():
            if only in name:
                found = record(pools, case)
                before, recorded[name] = recorded.get(name), found
                text = "not recorded before"
                if before is not None:
                    text = files.difference(before, found, case.close)
                num_different += bool(text)
                sys.stdout.write(f"{name}: {text or 'as recorded'}\n")
    if write:
        files.write({name: recorded[name] for name in CASES if name in recorded})
    return 0 if write else min(num_different, 1)


def _host_time(*, write: bool) -> int:
    """Print the ratios. They are not compared: they vary with the machine and its load."""
    least = host_time.measure(num_units=64, rounds=60, clock=time.process_time)
    ratios = {name: round(value / least["FSDP2"], 2) for name, value in least.items()}
    if write:
        HOST_TIME.write_text(json.dumps(ratios, indent=0) + "\n")
    recorded = json.loads(HOST_TIME.read_text())
    for name, ratio in ratios.items():
        sys.stdout.write(f"{name:30} recorded {recorded.get(name)}, found {ratio}\n")
    return 0


def main() -> int:
    """Parse the command line and run it; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--write", action="store_true", help="write the result to the record")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--host-time", action="store_true", help="measure host time")
    args = parser.parse_args()
    if args.host_time:
        return _host_time(write=args.write)
    return _trainings(only=args.only, write=args.write)


if __name__ == "__main__":
    sys.exit(main())
