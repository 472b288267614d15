"""What is communicated to clip gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.wrapping import mesh_of, wrap
from tests.ranks import RankPools


def sent_when_clipping(sizes: tuple[int, ...]) -> tuple[bool, list[str]]:
    """Whether this rank holds any row, and what it communicates to clip a second time."""
    model = nn.Linear(4, 3 if len(sizes) == 1 else 1, bias=False)
    outer = "optim" if len(sizes) == 2 else "no_shard"
    wrapped = wrap(model, [], mesh=mesh_of(*sizes), outer_dp_sharding_strategy=outer)
    wrapped(torch.ones(2, 4)).square().sum().backward()
    names = ("send", "recv", "all_reduce", "all_gather", "barrier")
    originals = {name: getattr(dist, name) for name in names}
    sent: list[str] = []
    nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
    for name, original in originals.items():
        setattr(dist, name, lambda *a, _n=name, _f=original, **k: (sent.append(_n), _f(*a, **k))[1])
    try:
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    start, end = wrapped.weight.local_rows
    return end > start, sent


@pytest.mark.parametrize(("sizes", "num_holders"), [((4,), 3), ((2, 2), 1)])
def test_clipping_where_a_rank_is_empty_is_one_all_reduce_of_the_others(
    pools: RankPools, sizes: tuple[int, ...], num_holders: int
) -> None:
    found = pools(4).run(sent_when_clipping, sizes)
    assert sum(holds for holds, _ in found) == num_holders
    expected = ["all_reduce"] if num_holders > 1 else []
    for holds, sent in found:
        assert sent == (expected if holds else [])
