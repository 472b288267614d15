"""Ranks that issue different collectives, die or hang raise named errors, or change no result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.comm import interface
from tests.distributed.nccl_double import as_on_cuda
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    batch,
    error_message,
    gradient_error,
    loss_of,
    on_mesh,
    own_loss,
    pair,
    step_all,
    train_own,
    weight_error,
    wrap,
)
from tests.ranks import RankFailure, RankPool, RankPools
from tests.reference.failing import PlannedFailure, fail
from tests.reference.models import Formula, Skipping, Stack


def _frozen(block: Any) -> None:
    block.up.weight.requires_grad_(False)


def _renamed(block: Any) -> None:
    block.norm2 = block.norm
    del block.norm


def _wider(block: Any) -> None:
    block.up.weight = nn.Parameter(torch.ones(2, 2))


def _scalar(block: Any) -> None:
    block.up.weight = nn.Parameter(torch.ones(()))


def _tied(block: Any) -> None:
    block.up.bias = block.down.bias


def _with_buffer(block: Any) -> None:
    block.register_buffer("table", torch.ones(2, device="meta"))


DIFFERENCES: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "requires_grad": (
        _frozen,
        ["up.weight of unit 'Block'", "rank 1 has shape (15, 7), torch.f", "frozen"],
    ),
    "names": (_renamed, ["unit 'Block'", "norm2.weight"]),
    "shape": (_wider, ["up.weight of unit 'Block'", "rank 1 has shape (2, 2)"]),
    "a scalar": (_scalar, ["unit 'Block'", "up.weight is 0-dim"]),
    "ties": (_tied, ["unit 'Block'", "rank 1 has the parameters"]),
    "buffers": (_with_buffer, ["table of unit 'Block'", "does not exist on rank 0"]),
}


@on_ranks(2, difference=list(DIFFERENCES), on_meta=[False, True])
def test_ranks_that_shard_different_parameters_raise_before_they_communicate(
    difference: str, on_meta: bool
) -> None:
    change, texts = DIFFERENCES[difference]
    with torch.device("meta") if on_meta else nullcontext():
        model = Stack()
        if dist.get_rank() == 1:
            change(model.blocks[1])
    text = error_message(Exception, lambda: wrap(model))
    # The group is usable: no rank waits for another one.
    dist.barrier()
    if difference == "a scalar" and dist.get_rank() == 1:
        assert text.startswith("parameter up.weight is 0-dim")
    else:
        assert text.startswith("ranks differ at ")
        assert all(one in text for one in texts)


@on_ranks(2)
def test_different_units_and_weights_across_ranks_raise() -> None:
    rank, model = dist.get_rank(), Stack()

    def error_at_first_use(model: Any) -> str:
        return error_message(RuntimeError, lambda: model(torch.ones(2, 5)))

    fewer = error_message(RuntimeError, lambda: wrap(model, list(model.blocks)[: 2 + rank]))
    # Rank 1 shards another unit while rank 0 uses the model.
    used, another = wrap(Stack()), nn.Linear(2, 2)
    late = error_message(RuntimeError, lambda: wrap(another) if rank else used(torch.ones(2, 5)))
    options = error_message(
        RuntimeError, lambda: wrap(Stack(), shard_granularity="row" if rank else "tensor")
    )
    torch.manual_seed(rank)
    weights = error_at_first_use(wrap(Stack(), sharding_strategy="no_shard"))
    torch.manual_seed(rank)
    never = error_at_first_use(wrap(Stack(), sharding_strategy="no_shard", check_ranks="never"))
    assert "ranks differ at unit 'Stack'" in fewer and "rank 1 has unit 'Block'" in fewer
    assert "ranks differ at unit 'the root (Stack)'" in late and "rank 1 has unit 'Linear'" in late
    assert "ranks differ at norm.weight of unit 'Block'" in options
    assert "copies of one weight must be identical across ranks" in weights
    assert "ranks differ at unit" in weights
    assert never == "no error"


@pytest.mark.parametrize(
    ("mesh", "strategy"), [("2", "no_shard"), ("HSDP 2x2", "optim_grads_params")]
)
@on_ranks("mesh")
def test_copies_of_weights_that_are_initialized_again_are_compared(
    mesh: str, strategy: str
) -> None:
    model = wrap(Stack(), sharding_strategy=strategy, **on_mesh(mesh))
    errors = []
    for seed in (3, dist.get_rank()):
        train_own(model, steps=1)
        torch.manual_seed(seed)
        model.blocks[1].up.reset_parameters()
        with torch.no_grad():
            errors.append(error_message(RuntimeError, lambda: own_loss(model)))
    assert errors[0] == "no error"
    assert "ranks differ at unit 'blocks.1 (Block)'" in errors[1]


@on_ranks(2)
def test_rank_comparison_is_one_collective_at_the_first_use() -> None:
    model = wrap(Stack(), sharding_strategy="no_shard")
    counts = []
    for _ in range(2):
        with torch.profiler.profile() as profile:
            model(torch.ones(2, 5))
        names = [event.name for event in profile.events()]
        counts.append(sum(name == "gloo:all_gather" for name in names))
    assert counts == [1, 0]


@on_ranks("mesh", mesh=["2", "HSDP 2x2", "HFSDP 2x2"])
def test_a_unit_skipped_on_one_rank_of_the_outermost_axis_is_named(mesh: str) -> None:
    options = on_mesh(mesh)
    rank = options["mesh"].get_local_rank(0)
    model = wrap(Skipping(), check_ranks="always", **options)
    model.skip = 1 if rank == 1 else None

    def step() -> None:
        model(torch.ones(2, 5)).square().mean().backward()

    text = error_message(RuntimeError, step)
    assert "must run on every rank" in text
    if mesh == "2":
        does = [
            f"rank {r} is about to gather {unit}" for r, unit in enumerate(("blocks.1", "blocks.2"))
        ]
        assert text.startswith(f"{does[rank]} (Block) where {does[1 - rank]}")


class Apart(Stack):
    """A stack whose ranks return the outputs of different blocks, or run different blocks."""

    is_run_apart = False

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.blocks[dist.get_rank()]
        return chosen(x) if self.is_run_apart else [block(x) for block in self.blocks][chosen.index]


@on_ranks(2, is_run_apart=[True, False])
def test_other_units_in_the_first_step_are_named_on_both_ranks(is_run_apart: bool) -> None:
    """The blocks have one size, so that a gather of both would mix their weights."""
    rank, model = dist.get_rank(), Apart(2)
    for index, block in enumerate(model.blocks):
        block.index = index
    wrap(model)
    with torch.no_grad():
        model(torch.ones(2, 5))
    model.is_run_apart = is_run_apart
    text = error_message(RuntimeError, lambda: model(torch.ones(2, 5)).sum().backward())
    # In the backward, both blocks are gathered ahead.
    action = "gather" if is_run_apart else "reduce"
    does = [f"rank {r} is about to {action} blocks.{r} (Block)" for r in range(2)]
    assert text.startswith(f"{does[rank]} where {does[1 - rank]}")


@on_ranks(2)
def test_ranks_compare_their_collectives_in_the_first_step_only() -> None:
    counts: dict[str, list[int]] = {"never": [], "once": []}
    for check, found in counts.items():
        model = wrap(Stack(1), check_ranks=check)
        for _ in range(2):
            with torch.profiler.profile() as profile:
                model(torch.ones(2, 5)).sum().backward()
            names = [event.name for event in profile.events()]
            found.append(sum("gather" in name and "gloo" in name for name in names))
    assert counts["once"][0] > counts["never"][0]
    assert counts["once"][1] == counts["never"][1]


@on_ranks(2, strategy=["no_shard", "optim_grads"], as_nccl=[False, True])
def test_only_a_unit_skipped_on_all_ranks_has_no_gradient(strategy: str, as_nccl: bool) -> None:
    policy = MixedPrecisionPolicy(
        grad_comm_dtype=torch.bfloat16,
        reduce_scatter_with_fp32_accumulation=as_nccl and strategy != "no_shard",
    )
    with as_on_cuda() if as_nccl else nullcontext():
        model = wrap(Skipping(), sharding_strategy=strategy, mp_policy=policy)
    found = []
    for skips in (True, dist.get_rank() == 0):
        model.zero_grad()
        model.skip = 1 if skips else None
        model(torch.ones(2, 5)).square().mean().backward()
        block = model.blocks[1]
        found.append([p.grad is not None for p in block.parameters() if p.to_local().numel()])
    nowhere, somewhere = found
    assert nowhere
    assert not any(nowhere)
    assert all(somewhere)


class Partial(Stack):
    """A stack that runs the blocks whose indices are in `runs`, and then `inside`."""

    runs: tuple[int, ...] = (0, 1)
    inside: Callable[[torch.Tensor], Any] | None = None

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.runs:
            x = self.blocks[index](x)
        return x if self.inside is None else x + self.inside(x[:, :5]).mean()


def _in_sequence(a: Any, b: Any, x: torch.Tensor) -> Any:
    return a(x) + b(x)


def _first_again(a: Any, b: Any, x: torch.Tensor) -> Any:
    return a(x) + b(x) + a(2 * x)


def _alternating(a: Any, b: Any, x: torch.Tensor) -> Any:
    found = a(x) + b(x)
    runs = [model.blocks[0] for model in (a, b, a) if 0 in model.runs]
    return found + sum(block(torch.ones(1, 7)).square().mean() for block in runs)


def _nested(a: Any, b: Any, x: torch.Tensor) -> Any:
    vars(a)["inside"] = b
    return a(x)


ROOTS = {
    "in sequence": _in_sequence,
    "the first one again": _first_again,
    "alternating": _alternating,
    "one inside the other": _nested,
}


@on_ranks("mesh", mesh=["2", "HSDP 2x2"], order=list(ROOTS))
def test_units_of_several_roots_may_be_skipped_in_one_loss(mesh: str, order: str) -> None:
    options = on_mesh(mesh) | {"sharding_strategy": "optim_grads", "max_live_grad_buffers": 1}
    pairs = [pair(lambda: Partial(2), **options) for _ in range(2)]
    plain, sharded = zip(*pairs, strict=True)
    # Blocks that ranks run, of both roots; all blocks have the same size.
    for runs in (((1,), (0, 1)), ((0,), (1,))), (((0, 1), (0, 1)), ((0, 1), ())):
        for rank in range(size := dist.get_world_size()):
            for a, b in (plain, sharded) if rank == dist.get_rank() else (plain,):
                a.runs, b.runs = runs[rank % 2]
                loss = ROOTS[order](a, b, batch(rank)).square().mean()
                (loss / size if a is plain[0] else loss).backward()
    errors = [gradient_error(mine, theirs) for theirs, mine in pairs]
    assert max(errors) < 1e-6, errors


def _in_backward(run: Callable[[Any, Any], torch.Tensor]) -> Callable[..., None]:
    def hook(a: Any, b: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: grad * (1 + run(a, b).detach().mean()))

    return hook


@torch.enable_grad()
def _with_backward(a: Any, b: Any) -> torch.Tensor:
    loss: torch.Tensor = b(batch(1)).square().mean()
    loss.backward()
    return loss


def _backward_in_backward(a: Any, b: Any, output: torch.Tensor) -> None:
    del a
    loss = b(batch(1)).square().mean()
    output.register_hook(lambda grad: loss.backward(retain_graph=True))


INSIDE: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "own unit": _in_backward(lambda a, b: a.blocks[0](torch.ones(1, 7))),
    "another root": _in_backward(lambda a, b: b(batch(1))),
    "another root and its backward": _in_backward(_with_backward),
    "backward of another root": _backward_in_backward,
    "another root in the forward": lambda a, b, output: output + b(batch(1)).mean(),
}


@on_ranks(2, strategy=["optim", "optim_grads_params"], inside=list(INSIDE))
def test_collectives_inside_a_backward_pair_if_a_rank_skips_a_unit(
    strategy: str, inside: str
) -> None:
    """After the first backward, weights count as stale."""
    strategies = ("optim_grads", strategy)
    pairs = [
        pair(lambda: Partial(2), sharding_strategy=each, gradient_scaling_factor=1.0)
        for each in strategies
    ]
    plain, sharded = zip(*pairs, strict=True)

    def after_block(module: Any, args: Any, output: torch.Tensor) -> Any:
        del args
        return INSIDE[inside](*(plain if module is plain[0].blocks[0] else sharded), output)

    for rank in range(2):
        for a, _ in (plain, sharded) if rank == dist.get_rank() else (plain,):
            a.runs = (0, 1) if rank else (0,)
            if rank == 0:
                # No gradient reaches this use, so rank 0 reduces the block late.
                a.blocks[1](torch.ones(1, 7))
            handle = a.blocks[0].register_forward_hook(after_block)
            loss = a(batch(rank)).square().mean()
            handle.remove()
            for _ in range(2):
                loss.backward(retain_graph=True)
    errors = [gradient_error(mine, theirs) for theirs, mine in pairs]
    assert max(errors) < 1e-6, errors


def _step_inside(self: Any, optimizer: Any, runs: Iterable[int]) -> Any:
    if optimizer is not None:
        self.blocks[0](torch.ones(2, 7)).square().mean().backward()
        step_all(optimizer)
    x = torch.ones(2, 7, requires_grad=True)
    for index in runs:
        x = self.blocks[index](x)
    return x.square().mean()


# The rank that ran a unit after the step reduced all units once more, and waited for the other one.
@on_ranks(2, strategy=["no_shard", "optim", "optim_grads"], runs=[((0,), ()), ((), (0, 1))])
def test_backward_of_what_follows_a_step_in_a_forward_pairs_if_a_rank_skips_units(
    strategy: str, runs: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    plain, model = pair(
        lambda: Formula(_step_inside, blocks=nn.ModuleList(nn.Linear(7, 7) for _ in range(2))),
        sharding_strategy=strategy,
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(3):
        model(optimizers[1], runs[dist.get_rank()]).backward()
        plain(optimizers[0], ())
        for each in runs:
            (plain(None, each) / 2).backward()
        step_all(*optimizers)
    assert weight_error(model, plain) < 1e-6


@on_ranks(2, strategy=["no_shard", "optim", "optim_grads"])
def test_an_evaluation_in_a_backward_pairs_if_ranks_refreshed_other_units(strategy: str) -> None:
    """Units that a rank skipped since the last step are stale there only."""
    pairs = [pair(lambda: Partial(2), sharding_strategy=strategy) for _ in range(2)]
    for step in range(2):
        for rank in range(2):
            for a, b in (
                zip(*pairs, strict=True)
                if rank == dist.get_rank()
                else [tuple(plain for plain, _ in pairs)]
            ):
                a.runs = b.runs = (0, 1) if rank else (0,)

                def evaluate(grad: torch.Tensor, a: Any = a) -> None:
                    with torch.no_grad():
                        a(batch(3))

                first = a(batch(rank))
                handle = b.blocks[0].register_forward_hook(
                    lambda _m, _a, output, hook=evaluate: output.register_hook(hook) and None
                )
                loss = (first + b(batch(rank))).square().mean()
                handle.remove()
                (loss / 2 if a is pairs[0][0] else loss).backward()
        errors = [gradient_error(mine, theirs) for theirs, mine in pairs]
        assert max(errors) < 1e-6, (step, errors)
        for model in (each for models in pairs for each in models):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()


class Repeated(Stack):
    """A stack whose middle block runs again; a gradient does not reach the forward `detached`."""

    order: tuple[int, ...] = (0, 1, 2, 1)
    detached = -1

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for place, index in enumerate(self.order):
            added = self.blocks[index](x) - x
            x = x + (added.detach() if place == self.detached else added)
        return x


@on_ranks(2, depth=[1, 2])
def test_a_unit_run_twice_may_lack_the_gradient_of_one_forward_on_a_rank(depth: int) -> None:
    plain, sharded = pair(Repeated, unshard_prefetch_depth=depth)
    # From the second step on, units are prefetched in the forward as well.
    for detached in (-1, 1, 3):
        for rank in range(2):
            for model in (plain, sharded) if rank == dist.get_rank() else (plain,):
                model.detached = detached if rank == 1 else -1
                loss = model(batch(rank)).square().mean()
                (loss / 2 if model is plain else loss).backward()
    assert gradient_error(sharded, plain) < 1e-6


# Where it is gathered, its gathered parameters are unfrozen, and the sharded ones when it is freed.
@on_ranks(2, strategy=["no_shard", "optim"])
def test_a_unit_unfrozen_before_reduce_grad_may_be_gathered_on_one_rank(strategy: str) -> None:
    plain, model = pair(Skipping, sharding_strategy=strategy)
    model.set_reshard_after_backward(False)
    for each in (plain, model):
        each.blocks[1].requires_grad_(False)
    model.skip = 1 if dist.get_rank() else None
    with model.no_sync():
        own_loss(model).backward()
    for rank in range(2):
        plain.skip = 1 if rank else None
        (loss_of(plain, rank) / 2).backward()
    model.blocks[1].requires_grad_(True)
    model.reduce_grad()
    for unit in (*model.blocks, model):
        unit.reshard()
    assert gradient_error(model, plain) < 1e-6


@on_ranks(2)
def test_a_double_backward_may_reach_a_unit_after_its_reduction_on_one_rank() -> None:
    """The in-place operation ends the backward of `inner` when an earlier forward's begins."""
    rank = dist.get_rank()

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.mul_(0.9)
        return m.linear(x) if m.runs else x

    def make() -> nn.Module:
        inner = Formula(run, linear=nn.Linear(5, 5))
        return Formula(
            lambda m, x: m.outer(x * 1.0), outer=Formula(lambda m, x: m.inner(x), inner=inner)
        ).double()

    def penalty(model: Any, runs: bool, seed: int) -> torch.Tensor:
        model.outer.inner.runs = runs
        x = batch(seed, 5, dtype=torch.float64).requires_grad_()
        loss = model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return grad.square().sum() + loss

    plain, model = pair(make, lambda m: (m.outer.inner, m.outer), sharding_strategy="optim")
    for other in range(2):
        (penalty(plain, bool(other), other) / 2).backward()
    penalty(model, bool(rank), rank).backward()
    assert gradient_error(model, plain) < 1e-12


