"""Weights gathered in a process group of their own: the same bits, and where each collective is."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.comm.gather_groups import group_of_same_ranks
from megatron_fsdp_v2.comm.local_groups import new_local_group
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from megatron_fsdp_v2.runtime.registered_pool import register_pool
from tests.cases import quick_if
from tests.distributed.on_ranks import on_ranks
from tests.distributed.test_registered_pool import Recorder
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    batch,
    listen,
    mesh_of,
    on_mesh,
    said,
    train_own,
    wrap,
)
from tests.reference.models import Stack
from tests.stream_safety import record_streams

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{strategy}, 2 ranks": ("2", strategy, {}) for strategy in STRATEGIES},
    **{f"{strategy}, 4 ranks": ("4", strategy, {}) for strategy in STRATEGIES},
    **{f"{strategy}, HSDP": ("HSDP 2x2", strategy, {}) for strategy in STRATEGIES},
    "HFSDP": ("HFSDP 2x2", STRATEGIES[-1], {}),
    "bf16": ("2", STRATEGIES[-1], {"mp_policy": BF16}),
    "trace pool": ("2", STRATEGIES[-1], {"enable_trace_pool": True}),
    "compared": ("2", STRATEGIES[-1], {"check_ranks": "always"}),
    "waiting": ("2", STRATEGIES[-1], {"enable_async_reduce_grad": False}),
}


@functools.cache
def _gather_group(mesh_name: str) -> dist.ProcessGroup:
    mesh = on_mesh(mesh_name)["mesh"]
    return group_of_same_ranks(mesh.get_group(mesh.ndim - 1))


def _sharded(mesh_name: str = "2", **options: Any) -> Any:
    torch.manual_seed(0)
    return wrap(Stack(), **on_mesh(mesh_name), **options)


QUICK = {*CASES} - {
    *(f"{strategy}, {ranks}" for strategy in STRATEGIES[:3] for ranks in ("4 ranks", "HSDP")),
    "bf16",
    "waiting",
}


@pytest.mark.parametrize(
    ("mesh_name", "strategy", "options"),
    [quick_if(name in QUICK, *case, id=name) for name, case in CASES.items()],
)
@on_ranks("mesh_name")
def test_a_group_for_gathers_changes_where_they_are_and_no_bit(
    mesh_name: str, strategy: str, options: dict[str, Any]
) -> None:
    groups, gathers = on_mesh(mesh_name)["mesh"].get_all_groups(), _gather_group(mesh_name)
    called = {group.group_name: f"axis {axis}" for axis, group in enumerate(groups)}
    called[gathers.group_name] = "gathers"
    weights, counts = [], []
    for group in (None, gathers):
        model = _sharded(mesh_name, sharding_strategy=strategy, gather_group=group, **options)
        wire = listen(model)
        weights.append(train_own(model, num_micro=2))
        counts.append(Counter((sent.kind, called[sent.group]) for sent in wire.sent))
    assert all(map(torch.equal, *weights))
    (without, apart), inner = counts, ("all_gather", f"axis {len(groups) - 1}")
    moved = {(kind, "gathers" if (kind, at) == inner else at) for kind, at in without}
    assert moved == set(apart)
    assert without[inner] == apart["all_gather", "gathers"]
    assert (apart["all_gather", "gathers"] > 0) == (strategy != "no_shard")
    assert without.total() == apart.total() > 0


@on_ranks(2)
def test_fsdp2s_method_gives_all_units_one_group_and_takes_it_back() -> None:
    plain = train_own(_sharded(), num_micro=2)
    model = _sharded()
    units = unit_of(model).context.units()

    def gathers() -> set[dist.ProcessGroup]:
        return {g.axes[-1].for_gathers().group for unit in units for g in unit.groups}

    mine, numbers, shared = mesh_of(2).get_group(), [], []
    for change in (
        lambda: None,
        lambda: model.blocks[0].set_separate_reduce_scatter_group(),
        lambda: model.set_separate_reduce_scatter_group(True),
        lambda: model.set_separate_reduce_scatter_group(False, recurse=False),
        lambda: model.set_separate_reduce_scatter_group(False),
    ):
        change()
        numbers.append(len(gathers()))
        shared.append(mine in gathers())
    model.set_separate_reduce_scatter_group()
    wire = listen(model)
    is_equal = all(map(torch.equal, plain, train_own(model, num_micro=2)))
    (apart,) = gathers()
    assert {s.group for s in wire.sent if s.kind == "all_gather"} == {apart.group_name}
    assert is_equal
    assert numbers == [1, 2, 1, 2, 1]
    assert shared == [True, True, False, True, True]


@on_ranks(4)
def test_a_group_that_does_not_fit_is_rejected() -> None:
    rank, mesh = dist.get_rank(), mesh_of(2, 2)
    inner = [0, 1] if rank < 2 else [2, 3]
    for group, text in (
        (mesh.get_group(0), f"gather_group has the ranks {[rank % 2, rank % 2 + 2]}"),
        (dist.group.WORLD, "gather_group has the ranks [0, 1, 2, 3], and the axis of the mesh"),
        (dist.group.WORLD, f"{inner}; give a group of those, in that order"),
        ("gloo", "must be a process group that this rank is part of, got str"),
        (7, "got int"),
    ):
        options = {"mesh": mesh, "gather_group": group}
        linear = functools.partial(fully_shard, torch.nn.Linear(4, 4), **options)
        assert text in said(ValueError, linear)
    model = _sharded("4")
    method = said(ValueError, lambda: model.set_separate_reduce_scatter_group("yes"))
    group = _gather_group("4")
    some = _sharded("4", gather_group=None if rank == 2 else group)
    ranks = said(RuntimeError, lambda: some(batch(0)))
    assert method == "enable must be True or False, got 'yes'"
    assert re.search("ranks differ at unit .* gathered in a group of its own", ranks)


@on_ranks(2)
def test_streams_and_registered_memory_know_the_group() -> None:
    model = _sharded(gather_group=_gather_group("2"), enable_trace_pool=True)
    registrar = Recorder()
    register_pool(model, registrar)
    with record_streams(model) as recording:
        train_own(model, num_micro=2)
    count = sum(op.name == "all_gather" for op in recording.schedule.operations("gather"))
    assert [str(v) for v in recording.violations()] == []
    assert count > 10
    assert len({g for _, g in registrar.told("register")}) == 2


@on_ranks(4, timeout_s=20)
def test_ranks_that_made_different_numbers_of_groups_make_one_together() -> None:
    if dist.get_rank() == 2:
        dist.new_group([2], use_local_synchronization=True)
    of_all = group_of_same_ranks(mesh_of(4).get_group())
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=of_all)
    # Ranks 0 to 2 hold a row each and the last one none.
    model = wrap(torch.nn.Linear(4, 3, bias=False))
    torch.nn.init.ones_(model.weight)
    has_rows = model.weight.to_local().numel() > 0
    assert total.item() == 6.0
    assert dist.get_process_group_ranks(of_all) == [0, 1, 2, 3]
    assert has_rows == (dist.get_rank() < 3)
    if has_rows:
        norm = torch.nn.utils.get_total_norm([model.weight.detach()]).item()
        assert norm == pytest.approx(12**0.5)


class _SplitFromAll:
    """In the place of NCCL's communicator of all ranks: counts what would split it.

    `ncclCommSplit` returns when every rank of the communicator has called it.
    """

    supports_splitting = True

    def __init__(self) -> None:
        self.num_splits = 0

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.num_splits += 1


@on_ranks(4, timeout_s=20)
def test_ranks_of_two_stages_make_different_numbers_of_groups_on_a_bound_device() -> None:
    from torch.distributed import distributed_c10d

    core: Any = distributed_c10d
    world: Any = dist.group.WORLD
    parent, rank = _SplitFromAll(), dist.get_rank()
    stages = [[0, 1], [2, 3]]
    mine = stages[rank // 2]

    def source(*args: Any) -> _SplitFromAll:
        parent.num_splits += 1
        return parent

    before, core._get_split_source = core._get_split_source, source
    world.bound_device_id = torch.device("cuda", 0)
    try:
        # As torch makes groups: every rank takes part, in those of others too.
        for ranks in stages:
            dist.new_group(ranks, backend="gloo")
        of_torch = parent.num_splits
        made = [new_local_group(mine, "gathers") for _ in range(1 + rank // 2)]
        is_bound = world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
        core._get_split_source = before
    splits = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(splits, torch.tensor([parent.num_splits - of_torch]))
    total = torch.ones(1)
    dist.all_reduce(total, group=made[-1])
    assert of_torch >= len(stages)
    # No rank waits for another one to split.
    assert [int(count) for count in splits] == [0, 0, 0, 0]
    assert is_bound
    assert total.item() == 2
