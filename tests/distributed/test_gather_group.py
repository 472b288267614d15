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
from megatron_fsdp_v2.diagnostics.stream_safety import record_streams
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from megatron_fsdp_v2.runtime.registered_pool import register_pool
from tests.distributed.test_registered_pool import Recorder
from tests.distributed.wrapping import BF16, STRATEGIES, batch, listen, mesh_of, said, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack

HFSDP = {"outer_dp_sharding_strategy": "optim"}
CASES: dict[str, tuple[tuple[int, ...], str, dict[str, Any]]] = {
    **{f"{strategy}, 2 ranks": ((2,), strategy, {}) for strategy in STRATEGIES},
    **{f"{strategy}, 4 ranks": ((4,), strategy, {}) for strategy in STRATEGIES},
    **{f"{strategy}, HSDP": ((2, 2), strategy, {}) for strategy in STRATEGIES},
    "HFSDP": ((2, 2), STRATEGIES[-1], HFSDP),
    "bf16": ((2,), STRATEGIES[-1], {"mp_policy": BF16}),
    "trace pool": ((2,), STRATEGIES[-1], {"enable_trace_pool": True}),
    "compared": ((2,), STRATEGIES[-1], {"check_ranks": "always"}),
    "waiting": ((2,), STRATEGIES[-1], {"enable_async_reduce_grad": False}),
}


@functools.cache
def _gather_group(*shape: int) -> dist.ProcessGroup:
    return group_of_same_ranks(mesh_of(*shape).get_group(len(shape) - 1))


def _steps(model: Any, num_steps: int = 2) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(num_steps):
        optimizer.zero_grad()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(batch(dist.get_rank(), step)).float().square().mean().backward()
        optimizer.step()
    return [param.to_local().detach().clone() for param in model.parameters()]


def _sharded(shape: tuple[int, ...], strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return wrap(Stack(), mesh=mesh_of(*shape), sharding_strategy=strategy, **options)


def with_and_without(
    shape: tuple[int, ...], strategy: str, options: dict[str, Any]
) -> tuple[bool, list[Counter[tuple[str, str]]]]:
    """Whether weights are bitwise identical; collectives by kind and group, without and with."""
    mesh, gathers = mesh_of(*shape), _gather_group(*shape)
    called = {group.group_name: f"axis {axis}" for axis, group in enumerate(mesh.get_all_groups())}
    called[gathers.group_name] = "gathers"
    weights, counts = [], []
    for group in (None, gathers):
        model = _sharded(shape, strategy, gather_group=group, **options)
        wire = listen(model)
        weights.append(_steps(model))
        counts.append(Counter((sent.kind, called[sent.group]) for sent in wire.sent))
    return all(map(torch.equal, *weights)), counts


QUICK = {*CASES} - {
    *(f"{strategy}, {ranks}" for strategy in STRATEGIES[:3] for ranks in ("4 ranks", "HSDP")),
    "bf16",
    "waiting",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.functional]) for n in CASES],
)
def test_a_group_for_gathers_changes_where_they_are_and_no_bit(pools: RankPools, name: str) -> None:
    shape, strategy, _ = CASES[name]
    inner = f"axis {len(shape) - 1}"
    world_size = 4 if shape != (2,) else 2
    for is_equal, (without, apart) in pools(world_size).run(with_and_without, *CASES[name]):
        assert is_equal
        moved = {
            (kind, "gathers" if (kind, at) == ("all_gather", inner) else at) for kind, at in without
        }
        assert moved == set(apart)
        assert without["all_gather", inner] == apart["all_gather", "gathers"]
        assert (apart["all_gather", "gathers"] > 0) == (strategy != "no_shard")
        assert without.total() == apart.total() > 0


def switched() -> tuple[bool, list[int], list[bool]]:
    """Bits with the method of FSDP2; groups that gathers are in; whether they are the mesh's."""
    plain = _steps(_sharded((2,), STRATEGIES[-1]))
    model = _sharded((2,), STRATEGIES[-1])
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
    is_equal = all(map(torch.equal, plain, _steps(model)))
    (apart,) = gathers()
    assert {sent.group == apart.group_name for sent in wire.sent if sent.kind == "all_gather"} == {
        True
    }
    return is_equal, numbers, shared


