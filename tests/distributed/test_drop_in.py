"""What a PyTorch user has around a model works on a sharded one, unmodified."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    MESHES,
    STRATEGIES,
    backward_both,
    batch,
    fp64_pair,
    gradient_error,
    listen,
    of_all_ranks,
    on_mesh,
    own_loss,
    pair,
    plain_loss,
    said,
    shards_of,
    train_both,
    weight_error,
    wrap,
)
from tests.ranks import RankPools
from tests.reference.models import Formula, Stack

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
    extra = {"momentum": 0.9, "weight_decay": 0.1} if cls is optim.SGD else {}
    first, second = (cls(m.parameters(), lr=0.01, **extra, **options) for m in (plain, sharded))
    # From its sixth step on RAdam divides by something else.
    train_both(plain, sharded, (first, second), range(7 if cls is optim.RAdam else 3))
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


# -- gradients ------------------------------------------------------------------------------------


def _number(norm: Any) -> float:
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@on_ranks(RANKS, strategy=STRATEGIES, order=[1.0, 2.0, float("inf")])
def test_clip_grad_norm_returns_and_applies_the_global_norm_on_every_rank(
    strategy: str, order: float
) -> None:
    plain, sharded = fp64_pair(strategy)
    backward_both(plain, sharded)
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01, order))
    norm: Any = nn.utils.clip_grad_norm_(sharded.parameters(), 0.01, order)
    whole, item = _number(norm), norm.item()
    assert whole == pytest.approx(expected, rel=1e-12)
    assert item == whole, "a partial norm would be logged"
    assert gradient_error(sharded, plain) < EXACT


@on_ranks(RANKS)
def test_total_norm_value_clipping_and_counting_are_global() -> None:
    plain, sharded = fp64_pair()
    backward_both(plain, sharded)
    grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (sharded, plain)]
    total = _number(nn.utils.get_total_norm(grads[0]))
    reference = float(nn.utils.get_total_norm(grads[1]))
    for model in (plain, sharded):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    held = of_all_ranks(sum(p.to_local().numel() for p in sharded.parameters()))
    counted, expected = (sum(p.numel() for p in m.parameters()) for m in (sharded, plain))
    assert gradient_error(sharded, plain) < EXACT
    assert total == pytest.approx(reference, rel=1e-12)
    assert counted == expected == sum(held)


class OneRow(nn.Module):
    """A parameter of one row: one rank alone holds it, and its gradient; another of six rows."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        rows = zip((1, 6), dtypes, strict=True)
        self.weights = nn.ParameterList(torch.full((r, 5), 0.5, dtype=d) for r, d in rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([(x.to(w.dtype) @ w.t()).double() for w in self.weights], 1)


@on_ranks(2)
def test_clip_grad_norm_works_where_ranks_hold_gradients_of_different_dtypes() -> None:
    # Collectives fail after two seconds, where others would hang for minutes.
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = OneRow(torch.float64, torch.float32)
    model = wrap(model, [], mesh=DeviceMesh.from_group(group, "cpu"))
    model(batch(0)).square().mean().backward()
    norms = of_all_ranks(_number(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert norms[0] > 0


# Where gradients are replicated, an overflow that only one rank's gradient has cannot be.
OVERFLOWS = [(s, "loss") for s in STRATEGIES] + [(s, "shard") for s in STRATEGIES[1:]]


@pytest.mark.parametrize(("strategy", "where"), OVERFLOWS)
@on_ranks(RANKS)
def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step(strategy: str, where: str) -> None:
    """Step 1 overflows on rank 1 only."""
    model = wrap(Stack().double(), sharding_strategy=strategy)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0, growth_interval=1)
    trace = []
    for step in range(3):
        optimizer.zero_grad()
        before = shards_of(model)
        loss = own_loss(model, step)
        overflows = step == 1 and dist.get_rank() == 1
        scaler.scale(loss * float("inf") if overflows and where == "loss" else loss).backward()
        if overflows and where == "shard":
            next(p.grad for p in model.parameters() if p.grad is not None).to_local().fill_(1e400)
        scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.get_scale(), not all(map(torch.equal, before, shards_of(model)))))
    assert trace == [(8.0, True), (4.0, False), (8.0, True)]


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


