"""Gradients are summed and then scaled: what is asked of NCCL, and what passes there are."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, override
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.comm.backends import NcclCollectives
from megatron_fsdp_v2.comm.interface import Axis, Collective, CollectiveKind, CommStream
from megatron_fsdp_v2.comm.streams import StreamCommunicator
from megatron_fsdp_v2.diagnostics.stream_safety import record_streams
from megatron_fsdp_v2.diagnostics.stream_safety.schedule import Operation
from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.distributed.wrapping import BF16, STRATEGIES, batch, mesh_of, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack

NUMEL = 24


class OneQueue:
    """A device on which everything runs at once, in order."""

    def new_stream(self, name: str) -> Any:
        return mock.Mock(name=name)

    def current_stream(self) -> Any:
        return mock.Mock()

    def is_current(self, stream: Any) -> bool:
        return True

    def use(self, stream: Any) -> Any:
        return contextlib.nullcontext(stream)


class Passes(TorchDispatchMode):
    """Elements that every operation of torch goes over."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and isinstance(result, torch.Tensor) and not func.is_view:
            self.found.append((str(func), result.numel()))
        return result


def reduction(
    cut: bool, wire: torch.dtype, accumulate: bool
) -> tuple[list[Any], list[tuple[str, int]], float]:
    """Operations asked of NCCL, passes over tensors, and the error of a scaled reduction."""
    rank, size = dist.get_rank(), dist.get_world_size()
    terms = [torch.arange(NUMEL * size).add(r).remainder(7).to(wire) for r in range(size)]
    into = torch.ones(NUMEL if cut else NUMEL * size)
    expected = sum(term.float() for term in terms) * (1 / 3) + float(accumulate)
    full = terms[rank].clone()
    asked, passes = [], Passes()

    def noting(name: str) -> Any:
        original = getattr(dist, name)

        def noted(*args: Any, op: Any = None, **kwargs: Any) -> Any:
            asked.append(op)
            before = len(passes.found)
            result = original(*args, op=op, **kwargs)
            # Gloo's own copies.
            del passes.found[before:]
            return result

        return mock.patch.object(dist, name, noted)

    communicator: Any = StreamCommunicator(OneQueue(), NcclCollectives())
    kind = CollectiveKind.REDUCE_SCATTER if cut else CollectiveKind.ALL_REDUCE
    axis = Axis(dist.group.WORLD, size, rank)
    names = [n for n in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, n)]
    with contextlib.ExitStack() as stack:
        for name in (*names, "all_reduce"):
            stack.enter_context(noting(name))
        stack.enter_context(passes)
        collective = Collective(kind, into, full, axis, CommStream.REDUCE, 1 / 3, accumulate)
        communicator.issue(collective, async_op=True).wait()
    start = rank * NUMEL if cut else 0
    error = (into - expected[start : start + into.numel()]).abs().max()
    return asked, passes.found, float(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_nccl_is_asked_for_plain_sums_and_one_pass_over_the_shard_scales(
    pools: RankPools, world_size: int
) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    for cut, wire, accumulate in itertools.product((True, False), dtypes, (True, False)):
        for asked, passes, error in pools(world_size).run(reduction, cut, wire, accumulate):
            assert set(asked) == {dist.ReduceOp.SUM}
            large = [numel for _, numel in passes if numel > 1]
            assert large == [NUMEL if cut else NUMEL * world_size], passes
            # Scaled in fp32: the sums of small integers are exact in bf16.
            assert error < 1e-6


def multiplied(strategy: str, outer: str, precision: str) -> tuple[list[str], int]:
    """Gradient buffers that a step multiplies, and how many parameter groups there are."""
    policy = BF16 if precision == "bf16" else MixedPrecisionPolicy()
    shape = (2, 2) if dist.get_world_size() == 4 else (dist.get_world_size(),)
    model = wrap(
        Stack(1),
        mesh=mesh_of(*shape),
        sharding_strategy=strategy,
        outer_dp_sharding_strategy=outer,
        mp_policy=policy,
        gradient_scaling_factor=0.3,
    )
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
    return found, sum(len(unit.groups) for _, unit in named_units(model))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mesh", ["1-D", "HSDP", "HFSDP"])
def test_a_step_multiplies_every_main_gradient_once_and_nothing_else(
    pools: RankPools, mesh: str, precision: str
) -> None:
    outer = "optim" if mesh == "HFSDP" else "no_shard"
    for strategy in STRATEGIES[mesh == "HFSDP" :]:
        ranks = pools(2 if mesh == "1-D" else 4)
        for found, num_groups in ranks.run(multiplied, strategy, outer, precision):
            assert len(found) == num_groups
            assert {name.rpartition(" ")[2] for name in found} == {"main"}, found


class Dot(nn.Module):
    """A loss whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3))
        self.blocks: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def fp16_gradients(shape: tuple[int, ...]) -> dict[str, list[float]]:
    """What means of values are, whose sum is beyond fp16's range, by strategy and policy."""
    found = {}
    fp16 = torch.float16
    policies = {
        "wire": MixedPrecisionPolicy(grad_comm_dtype=fp16),
        "main": MixedPrecisionPolicy(main_grads_dtype=fp16, grad_comm_dtype=torch.float32),
        "both": MixedPrecisionPolicy(main_grads_dtype=fp16),
    }
    for strategy, (name, policy) in itertools.product(STRATEGIES, policies.items()):
        model = wrap(Dot(), mesh=mesh_of(*shape), sharding_strategy=strategy, mp_policy=policy)
        model(torch.full((6, 3), 60_000.0)).backward()
        grad = model.weight.grad
        found[f"{strategy} {name}"] = [] if grad is None else grad.to_local().unique().tolist()
    return found


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_an_fp16_mean_does_not_overflow_where_the_sum_would(
    pools: RankPools, shape: tuple[int, ...]
) -> None:
    ranks = pools(len(shape) * 2 if len(shape) == 2 else shape[0]).run(fp16_gradients, shape)
    for found in ranks:
        for case, values in found.items():
            assert values == pytest.approx([60_000.0] * len(values), rel=1e-3), case
    assert all(any(found[case] for found in ranks) for case in ranks[0])
