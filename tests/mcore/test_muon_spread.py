"""Muon at its default precision is as close to Megatron's own as Megatron's own is to itself.

By default Newton-Schulz runs in bf16, where a last bit of a gradient can be a bf16 step of an
update. So the order of sums shows, in Megatron too: it adds up gradients in another order when the
same batches are cut into micro-batches of another size. How far that leads is measured here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.mcore.session import MODEL_FLAGS, Training, curves, fsdp, train
from tests.ranks import RankPools

MODEL = [*MODEL_FLAGS, "--global-batch-size", "8", "--train-iters", "8", "--optimizer", "muon"]
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --muon-tp-mode duplicated"
MICRO_BATCHES = ("1", "2", "4")


def _matrices(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The matrices of the layers. A probe for `train`; collective."""
    del optimizer
    return {
        name.replace("module.", ""): param.full_tensor()
        if hasattr(param, "full_tensor")
        else param.detach()
        for chunk in model
        for name, param in chunk.named_parameters()
        if param.dim() == 2 and "layers" in name
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


@pytest.mark.functional
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(2, ""), (4, TP2)],
    ids=["DP2", "TP2 x DP2"],
)
def test_default_precision_is_within_megatrons_own_spread(
    megatron: RankPools, world_size: int, flags: str
) -> None:
    def trained(*more: str) -> Training:
        words: Sequence[str] = [*MODEL, *flags.split(), *more]
        return curves(megatron(world_size).run(train, words, probe=_matrices))

    own = {size: trained("--micro-batch-size", size) for size in MICRO_BATCHES}
    spread = max(_apart(*pair) for pair in itertools.combinations(own.values(), 2))
    assert spread > 0, "the order of sums changes nothing: nothing was measured"
    found = {
        size: _apart(trained("--micro-batch-size", size, *fsdp()), own[size])
        for size in MICRO_BATCHES
    }
    assert max(found.values()) <= spread
