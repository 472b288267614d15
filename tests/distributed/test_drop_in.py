"""What a PyTorch user has around a model works on a sharded one, unmodified."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    fp64_pair,
    held_error,
    listen,
    own_loss,
    plain_loss,
    train_both,
    weight_error,
    wrap,
)
from tests.ranks import RankPools
from tests.reference.models import Stack

FP64 = torch.float64
RANKS = 3
EXACT = 1e-12
"""Tolerance in fp64: far above its rounding, far below any mistake."""


# -- optimizers -----------------------------------------------------------------------------------

CLASSES: tuple[Any, ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.RMSprop,
    optim.Adamax,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)
WITH_FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"{cls.__name__}, for-loop": (cls, {"foreach": False}) for cls in CLASSES},
    **{f"{cls.__name__}, foreach": (cls, {"foreach": True}) for cls in CLASSES},
    **{f"{cls.__name__}, fused": (cls, {"fused": True}) for cls in WITH_FUSED},
}


def _optimizer_error(cls: Any, options: dict[str, Any]) -> float:
    plain, sharded = fp64_pair()
    made: list[Any] = []
    for model in (plain, sharded):
        extra = {"momentum": 0.9, "weight_decay": 0.1} if cls is optim.SGD else {}
        made.append(cls(model.parameters(), lr=0.01, **extra, **options))
    train_both(plain, sharded, (made[0], made[1]), range(3))
    return weight_error(sharded, plain)


def optimizer_errors() -> tuple[dict[str, float | str], list[int]]:
    """Error by optimizer, or what it raised; and rows of every parameter here."""
    found: dict[str, float | str] = {}
    for name, (cls, options) in OPTIMIZERS.items():
        try:
            found[name] = _optimizer_error(cls, options)
        except NotImplementedError as error:
            found[name] = str(error)
    rows = [int(param.to_local().shape[0]) for param in fp64_pair()[1].parameters()]
    return found, rows


@pytest.fixture(scope="module")
def optimizers(pools: RankPools) -> Iterator[list[tuple[dict[str, float | str], list[int]]]]:
    """`optimizer_errors` of every rank."""
    yield pools(RANKS).run(optimizer_errors)


def test_the_shards_that_optimizers_meet_here_are_uneven_and_some_empty(optimizers: Any) -> None:
    rows = [rows for _, rows in optimizers]
    assert any(0 in r for r in rows)
    assert any(len({r[i] for r in rows} - {0}) > 1 for i in range(len(rows[0])))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_shards_like_the_whole(optimizers: Any, name: str) -> None:
    for found, _ in optimizers:
        assert isinstance(found[name], float), found[name]
        assert found[name] < EXACT


def whole_matrix_optimizers() -> dict[str, str]:
    """What optimizers that need whole tensors say at their first step."""
    said = {}
    for cls in (optim.Adafactor, optim.LBFGS):
        model = nn.Linear(5, 8, bias=False).double()
        model.blocks = []
        wrap(model)
        optimizer: Any = cls(model.parameters(), lr=0.01)

        def closure(model: Any = model) -> torch.Tensor:
            loss = own_loss(model, 0)
            loss.backward()
            return loss

        try:
            optimizer.step(closure)
            said[cls.__name__] = "nothing"
        except RuntimeError as error:
            said[cls.__name__] = str(error)
    return said


def test_an_optimizer_that_needs_whole_tensors_is_rejected_by_name(pools: RankPools) -> None:
    for said in pools(2).run(whole_matrix_optimizers):
        for name, message in said.items():
            assert name in message


# -- gradients ------------------------------------------------------------------------------------


def clipped() -> dict[tuple[str, float], tuple[float, float, float, float]]:
    """By strategy and norm: the norm, `item()` of it, the reference's, error of clipped grads."""
    found = {}
    for strategy in STRATEGIES:
        for order in (1.0, 2.0, float("inf")):
            plain, sharded = fp64_pair(strategy)
            plain_loss(plain, 0).backward()
            own_loss(sharded, 0).backward()
            expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01, order))
            norm: Any = nn.utils.clip_grad_norm_(sharded.parameters(), 0.01, order)
            error = _gradient_error(sharded, plain)
            whole = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            found[strategy, order] = (whole, float(norm.item()), expected, error)
    return found


