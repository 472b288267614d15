"""The support matrix counts trainings by kind of model and feature."""

from __future__ import annotations

from pathlib import Path

from functional_tests.support import counts, text, trainings
from tools.test_all import FAILED, PASSED, Results


def test_cells_count_the_trainings_that_passed(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl", "c0ffee", "0.0")
    names = [name for name, _ in trainings()]
    assert len(set(names)) == len(names) > 300
    latent = next(name for name, words in trainings() if "--multi-latent-attention" in words)
    for name in names:
        results.add("tests", name, FAILED if name == latent else PASSED)
    found = counts(results.outcomes("tests"))
    passed, total = found["all", "latent attention"]
    assert passed == total - 1
    written = " ".join(text(results).split())
    assert f" {passed} of {total} " in written
    assert f"{len(names)} at c0ffee" in written
    assert "not complete" in written
