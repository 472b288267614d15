"""Collectives: broadcasts, reductions, and a separate process group for all-gathers."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.comm import backends
from megatron_fsdp_v2.comm.calls import broadcast_shards, is_gloo
from megatron_fsdp_v2.comm.groups import group_of_same_ranks, new_local_group
from megatron_fsdp_v2.comm.interface import (
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    store_scaled,
)
from megatron_fsdp_v2.runtime.module import named_units, unit_of
from megatron_fsdp_v2.runtime.registered_pool import register_pool
from tests.cases import longer, quick_if
from tests.distributed.on_ranks import on_ranks
from tests.distributed.test_trace_pool import Recorder
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    batch,
    error_message,
    mesh_of,
    on_mesh,
    record_collectives,
    strategies_on,
    train_own,
    wrap,
)
from tests.reference.models import WIDTH, Stack
from tests.sharding import shard
from tests.stream_safety import record_streams
from tests.stream_safety.schedule import Operation

NUMEL = 1001
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.bool)


def _shard(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2, (NUMEL,), generator=generator).to(dtype)


@on_ranks("shape", shape=[(1,), (3,), (2, 2)])
def test_broadcast_shards_gathers_the_shards_of_each_group(shape: tuple[int, ...]) -> None:
    groups = mesh_of(*shape).get_all_groups()
    for group, dtype, is_in_place in itertools.product(groups, DTYPES, (False, True)):
        ranks = dist.get_process_group_ranks(group)
        output = torch.zeros(len(ranks) * NUMEL, dtype=dtype)
        shard = _shard(dist.get_rank(), dtype)
        if is_in_place:
            shard = output.narrow(0, dist.get_rank(group) * NUMEL, NUMEL).copy_(shard)
        broadcast_shards(output, shard, group=group).wait()
        expected = torch.cat([_shard(other, dtype) for other in ranks])
        assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("accumulate", [False, True])
def test_scaled_sum_is_rounded_once_if_the_value_is_wider(accumulate: bool) -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = torch.linspace(-1, 1, 1000).bfloat16()
    into = before.clone()

    store_scaled(into, value, 0.3, accumulate)

    exact = 0.3 * value.double() + (before.double() if accumulate else 0)
    assert ((into.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001).all()


@on_ranks(2)
def test_is_gloo_recognizes_only_gloo_groups() -> None:
    assert is_gloo(dist.group.WORLD)
    assert not is_gloo(dist.new_group(backend="fake"))


PIECE = 5000
"""Elements of a rank's slice: the last chunk of 1000 elements is full, the last of 1536 is not."""


def _full(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(PIECE * dist.get_world_size(), generator=generator).to(dtype)


@pytest.mark.parametrize(("chunk", "scale", "accumulate"), [(1000, 1.0, True), (1536, 0.3, False)])
@pytest.mark.parametrize(
    ("comm_dtype", "in_fp32"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "bf16 in fp32"],
)
@on_ranks("world_size", world_size=[2, 3])
def test_reduce_scatter_sums_in_rank_order_in_the_communication_dtype_or_fp32(
    world_size: int,
    chunk: int,
    comm_dtype: torch.dtype,
    in_fp32: bool,
    accumulate: bool,
    scale: float,
) -> None:
    rank = dist.get_rank()
    first, *others = (_full(r, comm_dtype).view(world_size, -1)[rank] for r in range(world_size))
    total = first.float() if in_fp32 else first
    for piece in others:
        total = total + piece
    # Ones, so that an unwanted accumulation changes the result.
    into = torch.ones(PIECE)
    scaled = total.float()
    expected = torch.add(into, scaled, alpha=scale) if accumulate else scaled * scale
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "SUM_CHUNK", chunk)
        full, axis = _full(rank, comm_dtype), Axis(dist.group.WORLD, world_size, rank)
        kind, stream = CollectiveKind.REDUCE_SCATTER, CommStream.REDUCE
        collective = Collective(
            kind, into, full, axis, stream, scale, accumulate, sums_in_fp32=in_fp32
        )
        work = backends.CpuCommunicator().issue(collective, async_op=True)
        work.wait()
        work.wait()
    assert torch.equal(into, expected)


@on_ranks("mesh_name", mesh_name=["2", "HSDP 2x2", "HFSDP 2x2"], precision=["fp32", "bf16"])
def test_step_multiplies_only_main_gradients_once(mesh_name: str, precision: str) -> None:
    policy = BF16 if precision == "bf16" else MixedPrecisionPolicy()
    for strategy in strategies_on(mesh_name):
        options = {"sharding_strategy": strategy, "gradient_scaling_factor": 0.3}
        model = wrap(Stack(1), mp_policy=policy, **on_mesh(mesh_name), **options)
        with record_streams(model) as recording:
            loss = model(batch(dist.get_rank())).float()
            loss.sum().backward()
        found = [
            region.buffer.name
            for record in recording.schedule.records
            if isinstance(record, Operation) and record.name.startswith("aten.mul")
            for region in record.writes
            if " grads " in region.buffer.name
        ]
        assert len(found) == sum(len(unit.groups) for _, unit in named_units(model))
        assert {name.rpartition(" ")[2] for name in found} == {"main"}, found


