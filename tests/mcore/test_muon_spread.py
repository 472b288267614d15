"""Muon at its default precision is as close to Megatron's own as Megatron's own is to itself.

By default Newton-Schulz runs in bf16, where a last bit of a gradient can be a bf16 step of an
update. So the order of sums shows, in Megatron too: it adds up the gradients of the same batches in
another order when they are cut into micro-batches of another size or are spread over another number
of ranks. How far that leads is measured here.

A distance of weights is a sum over a hundred thousand elements, nearly the same for every pair of
runs: its median may not be a tenth above Megatron's own. A distance of losses is how those weights
differ along one direction, and of three such numbers even the median is a matter of luck: it moves
by half when a sum is cut elsewhere. It has to be within twice the largest of Megatron's own; a
wrong gradient is farther by orders of magnitude.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch

from tests.mcore import flags as f
from tests.mcore.matrix_optimizers import whole_matrices
from tests.mcore.session import Training, distance
from tests.mcore.trained import trained
from tests.ranks import RankPools

TP2 = f"{f.TP2_SP} --muon-tp-mode duplicated"
EP2 = f"{f.ALLTOALL} {f.EP2} --moe-router-load-balancing-type none"
SEQUENCES = 8
STEPS = f"--global-batch-size {SEQUENCES} --train-iters 8 --optimizer muon"


@dataclass(frozen=True)
class Case:
    """Runs that differ in nothing but the order of sums.

    Attributes:
        ranks: Of the runs that are compared with Megatron.
        flags: Theirs.
        copies: Data-parallel ranks among them.
        others: Ranks, flags and data-parallel ranks of Megatron's further runs.
    """

    ranks: int
    flags: str
    copies: int
    others: tuple[tuple[int, str, int], ...]


CASES = {
    "DP2": Case(2, "", 2, ((1, "", 1),)),
    "TP2 x DP2": Case(4, TP2, 2, ((2, TP2, 1),)),
    "EP2": Case(2, EP2, 2, ((4, EP2, 4),)),
}


def _apart(one: Training, other: Training) -> float:
    """Distance of the matrices of the first rank, over their length."""
    ours, theirs = one.extras[0], other.extras[0]
    assert set(ours) == set(theirs)
    pairs = [(_like(ours[name], theirs[name]), theirs[name]) for name in theirs]
    apart = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return (apart / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5


def _like(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """What the first tensor-parallel rank has of a matrix, if it has a part: its beginning."""
    return whole[: part.shape[0], : part.shape[1]]


@dataclass(frozen=True)
class Distances:
    """Distances of weights and of losses, over their length, of every two runs."""

    weights: list[float]
    losses: list[float]

    @staticmethod
    def of(pairs: Iterable[tuple[Training, Training]]) -> Distances:
        """Distances of these pairs."""
        kept = list(pairs)
        return Distances(
            [_apart(*pair) for pair in kept], [distance(a.losses, b.losses) for a, b in kept]
        )


def measure(pools: RankPools, case: Case) -> tuple[Distances, Distances]:
    """How far Megatron's own is from itself, and from it what this package trains."""

    def runs(ranks: int, flags: str, copies: int, *more: f.Flags) -> list[Training]:
        batches = [f"--micro-batch-size {n}" for n in (1, 2, 4, 8) if n * copies <= SEQUENCES]
        common = [STEPS, flags, *more]
        return [trained(pools, ranks, *common, size, probe=whole_matrices) for size in batches]

    same = runs(case.ranks, case.flags, case.copies)
    own = [*same, *(run for other in case.others for run in runs(*other))]
    ours = runs(case.ranks, case.flags, case.copies, f.fsdp())
    return Distances.of(itertools.combinations(own, 2)), Distances.of(zip(ours, same, strict=True))


@pytest.mark.functional
@pytest.mark.parametrize("name", CASES)
def test_default_precision_is_within_megatrons_own_spread(megatron: RankPools, name: str) -> None:
    spread, found = measure(megatron, CASES[name])
    assert statistics.median(spread.weights) > 0, "the order of sums changes nothing"
    assert statistics.median(found.weights) <= 1.1 * statistics.median(spread.weights)
    assert statistics.median(found.losses) <= 2 * max(spread.losses)
