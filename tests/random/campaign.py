"""Runs many cases, one after the other, on rank pools."""

from __future__ import annotations

import collections
import sys
import tempfile
import time

from tests.random.cases import Case, to_json
from tests.random.generate import generate
from tests.random.program import Outcome, run_case
from tests.ranks import RankFailure, RankPools, rank_pools

TIMEOUT_S = 20.0


def outcome_of(case: Case, pools: RankPools, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run a case on ranks; the worst of what they say."""
    pool = pools(case.world_size)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            found: list[Outcome] = pool.run(run_case, case, folder, timeout_s=timeout_s)
        except RankFailure as failure:
            return Outcome("hang", -1, str(failure))
    worst = next((o for k in ("raised", "invalid", "different") for o in found if o.kind == k), None)
    if worst is not None and worst.kind != "different":
        # Collectives may be left half done.
        pool.close()
    return found[0] if worst is None else worst


def main() -> None:
    """For now: run seeds from a range and print what went wrong."""
    start, end = int(sys.argv[1]), int(sys.argv[2])
    began = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    with rank_pools() as pools:
        for seed in range(start, end):
            case = generate(seed)
            before = time.monotonic()
            outcome = outcome_of(case, pools)
            counts[outcome.kind] += 1
            if outcome.kind != "same":
                took = time.monotonic() - before
                last = outcome.text.strip().splitlines()[-1] if outcome.text else ""
                print(f"{seed} {outcome.kind} event {outcome.event} {took:.1f}s: {last[:300]}", flush=True)
                with open(f"/tmp/random_cases/{seed}.txt", "w") as file:
                    file.write(to_json(case) + "\n" + outcome.text)
    print(dict(counts), f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
