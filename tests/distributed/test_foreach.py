"""Foreach and fused operations, and attributes, of sharded parameters."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
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
    train_both,
    weight_error,
    wrap,
)
from tests.ranks import RankPools
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


def choices() -> tuple[Any, Any, bool]:
    """Fused and foreach, where fused is asked for and where not; and what clipping chooses."""
    params = list(wrap(Stack()).parameters())
    with _foreach_on_cpu():
        choose = optimizers._default_to_fused_or_foreach
        return (
            choose(params, differentiable=False, use_fused=True),
            choose(params, differentiable=False, use_fused=False),
            _has_foreach_support(params, torch.device("cpu")),
        )


def test_pytorch_chooses_fused_and_foreach_for_sharded_parameters(pools: RankPools) -> None:
    assert set(pools(2).run(choices)) == {((True, False), (False, True), True)}


def operations_of_a_step() -> list[tuple[list[str], list[str]]]:
    """Operations of a step by default and of clipping, of models of 2 and of 5 blocks."""
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
    return found


def test_a_step_and_clipping_take_as_many_operations_for_more_parameters(pools: RankPools) -> None:
    for few, many in pools(2).run(operations_of_a_step):
        assert few == many
        assert "_foreach_addcdiv_" in few[0]
        assert "_foreach_norm" in few[1]


# -- optimizers ------------------------------------------------------------------------------------


def optimizer_errors(strategy: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Error of every optimizer as it is by default on a GPU, and fused."""
    found = {}
    mesh = mesh_of(*sizes)
    cases: list[tuple[Any, dict[str, Any]]] = [(cls, {}) for cls in CLASSES]
    for cls, fused in [*cases, *((cls, {"fused": True}) for cls in WITH_FUSED)]:
        plain, sharded = fp64_pair(strategy, mesh=mesh)
        options = {"weight_decay": 0.1, **fused}
        if cls is optim.Rprop:
            options.pop("weight_decay")
        pair = tuple(cls(m.parameters(), lr=0.01, **options) for m in (plain, sharded))
        with _foreach_on_cpu():
            train_both(plain, sharded, pair, range(2))
        found[f"{cls.__name__} {fused}"] = weight_error(sharded, plain)
    return found


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        ((3,), "optim_grads_params"),
        ((2, 2), "no_shard"),
        *(
            pytest.param(sizes, strategy, marks=pytest.mark.functional)
            for sizes in ((3,), (2, 2))
            for strategy in STRATEGIES
        ),
    ],
)
def test_optimizers_as_chosen_on_a_gpu_step_shards_like_the_whole(
    pools: RankPools, sizes: tuple[int, ...], strategy: str
) -> None:
    for found in pools(3 if len(sizes) == 1 else 4).run(optimizer_errors, strategy, sizes):
        assert max(found.values()) < 1e-12, found


def _pair_of(shard: Callable[[Any], Any], seed: int) -> tuple[Any, Any]:
    """The same fp64 model twice: plain, and as `shard` leaves it."""
    made: list[Any] = []
    for _ in range(2):
        torch.manual_seed(seed)
        made.append(Stack().double())
    shard(made[1])
    return made[0], made[1]


