"""The support matrix of docs/tested.md, written from the results of `make test-all`.

    python -m functional_tests.support [--results out/test_all/results.jsonl]

A cell counts the trainings of the functional matrix, and of Megatron-LM's own configurations, with
a kind of model and a feature: those that passed when they last ran, of all.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from functional_tests import test_matrix
from functional_tests.matrix import STRATEGIES
from functional_tests.upstream import test_upstream
from tests.pages import table, wrapped
from tests.processes import ROOT
from tools.page_parts import with_part
from tools.test_all import PASSED, Results

PAGE = ROOT / "docs" / "tested.md"

MODELS = {
    "experts": "--num-experts",
    "latent attention": "--multi-latent-attention",
    "multi-token prediction": "--mtp-num-layers",
    "hybrid": "--hybrid-layer-pattern",
    "sparse attention, delta nets": "--experimental-attention-variant",
}
"""Kinds of models by their flag; a model without any is dense."""

FEATURES = {
    **{f"`{strategy}`": f"strategy {strategy}" for strategy in reversed(STRATEGIES)},
    "HSDP, HFSDP": "--num-distributed-optimizer-instances",
    "tensor parallelism": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "virtual stages": "--num-layers-per-virtual-pipeline-stage "
    "--num-virtual-stages-per-pipeline-rank",
    "context parallelism": "--context-parallel-size",
    "expert parallelism": "--expert-model-parallel-size",
    "bf16, fp16": "--bf16 --fp16",
    "FP8, FP4": "--fp8-format --fp4-format",
    "Transformer Engine's layers": "transformer_engine",
    "recomputation": "--recompute-granularity",
    "overlap of gathers, reductions": "--overlap-param-gather",
    "overlapped experts": "--overlap-moe-expert-parallel-comm",
    "trace pool": "--fsdp-trace-pool",
    "Muon": "muon",
    "offloaded optimizer": "--optimizer-cpu-offload",
}
"""Features by flags or values; one of them is enough."""


def trainings() -> Iterator[tuple[str, set[str]]]:
    """Return the names of all tests that compare trainings, and the words that select features."""
    for test in (
        test_matrix.test_sharded_training_matches_megatrons_ddp,
        test_matrix.test_flags_do_not_change_the_training,
        test_upstream.test_configuration_matches_megatrons_ddp,
    ):
        (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
        file = f"{test.__module__.replace('.', '/')}.py"
        for case in mark.args[1]:
            first, *strategy = case.values
            run = first.sharded(*strategy) if strategy else test_upstream.sides.sharded(first)
            yield f"{file}::{test.__name__}[{case.id}]", _features(run.flags)


def _features(flags: Sequence[str]) -> set[str]:
    """Return flags and values, without the flags of parallel sizes of 1."""
    words = set(flags)
    for flag, value in itertools.pairwise(flags):
        if flag.endswith(("-parallel-size", "-instances")) and value == "1":
            words.remove(flag)
        if flag == "--data-parallel-sharding-strategy":
            words.add(f"strategy {value}")
    return words


def counts(outcomes: Mapping[str, str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the numbers of trainings that passed, and of all, by feature and model."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for name, words in trainings():
        models = [model for model, flag in MODELS.items() if flag in words] or ["dense"]
        features = [f for f, flags in FEATURES.items() if words & {flags, *flags.split()}]
        for key in itertools.product(("all", *features), models):
            passed, total = found.get(key, (0, 0))
            found[key] = passed + (outcomes.get(name) == PASSED), total + 1
    return found


def text(results: Results) -> str:
    """Return the paragraph and the table."""
    last = {result.test: result for result in results.every() if result.suite == "tests"}
    found = counts({name: result.outcome for name, result in last.items()})
    commits = Counter(last[name].commit for name, _ in trainings() if name in last)
    passed, total = map(sum, zip(*(n for (f, _), n in found.items() if f == "all"), strict=True))
    ran = ", ".join(f"{number} at {commit}" for commit, number in commits.most_common())
    about = (
        "`python -m functional_tests.support` counts the trainings of `make test-all` on CPUs, "
        f"with Megatron's own loop ({ran}). A number is of trainings that equal their reference; "
        "*a of b* stands where some failed or were not run; an empty cell has no training. A model "
        "may be of several kinds."
    )
    if passed < total:
        about += " The run was not complete."
    models = ("dense", *MODELS)
    rows = [
        (feature, *(_cell(*found.get((feature, model), (0, 0))) for model in models))
        for feature in ("all", *FEATURES)
    ]
    return "\n".join(wrapped(about, 110)) + "\n\n" + table(("", *models), rows) + "\n"


def _cell(passed: int, total: int) -> str:
    if not total:
        return ""
    return str(total) if passed == total else f"{passed} of {total}"


def main() -> None:
    """Write the part of the page."""
    parser = argparse.ArgumentParser(prog="python -m functional_tests.support")
    parser.add_argument("--results", type=Path, default=Path("out/test_all/results.jsonl"))
    results = Results(parser.parse_args().results, "", "")
    PAGE.write_text(with_part(PAGE.read_text(), "support", text(results)))


if __name__ == "__main__":
    main()
