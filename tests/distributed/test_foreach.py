"""Foreach and fused operations, and attributes, of sharded parameters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import optimizer as optimizers

from megatron_fsdp_v2.dtensor.row_shards import RowShards, TensorShard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    Operations,
    batch,
    error_message,
    mesh_of,
    own_loss,
    plain_loss,
    step_all,
    weight_error,
    wrap,
)
from tests.reference.models import Stack

# -- default implementations -----------------------------------------------------------------------


@on_ranks(2)
def test_operations_of_step_and_clipping_do_not_grow_with_parameters() -> None:
    found = []
    name = "_get_foreach_kernels_supported_devices"
    for num_blocks in (2, 5):
        model = wrap(Stack(num_blocks), sharding_strategy="no_shard")
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        # Torch chooses foreach implementations as on a GPU.
        with mock.patch.object(optimizers, name, lambda: ["cpu"]):
            for _ in range(2):
                model(batch(0)).square().mean().backward()
                with Operations() as clipping:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with Operations() as step:
                    optimizer.step()
        found.append((step.names, clipping.names))
    few, many = found
    assert few == many
    assert "_foreach_addcdiv_" in few[0]
    assert "_foreach_norm" in few[1]


# -- optimizers ------------------------------------------------------------------------------------


@on_ranks(2, how=["foreach", "fused"])
def test_one_optimizer_steps_sharded_fsdp2_and_plain_parameters(how: str) -> None:
    wholes = [Stack().double() for _ in range(3)]
    others: list[Any] = [copy.deepcopy(model) for model in wholes]
    their_fully_shard(others[1], mesh=mesh_of(2))
    wrap(others[2])
    optimizers = [
        optim.AdamW([p for m in models for p in m.parameters()], lr=0.01, eps=1e-2, **{how: True})
        for models in (wholes, others)
    ]
    for step in range(2):
        for model in (*wholes, others[0]):
            plain_loss(model, step).backward()
        for model in others[1:]:
            own_loss(model, step).backward()
        for model in (*wholes[1:], *others[1:]):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        step_all(*optimizers)
    same = zip(others[0].parameters(), wholes[0].parameters(), strict=True)
    theirs = zip(others[1].parameters(), wholes[1].parameters(), strict=True)
    errors = [float((a - b).abs().max()) for a, b in same]
    errors += [float((a.full_tensor() - b).abs().max()) for a, b in theirs]
    assert max(*errors, weight_error(others[2], wholes[2])) < 1e-12


# -- operations ------------------------------------------------------------------------------------

UNARY = {
    name.removeprefix("_foreach_").rstrip("_")
    for name in dir(torch)
    if name.startswith("_foreach_") and not name.endswith(("norm", "max", "mm", "powsum"))
}
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_min", "clamp_max", "copy")
TERNARY = ("addcmul", "addcdiv", "lerp")
UNARY -= {*BINARY, *TERNARY}


def _values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.rand(n, 2, generator=generator, dtype=torch.float64) * 0.8 + 0.1 for n in (5, 2, 4, 3)
    ]


def _as_shards(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values as uneven rows, rows over a 2-D mesh, a TP-local shard and a plain tensor."""
    flat, both = mesh_of(4), mesh_of(2, 2)
    rank, (row, column) = dist.get_rank(), (both.get_local_rank(0), both.get_local_rank(1))
    spread, halves = ((0, 0), (0, 3), (3, 3), (3, 5)), ((0, 2), (2, 2))
    part = torch.chunk(values[2], 2)[column]
    by_rows, replicated = RowShards(spread, (1,)), RowShards(halves, (1, 0))
    cut = RowShards(((0, 0), (0, 2)), (1,), TensorShard(both, 0))
    start, end = spread[rank]
    first, last = halves[row]
    low, high = ((0, 0), (0, 2))[row]
    return [
        UnevenDTensor.from_rows(values[0][start:end].clone(), flat, by_rows, (5, 2)),
        UnevenDTensor.from_rows(values[1][first:last].clone(), both, replicated, (2, 2)),
        UnevenDTensor.from_rows(part[low:high].clone(), both, cut, (4, 2)),
        values[3].clone(),
    ]


