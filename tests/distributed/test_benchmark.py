"""`make bench` measures every contender and writes what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_benchmark_reports_a_ratio_for_every_contender(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--width", "8", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *sizes],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ratios = json.loads((tmp_path / "bench.json").read_text())["ratio"]
    assert ratios["FSDP2"] == 1.0
    assert len(ratios) == 6
    assert all(name in done.stdout for name in ratios)
    assert (tmp_path / "bench.png").stat().st_size > 1000
