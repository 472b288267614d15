"""Gradients that are not finite are found at the cost of one pass, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_v2.runtime.finite_grads import not_finite
from tests.distributed.wrapping import Operations, batch, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack

BAD = "blocks.1.up.weight"


def checked(strategy: str) -> tuple[set[int], bool, dict[str, list[str]]]:
    """Operations of a check, of 2 and of 5 blocks; whether BAD has rows here; names found."""
    counts = set()
    for num_blocks in (5, 2):
        model: Any = wrap(Stack(num_blocks), [], sharding_strategy=strategy)
        model(batch(0)).sum().backward()
        with Operations() as check:
            found = {"finite": not_finite(model)}
        counts.add(len(check.names))
    grad = model.get_parameter(BAD).grad
    for value in ("nan", "-inf") if grad is not None else ():
        grad.to_local()[-1, -1] = float(value)
        found[value] = not_finite(model)
    for param in model.parameters():
        param.grad = None
    # The memory has it still, but no gradient has.
    found["dropped"] = not_finite(model)
    if grad is not None:
        model.get_parameter(BAD).grad = torch.full_like(grad, float("inf"))
        found["another"] = not_finite(model)
    return counts, grad is not None, found


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_gradients_are_checked_in_one_pass_and_named(pools: RankPools, strategy: str) -> None:
    results = pools(2).run(checked, strategy)
    assert any(has_rows for _, has_rows, _ in results)
    for counts, has_rows, found in results:
        assert len(counts) == 1
        assert max(counts) < 10
        assert found.pop("finite") == found.pop("dropped") == []
        assert found == {key: [BAD] for key in ("nan", "-inf", "another") if has_rows}