def _calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Functions, and arguments after the first; an `_Operand` stands for a list of tensors."""
    for name in sorted(UNARY):
        yield name, ()
    for name in BINARY:
        yield name, (_Operand(1),)
        if name != "copy":
            yield name, (0.7,)
            yield name, ([0.7, 0.8, 0.9, 1.1],)
        if name in ("add", "mul", "div"):
            yield name, (torch.tensor(0.7, dtype=torch.float64),)
    for name in TERNARY:
        yield name, (_Operand(1), 0.3 if name == "lerp" else _Operand(2))


class _Operand:
    def __init__(self, seed: int) -> None:
        self.seed = seed


def _applied(function: Any, rest: tuple[Any, ...], describe: Callable[..., Any]) -> Any:
    operands = [describe(_values(arg.seed)) if isinstance(arg, _Operand) else arg for arg in rest]
    first = describe(_values(0))
    result = function(first, *operands)
    return first if function.__name__.endswith("_") else result


@on_ranks(4)
def test_every_foreach_operation_runs_on_uneven_empty_and_mixed_shards() -> None:
    count = 0
    for (name, rest), suffix in itertools.product(_calls(), ("", "_")):
        function = getattr(torch, f"_foreach_{name}{suffix}", None)
        if function is None:
            continue
        count += 1
        expected = _applied(function, rest, lambda values: values)
        found = _applied(function, rest, _as_shards)
        kinds = [type(tensor) for tensor in found]
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
        assert kinds == [UnevenDTensor] * 3 + [torch.Tensor], function.__name__
        assert all(map(torch.allclose, whole, expected)), function.__name__
    assert count > 80


@on_ranks(2)
def test_operands_of_different_rows_are_gathered_and_writes_to_leaves_are_rejected() -> None:
    mesh = mesh_of(2)

    def uneven(*ranges: tuple[int, int]) -> UnevenDTensor:
        rows = torch.ones(2, 2)
        return UnevenDTensor.from_rows(rows, mesh, RowShards(ranges, (1,)), (4, 2))

    mine, other = uneven((0, 2), (2, 4)), uneven((2, 4), (0, 2))
    theirs = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    leaf = nn.Parameter(uneven((0, 2), (2, 4)))
    scale = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    torch._foreach_mul_([mine, theirs], scale)
    assert float(mine.to_local().sum()) == float(theirs.to_local().sum()) == 12.0
    torch._foreach_add_([mine], [other])
    of_leaf = error_message(RuntimeError, lambda: torch._foreach_mul_([leaf], 2.0))
    assert torch.equal(mine.full_tensor(), torch.full((4, 2), 4.0))
    assert "_foreach_mul_ writes, recorded by autograd" in of_leaf


@on_ranks(3)
def test_writes_through_two_handles_of_one_parameter_both_count() -> None:
    """`p.data` is a new object at every read. One of the ranks has no rows."""
    model = wrap(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)))
    params = list(model.parameters())
    with torch.no_grad():
        before = [p.full_tensor() for p in params]
        transposed = [p.data.t() for p in params for _ in range(2)]
        torch._foreach_add_([*transposed, params[0].detach()], [1.0, 2.0, 4.0, 8.0, 16.0])
    after = [p.full_tensor() for p in params]
    assert [round(float((b - a).sum())) for a, b in zip(before, after, strict=True)] == [
        4 * 19,
        4 * 12,
    ]
    # Autograd distinguishes a parameter from its data.
    straight_through = params[0].t() * 3 - params[0].data.t() * 2
    (grad,) = torch.autograd.grad(straight_through.sum(), params[0])
    assert torch.equal(grad.full_tensor(), torch.full((2, 2), 3.0))


# -- attributes ------------------------------------------------------------------------------------


def _num_cached() -> int:
    propagator = DTensor._op_dispatcher.sharding_propagator
    return len(FakeTensorMode.cache) + propagator.propagate_op_sharding.cache_info().currsize


@on_ranks(2, foreach=[False, True])
def test_learning_rate_changes_add_no_cache_entries(foreach: bool) -> None:
    """DTensor's dispatcher caches an entry for every scalar argument of an operation."""
    # Evenly sharded rows, which a plain DTensor could represent.
    model = wrap(Stack(width=8, ends=(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    counts = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(_num_cached())
    assert counts[2:] == counts[2:3] * 4