def _gradient_error(sharded: nn.Module, plain: nn.Module) -> float:
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max(held_error(p.grad, q.grad) for p, q in pairs if p.grad is not None)  # type: ignore[arg-type]


def test_clip_grad_norm_returns_and_applies_the_global_norm_on_every_rank(
    pools: RankPools,
) -> None:
    for found in pools(RANKS).run(clipped):
        assert len(found) == 3 * len(STRATEGIES)
        for case, (norm, item, expected, error) in found.items():
            assert norm == pytest.approx(expected, rel=1e-12), case
            assert item == norm, f"{case}: a partial norm would be logged"
            assert error < EXACT, case


def gradient_utilities() -> tuple[float, float, float, int, int, int]:
    """Error of clipped values, total norm and the reference's, counted parameters."""
    plain, sharded = fp64_pair()
    plain_loss(plain, 0).backward()
    own_loss(sharded, 0).backward()
    grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (sharded, plain)]
    total: Any = nn.utils.get_total_norm(grads[0])
    reference = float(nn.utils.get_total_norm(grads[1]))
    for model in (plain, sharded):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    held = sum(p.to_local().numel() for p in sharded.parameters())
    counts = [sum(p.numel() for p in m.parameters()) for m in (sharded, plain)]
    error = _gradient_error(sharded, plain)
    return error, float(total.full_tensor()), reference, counts[0], counts[1], held


def test_total_norm_value_clipping_and_counting_are_global(pools: RankPools) -> None:
    results = pools(RANKS).run(gradient_utilities)
    for error, total, reference, counted, expected, _ in results:
        assert error < EXACT
        assert total == pytest.approx(reference, rel=1e-12)
        assert counted == expected
    assert sum(held for *_, held in results) == results[0][4]


class OneRow(nn.Module):
    """A parameter of one row: one rank alone holds it, and its gradient."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
        super().__init__()
        rows = [1] + [6] * (len(dtypes) - 1)
        self.weights = nn.ParameterList(
            torch.full((r, 5), 0.5, dtype=d) for r, d in zip(rows, dtypes, strict=True)
        )
        self.blocks: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([(x.to(w.dtype) @ w.t()).double() for w in self.weights], 1)


def _impatient_mesh() -> DeviceMesh:
    """A mesh whose collectives fail after two seconds, where others would hang for minutes."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    return DeviceMesh.from_group(group, "cpu")


def gradient_on_one_rank(dtypes: tuple[torch.dtype, ...]) -> float:
    """A global norm where ranks hold gradients of different dtypes."""
    model = wrap(OneRow(dtypes), mesh=_impatient_mesh())
    model(batch(0)).square().mean().backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def test_clip_grad_norm_works_where_ranks_hold_gradients_of_different_dtypes(
    pools: RankPools,
) -> None:
    dtypes = (torch.float64, torch.float32)
    norms = pools(2).run(gradient_on_one_rank, dtypes)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert norms[0] > 0


def scaled_steps(strategy: str, where: str) -> list[tuple[float, bool]]:
    """Scale after every step, and whether weights moved in it; step 1 overflows on rank 1 only."""
    _, model = fp64_pair(strategy)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0, growth_interval=1)
    trace = []
    for step in range(3):
        optimizer.zero_grad()
        before = [p.to_local().detach().clone() for p in model.parameters()]
        loss = own_loss(model, step)
        overflows = step == 1 and dist.get_rank() == 1
        scaler.scale(loss * float("inf") if overflows and where == "loss" else loss).backward()
        if overflows and where == "shard":
            next(p.grad for p in model.parameters() if p.grad is not None).to_local().fill_(1e400)
        scaler.step(optimizer)
        scaler.update()
        moved = any(
            not torch.equal(old, p.to_local())
            for old, p in zip(before, model.parameters(), strict=True)
        )
        trace.append((scaler.get_scale(), moved))
    return trace


def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step(pools: RankPools) -> None:
    # Where gradients are replicated, an overflow that only one rank's gradient has cannot be.
    cases = [(s, "loss") for s in STRATEGIES] + [(s, "shard") for s in STRATEGIES[1:]]
    for strategy, where in cases:
        for trace in pools(RANKS).run(scaled_steps, strategy, where):
            assert trace == [(8.0, True), (4.0, False), (8.0, True)], (strategy, where)


