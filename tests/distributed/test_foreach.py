"""Foreach and fused operations, and attributes, of sharded parameters."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import optimizer as optimizers
from torch.utils._foreach_utils import _has_foreach_support

from megatron_fsdp_v2.dtensor.row_shards import RowShards, TensorShard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, plain_attributes
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.cases import longer
from tests.distributed.on_ranks import on_ranks
from tests.distributed.test_drop_in import CLASSES, WITH_FUSED
from tests.distributed.wrapping import (
    STRATEGIES,
    Operations,
    batch,
    fp64_pair,
    mesh_of,
    own_loss,
    plain_loss,
    said,
    step_all,
    train_both,
    weight_error,
    wrap,
)
from tests.reference.models import Stack


@contextmanager
def _foreach_on_cpu() -> Iterator[None]:
    """Have PyTorch choose on CPU as on a GPU."""
    name = "_get_foreach_kernels_supported_devices"
    original = getattr(optimizers, name)
    setattr(optimizers, name, lambda: [*original(), "cpu"])
    try:
        yield
    finally:
        setattr(optimizers, name, original)


# -- what PyTorch chooses --------------------------------------------------------------------------


@on_ranks(2)
def test_pytorch_chooses_fused_and_foreach_for_sharded_parameters() -> None:
    params = list(wrap(Stack()).parameters())
    with _foreach_on_cpu():
        choose = optimizers._default_to_fused_or_foreach
        assert choose(params, differentiable=False, use_fused=True) == (True, False)
        assert choose(params, differentiable=False, use_fused=False) == (False, True)
        assert _has_foreach_support(params, torch.device("cpu"))


@on_ranks(2)
def test_a_step_and_clipping_take_as_many_operations_for_more_parameters() -> None:
    found = []
    for num_blocks in (2, 5):
        model = wrap(Stack(num_blocks), sharding_strategy="no_shard")
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        with _foreach_on_cpu():
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


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        ((3,), "optim_grads_params"),
        ((2, 2), "no_shard"),
        *(longer(sizes, strategy) for sizes in ((3,), (2, 2)) for strategy in STRATEGIES),
    ],
)
@on_ranks("sizes")
def test_optimizers_as_chosen_on_a_gpu_step_shards_like_the_whole(
    sizes: tuple[int, ...], strategy: str
) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [(cls, {}) for cls in CLASSES]
    for cls, fused in [*cases, *((cls, {"fused": True}) for cls in WITH_FUSED)]:
        plain, sharded = fp64_pair(strategy, mesh=mesh_of(*sizes))
        options = {"weight_decay": 0.1, **fused}
        if cls is optim.Rprop:
            options.pop("weight_decay")
        pair = tuple(cls(m.parameters(), lr=0.01, **options) for m in (plain, sharded))
        with _foreach_on_cpu():
            train_both(plain, sharded, pair, range(2))
        assert weight_error(sharded, plain) < 1e-12, (cls, fused)


@on_ranks(2, how=["foreach", "fused"])
def test_one_optimizer_steps_ours_and_fsdp2s_and_plain_parameters(how: str) -> None:
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


def _described(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same as: uneven rows, rows over a 2-D mesh, a tensor-parallel part, a plain tensor."""
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
    """Functions, and arguments after the first, of which numbers stand for lists of tensors."""
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
        found = _applied(function, rest, _described)
        kinds = [type(tensor) for tensor in found]
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
        assert kinds == [UnevenDTensor] * 3 + [torch.Tensor], function.__name__
        assert all(map(torch.allclose, whole, expected)), function.__name__
    assert count > 80


@on_ranks(2)
def test_operands_of_different_rows_and_leaves_in_training_are_rejected() -> None:
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
    in_place = said(ValueError, lambda: torch._foreach_add_([mine], [other]))
    of_leaf = said(RuntimeError, lambda: torch._foreach_mul_([leaf], 2.0))
    assert "_foreach_add_ mixes two tensors" in in_place
    assert "sharded differently" in in_place
    assert "a leaf Variable that requires grad" in of_leaf


# -- attributes ------------------------------------------------------------------------------------

READ = (
    *("grad", "requires_grad", "dtype", "device", "shape", "ndim", "is_leaf", "is_cuda", "layout"),
    *("_version", "grad_fn", "retains_grad", "grad_dtype", "nbytes", "itemsize", "output_nr"),
)
CALLED = ("numel", "size", "dim", "stride", "is_floating_point", "is_complex", "element_size")


def _num_frames(read: Callable[[], Any]) -> int:
    """Python functions that are called by a function, and in C `__torch_function__`s."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    try:
        read()
    finally:
        sys.setprofile(None)
    return len(calls) - 1


@on_ranks(2)
def test_reading_an_attribute_is_one_call_and_what_pytorch_has() -> None:
    model: Any = wrap(Stack())
    model(batch(0)).sum().backward()
    base = torch._C.TensorBase
    reads: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        **{n: (lambda p, n=n: getattr(p, n), base.__dict__[n].__get__) for n in READ},
        **{n: (lambda p, n=n: getattr(p, n)(), getattr(base, n)) for n in CALLED},
    }
    for param in model.parameters():
        for name, (read, plainly) in reads.items():
            with plain_attributes():
                expected = plainly(param)
            found = read(param)
            assert found is expected or found == expected, name
            # Without rows here it depends on who asks.
            most = 3 if name == "grad" and param.empty_grad is not None else 1
            assert _num_frames(functools.partial(read, param)) <= most, name
        param.grad = None
        param.requires_grad = False
        assert param.grad is None and not param.requires_grad


@on_ranks(2)
def test_a_gradient_that_autograd_makes_of_a_shard_knows_its_rows() -> None:
    model: Any = wrap(Stack())
    param = model.output.weight
    (3 * param).backward(param.detach())
    grad = param.grad
    assert (grad is None) == (not param.to_local().numel())
    assert grad is None or type(grad) is UnevenDTensor
    assert grad is None or torch.equal(grad.to_local(), 3 * param.detach().to_local())


@on_ranks(2)
def test_missing_gradients_and_gaps_are_zeroed_in_one_operation() -> None:
    module = nn.Sequential(*(nn.Linear(5, n, bias=False) for n in (7, 3, 1)))
    (group,) = unit_of(wrap(module, [])).groups
    grads, view = group.grads.buffers, group.grads.buffers.views[0]
    grads.take(grads.full).fill_(1.0)
    grads.add(0, torch.full_like(view, 2.0))
    with Operations() as filling:
        grads.fill_missing()
    left = grads.full.tensor.sum() - view.sum()
    num_ranges = 2 + len(group.layout.gaps())
    assert bool(left == 0 and (view == 2.0).all())
    assert num_ranges > 2
    assert [name for name in filling.names if name != "slice"] == ["_foreach_zero_"]
