"""`--create-all-gather-group`: weights are gathered in process groups of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.mcore.session import MODEL_FLAGS, Training, curves, fsdp, train
from tests.ranks import RankPools

FLAG = "--create-all-gather-group"
_STEPS = ["--train-iters", "3", "--global-batch-size", "16"]
_MOE = """
--num-experts 4 --moe-router-topk 2 --disable-bias-linear --swiglu --moe-ffn-hidden-size 64
--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
"""


def groups_of_gathers(model: Any, optimizer: Any) -> dict[str, bool]:
    """Names of the process groups that weights are gathered in, and whether ranks fit."""
    from megatron_fsdp_v2.runtime.fsdp_module import named_units

    del optimizer
    found: dict[str, bool] = {}
    for _, unit in named_units(model[0]):
        for group in unit.groups:
            axis = group.axes[-1]
            gathers = axis.for_gathers().group
            fits = gathers is not axis.group and axis.size == gathers.size()
            ranks = [dist.get_process_group_ranks(one) for one in (gathers, axis.group)]
            name = gathers.group_name
            found[name] = found.get(name, True) and fits and ranks[0] == ranks[1]
    return found


def _train(pools: RankPools, world_size: int, *flags: str, probe: Any = None) -> Training:
    words = [*MODEL_FLAGS, *_STEPS, *fsdp("optim_grads_params", *flags)]
    return curves(pools(world_size).run(train, words, probe))


@pytest.mark.parametrize(
    ("world_size", "flags", "num_groups"),
    [
        pytest.param(2, "--overlap-grad-reduce --overlap-param-gather", 1, id="dense"),
        pytest.param(4, _MOE, 2, id="experts", marks=pytest.mark.functional),
        pytest.param(
            4,
            "--num-distributed-optimizer-instances 2 --overlap-grad-reduce",
            1,
            id="instances",
            marks=pytest.mark.functional,
        ),
    ],
)
def test_it_changes_the_group_and_no_bit(
    megatron: RankPools, world_size: int, flags: str, num_groups: int
) -> None:
    plain = _train(megatron, world_size, *flags.split())
    apart = _train(megatron, world_size, *flags.split(), FLAG, probe=groups_of_gathers)
    assert (apart.losses, apart.grad_norms) == (plain.losses, plain.grad_norms)
    for found in apart.extras:
        assert list(found.values()) == [True] * num_groups


def groups_of_a_collection() -> list[Any]:
    """What is gathered in the groups that a collection has, has not, or has of other ranks."""
    from megatron_fsdp_v2_mcore.model.meshes import Meshes, gather_groups

    mesh = init_device_mesh("cpu", (2,))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    given = dist.new_group([0, 1])
    found: list[Any] = []
    for group, are_made in ((None, False), (None, True), (given, False), (alone, False)):
        collection = SimpleNamespace(dp_cp_ag=group)
        made = gather_groups(collection, Meshes(mesh, None), None, are_made=are_made).get(mesh)
        again = gather_groups(collection, Meshes(mesh, None), None, are_made=are_made).get(mesh)
        assert made is again
        found.append(None if made is None else (made is given, made.size()))
    return found


def test_groups_of_a_collection_are_used_where_they_fit(megatron: RankPools) -> None:
    for found in megatron(2).run(groups_of_a_collection):
        assert found == [None, (False, 2), (True, 2), (False, 2)]