@on_ranks(2)
def test_a_sharded_module_is_still_a_module() -> None:
    torch.manual_seed(0)
    model = WithBuffers()
    buffers = dict(model.named_buffers())
    wrap(model)
    x, up = batch(0), model.blocks[0].up
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert set(buffers) <= set(model.state_dict())
    model.train()
    model(x)
    assert int(model.statistics.num_batches_tracked) == 1
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), model(x)), "eval() does not reach children"
    assert int(model.statistics.num_batches_tracked) == 1
    model.train()
    for trains in (False, True):
        up.requires_grad_(trains)
        model.zero_grad()
        model(x).square().mean().backward()
        held = [param for param in up.parameters() if param.to_local().numel()]
        assert all((param.grad is not None) is trains for param in held)
    model.requires_grad_(False)
    assert not model(x).requires_grad
    shapes = [
        [(n, tuple(p.shape)) for n, p in m.named_parameters()] for m in (model, WithBuffers())
    ]
    assert shapes[0] == shapes[1]


@on_ranks(2)
def test_a_parameter_frozen_at_wrapping_can_be_trained_later() -> None:
    model = Stack()
    model.blocks[0].up.requires_grad_(False)
    wrap(model)
    model.blocks[0].up.requires_grad_(True)
    own_loss(model).backward()
    params = [p for p in model.blocks[0].up.parameters() if p.to_local().numel()]
    assert params
    assert all(p.grad is not None for p in params)


@on_ranks(2, strategy=STRATEGIES)
def test_one_that_an_evaluation_finds_unfrozen_can_be_trained(strategy: str) -> None:
    """In inference mode, which makes tensors that nobody may write outside of it."""
    model = wrap(Stack().requires_grad_(False), sharding_strategy=strategy)
    model.requires_grad_(True)
    with torch.inference_mode():
        own_loss(model)
    own_loss(model).backward()
    assert all(p.grad is not None for p in model.parameters() if p.to_local().numel())


@on_ranks(2)
def test_prefetch_lists_of_several_units_gather_nothing_twice() -> None:
    model = wrap(Stack(4))
    own_loss(model).backward()
    wire = listen(model)

    def count() -> int:
        wire.sent.clear()
        own_loss(model).backward()
        return wire.count("all_gather")

    recorded = count()
    first, second, third, fourth = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    forward = count()
    first.set_modules_to_forward_prefetch([])
    fourth.set_modules_to_backward_prefetch([third, second])
    assert forward == recorded
    assert count() == recorded


@on_ranks(4)
def test_a_partial_reshard_after_forward_is_rejected() -> None:
    """A number of ranks, as FSDP2 takes one."""
    text = said(ValueError, lambda: wrap(Stack(1), reshard_after_forward=3))
    assert "reshard_after_forward" in text


# -- what is communicated to clip gradients -------------------------------------------------------


@pytest.mark.parametrize(("mesh_name", "num_holders"), [("4", 3), ("HFSDP 2x2", 1)])
@on_ranks("mesh_name")
def test_clipping_where_a_rank_is_empty_is_one_all_reduce_per_axis_on_every_rank(
    mesh_name: str, num_holders: int
) -> None:
    """And gradients are clipped as those of a plain model are."""
    plain, model = pair(lambda: nn.Linear(4, num_holders, bias=False), **on_mesh(mesh_name))
    for either in (plain, model):
        either(torch.ones(2, 4)).square().sum().backward()
    sent: list[str] = []

    def noted(name: str) -> Any:
        original = getattr(dist, name)
        return mock.patch.object(
            dist, name, lambda *a, **k: (sent.append(name), original(*a, **k))[1]
        )

    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    error = gradient_error(model, plain)
    with contextlib.ExitStack() as stack:
        for name in ("send", "recv", "all_reduce", "all_gather", "barrier"):
            stack.enter_context(noted(name))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    start, end = model.weight.local_rows
    assert sum(of_all_ranks(end > start)) == num_holders
    assert sent == ["all_reduce"] * len(MESHES[mesh_name][0])
    assert norm == pytest.approx(expected, rel=1e-6)
    assert error < 1e-6


