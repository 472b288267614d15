"""How many collectives a step of several micro-batches takes, for every strategy."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import MESHES, on_mesh, sends, strategies_on, wrap
from tests.reference.models import Stack

NUM_BLOCKS = 2
NUM_UNITS = NUM_BLOCKS + 1
"""Blocks and the root, of one parameter group each."""

SYNCS = ("every", "last", "afterwards")
"""Which backwards synchronize gradients: all, the last one alone (`no_sync` around the others), or
none, with `reduce_grad` after them."""


def expected(mesh_name: str, strategy: str, syncs: str, num_micro: int) -> Counter[Any]:
    """Collectives of a step: kind and axis, and how often.

    ZeRO-2 and ZeRO-3 reduce in every backward along the inner axis, to keep whole gradients out of
    memory. All else is reduced once a synchronization. Weights that are whole between uses are
    gathered after a synchronization, when they may have been stepped; with ZeRO-3 for each forward
    and backward, those of the root, whose backward follows its forward, once for both.
    """
    is_2d, has_outer_shards = len(MESHES[mesh_name][0]) == 2, MESHES[mesh_name][1] == "optim"
    num_syncs = num_micro if syncs == "every" else 1
    reduces_each = strategy in ("optim_grads", "optim_grads_params")
    found = {
        "reduce inner": NUM_UNITS * (num_micro if reduces_each else num_syncs),
        "reduce outer": NUM_UNITS * num_syncs * is_2d,
        "gather inner": NUM_UNITS * num_syncs * (strategy != "no_shard"),
        "gather outer": NUM_UNITS * num_syncs * has_outer_shards,
    }
    if strategy == "optim_grads_params":
        found["gather inner"] = (2 * NUM_UNITS - 1) * num_micro
    return Counter({name: count for name, count in found.items() if count})


def counted(model: Any, axes: Any, syncs: str, num_micro: int) -> Counter[Any]:
    """The same, of a step that is made."""
    with sends(axes) as sent:
        for number in range(num_micro):
            synchronizes = syncs == "every" or (syncs == "last" and number == num_micro - 1)
            with contextlib.nullcontext() if synchronizes else model.no_sync():
                model(torch.randn(4, 5)).square().mean().backward()
        if syncs == "afterwards":
            model.reduce_grad()
    found: Counter[Any] = Counter()
    for (kind, axis, _, _), count in sent.items():
        found[f"{'gather' if kind == 'all_gather' else 'reduce'} {axis}"] += count
    return found


@on_ranks("mesh_name", mesh_name=["2", "HSDP 2x2", "HFSDP 2x2"])
def test_a_step_takes_the_collectives_of_the_formula(mesh_name: str) -> None:
    wrong = {}
    for strategy in strategies_on(mesh_name):
        for overlaps in (False, True):
            model = wrap(
                Stack(NUM_BLOCKS),
                sharding_strategy=strategy,
                enable_unshard_prefetch=overlaps,
                enable_async_reduce_grad=overlaps,
                **on_mesh(mesh_name),
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            axes = model._fsdp_unit.groups[0].axes
            for syncs in SYNCS:
                for num_micro in (1, 2, 4):
                    found = counted(model, axes, syncs, num_micro)
                    wanted = expected(mesh_name, strategy, syncs, num_micro)
                    if found != wanted:
                        wrong[strategy, overlaps, syncs, num_micro] = found, wanted
                    optimizer.step()
                    optimizer.zero_grad()
    assert not wrong, wrong