# -- the module itself ----------------------------------------------------------------------------


class WithBuffers(Stack):
    """Running statistics, a buffer and dropout."""

    def __init__(self) -> None:
        super().__init__(1)
        self.statistics = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("offset", torch.full((5,), 0.25))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.dropout(self.statistics(x) + self.offset))


def module_habits() -> dict[str, bool]:
    """What a sharded module does when it is treated as a module."""
    torch.manual_seed(0)
    model = WithBuffers()
    buffers = dict(model.named_buffers())
    wrap(model)
    x = batch(0)
    checks = {
        "buffers are the same tensors": all(
            buffer is buffers[name] for name, buffer in model.named_buffers()
        ),
        "buffers are in the state dict": set(buffers) <= set(model.state_dict()),
    }
    model.train()
    model(x)
    checks["running statistics are updated"] = int(model.statistics.num_batches_tracked) == 1
    model.eval()
    with torch.no_grad():
        checks["eval() reaches children"] = torch.equal(model(x), model(x))
    checks["eval() leaves statistics"] = int(model.statistics.num_batches_tracked) == 1
    model.train()
    model.blocks[0].up.requires_grad_(False)
    model(x).square().mean().backward()
    checks["frozen after wrapping: no gradient"] = all(
        p.grad is None for p in model.blocks[0].up.parameters()
    )
    model.blocks[0].up.requires_grad_(True)
    model.zero_grad()
    model(x).square().mean().backward()
    checks["trained again: a gradient"] = all(
        p.grad is not None for p in model.blocks[0].up.parameters() if p.to_local().numel()
    )
    model.requires_grad_(False)
    checks["all frozen: no graph"] = not model(x).requires_grad
    checks["named_parameters keep names and shapes"] = [
        (n, tuple(p.shape)) for n, p in model.named_parameters()
    ] == [(n, tuple(p.shape)) for n, p in WithBuffers().named_parameters()]
    return checks


def test_a_sharded_module_is_still_a_module(pools: RankPools) -> None:
    for checks in pools(2).run(module_habits):
        assert [claim for claim, holds in checks.items() if not holds] == []


def thawed() -> list[bool]:
    """Whether a parameter frozen when it was sharded has a gradient once it is trained."""
    model = Stack()
    model.blocks[0].up.requires_grad_(False)
    wrap(model)
    model.blocks[0].up.requires_grad_(True)
    model(batch(dist.get_rank())).square().mean().backward()
    params = [p for p in model.blocks[0].up.parameters() if p.to_local().numel()]
    return [p.grad is not None for p in params]


def test_a_parameter_frozen_at_wrapping_can_be_trained_later(pools: RankPools) -> None:
    for found in pools(2).run(thawed):
        assert found
        assert all(found)


def gathers_with_prefetch_lists() -> tuple[int, int, int]:
    """All-gathers of a step: with the recorded order, with a list forward, with one backward."""
    model = wrap(Stack(4))
    _step_of(model)
    wire = listen(model)

    def count() -> int:
        wire.sent.clear()
        _step_of(model)
        return wire.count("all_gather")

    recorded = count()
    first, second, third, fourth = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    forward = count()
    first.set_modules_to_forward_prefetch([])
    fourth.set_modules_to_backward_prefetch([third, second])
    return recorded, forward, count()


def _step_of(model: nn.Module) -> None:
    model(batch(dist.get_rank())).square().mean().backward()


def test_prefetch_lists_of_several_units_gather_nothing_twice(pools: RankPools) -> None:
    for recorded, forward, backward in pools(2).run(gathers_with_prefetch_lists):
        assert forward == recorded
        assert backward == recorded


def said_about_an_integer() -> str:
    """What a `reshard_after_forward` that is a number of ranks, as FSDP2 takes one, leads to."""
    try:
        wrap(Stack(1), reshard_after_forward=3)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_partial_reshard_after_forward_is_rejected(pools: RankPools) -> None:
    for said in pools(4).run(said_about_an_integer):
        assert "reshard_after_forward" in said