def trained_among_others(how: str) -> list[float]:
    """Errors of plain, FSDP2's and our parameters in one optimizer."""
    mesh = mesh_of(dist.get_world_size())
    pairs = [
        _pair_of(lambda model: None, 1),
        _pair_of(lambda model: their_fully_shard(model, mesh=mesh), 2),
        _pair_of(lambda model: wrap(model, mesh=mesh), 3),
    ]
    optimizers = [
        optim.AdamW(
            [param for pair in pairs for param in pair[index].parameters()],
            lr=0.01,
            eps=1e-2,
            **{how: True},
        )
        for index in range(2)
    ]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for plain, other in pairs:
            plain_loss(plain, step).backward()
            (plain_loss if plain is pairs[0][0] else own_loss)(other, step).backward()
        for plain, other in pairs[1:]:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1, foreach=True)
            nn.utils.clip_grad_norm_(other.parameters(), 0.1, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
    (alone, same), (whole, theirs), (plain, ours) = pairs
    return [
        _distance(same.parameters(), alone.parameters()),
        _distance((p.full_tensor() for p in theirs.parameters()), whole.parameters()),
        weight_error(ours, plain),
    ]


def _distance(mine: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(mine, others, strict=True))


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_one_optimizer_steps_ours_and_fsdp2s_and_plain_parameters(
    pools: RankPools, how: str
) -> None:
    for errors in pools(2).run(trained_among_others, how):
        assert max(errors) < 1e-12, errors


# -- operations ------------------------------------------------------------------------------------

UNARY = {
    name.removeprefix("_foreach_").rstrip("_")
    for name in dir(torch)
    if name.startswith("_foreach_") and not name.endswith(("norm", "max", "powsum"))
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


def wrong_operations() -> tuple[int, list[str]]:
    """How many operations were run, and those that gave something else than on whole tensors."""
    wrong, count = [], 0
    for (name, rest), suffix in itertools.product(_calls(), ("", "_")):
        function = getattr(torch, f"_foreach_{name}{suffix}", None)
        if function is None:
            continue
        count += 1
        expected = _applied(function, rest, lambda values: values)
        found = _applied(function, rest, _described)
        kinds = [type(tensor) for tensor in found]
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
        if kinds != [UnevenDTensor] * 3 + [torch.Tensor]:
            wrong.append(f"{function.__name__}: {kinds}")
        elif not all(map(torch.allclose, whole, expected)):
            wrong.append(function.__name__)
    return count, wrong


def test_every_foreach_operation_runs_on_uneven_empty_and_mixed_shards(pools: RankPools) -> None:
    for count, wrong in pools(4).run(wrong_operations):
        assert count > 80
        assert wrong == []


def refused_operations() -> list[str]:
    """What is said of lists whose tensors have no meaning together, or of a leaf in training."""
    mesh = mesh_of(2)
    rank = dist.get_rank()

    def uneven(*ranges: tuple[int, int]) -> UnevenDTensor:
        rows = torch.ones(2, 2)
        return UnevenDTensor.from_rows(rows, mesh, RowShards(ranges, (1,)), (4, 2))

    mine, other = uneven((0, 2), (2, 4)), uneven((2, 4), (0, 2))
    theirs = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    leaf = nn.Parameter(uneven((0, 2), (2, 4)))
    scale = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    torch._foreach_mul_([mine, theirs], scale)
    assert float(mine.to_local().sum()) == float(theirs.to_local().sum()) == 12.0, rank
    return [
        said(ValueError, lambda: torch._foreach_add_([mine], [other])),
        said(ValueError, lambda: torch._foreach_add([mine], [other])),
        said(RuntimeError, lambda: torch._foreach_mul_([leaf], 2.0)),
    ]


def test_operands_of_different_rows_and_leaves_in_training_are_rejected(pools: RankPools) -> None:
    for in_place, out_of_place, leaf in pools(2).run(refused_operations):
        assert "_foreach_add_ mixes two tensors" in in_place
        assert "sharded differently" in out_of_place
        assert "a leaf Variable that requires grad" in leaf


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


def attribute_costs() -> list[str]:
    """Attributes that differ from those PyTorch has, or are more than one call away."""
    model: Any = wrap(Stack())
    model(batch(0)).sum().backward()
    wrong = []
    for param in model.parameters():
        for name in READ:
            with plain_attributes():
                expected = torch._C.TensorBase.__dict__[name].__get__(param)
            if getattr(param, name) is not expected and getattr(param, name) != expected:
                wrong.append(name)
            if _num_frames(lambda p=param, n=name: getattr(p, n)) > 1:
                wrong.append(f"{name}: frames")
        for name in CALLED:
            with plain_attributes():
                expected = getattr(torch._C.TensorBase, name)(param)
            if getattr(param, name)() != expected:
                wrong.append(name)
            if _num_frames(lambda p=param, n=name: getattr(p, n)()) > 1:
                wrong.append(f"{name}: frames")
        param.grad = None
        param.requires_grad = False
        if param.grad is not None or param.requires_grad:
            wrong.append("written")
    return wrong


def test_reading_an_attribute_is_one_call_and_what_pytorch_has(pools: RankPools) -> None:
    assert pools(2).run(attribute_costs) == [[], []]


def grad_of_a_penalty() -> tuple[str, bool]:
    """Kind and value of a gradient that autograd makes of the sharded parameter itself."""
    model: Any = wrap(Stack())
    param = model.output.weight
    (3 * param).backward(param.detach())
    with plain_attributes():
        before = type(torch._C.TensorBase.__dict__["grad"].__get__(param)).__name__
    return before, type(param.grad) is UnevenDTensor and torch.equal(
        param.grad.to_local(), 3 * param.detach().to_local()
    )


def test_a_gradient_that_autograd_makes_of_a_shard_knows_its_rows(pools: RankPools) -> None:
    assert set(pools(2).run(grad_of_a_penalty)) == {("DTensor", True)}


def operations_that_fill() -> tuple[list[str], int, bool]:
    """What zeroes missing gradients and gaps, how many of those there are, and whether it did."""
    module = nn.Sequential(*(nn.Linear(5, n, bias=False) for n in (7, 3, 1)))
    (group,) = unit_of(wrap(module, [])).groups
    grads, view = group.grads.buffers, group.grads.buffers.views[0]
    grads.take(grads.full).fill_(1.0)
    grads.add(0, torch.full_like(view, 2.0))
    with Operations() as filling:
        grads.fill_missing()
    left = grads.full.tensor.sum() - view.sum()
    return filling.names, 2 + len(group.layout.gaps()), bool(left == 0 and (view == 2.0).all())


def test_missing_gradients_and_gaps_are_zeroed_in_one_operation(pools: RankPools) -> None:
    for names, num_ranges, is_filled in pools(2).run(operations_that_fill):
        assert is_filled
        assert num_ranges > 2
        assert [name for name in names if name != "slice"] == ["_foreach_zero_"]