@functools.cache
def _gather_group(mesh_name: str) -> dist.ProcessGroup:
    mesh = on_mesh(mesh_name)["mesh"]
    return group_of_same_ranks(mesh.get_group(mesh.ndim - 1))


def _sharded(mesh_name: str = "2", **options: Any) -> Any:
    torch.manual_seed(0)
    return wrap(Stack(), **on_mesh(mesh_name), **options)


def _gather_group_cases() -> Iterator[Any]:
    """Cases: mesh, strategy and options."""
    most = STRATEGIES[-1]
    for mesh_name, strategy in itertools.product(("2", "4", "HSDP 2x2"), STRATEGIES):
        yield quick_if(mesh_name == "2" or strategy == most, mesh_name, strategy, {})
    yield "HFSDP 2x2", most, {}
    yield "2", most, {"enable_trace_pool": True}
    yield "2", most, {"check_ranks": "always"}
    yield longer("2", most, {"mp_policy": BF16})
    yield longer("2", most, {"enable_async_reduce_grad": False})


@pytest.mark.parametrize(("mesh_name", "strategy", "options"), list(_gather_group_cases()))
@on_ranks("mesh_name")
def test_gather_group_moves_gathers_and_keeps_results_bitwise_identical(
    mesh_name: str, strategy: str, options: dict[str, Any]
) -> None:
    groups, gathers = on_mesh(mesh_name)["mesh"].get_all_groups(), _gather_group(mesh_name)
    called = {group.group_name: f"axis {axis}" for axis, group in enumerate(groups)}
    called[gathers.group_name] = "gathers"
    weights, counts = [], []
    for group in (None, gathers):
        model = _sharded(mesh_name, sharding_strategy=strategy, gather_group=group, **options)
        recorded = record_collectives(model)
        weights.append(train_own(model, num_micro=2))
        counts.append(Counter((sent.kind, called[sent.group]) for sent in recorded.sent))
    assert all(map(torch.equal, *weights))
    (without, apart), inner = counts, ("all_gather", f"axis {len(groups) - 1}")
    moved = {(kind, "gathers" if (kind, at) == inner else at) for kind, at in without}
    assert moved == set(apart)
    assert without[inner] == apart["all_gather", "gathers"]
    assert (apart["all_gather", "gathers"] > 0) == (strategy != "no_shard")
    assert without.total() == apart.total() > 0


@pytest.mark.parametrize(
    ("mesh_name", "options"),
    [
        ("2", {"sharding_strategy": "optim_grads"}),
        ("2", {}),
        ("2", {"enable_trace_pool": True, "enable_async_reduce_grad": False}),
        ("2", {"mp_policy": BF16, "offload_policy": CPUOffloadPolicy()}),
        ("3", {"check_ranks": "always"}),
        ("HSDP 2x2", {}),
        ("HFSDP 2x2", {}),
    ],
)
@on_ranks("mesh_name")
def test_units_that_reduce_once_reduce_no_gradient_in_no_sync(
    mesh_name: str, options: dict[str, Any]
) -> None:
    trained, counts = [], []
    for once, num_micro in ((False, 3), (True, 3), (True, 1)):
        model = _sharded(mesh_name, reduces_once=once, **options)
        recorded = record_collectives(model)
        trained.append(train_own(model, num_micro=num_micro))
        counts.append(recorded.count("reduce_scatter"))
    several, once_of_three, single = counts
    assert several > single and once_of_three == single
    bound = 1e-2 if "mp_policy" in options else 1e-6
    assert all(
        torch.allclose(one, other, rtol=bound, atol=bound)
        for one, other in zip(*trained[:2], strict=True)
    )