@on_ranks(2, strategy=["no_shard", "optim"])
def test_a_gradient_of_negative_zeros_on_one_rank_is_a_gradient_on_all(strategy: str) -> None:
    rank, x = dist.get_rank(), torch.ones(64, requires_grad=True)
    block = Formula(lambda m, x: x * m.scale, scale=nn.Parameter(torch.ones(64)))
    model = Formula(lambda m, x: m.block(x) if rank == 0 else x, block=block)
    wrap(model, [block], sharding_strategy=strategy)
    (model(x).sum() * -0.0).backward()
    assert block.scale.grad is not None


@on_ranks(2)
def test_trace_pools_that_differ_between_ranks_do_not_change_the_order_of_gathers() -> None:
    plain, sharded = pair(lambda: Repeated(4), enable_trace_pool=True)
    once, late = (0, 1, 2, 1, 3), (0, 1, 2, 3, 1)
    # Rank 1 traces another pass in the second step, and makes another plan.
    for order, detached in ((once, -1), (once, 1), (once, -1), (late, -1)):
        for rank in range(2):
            for model in (plain, sharded) if rank == dist.get_rank() else (plain,):
                model.order, model.detached = order, detached if rank == 1 else -1
                loss = model(batch(rank)).square().mean()
                (loss / 2 if model is plain else loss).backward()
    assert gradient_error(sharded, plain) < 1e-6


