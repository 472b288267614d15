"""Optimizers, gradient clipping and other PyTorch utilities work on sharded models unmodified."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    MESHES,
    STRATEGIES,
    Dispatched,
    batch,
    error_message,
    fp64_pair,
    gradient_error,
    of_all_ranks,
    on_mesh,
    own_loss,
    pair,
    plain_loss,
    train_both,
    weight_error,
    whole,
    wrap,
)
from tests.reference.models import INPUT, Block, Formula, Stack

RANKS = 3
EXACT = 1e-12
"""Tolerance in fp64: far above rounding errors, far below the error of any mistake."""


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
    **{f"{cls.__name__}, for-loop": (cls, {"foreach": False}) for cls in CLASSES[1:2]},
    **{f"{cls.__name__}, foreach": (cls, {"foreach": True}) for cls in CLASSES},
    **{f"{cls.__name__}, fused": (cls, {"fused": True}) for cls in WITH_FUSED},
}


@on_ranks(RANKS, name=OPTIMIZERS)
def test_optimizer_with_a_schedule_steps_like_the_unsharded_one(name: str) -> None:
    cls, options = OPTIMIZERS[name]
    plain, sharded = fp64_pair()
    extra = {"momentum": 0.9, "weight_decay": 0.1} if cls is optim.SGD else {}
    first, second = (cls(m.parameters(), lr=0.01, **extra, **options) for m in (plain, sharded))
    schedules = [optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (first, second)]

    def advance() -> None:
        for schedule in schedules:
            schedule.step()

    # RAdam switches to the rectified update at its sixth step.
    train_both(plain, sharded, (first, second), range(7 if cls is optim.RAdam else 3), advance)
    assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] < 0.01
    empty = of_all_ranks([not param.to_local().numel() for param in sharded.parameters()])
    assert any(map(any, empty)) and weight_error(sharded, plain) < EXACT


# -- gradients ------------------------------------------------------------------------------------


def _number(norm: Any) -> float:
    return float(whole(norm))


@on_ranks(2)
def test_clip_grad_norm_works_where_ranks_hold_gradients_of_different_dtypes() -> None:
    # Collectives fail after 20 seconds instead of the default timeout of minutes.
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    # A parameter of one row, held by one rank with its gradient, and a parameter of six rows.
    rows = ((1, torch.float64), (6, torch.float32))
    weights = nn.ParameterList(torch.full((number, 5), 0.5, dtype=dtype) for number, dtype in rows)
    model = Formula(
        lambda m, x: torch.cat([(x.to(w.dtype) @ w.t()).double() for w in m.weights], 1),
        weights=weights,
    )
    wrap(model, [], mesh=DeviceMesh.from_group(group, "cpu"))
    model(batch(0)).square().mean().backward()
    norms = of_all_ranks(_number(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert norms[0] > 0


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
def test_sharded_module_keeps_the_behavior_of_a_module() -> None:
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


# -- backwards inside a forward ------------------------------------------------------------------


def _train_step(model: Any, optimizer: Any, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Train on each micro-batch inside one forward."""
    losses = []
    for x in micro_batches:
        loss = functools.reduce(lambda y, block: block(y), model.blocks, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@on_ranks(2, strategy=STRATEGIES)
def test_a_training_step_may_be_the_forward_of_the_root(strategy: str) -> None:
    plain, model = pair(
        lambda: Formula(_train_step, blocks=nn.ModuleList(Block(INPUT) for _ in range(3))).double(),
        sharding_strategy=strategy,
    )
    optimizers = [optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(3):
        inputs = [batch(0, 2 * step + number, dtype=torch.float64) for number in range(2)]
        losses = [m(o, inputs) for m, o in zip((plain, model), optimizers, strict=True)]
        assert torch.equal(*losses)
    assert weight_error(model, plain) < EXACT


def _train_then_use(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    """Train, run a unit on the first rank alone, and use a parameter itself on all ranks."""
    _train_step(model, optimizer, [x])
    if dist.get_rank() == 0:
        model.blocks[0](x)
    weight = model.blocks[1].norm.weight
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).sum()


@on_ranks(2, strategy=STRATEGIES[:3])
def test_a_use_of_a_parameter_itself_after_a_training_step_inside_a_forward(strategy: str) -> None:
    plain, model = pair(
        lambda: Formula(
            _train_then_use, blocks=nn.ModuleList(Block(INPUT) for _ in range(3))
        ).double(),
        sharding_strategy=strategy,
    )
    optimizers = [optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(3):
        x = batch(0, step, dtype=torch.float64)
        sums = [m(o, x) for m, o in zip((plain, model), optimizers, strict=True)]
        assert torch.allclose(*sums, rtol=EXACT)
    assert weight_error(model, plain) < EXACT


def _train_between(model: Any, optimizer: Any, x: torch.Tensor, is_first: bool) -> torch.Tensor:
    """Train a block, or a layer of the root before that block runs."""
    loss = model.head(x).square().mean()
    if is_first:
        loss = loss + model.blocks[0](x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    y = loss if is_first else model.blocks[0](x).square().mean()
    return y.detach()  # type: ignore[no-any-return]


@on_ranks(2, strategy=STRATEGIES[1::2])
def test_a_training_step_may_run_between_two_modules_of_a_unit(strategy: str) -> None:
    plain, model = pair(
        lambda: Formula(
            _train_between,
            blocks=nn.ModuleList(Block(INPUT) for _ in range(2)),
            head=nn.Linear(INPUT, 1),
        ).double(),
        lambda m: [list(m.blocks)],
        sharding_strategy=strategy,
    )
    optimizers = [optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(4):
        x = batch(0, step, dtype=torch.float64)
        losses = [m(o, x, not step % 2) for m, o in zip((plain, model), optimizers, strict=True)]
        assert torch.equal(*losses)
    assert weight_error(model, plain) < EXACT


def _train_then_run(model: Any, optimizer: Any, x: torch.Tensor, runs_on: bool) -> None:
    loss = model.blocks[0](x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if runs_on:
        model.blocks[1](x)


@on_ranks(2, strategy=STRATEGIES[:-1])
def test_after_a_training_step_in_a_forward_other_units_may_run_on_each_rank(strategy: str) -> None:
    """All ranks gather the new weights in that forward, before the next collective of the user."""
    blocks = nn.ModuleList(Block(INPUT) for _ in range(3))
    model = wrap(Formula(_train_then_run, blocks=blocks), sharding_strategy=strategy)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    sent: list[str] = []
    for step in range(3):
        with Dispatched(lambda func, *_: sent.append(func.name())):
            model(optimizer, batch(dist.get_rank(), step), dist.get_rank() == 0)
    sent = [name for name in sent if name.startswith("c10d::")]
    assert len(sent) > 3
    assert of_all_ranks(sent) == [sent, sent]


# -- forwards inside a backward ------------------------------------------------------------------


class _RunInBackward(torch.autograd.Function):
    """Call a function in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.run()
        return grads[0], None


def _in_hook(x: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
    x = x.clone()
    x.register_hook(lambda grad: run())
    return x


def _in_callback(x: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    return _in_hook(x, lambda: queue(run))


INSIDE: dict[str, Callable[[torch.Tensor, Callable[[], None]], torch.Tensor]] = {
    "hook": _in_hook,
    "function": _RunInBackward.apply,
    "callback": _in_callback,
}


@on_ranks(2, inside=INSIDE)
def test_forward_inside_a_backward_computes_with_current_weights(inside: str) -> None:
    """The last step follows a forward without a backward, which expects no recomputation."""
    errors: dict[str, float] = {}
    for strategy in STRATEGIES:
        plain, model = pair(sharding_strategy=strategy, mp_policy=BF16)
        other = wrap(Stack(), sharding_strategy=strategy)
        params = [*plain.parameters(), *model.parameters()]
        for step in range(3):
            expected = copy.deepcopy(plain).bfloat16()(batch(1).bfloat16())
            found: list[torch.Tensor] = []
            # In another model's backward, and in one without a model.
            for x in (other(batch(0)), batch(0).requires_grad_()):
                run = functools.partial(_append_output, model, found)
                INSIDE[inside](x, run).sum().backward()
            errors[f"{strategy} {step}"] = max(float((y - expected).abs().max()) for y in found)
            assert len(found) == 2
            if step == 1:
                model(batch(0))
            with torch.no_grad():
                for param in params:
                    param.mul_(1.5)
    assert max(errors.values()) == 0, errors


def _append_output(model: Any, found: list[torch.Tensor]) -> None:
    found.append(model(batch(1)).detach())


# -- collectives of gradient clipping, gradient scaling, optimizers with norms --------------------


@pytest.mark.parametrize(("mesh_name", "num_holders"), [("4", 3), ("HFSDP 2x2", 1)])
@on_ranks("mesh_name")
def test_clipping_with_empty_ranks_issues_one_all_reduce_per_axis(
    mesh_name: str, num_holders: int
) -> None:
    _, model = pair(lambda: nn.Linear(4, num_holders, bias=False), **on_mesh(mesh_name))
    model(torch.ones(2, 4)).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    sent: list[str] = []
    with Dispatched(lambda func, *_: sent.append(func.name())):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    start, end = model.weight.local_rows
    assert sum(of_all_ranks(end > start)) == num_holders
    collectives = [name for name in sent if name.startswith("c10d::")]
    assert collectives == ["c10d::allreduce_"] * len(MESHES[mesh_name][0])


X = torch.arange(16.0).view(2, 8)


def two_layers() -> Formula:
    """Two layers: of four ranks, two hold rows of `few` and three hold rows of `many`."""
    return Formula(
        lambda model, x: model.few(x[:, :4]).square().sum() + model.many(x).square().sum(),
        few=nn.Linear(4, 2, bias=False),
        many=nn.Linear(8, 6, bias=False),
    )


def _with_gradients(strategy: str = STRATEGIES[-1]) -> tuple[Any, Any]:
    """The model with gradients, plain and sharded over all ranks."""
    plain, model = pair(two_layers, lambda m: [m.few], sharding_strategy=strategy)
    for either in (plain, model):
        either(X).backward()
    return plain, model


@pytest.mark.parametrize(
    ("name", "num_holders", "foreach", "order"),
    [
        ("few", 2, True, 2.0),
        ("many", 3, False, 1.0),
        ("few", 2, False, float("inf")),
        ("few", 2, True, -1.0),
    ],
)
@on_ranks(4, timeout_s=20)
def test_subset_without_rows_on_a_rank_is_clipped_to_the_unsharded_norm(
    name: str, num_holders: int, foreach: bool, order: float
) -> None:
    part, whole = (getattr(model, name) for model in reversed(_with_gradients()))
    options: dict[str, Any] = {"norm_type": order, "foreach": foreach}
    for _ in range(2):
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5, **options)
        norm: Any = nn.utils.clip_grad_norm_(part.parameters(), 0.5, **options)
    whole_norm, item = _number(norm), norm.item()
    holds = part.weight.to_local().numel() > 0
    assert sum(of_all_ranks(holds)) == num_holders
    assert whole_norm == pytest.approx(expected.item(), rel=1e-6)
    assert item == whole_norm, "a partial norm would be logged"
    assert gradient_error(part, whole) < 1e-6


@on_ranks(4, timeout_s=20)
def test_ranks_without_rows_take_part_in_clipping_if_other_ranks_have_gradients() -> None:
    _, model = _with_gradients()

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


def _clip_by_hand(grads: Sequence[Any]) -> float:
    total = sum(float(grad.pow(2).sum()) for grad in grads) ** 0.5
    for grad in grads:
        grad.mul_(1.0 / total)
    return total


def _clip_on_rows(grads: Sequence[Any]) -> float:
    """Sum over the local rows, with an all-reduce of torch."""
    rows = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    total = torch.stack([each.square().sum() for each in rows]).sum()
    if rows[0] is not grads[0]:
        dist.all_reduce(total)
    torch._foreach_div_(rows, float(total.sqrt()))
    return float(total)


ORDERS = (-math.inf, -2.5, -1.0, 0.0, 0.5, 3.0)


def _total_norms(grads: Sequence[Any], **options: Any) -> list[Any]:
    """Total norms of many orders; of all gradients, and if those of the first layer are zero."""
    orders = [nn.utils.get_total_norm(grads, order, **options) for order in ORDERS]
    grads[0].zero_()
    orders += [nn.utils.get_total_norm(grads, order, **options) for order in ORDERS]
    return [whole(norm) for norm in orders]


def _nan_norms(grads: Sequence[Any]) -> list[bool]:
    """Whether norms are NaN if the last row of a gradient is."""
    grads[1][-1] = math.nan
    norms = [nn.utils.get_total_norm(grads, order) for order in (-math.inf, math.inf, 2.0)]
    grads[1][-1] = 0.0
    return [bool(whole(norm).isnan()) for norm in norms]


LOOPS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "norms": lambda grads: [whole(grad.norm()) for grad in grads],
    "vector_norm": lambda grads: [float(vector_norm(grad)) for grad in grads],
    "vector_norm, inf": lambda grads: max(float(vector_norm(g, float("inf"))) for g in grads),
    "norm of norms": lambda grads: vector_norm(torch.stack([g.norm() for g in grads])).item(),
    "_foreach_norm": lambda grads: [whole(norm) for norm in torch._foreach_norm(grads)],
    "_foreach_norm, summed": lambda g: sum(n.item() ** 2 for n in torch._foreach_norm(g)),
    "finite": lambda grads: all(bool(grad.isfinite().all()) for grad in grads),
    "histograms": lambda grads: [whole(torch.histc(grad, 4, -9, 9)) for grad in grads],
    "largest": lambda grads: max(grad.abs().max().item() for grad in grads),
    "mean and deviation": lambda grads: [(g.mean().item(), float(g.std())) for g in grads],
    "zeros": lambda grads: sum(int((grad == 0).sum()) for grad in grads),
    "clip by hand": _clip_by_hand,
    "clip local rows": _clip_on_rows,
    "clamp": lambda grads: [grad.clamp_(-0.1, 0.1).sum().item() for grad in grads],
    "get_total_norm": lambda grads: whole(nn.utils.get_total_norm(grads)),
    "get_total_norm, orders": _total_norms,
    "get_total_norm, orders, one by one": lambda grads: _total_norms(grads, foreach=False),
    "get_total_norm, nan": _nan_norms,
    "_foreach_norm, orders": lambda g: [
        whole(n) for o in ORDERS for n in torch._foreach_norm(g, o)
    ],
}
"""Loops that users write over the gradients of a model."""


@on_ranks(4, timeout_s=20, name=LOOPS)
def test_loop_over_gradients_is_right_where_ranks_have_no_rows(name: str) -> None:
    plain, model = _with_gradients()
    found, expected = (
        LOOPS[name]([p.grad for p in each.parameters() if p.grad is not None])
        for each in (model, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert gradient_error(model, plain) < 1e-6
    held = of_all_ranks([param.to_local().numel() for param in model.parameters()])
    assert any(map(any, held)) and not all(map(any, held))


# Replicated gradients cannot overflow on one rank only.
OVERFLOWS = [
    ("no_shard", "", "few", True),
    ("no_shard", "loss", "", False),
    (STRATEGIES[-1], "", "", False),
    (STRATEGIES[-1], "loss", "few", True),
    (STRATEGIES[-1], "shard", "few", True),
    (STRATEGIES[-1], "shard", "", False),
]


@pytest.mark.parametrize(("strategy", "where", "name", "fused"), OVERFLOWS)
@on_ranks(4, timeout_s=20)
def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step(
    strategy: str, where: str, name: str, fused: bool
) -> None:
    """Ranks that hold no row of the stepped parameters skip the step too."""
    plain, model = _with_gradients(strategy)
    holders, rank = of_all_ranks(model.few.weight.to_local().numel() > 0), dist.get_rank()
    optimizers = []
    for either in (plain, model):
        either.zero_grad()
        params = getattr(either, name).parameters() if name else either.parameters()
        optimizers.append(torch.optim.AdamW(params, lr=0.1, fused=fused))
    if not where:
        plain(X).backward()
        optimizers[0].step()
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(model(X * float("inf") if where == "loss" and rank == 3 else X)).backward()
    if where == "shard" and rank == holders.index(True):
        model.few.weight.grad.to_local().fill_(float("inf"))
    if not fused:
        scaler.unscale_(optimizers[1])
    scaler.step(optimizers[1])
    scaler.update()
    # A step that only some ranks skip would leave weights that differ from the plain ones.
    assert scaler.get_scale() == (2.0 if where else 8.0)
    assert weight_error(model, plain) < 1e-5


class _Optimizer(optim.Optimizer):
    """An optimizer that steps parameters one by one, as most published optimizers do."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, self.state[param], group["lr"])
        return loss

    def _update(self, param: Any, state: Any, lr: float) -> None:
        raise NotImplementedError


class Lamb(_Optimizer):
    """Adam's direction, scaled by norms."""

    def _update(self, param: Any, state: Any, lr: float) -> None:
        if not state:
            state["mean"] = torch.zeros_like(param)
            state["square"] = torch.zeros_like(param)
        state["mean"].mul_(0.9).add_(param.grad, alpha=0.1)
        state["square"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
        update = state["mean"] / state["square"].sqrt().add(1e-3)
        ratio = param.norm() / update.norm().clamp(min=1e-3)
        param.sub_(update * ratio, alpha=lr)


class Lars(_Optimizer):
    """Gradient descent with a rate computed from norms that are read on the host."""

    def _update(self, param: Any, state: Any, lr: float) -> None:
        of_param, of_grad = torch.norm(param).item(), torch.norm(param.grad).item()
        rate = of_param / (of_grad + 1e-3) if of_param > 0 and of_grad > 0 else 1.0
        param.add_(param.grad, alpha=-lr * rate)


CLASSES_NORMS: list[Any] = [Lamb, Lars, optim.Adafactor]


def _with_unused_layer() -> Formula:
    """A layer, and an unused layer without a gradient on any rank."""
    layers = {name: nn.Linear(5, 5) for name in ("used", "other")}
    return Formula(lambda self, x: self.used(x), **layers)


# Class, model, units and mesh.
CASES: dict[str, tuple[Any, Callable[[], nn.Module], Any, str]] = {
    **{f"{kind.__module__}.{kind.__name__}": (kind, Stack, None, "3") for kind in CLASSES_NORMS},
    "a rank without rows of the whole model": (
        *(Lamb, lambda: nn.Linear(5, 2, bias=False), lambda model: []),
        "3",
    ),
    "rows are replicated": (Lamb, Stack, None, "HSDP 2x2"),
    "a parameter that is not used": (Lamb, _with_unused_layer, lambda m: [m.used, m.other], "3"),
}


@on_ranks(lambda name: 4 if "HSDP" in CASES[name][-1] else 3, name=CASES)
def test_optimizer_with_parameter_norms_steps_like_the_unsharded_one(name: str) -> None:
    kind, build, units, mesh = CASES[name]
    plain, sharded = pair(lambda: build().double(), units, **on_mesh(mesh))
    train_both(plain, sharded, (kind(plain.parameters()), kind(sharded.parameters())), range(3))
    assert weight_error(sharded, plain) < EXACT


@on_ranks(3)
def test_step_uses_gradients_of_its_closure_and_ignores_dropped_gradients() -> None:
    plain, sharded = fp64_pair()
    for model, loss_of in ((plain, plain_loss), (sharded, own_loss)):
        optimizer = Lamb(model.parameters())

        def closure(model: Any = model, loss_of: Any = loss_of, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        optimizer.zero_grad()
        optimizer.step()
    assert weight_error(sharded, plain) < EXACT


@on_ranks(3, calls=[False, True])
def test_optimizer_of_a_package_with_fused_kernels_finds_no_empty_gradients(calls: bool) -> None:
    found = []

    class Fused(optim.AdamW):
        __module__ = "transformer_engine.pytorch.optimizers.fused_adam"

        def _init_group(self, group: Any, *lists: Any) -> Any:
            result = super()._init_group(group, *lists)
            found.extend(param.to_local().numel() for param in lists[0])
            return result

    model = wrap(Stack())
    params = list(model.parameters())
    optimizer = type("Derived", (Fused,), {})(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = own_loss(model, 0)
        loss.backward()
        return loss

    for _ in range(2):
        closure()
        optimizer.step(*[closure] * calls)
    held = [param for param in params if param.to_local().numel()]
    assert found == [param.to_local().numel() for param in held] * 2 and len(held) < len(params)
    assert all(param.grad is not None for param in params)
    state_dict = optimizer.state_dict()
    assert list(state_dict["state"]) == list(range(len(params)))
    optimizer.load_state_dict(state_dict)
    assert list(optimizer.state) == held


class _Random(_Optimizer):
    def _update(self, param: Any, state: Any, lr: float) -> None:
        param.sub_(torch.rand(param.shape), alpha=lr)


class _Unknown(_Optimizer):
    def _update(self, param: Any, state: Any, lr: float) -> None:
        param.to_sparse()


@on_ranks(2)
def test_optimizer_that_cannot_step_shards_is_rejected_by_name() -> None:
    for kind, why in ((_Random, "draws random numbers"), (_Unknown, "layout")):
        model = wrap(Stack())
        optimizer = kind(model.parameters())
        own_loss(model, 0).backward()
        text = error_message(RuntimeError, optimizer.step)
        assert f"{kind.__name__} cannot step sharded parameters" in text and why in text, text


class _Outer(_Optimizer):
    """An optimizer that catches the error of an optimizer that it steps."""

    inner: Any

    def _update(self, param: Any, state: Any, lr: float) -> None:
        with contextlib.suppress(RuntimeError):
            self.inner.step()
        param.to_sparse()


@on_ranks(2)
def test_step_that_raised_no_longer_names_errors_or_allows_plain_operands() -> None:
    model = wrap(Stack())
    param = next(model.parameters())
    inner, outer = _Unknown(model.parameters()), _Outer(model.parameters())
    outer.inner = inner
    own_loss(model, 0).backward()
    for optimizer in (inner, outer):
        text = error_message(RuntimeError, optimizer.step)
        assert f".{type(optimizer).__name__} cannot step" in text, text
        text = error_message(RuntimeError, param.to_sparse)
        assert "cannot step" not in text and "layout" in text, text
        assert "sharded" in error_message(RuntimeError, lambda: param @ torch.ones(5, 5))
