"""How many collectives a step under Megatron takes, for every strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from tests.cases import quick_rows
from tests.mcore import flags as f
from tests.mcore.session import train
from tests.ranks import RankPools

NUM_UNITS = 5
"""Embedding, two layers, output layer, and the chunk with the last norm: one group each."""

STEPS = 2


def expected(strategy: str, num_micro: int) -> Counter[str]:
    """Collectives of a step. Overlap moves them and changes none of them.

    ZeRO-2 and ZeRO-3 reduce in every backward, to keep whole gradients out of memory; the others
    once. Whole weights are gathered once a step, those of ZeRO-3 for each forward and backward, of
    the chunk, whose backward follows its forward, once for both.
    """
    reductions = NUM_UNITS * (num_micro if strategy in (f.ZERO2, f.ZERO3) else 1)
    gathers = (2 * NUM_UNITS - 1) * num_micro if strategy == f.ZERO3 else NUM_UNITS
    if strategy == f.NO_SHARD:
        return Counter(all_reduce=reductions)
    return Counter(reduce_scatter=reductions, all_gather=gathers)


def counted(flags: Sequence[str]) -> Counter[Any]:
    """Run a training; return the collectives of its units, by kind."""
    from megatron_fsdp_v2.comm import backends

    found: Counter[Any] = Counter()
    issue = backends.CpuCommunicator.issue

    def counting(self: Any, collective: Any, *, async_op: bool) -> Any:
        found[collective.kind.value] += 1
        return issue(self, collective, async_op=async_op)

    with mock.patch.object(backends.CpuCommunicator, "issue", counting):
        train(flags)
    return found


@pytest.mark.parametrize(
    ("strategy", "overlap", "num_micro"),
    quick_rows(
        [
            (strategy, overlap, num_micro)
            for strategy in f.STRATEGIES
            for overlap in ("", f.OVERLAP)
            for num_micro in (1, 2, 4)
        ],
        [(f.ZERO2, "", 1), (f.ZERO3, "", 2)],
    ),
)
def test_a_step_takes_the_collectives_of_the_formula(
    megatron: RankPools, strategy: str, overlap: str, num_micro: int
) -> None:
    # Two ranks, two samples in a micro-batch.
    size = f"--train-iters {STEPS} --global-batch-size {4 * num_micro}"
    words = f.words(f.MODEL_FLAGS, f.UNTIED, size, f.fsdp(strategy), overlap)
    for found in megatron(2).run(counted, words):
        assert {kind: count / STEPS for kind, count in found.items()} == expected(
            strategy, num_micro
        )