X = torch.arange(16.0).view(2, 8)


def two_layers() -> Formula:
    """Over four ranks, `few` is on two of them and `many` on three."""
    return Formula(
        lambda model, x: model.few(x[:, :4]).square().sum() + model.many(x).square().sum(),
        few=nn.Linear(4, 2, bias=False),
        many=nn.Linear(8, 6, bias=False),
    )


def _two() -> tuple[Any, Any]:
    """The model with gradients twice: plain, and sharded over all ranks."""
    plain, model = pair(two_layers, lambda m: [m.few])
    for either in (plain, model):
        either(X).backward()
    return plain, model


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("name", "num_holders"), [("few", 2), ("many", 3)])
@on_ranks(4, timeout_s=20)
def test_a_subset_that_some_rank_holds_no_row_of_is_clipped_to_the_unsharded_norm_on_all(
    name: str, num_holders: int, foreach: bool, order: float
) -> None:
    part, whole = (getattr(model, name) for model in reversed(_two()))
    options: dict[str, Any] = {"norm_type": order, "foreach": foreach}
    for _ in range(2):
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5, **options)
        norm = nn.utils.clip_grad_norm_(part.parameters(), 0.5, **options).item()
    holds = part.weight.to_local().numel() > 0
    assert sum(of_all_ranks(holds)) == num_holders
    assert holds == (part.weight.grad is not None)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    assert gradient_error(part, whole) < 1e-6


@on_ranks(4, timeout_s=20)
def test_ranks_without_rows_come_to_clip_exactly_where_others_have_gradients() -> None:
    _, model = _two()

    def norm() -> bool:
        return bool(nn.utils.clip_grad_norm_(model.few.parameters(), 1.0).item())

    found = [norm()]
    model.zero_grad()
    found.append(norm())
    model(torch.ones(2, 8)).backward()
    found.append(norm())
    model.zero_grad(set_to_none=False)
    found.append(norm())
    model.few.requires_grad_(False)
    model.zero_grad()
    model(torch.ones(2, 8)).backward()
    assert [*found, norm()] == [True, False, True, False, False]


@pytest.mark.parametrize("broken", [None, 0, 3], ids=["whole", "inf on rank 0", "inf on rank 3"])
@on_ranks(4, timeout_s=20, name=["few", "many", ""], fused=[False, True])
def test_grad_scaler_decides_alike_where_ranks_hold_no_rows(
    name: str, fused: bool, broken: int | None
) -> None:
    plain, model = _two()
    optimizers = []
    for either in (plain, model):
        either.zero_grad()
        params = getattr(either, name).parameters() if name else either.parameters()
        optimizers.append(torch.optim.AdamW(params, lr=0.1, fused=fused))
    if broken is None:
        plain(X).backward()
        optimizers[0].step()
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(model(X * float("inf") if dist.get_rank() == broken else X)).backward()
    if not fused:
        scaler.unscale_(optimizers[1])
    scaler.step(optimizers[1])
    scaler.update()
    # A step that only some ranks skip would leave weights that differ from the plain ones.
    assert scaler.get_scale() == (8.0 if broken is None else 2.0)
    assert weight_error(model, plain) < 1e-5


@on_ranks(2, strategy=STRATEGIES, set_to_none=[True, False])
def test_a_module_resets_gradients_between_a_forward_and_its_backward(
    strategy: str, set_to_none: bool
) -> None:
    """As the tutorials of torch do; gathered parameters then stand where sharded ones would."""
    plain, model = pair(sharding_strategy=strategy)
    backward_both(plain, model)
    loss = own_loss(model, 1)
    plain.zero_grad()
    model.zero_grad(set_to_none)
    plain_loss(plain, 1).backward()
    loss.backward()
    assert gradient_error(model, plain) < 1e-6