class _Gate(nn.Module):
    """A unit whose forward all ranks run, and whose weight some of them use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, is_used: bool) -> torch.Tensor:
        return self.linear(x) if is_used else 2 * x


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.gate = nn.Linear(batch(0).shape[1], WIDTH), _Gate()

    def forward(self, x: torch.Tensor, *is_used: bool) -> torch.Tensor:
        x = self.head(x)
        return self.gate(x, *is_used) if is_used else x


@on_ranks(2)
def test_a_kept_gradient_of_one_rank_is_reduced_on_all_ranks() -> None:
    """The synchronized backward does not reach the unit, and one rank has a gradient of it."""
    found = []
    for once in (False, True):
        torch.manual_seed(0)
        model: Any = _Gated()
        for unit in (model.head, model.gate, model):
            shard(unit, mesh=mesh_of(2), reduces_once=once)
        with model.no_sync():
            model(batch(0), dist.get_rank() == 0).sum().backward()
        model(batch(1)).sum().backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(map(torch.allclose, *found))


@on_ranks(2)
def test_set_separate_reduce_scatter_group_sets_and_resets_the_group_of_all_units() -> None:
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
    recorded = record_collectives(model)
    is_equal = all(map(torch.equal, plain, train_own(model, num_micro=2)))
    (apart,) = gathers()
    assert {s.group for s in recorded.sent if s.kind == "all_gather"} == {apart.group_name}
    assert is_equal
    assert numbers == [1, 2, 1, 2, 1]
    assert shared == [True, True, False, True, True]


@on_ranks(4)
def test_mismatched_gather_group_is_rejected() -> None:
    rank, mesh = dist.get_rank(), mesh_of(2, 2)
    inner = [0, 1] if rank < 2 else [2, 3]
    for group, text in (
        (mesh.get_group(0), f"gather_group has the ranks {[rank % 2, rank % 2 + 2]}"),
        (dist.group.WORLD, "gather_group has the ranks [0, 1, 2, 3], and the axis of the mesh"),
        (dist.group.WORLD, f"{inner}; give a group of these ranks in this order"),
        ("gloo", "must be a process group that this rank is part of, got str"),
        (7, "got int"),
    ):
        options = {"mesh": mesh, "gather_group": group}
        linear = functools.partial(shard, torch.nn.Linear(4, 4), **options)
        assert text in error_message(ValueError, linear)
    model = _sharded("4")
    method = error_message(ValueError, lambda: model.set_separate_reduce_scatter_group("yes"))
    group = _gather_group("4")
    some = _sharded("4", gather_group=None if rank == 2 else group)
    ranks = error_message(RuntimeError, lambda: some(batch(0)))
    assert method == "enable must be True or False, got 'yes'"
    assert re.search("ranks differ at unit .* gathered in a group of its own", ranks)


@on_ranks(2)
def test_streams_and_registered_memory_use_the_gather_group() -> None:
    model = _sharded(gather_group=_gather_group("2"), enable_trace_pool=True)
    registrar = Recorder()
    register_pool(model, registrar)
    with record_streams(model) as recording:
        train_own(model, num_micro=2)
    count = sum(op.name == "all_gather" for op in recording.schedule.operations("gather"))
    assert [str(v) for v in recording.violations()] == []
    assert count > 10
    assert len({g for _, g in registrar.calls_of("register")}) == 2


@on_ranks(4, timeout_s=20)
def test_ranks_with_different_numbers_of_groups_create_a_common_group() -> None:
    if dist.get_rank() == 2:
        dist.new_group([2], use_local_synchronization=True)
    of_all = group_of_same_ranks(mesh_of(4).get_group())
    if dist.get_rank() != 2:
        # torch 2.15 names groups of all ranks by this count, also in later tests.
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=of_all)
    # Ranks 0 to 2 hold one row each, and rank 3 holds none.
    model = wrap(torch.nn.Linear(4, 3, bias=False))
    torch.nn.init.ones_(model.weight)
    has_rows = model.weight.to_local().numel() > 0
    assert total.item() == 6.0
    assert dist.get_process_group_ranks(of_all) == [0, 1, 2, 3]
    assert has_rows == (dist.get_rank() < 3)
    norm = torch.nn.utils.get_total_norm([model.weight.detach()]).item()
    assert norm == pytest.approx(12**0.5)


@on_ranks(4, timeout_s=20)
def test_ranks_of_two_stages_create_different_numbers_of_groups_on_a_bound_device() -> None:
    from torch.distributed import distributed_c10d

    core: Any = distributed_c10d
    world: Any = dist.group.WORLD
    rank, num_splits = dist.get_rank(), 0
    stages = [[0, 1], [2, 3]]
    mine = stages[rank // 2]

    def source(*args: Any) -> None:
        # `ncclCommSplit` of the returned group blocks until every rank has called it.
        nonlocal num_splits
        num_splits += 1

    before, core._get_split_source = core._get_split_source, source
    world.bound_device_id = torch.device("cuda", 0)
    try:
        # In torch, every rank takes part in creating every group, also groups of other ranks.
        for ranks in stages:
            dist.new_group(ranks, backend="gloo")
        of_torch = num_splits
        made = [new_local_group(mine, "gathers") for _ in range(1 + rank // 2)]
        is_bound = world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
        core._get_split_source = before
    splits = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(splits, torch.tensor([num_splits - of_torch]))
    total = torch.ones(1)
    dist.all_reduce(total, group=made[-1])
    assert of_torch >= len(stages)
    # No rank waits for a split by another rank.
    assert [int(count) for count in splits] == [0, 0, 0, 0]
    assert is_bound
    assert total.item() == 2