TIMEOUT_S = 1.5
WIDTH = 8


class Block(nn.Module):
    """A layer with callbacks before its forward and at the end of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.before: Callable[[], None] | None = None
        self.in_backward: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before is not None:
            self.before()
        x = x * 1
        act = self.in_backward
        if act is not None:
            # The gradient of `x` is one of this block's last, right before the block's reduction.
            x.register_hook(lambda grad: act())
        return x @ self.weight


def _mesh_of_its_own(timeout_s: float) -> DeviceMesh:
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
    return DeviceMesh.from_group(group, "cpu")


def _model(timeout_s: float, strategy: str) -> tuple[nn.Module, list[Block]]:
    """A model of three units over a dedicated process group, after one complete step."""
    blocks = [Block(), Block(), Block()]
    # One collective at a time, so that the error reports the first one that lacks a rank.
    options: dict[str, Any] = {"enable_unshard_prefetch": False, "enable_async_reduce_grad": False}
    options |= {"mesh": _mesh_of_its_own(timeout_s), "sharding_strategy": strategy}
    model = wrap(nn.Sequential(*blocks), blocks, **options)
    _step(model)
    return model, blocks


def _step(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, WIDTH)).square().mean()
    loss.backward()
    return loss.detach()


def _error_without_rank_1(strategy: str, *, in_backward: bool) -> str:
    """Stop rank 1 at the middle unit; return the error message of rank 0."""
    model, blocks = _model(TIMEOUT_S, strategy)
    if dist.get_rank() == 1:
        setattr(blocks[1], "in_backward" if in_backward else "before", fail)
    try:
        _step(model)
    except PlannedFailure:
        # Like a rank that hangs: its process exists and issues no collective.
        time.sleep(TIMEOUT_S + 0.3)
        return ""
    except RuntimeError as error:
        assert isinstance(error.__cause__, RuntimeError)
        return str(error)
    raise AssertionError("no rank was missed")


@pytest.mark.parametrize(
    ("strategy", "in_backward", "collective"),
    [
        ("optim_grads_params", False, "all-gather of 2/0"),
        ("optim_grads_params", True, "reduce-scatter of 1/0"),
        ("no_shard", True, "all-reduce of 1/0"),
    ],
)
def test_unresponsive_rank_raises_an_error_that_names_unit_and_collective(
    pools: RankPools, strategy: str, in_backward: bool, collective: str
) -> None:
    message, _ = pools(2).run(_error_without_rank_1, strategy, in_backward=in_backward)
    assert message.startswith(f"{collective} failed on rank 0: rank 1 did not take part within 1.5")
    assert "The first error in the logs of rank 1 is the cause" in message
    assert "RuntimeOptions(check_ranks='always')) names the unit" in message


@on_ranks(2)
def test_rank_comparison_at_the_first_use_reports_a_missing_rank() -> None:
    model: Any = fully_shard(Block(), mesh=_mesh_of_its_own(TIMEOUT_S))
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT_S + 0.3)
        return
    text = error_message(RuntimeError, lambda: model(torch.ones(2, WIDTH)))
    assert text.startswith("comparison of what ranks sharded, at the first use failed on rank 0")


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def _die_during_a_step() -> Any:
    model, blocks = _model(30.0, "optim_grads_params")
    if dist.get_rank() == 1:
        blocks[1].before = lambda: os._exit(9)
    _step(model)


def test_rank_that_dies_raises_an_error_that_names_unit_and_collective(own_pool: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        own_pool.run(_die_during_a_step)
    message = str(raised.value)
    assert "rank 1: the process died" in message
    assert "all-gather of 2/0 failed on rank 0: the connection to rank 1 was lost" in message
    # Long before the timeout: a closed connection is noticed at once.
    assert time.monotonic() - started < 20.0


FAILURES = [
    # Other ranks of the group, the backend's error, and its explanation.
    ([1], "Timed out", ": rank 1 did not take part within 5 s, the timeout of this process group"),
    ([1, 2], "Broken pipe", ": the connection to one of ranks 1, 2 was lost: a process ended"),
    ([*range(1, 20)], "Timed out", ": one of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more did"),
    ([], "Timed out", ": one of the others did not take part within 5 s"),
    ([1], "bad sizes", ": bad sizes"),
]


@pytest.mark.parametrize(("others", "raised", "explanation"), FAILURES)
def test_failure_message_explains_the_backend_error_before_quoting_it(
    monkeypatch: pytest.MonkeyPatch, others: list[int], raised: str, explanation: str
) -> None:
    members = ([0, *others], timedelta(seconds=5))
    monkeypatch.setattr(interface, "members_of", lambda group: members)
    error = interface.collective_error("gather", None, RuntimeError(f"{raised}\nand a trace"))
    assert str(error).startswith(f"gather failed on rank 0{explanation}")
    assert raised in str(error)
    assert "trace" not in str(error)
