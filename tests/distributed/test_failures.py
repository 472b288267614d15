"""Regression tests of wrong results known from other packages, and training after an exception."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any, override
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint as recompute

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.comm import backends
from megatron_fsdp_v2.comm.interface import Collective, Work
from megatron_fsdp_v2.params.gradients import GroupGrads
from megatron_fsdp_v2.runtime.context import PROCESS
from megatron_fsdp_v2.runtime.module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    batch,
    dying_collectives,
    error_message,
    fp64_pair,
    gradient_error,
    loss_of,
    mesh_of,
    on_mesh,
    own_loss,
    pair,
    plain_loss,
    record_collectives,
    step_all,
    train_both,
    weight_error,
    wrap,
)
from tests.reference.failing import PlannedFailure, fail, fail_in_backward, failing
from tests.reference.models import Checkpointed, Formula, Skipping, Stack

# -- weights changed outside the optimizer --------------------------------------------------------


def _write(model: nn.Module, weights: dict[str, torch.Tensor], how: str) -> None:
    if how in ("load_state_dict", "assign"):
        model.load_state_dict(weights, assign=how == "assign")
    elif how == "set_model_state_dict":
        donor = wrap(Stack())
        donor.load_state_dict(weights)
        set_model_state_dict(model, donor.state_dict())
    for name, param in model.named_parameters():
        if how == "copy_":
            with torch.no_grad():
                param.copy_(weights[name])
        elif how == "local":
            start, end = param.local_rows
            with torch.no_grad():
                param.to_local().copy_(weights[name][start:end])
        elif how == "data":
            param.data.copy_(weights[name])
        elif how == "detached local":
            start, end = param.local_rows
            param.detach().to_local().copy_(weights[name][start:end])
        elif how == "foreach":
            with torch.no_grad():
                torch._foreach_zero_([param])
                torch._foreach_add_([param], [_like(param, weights[name])])


def _like(param: Any, full: torch.Tensor) -> Any:
    donor = param.detach().clone()
    donor.copy_(full)
    return donor


WRITTEN = [
    ("load_state_dict", "step"),
    ("load_state_dict", "evaluation"),
    ("load_state_dict", "forward with gradients"),
    ("assign", "step"),
    ("copy_", "step"),
    ("local", "step"),
    ("set_model_state_dict", "evaluation"),
    ("copy_", "evaluation"),
    ("local", "evaluation"),
    ("data", "evaluation"),
    ("detached local", "evaluation"),
    ("foreach", "evaluation"),
]


@pytest.mark.parametrize(("how", "before"), WRITTEN, ids=" after ".join)
@on_ranks(2, strategy=STRATEGIES[1::2])
def test_next_forward_uses_weights_changed_outside_the_optimizer(
    strategy: str, how: str, before: str
) -> None:
    torch.manual_seed(1)
    other = Stack()
    model = wrap(Stack(), sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own_loss(model).backward()
    step_all(optimizer)
    if before != "step":
        with torch.set_grad_enabled(before == "forward with gradients"):
            model(batch(0))
    _write(model, {n: p.detach() for n, p in other.named_parameters()}, how)
    expected = other(batch(0)).detach()
    for trains in (False, False, True, False):
        if trains:
            own_loss(model).backward()
            continue
        with torch.no_grad():
            assert float((model(batch(0)) - expected).norm() / expected.norm()) < 1e-6


# -- different numbers of evaluations -------------------------------------------------------------


@on_ranks(2, strategy=STRATEGIES[:3], trains_first=[False, True])
def test_ranks_may_evaluate_different_numbers_of_batches_below_zero_3(
    strategy: str, trains_first: bool
) -> None:
    model = wrap(Stack(), sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if trains_first:
        own_loss(model).backward()
        optimizer.step()
    recorded = record_collectives(model)

    def evaluate(times: int) -> None:
        for _ in range(times):
            with torch.no_grad():
                model(batch(0))

    evaluate(1)
    recorded.sent.clear()
    evaluate(3 * dist.get_rank())
    collectives = len(recorded.sent)
    optimizer.zero_grad()
    own_loss(model).backward()
    optimizer.step()
    evaluate(1)
    assert collectives == 0


# -- recomputation --------------------------------------------------------------------------------


@on_ranks(2, use_reentrant=[False, True])
def test_autocast_applies_in_a_recomputation(use_reentrant: bool) -> None:
    plain, sharded = pair(lambda: Checkpointed(use_reentrant=use_reentrant))
    seen: list[torch.dtype] = []
    for block in sharded.blocks:
        block.up.register_forward_hook(lambda m, a, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [plain_loss(plain), own_loss(sharded)]
    for loss in losses:
        loss.backward()
    # Three blocks, each once in the forward and once more in the backward.
    assert seen == [torch.bfloat16] * 6
    assert gradient_error(sharded, plain) < 2e-3


@on_ranks(2, strategy=["optim_grads", "optim_grads_params"], use_reentrant=[None, False, True])
def test_several_passes_may_run_in_one_autocast_context(
    strategy: str, use_reentrant: bool | None
) -> None:
    """Autocast stores casts of weights, from evaluations too, until the context ends."""

    def build() -> nn.Module:
        return Stack() if use_reentrant is None else Checkpointed(use_reentrant=use_reentrant)

    x, pairs = torch.linspace(-1, 1, 10).view(2, 5), pair(build, sharding_strategy=strategy)
    outputs: list[list[torch.Tensor]] = []
    for model in pairs:
        found: list[torch.Tensor] = []
        outputs.append(found)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for step in range(2):
                with torch.no_grad():
                    found.append(model(x))
                # Both forwards of a loss share the casts.
                found.append((model(x + step).float() * model(x).float()).mean())
                found[-1].backward()
    assert all(map(torch.equal, *outputs))
    assert gradient_error(pairs[1], pairs[0]) == 0.0


def _unit_with_detached_input(model: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model.outside(x).tanh()
    return y + model.unit(y.detach())


def _recomputed_twice(model: Any, x: torch.Tensor) -> Any:
    for _ in range(2):
        x = recompute(_unit_with_detached_input, model, x, use_reentrant=False)
    return x


@on_ranks(2)
def test_recomputation_that_stops_early_needs_no_backward() -> None:
    plain, sharded = pair(
        lambda: Formula(_recomputed_twice, outside=nn.Linear(5, 5), unit=nn.Linear(5, 5)),
        lambda model: [model.unit],
    )
    found = []
    for model in (plain, sharded):
        x = torch.linspace(-1, 1, 10).view(2, 5).requires_grad_()
        found.append(torch.autograd.grad(model(x).square().mean(), x)[0])
    assert torch.equal(*found)
    backward_both(plain, sharded)
    assert gradient_error(sharded, plain) < 1e-6


# -- interruptions --------------------------------------------------------------------------------

EXACT = 1e-12


def _fail_in_backward(model: Any, block: int = 1) -> None:
    with failing(model.blocks[block].register_forward_hook(fail_in_backward)):
        own_loss(model, 7).backward()


def _forward_without_backward(model: Any) -> None:
    own_loss(model, 7)


def _adamw(*models: Any) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]


def _trained(strategy: str, **options: Any) -> tuple[Any, Any, list[Any]]:
    """A plain and a sharded model and their optimizers after two steps."""
    plain, model = fp64_pair(strategy, **options)
    optimizers = _adamw(plain, model)
    train_both(plain, model, optimizers, range(2))
    return plain, model, optimizers


class First(nn.Sequential):
    """Takes a list, of which it uses the first tensor."""

    @override
    def forward(self, inputs: list[torch.Tensor]) -> Any:
        return super().forward(inputs[0])


@on_ranks(2)
def test_a_list_holds_the_tensors_of_its_owner_after_a_failed_forward_and_the_next() -> None:
    model: Any = fully_shard(First(nn.Linear(4, 4)), mesh=mesh_of(2))
    inputs = [torch.ones(2, 4, requires_grad=True)]
    (own,) = inputs
    with failing(model[0].register_forward_pre_hook(fail)):
        model(inputs)
    model(inputs)
    assert inputs[0] is own


@on_ranks(2, strategy=STRATEGIES[::3])
def test_optimizer_of_gathered_weights_raises_at_its_first_step(strategy: str) -> None:
    plain, model = fp64_pair(strategy)
    _forward_without_backward(model)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    message = error_message(RuntimeError, early.step)
    model.reshard()
    optimizers = _adamw(plain, model)
    train_both(plain, model, optimizers, range(2))
    assert message.startswith("the optimizer holds the gathered weights of input.weight")
    assert "reshard()" in message
    assert weight_error(model, plain) < EXACT


@on_ranks(2, before_it=["", "gathered", "exception in a backward"])
def test_functional_call_is_rejected_and_replaces_nothing(before_it: str) -> None:
    plain, model, optimizers = _trained(STRATEGIES[-1])
    if before_it == "gathered":
        model.unshard()
    elif before_it:
        _fail_in_backward(model)
        model.zero_grad()
    other = {name: torch.zeros(param.shape).double() for name, param in model.named_parameters()}
    if before_it == "gathered":
        other = {name: torch.nn.Parameter(value) for name, value in other.items()}
    before = dict(other)
    x = torch.ones(2, 5).double()
    message = error_message(ValueError, lambda: torch.func.functional_call(model, other, (x,)))
    untouched = all(other[name] is before[name] and not other[name].any() for name in other)
    train_both(plain, model, optimizers, range(2, 4))
    assert message.startswith("parameter ")
    assert "functional_call" in message and "load_state_dict" in message
    assert untouched
    assert weight_error(model, plain) < EXACT


@on_ranks(2, strategy=["optim", "optim_grads"])
def test_reduce_grad_after_a_backward_that_failed_on_one_rank_meets_the_other(
    strategy: str,
) -> None:
    plain, model, optimizers = _trained(strategy)
    with model.no_sync():
        own_loss(model, 7).backward()
    if dist.get_rank() == 0:
        _fail_in_backward(model)
    else:
        own_loss(model, 7).backward()
    model.reduce_grad()
    model.zero_grad()
    train_both(plain, model, optimizers, range(2, 4))
    assert weight_error(model, plain) < EXACT


def _check_goes_on_after_failing_on_one_rank(
    strategy: str, plan: Callable[[Any], Any], **options: Any
) -> None:
    """Train, fail in the backward of rank 0 alone, and train on.

    Args:
        strategy: A strategy below ZeRO-3.
        plan: Given the loss of rank 0, returns the context in which its backward fails.
        options: Other options of the sharded model.
    """
    plain, model, optimizers = _trained(strategy, **options)
    model.zero_grad()
    loss = own_loss(model, 7)
    if dist.get_rank() == 0:
        with plan(loss), pytest.raises(PlannedFailure):
            loss.backward()
    else:
        loss.backward()
    model.reset_iter_state()
    model.zero_grad()
    train_both(plain, model, optimizers, range(2, 4))
    assert weight_error(model, plain) < EXACT


# Such as out of memory in the loss of one rank. Its model is not told that a backward began.
@on_ranks(2, strategy=STRATEGIES[:3])
def test_training_goes_on_after_a_backward_that_reached_no_unit_on_one_rank(strategy: str) -> None:
    def plan(loss: torch.Tensor) -> Any:
        loss.register_hook(fail)
        return contextlib.nullcontext()

    _check_goes_on_after_failing_on_one_rank(strategy, plan)


# The other rank reduced the unit. Afterwards reductions of different units were paired.
@on_ranks(2, strategy=STRATEGIES[:3], index=[0, 2, 3])
def test_training_goes_on_after_a_main_gradient_was_not_allocated_on_one_rank(
    strategy: str, index: int
) -> None:
    new_main, left = GroupGrads._new_main, index

    def fail_once(self: GroupGrads, **options: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left == -1:
            raise PlannedFailure
        return new_main(self, **options)

    patched = mock.patch.object(GroupGrads, "_new_main", fail_once)
    # Ranks that compare all collectives have compared this one.
    check_ranks = "always" if index else "once"
    _check_goes_on_after_failing_on_one_rank(
        strategy, lambda loss: patched, check_ranks=check_ranks
    )


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("use_reentrant", [None, True])
@on_ranks(2, strategy=STRATEGIES[1::2])
def test_an_earlier_loss_has_its_gradients_after_ctrl_c_in_a_forward(
    strategy: str, use_reentrant: bool | None
) -> None:
    def build() -> Any:
        recomputes = use_reentrant is not None
        return (Checkpointed(use_reentrant=use_reentrant) if recomputes else Stack()).double()

    plain, model = pair(build, sharding_strategy=strategy)
    earlier = own_loss(model)
    handle = model.blocks[1].register_forward_pre_hook(_interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        own_loss(model, 1)
    handle.remove()
    earlier.backward()
    for rank in range(2):
        (loss_of(plain, rank) / 2).backward()
    assert gradient_error(model, plain) < EXACT
    train_both(plain, model, _adamw(plain, model), range(1, 3))
    assert weight_error(model, plain) < EXACT


def _try_block(self: Any, x: torch.Tensor) -> Any:
    with contextlib.suppress(PlannedFailure):
        self.block(x)
    return self.output(x)


@on_ranks(2)
def test_unit_that_raises_and_whose_caller_goes_on_is_resharded() -> None:
    block = Formula(lambda self, x: fail(self.layer(x)), layer=nn.Linear(4, 4))
    model = Formula(_try_block, block=block, output=nn.Linear(4, 4))
    wrap(model, [block])
    loss = model(torch.ones(2, 4)).sum()
    assert not unit_of(block).is_unsharded
    loss.backward()


@on_ranks(2, is_async=[False, True], at_issue=[False, True])
def test_next_forward_gathers_weights_after_a_failed_gather(is_async: bool, at_issue: bool) -> None:
    plain, model = pair(enable_unshard_prefetch=is_async)
    lost = mock.Mock(side_effect=RuntimeError("Connection closed by peer"))
    with torch.no_grad():
        own_loss(model, 0)
    group = unit_of(model.blocks[1]).groups[0]

    def fails(collective: Collective, *, async_op: bool) -> Work:
        assert async_op is is_async
        collective.output.fill_(float("nan"))
        if at_issue:
            lost()
        work = mock.Mock(wait=lost)
        with mock.patch.object(backends, "all_gather_single", return_value=work):
            return communicator.issue(collective, async_op=async_op)

    broken: Any = backends.CpuCommunicator()
    broken.issue = fails
    communicator = group.replace_communicator(broken)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Connection closed by peer"):
        own_loss(model, 0)
    group.replace_communicator(communicator)
    backward_both(plain, model, 0)
    assert gradient_error(model, plain) < 1e-6


@on_ranks(2, strategy=STRATEGIES[1::2])
def test_reductions_of_a_failed_backward_are_dropped(strategy: str) -> None:
    """Of the two parameters of the second group, one is unused."""
    params = {name: nn.Parameter(torch.ones(8, 4)) for name in ("first", "second", "unused")}
    for name in ("second", "unused"):
        params[name].requires_gradient_reduction = False  # type: ignore[attr-defined]
    model = wrap(
        Formula(lambda m, x: (x @ m.first + x @ m.second).sum(), **params),
        sharding_strategy=strategy,
        on_missing_grad="error",
    )
    with pytest.raises(RuntimeError, match="no gradient arrived for unused"):
        model(torch.ones(2, 8)).backward()
    model.reset_iter_state()
    assert not any(p.grad.count_nonzero() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("evaluates", [False, True], ids=["reset", "evaluation"])
@on_ranks(2, strategy=STRATEGIES[:-1])
def test_a_failed_backward_leaves_no_rank_ahead_of_the_others(
    strategy: str, evaluates: bool
) -> None:
    """A backward fails on all ranks, after one rank has skipped a unit; a step follows."""
    options = {"sharding_strategy": strategy, "check_ranks": "always"}
    plain, model = pair(lambda: Skipping().double(), **options)
    model.skip = 1 if dist.get_rank() == 1 else None
    _fail_in_backward(model, block=0)
    if evaluates:
        with torch.inference_mode():
            own_loss(model, 3)
    else:
        model.reset_iter_state()
    dist.all_reduce(torch.ones(1))
    model.zero_grad()
    own_loss(model, 1).backward()
    for rank in range(2):
        plain.skip = 1 if rank == 1 else None
        (loss_of(plain, rank, 1) / 2).backward()
    assert gradient_error(model, plain) < EXACT


@on_ranks("mesh", mesh=["2", "HSDP 2x2"], strategy=STRATEGIES[:-1])
def test_a_rank_whose_backward_alone_fails_at_its_end_stays_in_step(
    mesh: str, strategy: str
) -> None:
    plain, model = pair(lambda: Stack().double(), sharding_strategy=strategy, **on_mesh(mesh))
    inputs = batch(dist.get_rank(), 7, dtype=torch.float64).requires_grad_()
    if dist.get_rank() == 0:
        inputs.register_hook(fail)
    with contextlib.suppress(PlannedFailure):
        model(inputs).square().mean().backward()
    model.zero_grad()
    backward_both(plain, model, 1)
    assert gradient_error(model, plain) < EXACT


# Below ZeRO-3 another rank may have issued it, so that the repair does.
@on_ranks(2, strategy=STRATEGIES[2:])
def test_a_reduction_that_is_not_issued_leaves_its_gradients_at_zero_3(strategy: str) -> None:
    def run(m: Any, last: float) -> torch.Tensor:
        return m.a.sum() + m.b.sum() + (m.c.sum() * last if last else 0)

    weights = {name: nn.Parameter(torch.ones(4).double()) for name in "bc"}
    model: Any = Formula(run, a=nn.Parameter(torch.ones(4)), **weights)
    wrap(model, (), sharding_strategy=strategy, on_missing_grad="error")
    model(1.0).backward()
    with pytest.raises(RuntimeError, match="no gradient arrived for c"):
        model(0.0).backward()
    model.reset_iter_state()
    kept = float(strategy == "optim_grads_params")
    for param, value in ((model.a, 0.0), (model.b, kept)):
        assert param.grad is not None and param.grad.to_local().eq(value).all()


# -- a new training after one that died -----------------------------------------------------------


@on_ranks(2, strategy=STRATEGIES)
def test_a_training_that_died_in_any_collective_leaves_nothing_to_the_next(strategy: str) -> None:
    """As after a restart within a process: another model, on process groups of its own."""

    def trained(mesh: Any) -> Any:
        torch.manual_seed(0)
        model = wrap(Stack(), mesh=mesh, sharding_strategy=strategy, enable_trace_pool=True)
        contexts.append(weakref.ref(unit_of(model).context))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(3):
            own_loss(model, step).backward()
            step_all(optimizer)
        return [param.full_tensor().detach() for param in model.parameters()]

    contexts: list[Any] = []
    with dying_collectives() as dying:
        expected = trained(mesh_of(2))
        last = dying.count
        others = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
        for dying.dies_at in range(last // 2, last, 3):
            dying.count = 0
            with pytest.raises(RuntimeError, match="a rank is gone"):
                trained(mesh_of(2))
            dying.count = -(10**6)
            again = trained(others)
            assert all(map(torch.equal, again, expected)), dying.dies_at
    gc.collect()
    assert not PROCESS.under_way
    assert not any(context() for context in contexts)
