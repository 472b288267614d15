"""Gradients are summed and then scaled: what is asked of NCCL, and what passes there are."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.comm.backends import NcclCollectives
from megatron_fsdp_v2.comm.interface import Axis, Collective, CollectiveKind, CommStream
from megatron_fsdp_v2.comm.streams import StreamCommunicator
from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    Dispatched,
    batch,
    mesh_of,
    of_all_ranks,
    on_mesh,
    strategies_on,
    wrap,
)
from tests.reference.models import Formula, Stack
from tests.stream_safety import record_streams
from tests.stream_safety.schedule import Operation

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


@pytest.mark.parametrize("accumulate", [True, False], ids=["added", ""])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [True, False], ids=["reduce-scatter", "all-reduce"])
@on_ranks("world_size", world_size=[2, 3])
def test_nccl_is_asked_for_plain_sums_and_one_pass_over_the_shard_scales(
    world_size: int, cut: bool, wire: torch.dtype, accumulate: bool
) -> None:
    rank, size = dist.get_rank(), world_size
    terms = [torch.arange(NUMEL * size).add(r).remainder(7).to(wire) for r in range(size)]
    into = torch.ones(NUMEL if cut else NUMEL * size)
    expected = sum(term.float() for term in terms) * (1 / 3) + float(accumulate)
    full = terms[rank].clone()
    asked, passes = [], []

    def look(func: Any, _: Any, result: Any) -> None:
        """Note the elements that an operation goes over."""
        if func.namespace == "aten" and isinstance(result, torch.Tensor) and not func.is_view:
            passes.append((str(func), result.numel()))

    def noting(name: str) -> Any:
        original = getattr(dist, name)

        def noted(*args: Any, op: Any = None, **kwargs: Any) -> Any:
            asked.append(op)
            before = len(passes)
            result = original(*args, op=op, **kwargs)
            # Gloo's own copies.
            del passes[before:]
            return result

        return mock.patch.object(dist, name, noted)

    communicator: Any = StreamCommunicator(OneQueue(), NcclCollectives())
    kind = CollectiveKind.REDUCE_SCATTER if cut else CollectiveKind.ALL_REDUCE
    axis = Axis(dist.group.WORLD, size, rank)
    names = [n for n in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, n)]
    with contextlib.ExitStack() as stack:
        for name in (*names, "all_reduce"):
            stack.enter_context(noting(name))
        stack.enter_context(Dispatched(look))
        collective = Collective(kind, into, full, axis, CommStream.REDUCE, 1 / 3, accumulate)
        communicator.issue(collective, async_op=True).wait()
    start = rank * NUMEL if cut else 0
    assert set(asked) == {dist.ReduceOp.SUM}
    assert [numel for _, numel in passes if numel > 1] == [into.numel()], passes
    # Scaled in fp32: the sums of small integers are exact in bf16.
    assert float((into - expected[start : start + into.numel()]).abs().max()) < 1e-6


@on_ranks("mesh_name", mesh_name=["2", "HSDP 2x2", "HFSDP 2x2"], precision=["fp32", "bf16"])
def test_a_step_multiplies_every_main_gradient_once_and_nothing_else(
    mesh_name: str, precision: str
) -> None:
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


def _dot() -> Any:
    """A loss whose gradient is its input, whatever the dtype."""
    return Formula(lambda m, x: (m.weight * x).sum(), weight=nn.Parameter(torch.zeros(6, 3)))


FP16_POLICIES = {
    "wire": MixedPrecisionPolicy(grad_comm_dtype=torch.float16),
    "main": MixedPrecisionPolicy(main_grads_dtype=torch.float16, grad_comm_dtype=torch.float32),
    "both": MixedPrecisionPolicy(main_grads_dtype=torch.float16),
}


@on_ranks("shape", shape=[(2,), (3,), (2, 2)], strategy=STRATEGIES, policy=FP16_POLICIES)
def test_an_fp16_mean_does_not_overflow_where_the_sum_would(
    shape: tuple[int, ...], strategy: str, policy: str
) -> None:
    options = {"sharding_strategy": strategy, "mp_policy": FP16_POLICIES[policy]}
    model = wrap(_dot(), mesh=mesh_of(*shape), **options)
    model(torch.full((6, 3), 60_000.0)).backward()
    grad = model.weight.grad
    values = [] if grad is None else grad.to_local().unique().tolist()
    assert any(of_all_ranks(values))
    assert values == pytest.approx([60_000.0] * len(values), rel=1e-3)