def test_fsdp2s_method_gives_all_units_one_group_and_takes_it_back(pools: RankPools) -> None:
    for is_equal, numbers, shared in pools(2).run(switched):
        assert is_equal
        assert numbers == [1, 2, 1, 2, 1]
        assert shared == [True, True, False, True, True]


def rejected() -> list[str]:
    """What bad groups are told, and ranks of which one has no group for gathers."""
    mesh, linear = mesh_of(2, 2), torch.nn.Linear
    others = [mesh.get_group(0), dist.group.WORLD, "gloo", 7]
    found = [
        said(ValueError, lambda g=g: fully_shard(linear(4, 4), mesh=mesh, gather_group=g))
        for g in others
    ]
    model = _sharded((4,), STRATEGIES[-1])
    found.append(said(ValueError, lambda: model.set_separate_reduce_scatter_group("yes")))
    group = _gather_group(4)
    some = _sharded((4,), STRATEGIES[-1], gather_group=None if dist.get_rank() == 2 else group)
    return [*found, said(RuntimeError, lambda: some(batch(0)))]


def test_a_group_that_does_not_fit_is_rejected(pools: RankPools) -> None:
    for rank, (outer, world, text, number, method, ranks) in enumerate(pools(4).run(rejected)):
        inner = [0, 1] if rank < 2 else [2, 3]
        assert f"gather_group has the ranks {[rank % 2, rank % 2 + 2]}" in outer
        assert "gather_group has the ranks [0, 1, 2, 3], and the axis of the mesh" in world
        assert f"{inner}; give a group of those, in that order" in world
        assert "must be a process group that this rank is part of, got str" in text
        assert "got int" in number
        assert method == "enable must be True or False, got 'yes'"
        assert re.search("ranks differ at unit .* gathered in a group of its own", ranks)


def races_and_registered() -> tuple[list[str], int, set[str]]:
    """Violations of recorded steps; gathers recorded; groups that a trace pool is registered in."""
    model = _sharded((2,), STRATEGIES[-1], gather_group=_gather_group(2), enable_trace_pool=True)
    registrar = Recorder()
    register_pool(model, registrar)
    with record_streams(model) as recording:
        _steps(model)
    count = sum(op.name == "all_gather" for op in recording.schedule.operations("gather"))
    return (
        [str(v) for v in recording.violations()],
        count,
        {g for _, g in registrar.told("register")},
    )


def test_streams_and_registered_memory_know_the_group(pools: RankPools) -> None:
    for violations, num_gathers, registered in pools(2).run(races_and_registered):
        assert violations == []
        assert num_gathers > 10
        assert len(registered) == 2


def groups_after_different_numbers() -> tuple[float, list[int], str]:
    """A sum and ranks in a second group, and the norm of a subset, where ranks made others."""
    if dist.get_rank() == 2:
        dist.new_group([2], use_local_synchronization=True)
    of_all = group_of_same_ranks(mesh_of(4).get_group())
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=of_all)
    # Ranks 0 to 2 hold a row each and the last one none.
    model = wrap(torch.nn.Linear(4, 3, bias=False), [])
    torch.nn.init.ones_(model.weight)
    norm = "no rows"
    if model.weight.to_local().numel():
        norm = f"{torch.nn.utils.get_total_norm([model.weight.detach()]).item():.3f}"
    return total.item(), dist.get_process_group_ranks(of_all), norm


def test_ranks_that_made_different_numbers_of_groups_make_one_together(pools: RankPools) -> None:
    found = pools(4).run(groups_after_different_numbers, timeout_s=20)
    assert [(total, ranks) for total, ranks, _ in found] == [(6.0, [0, 1, 2, 3])] * 4
    assert [norm for *_, norm in found] == ["3.464", "3.464", "3.464", "no rows"]
