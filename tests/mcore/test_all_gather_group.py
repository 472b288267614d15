"""`--create-all-gather-group`: weights are gathered in process groups of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.cases import longer
from tests.mcore.flags import ALLTOALL, EP2, HSDP, OVERLAP, OVERLAP_GRADS, fsdp
from tests.mcore.trained import assert_equal, on_megatron, trained
from tests.ranks import RankPools

FLAG = "--create-all-gather-group"
STEPS = "--train-iters 2 --global-batch-size 8"


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


@pytest.mark.parametrize(
    ("world_size", "flags", "num_groups"),
    [
        pytest.param(2, OVERLAP, 1, id="dense"),
        longer(4, f"{ALLTOALL} {EP2}", 2, id="experts"),
        longer(4, f"{HSDP} {OVERLAP_GRADS}", 1, id="instances"),
    ],
)
def test_it_changes_the_group_and_no_bit(
    megatron: RankPools, world_size: int, flags: str, num_groups: int
) -> None:
    common = [STEPS, fsdp(), flags]
    apart = trained(megatron, world_size, *common, FLAG, probe=groups_of_gathers)
    assert_equal(apart, trained(megatron, world_size, *common))
    for found in apart.extras:
        assert list(found.values()) == [True] * num_groups


@on_megatron(2)
def test_groups_of_a_collection_are_used_where_they_fit() -> None:
    """A collection has one, has none, or has one of other ranks."""
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
    assert found == [None, (False, 2), (True, 2), (False, 2)]
