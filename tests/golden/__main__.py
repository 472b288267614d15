"""Compare trainings with their golden records, or write the records.

Usage:

    python -m tests.golden               compare all cases; print the first difference of each
    python -m tests.golden --only TEXT   only the cases whose name contains TEXT
    ... --write                          write the result to the record

The exit status is 1 if a case differs from its record and nothing is written.
"""

from __future__ import annotations

import argparse
import sys

from tests.golden import files
from tests.golden.cases import CASES
from tests.golden.recording import record
from tests.ranks import rank_pools


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


def main() -> int:
    """Parse the command line and run it; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--write", action="store_true", help="write the result to the record")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    args = parser.parse_args()
    return _trainings(only=args.only, write=args.write)


if __name__ == "__main__":
    sys.exit(main())
