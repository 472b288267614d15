"""Long trainings leave nothing behind in the caches of torch's dispatchers."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import wrap
from tests.reference.models import Stack


def _num_cached() -> int:
    propagator = DTensor._op_dispatcher.sharding_propagator
    return len(FakeTensorMode.cache) + propagator.propagate_op_sharding.cache_info().currsize


@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(2)
def test_steps_with_other_learning_rates_fill_no_cache(foreach: bool) -> None:
    """DTensor's dispatcher keeps an entry for every number that an operation is given."""
    # Rows that are cut evenly, so that a plain DTensor would do.
    model = wrap(Stack(width=8, ends=(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    counts = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(_num_cached())
    assert counts[2:] == counts[2:3] * 4
