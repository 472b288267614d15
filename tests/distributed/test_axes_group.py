"""What is reduced over two mesh axes in one process group that has no communicator of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2_mcore.formats.axes import group_over
from tests.distributed import wrapping
from tests.distributed.nccl_double import as_on_cuda
from tests.ranks import RankPools


def reduced() -> tuple[list[float], list[int], bool]:
    """Maxima over a mesh of 2 x 2, size and rank there, and whether one axis has its own group."""
    mesh = wrapping.mesh_of(2, 2)
    axes = [Axis(mesh.get_group(a), mesh.size(a), mesh.get_local_rank(a)) for a in range(2)]
    group = group_over(axes)
    # The largest of each column is another rank's.
    values = torch.eye(4)[dist.get_rank()] * (dist.get_rank() + 1)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    later = torch.tensor([float(dist.get_rank())])
    work = dist.all_reduce(later, dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    work.wait()
    is_own = group_over(axes[1:]) is axes[1].group
    return [*values.tolist(), later.item()], [group.size(), group.rank()], is_own


def reduced_as_on_cuda() -> tuple[list[float], list[int], bool]:
    """The same over groups that answer as NCCL does."""
    with as_on_cuda():
        return reduced()


@pytest.mark.parametrize("function", [reduced, reduced_as_on_cuda])
def test_a_group_over_two_axes_reduces_over_all_of_their_ranks(
    pools: RankPools, function: Callable[[], tuple[list[float], list[int], bool]]
) -> None:
    for rank, (values, place, is_own) in enumerate(pools(4).run(function)):
        assert values == [1.0, 2.0, 3.0, 4.0, 3.0]
        assert place == [4, rank]
        assert is_own
