"""The process group that behaves like NCCL: return values, dtypes, reductions, order of calls."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2_mcore.formats.axes import group_over
from tests.cases import longer
from tests.distributed import wrapping
from tests.distributed.nccl_double import FLOAT8, as_on_cuda, mesh_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, error_message, record_collectives, wrap


@on_ranks(2)
def test_dtypes_that_nccl_does_not_support_raise() -> None:
    group = mesh_of(2).get_group(0)
    for dtype in (torch.int16, torch.uint16, torch.uint32):
        tensor = torch.zeros(2, dtype=dtype)
        text = error_message(
            TypeError, lambda t=tensor: dist.broadcast(t, group=group, group_src=0)
        )  # type: ignore[misc]
        assert f"not supported for NCCL process group: {dtype}" in text
    for dtype in FLOAT8:
        tensor = torch.zeros(2).to(dtype)
        text = error_message(RuntimeError, lambda t=tensor: dist.all_reduce(t, group=group))  # type: ignore[misc]
        assert "Unsupported Float8 type for NCCL reduction" in text


@on_ranks(2)
def test_a_synchronous_call_returns_none_and_an_asynchronous_call_a_work_handle() -> None:
    double = mesh_of(2).get_group(0)
    two, four = torch.zeros(2), torch.zeros(4)
    calls: dict[str, tuple[Any, ...]] = {
        "_allgather_base": (c10d.AllgatherOptions, four, two),
        "allgather_into_tensor_coalesced": (c10d.AllgatherOptions, [four], [two]),
        "allgather": (c10d.AllgatherOptions, [[two, two.clone()]], [two]),
        "_reduce_scatter_base": (c10d.ReduceScatterOptions, two, four),
        "reduce_scatter_tensor_coalesced": (c10d.ReduceScatterOptions, [two], [four]),
        "allreduce": (c10d.AllreduceOptions, [two]),
        "alltoall_base": (c10d.AllToAllOptions, two, two.clone(), [], []),
        "broadcast": (c10d.BroadcastOptions, [two]),
        "barrier": (c10d.BarrierOptions,),
    }
    for name, (kind, *given) in calls.items():
        for is_async in (False, True):
            options = kind()
            options.asyncOp = is_async
            found = getattr(double, name)(*given, options)
            assert isinstance(found, dist.Work) if is_async else found is None, name


@on_ranks(2)
def test_different_calls_across_ranks_raise() -> None:
    group = mesh_of(2).get_group(0)
    tensor = torch.zeros(2 + dist.get_rank())
    text = error_message(RuntimeError, lambda: dist.all_reduce(tensor, group=group))
    assert "issue different calls" in text
    assert "all_reduce SUM of [(2, torch.float32)]" in text
    assert "all_reduce SUM of [(3, torch.float32)]" in text


class Square(torch.nn.Linear):
    """A module whose weight gradient is the input, for any weight."""

    def __init__(self) -> None:
        super().__init__(32, 48, bias=False)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * gradient).sum()


@pytest.mark.parametrize(
    ("mesh_name", "strategy", "main_grads"),
    [
        ("3", STRATEGIES[-1], torch.float32),
        ("HFSDP 2x2", STRATEGIES[1], torch.bfloat16),
        longer("3", STRATEGIES[1], torch.bfloat16),
        longer("HSDP 2x2", STRATEGIES[-1], torch.float32),
    ],
)
@on_ranks("mesh_name", answers_as_nccl=[True, False])
def test_reduce_scatter_with_fp32_accumulation_adds_bf16_gradients_in_fp32(
    mesh_name: str, strategy: str, main_grads: torch.dtype, answers_as_nccl: bool
) -> None:
    """The number of bytes does not change. The second of two gradients is accumulated."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        main_params_dtype=torch.float32,
        main_grads_dtype=main_grads,
        grad_comm_dtype=torch.bfloat16,
    )
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    # Rank 0 has 1, the others less than half of its last bit, of which a ring in bf16 loses most.
    given = torch.rand(size, 48, 32, generator=generator).mul_(2**-9)
    given[0] = 1.0
    given = given.bfloat16().float()
    errors, nbytes = [], []
    for in_fp32 in (True, False):
        asked = dataclasses.replace(policy, reduce_scatter_with_fp32_accumulation=in_fp32)
        options = {"sharding_strategy": strategy, "gradient_scaling_factor": 1.0}
        with as_on_cuda() if answers_as_nccl else contextlib.nullcontext():
            model = wrap(Square(), mp_policy=asked, **wrapping.on_mesh(mesh_name), **options)
        recorded = record_collectives(model)
        for _ in range(2):
            model(given[rank]).backward()
        found = model.weight.grad.full_tensor().double()
        exact = 2 * given.double().sum(0)
        errors.append(float((found - exact).abs().max()))
        nbytes.append(recorded.nbytes("reduce_scatter"))
    assert nbytes[0] == nbytes[1] > 0
    if main_grads is torch.float32 and mesh_name == "3":
        assert errors[0] < 1e-6
        assert errors[1] > 1e-3
    # Rounding to bf16, whose last bit is 2**-7 here and 2**-6 above 2: along the outer axis, and in
    # bf16 main gradients.
    assert errors[0] <= (2**-6 if main_grads is torch.float32 else 2**-5)


@on_ranks(4, answers_as_nccl=[False, True])
def test_a_group_over_two_axes_reduces_over_all_of_their_ranks(answers_as_nccl: bool) -> None:
    with as_on_cuda() if answers_as_nccl else contextlib.nullcontext():
        mesh = wrapping.mesh_of(2, 2)
        axes = [Axis(mesh.get_group(a), mesh.size(a), mesh.get_local_rank(a)) for a in range(2)]
        group, rank = group_over(axes), dist.get_rank()
    # Each rank holds the largest value of one column.
    values, later = torch.eye(4)[rank] * (rank + 1), torch.tensor([float(rank)])
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    work = dist.all_reduce(later, dist.ReduceOp.MAX, group=group, async_op=True)
    work.wait()
    assert values.tolist() == [1.0, 2.0, 3.0, 4.0] and later.item() == 3.0
    assert (group.size(), group.rank()) == (4, rank)
    assert group_over(axes[1:]) is axes[1].group
