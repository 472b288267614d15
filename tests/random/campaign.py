"""Runs many cases, reports their coverage, and writes each failing case after shrinking it.

python -m tests.random.campaign --cases 1000 --seed 0
python -m tests.random.campaign --replay out/random/case_453.json
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.machine import transitions
from tests.random.cases import Case, from_json, to_json
from tests.random.generate import generate
from tests.random.program import Outcome, run_case
from tests.random.rules import all_options
from tests.random.shrink import shrink
from tests.ranks import RankFailure, RankPools, rank_pools

TIMEOUT_S = 30.0
SHRINKING_TIMEOUT_S = 10.0
PROGRESS_EVERY_S = 15.0
MOST_FAILURES = 5
FEW = 300
"""Minimum number of cases for which every generated feature must occur in a passing case."""

Runs = Callable[[Case, str], Outcome]


def run_watched(case: Case, folder: str) -> Outcome:
    """Run a case on this rank; the outcome is `unexplored` if the machine was where no world is."""
    met: set[transitions.Row] = set()
    with transitions.recording(met):
        outcome = run_case(case, folder)
    unknown = met - transitions.known()
    if unknown and outcome.kind == "same":
        return Outcome("unexplored", -1, transitions.shown(unknown))
    return outcome


def outcome_of(
    case: Case, pools: RankPools, timeout_s: float = TIMEOUT_S, run: Runs = run_case
) -> Outcome:
    """Run a case on its number of ranks; return the worst outcome."""
    pool = pools(case.world_size)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            found: list[Outcome] = pool.run(run, case, folder, timeout_s=timeout_s)
        except RankFailure as failure:
            return Outcome("hang", -1, str(failure))
    for kind in ("raised", "rejected", "invalid", "different", "unexplored"):
        for outcome in found:
            if outcome.kind == kind:
                if kind not in ("different", "unexplored"):
                    # Collectives may be incomplete.
                    pool.close()
                return outcome
    return found[0]


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def kind_of_failure(outcome: Outcome) -> str:
    """Return the kind of a failure; a smaller case must fail in the same way."""
    if outcome.kind == "unexplored":
        return f"unexplored {outcome.text.splitlines()[0]}"
    if outcome.kind != "raised":
        return outcome.kind
    last = outcome.text.strip().splitlines()[-1]
    return outcome.kind + re.sub(r"[^A-Za-z ]", "", last)[:25]


def shrunk(case: Case, pools: RankPools, run: Runs = run_case) -> Case:
    """Shrink a failing case; return the case itself if it no longer fails."""
    first = outcome_of(case, pools, SHRINKING_TIMEOUT_S, run)
    if first.kind == "same":
        return case
    way = kind_of_failure(first)

    def fails(candidate: Case) -> bool:
        return kind_of_failure(outcome_of(candidate, pools, SHRINKING_TIMEOUT_S, run)) == way

    # Each try that hangs takes the full timeout.
    return shrink(case, fails, most_tries=40 if first.kind == "hang" else 200)


def report(case: Case, pools: RankPools, folder: Path, run: Runs = run_case) -> Path:
    """Shrink a failing case and write it to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"case_{case.seed}.json"
    path.write_text(to_json(shrunk(case, pools, run)))
    return path


def replay(path: Path, pools: RankPools, run: Runs = run_case) -> int:
    """Run a case from a file; return status 1 if it still fails."""
    outcome = outcome_of(from_json(path.read_text()), pools, run=run)
    _print(f"{outcome.kind} at event {outcome.event}\n{outcome.text}")
    return int(outcome.kind != "same")


def features_of(case: Case) -> set[str]:
    """Return the features that a case covers: the value of each field."""
    nodes = case.tree.walk()
    found = {f"{case.world_size} ranks"} | ({"ties"} if case.ties else set())
    for part in (case, *nodes, *all_options(case), *case.program):
        name, of = type(part).__name__, getattr(part, "kind", getattr(part, "do", ""))
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, str | bool | float | None) or field.name == "mesh":
                found.add(f"{name} {of}: {field.name} {value}")
    for above in nodes:
        below = above.walk()[1:]
        if above.unit and any(node.unit for node in below):
            found.add("nested units")
        if above.kind == "checkpoint" and any(node.kind == "checkpoint" for node in below):
            found.add("nested recomputation")
    if any(event.options is not None for event in case.program):
        found.add("another sharding after a load")
    return found


def main() -> int:
    """Run the cases; return status 1 if a case failed or a feature never occurred."""
    parser = argparse.ArgumentParser(prog="tests.random.campaign", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/random"))
    parser.add_argument("--replay", type=Path, help="a case that failed")
    options = parser.parse_args()
    with rank_pools() as pools:
        if options.replay is not None:
            return replay(options.replay, pools, run_watched)
        return _campaign(options.cases, options.seed, options.out, pools, run_watched)


def _campaign(num_cases: int, first_seed: int, folder: Path, pools: RankPools, run: Runs) -> int:
    began = said = time.monotonic()
    drawn: set[str] = set()
    covered: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    num_failures = 0
    for number in range(num_cases):
        case = generate(first_seed + number)
        outcome = outcome_of(case, pools, run=run)
        kinds[outcome.kind] += 1
        drawn |= features_of(case)
        covered.update(features_of(case) if outcome.kind == "same" else ())
        now = time.monotonic()
        if now - said > PROGRESS_EVERY_S:
            said, spent = now, now - began
            rest = spent / (number + 1) * (num_cases - number - 1)
            _print(
                f"{number + 1} of {num_cases} cases, {num_failures} failed, {spent:.0f} s, "
                f"about {rest:.0f} s left"
            )
        if outcome.kind in ("same", "rejected"):
            continue
        num_failures += 1
        last = outcome.text.strip().splitlines()[-1][:300] if outcome.text else ""
        _print(f"seed {case.seed}: {outcome.kind} at event {outcome.event}: {last}")
        # A case that the plain model cannot run is a bug of the generator.
        if num_failures <= MOST_FAILURES and outcome.kind != "invalid":
            _print(f"  made smaller: {report(case, pools, folder, run)}")
    _print(f"{num_cases} cases in {time.monotonic() - began:.0f} s: {dict(kinds)}")
    for feature, count in sorted(covered.items()):
        _print(f"  {count:5d}  {feature}")
    missing = drawn - covered.keys() if num_cases >= FEW else set()
    for feature in sorted(missing):
        _print(f"no case that ended well had: {feature}")
    return int(num_failures > 0 or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
