"""Patterns of models that do unusual things around their units; rows beside `patterns.PATTERNS`.

They have no golden record of their own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2 import FSDPModule, register_fsdp_forward_method
from megatron_fsdp_v2.optim import flat_optimizer
from tests.parity.patterns import Pattern, batch, mean_output, mean_square, plain_sgd, two_forwards
from tests.reference.failing import PlannedFailure, fail, fail_in_backward, failing
from tests.reference.fused import FusedLinear
from tests.reference.models import (
    INPUT,
    WIDTH,
    Block,
    Checkpointed,
    Elementless,
    Formula,
    Nested,
    Skipping,
    Stack,
)

# -- inputs and outputs that are changed in place -------------------------------------------------


def _in_place(what: Callable[..., Any], call: Callable[..., Any]) -> Callable[[], nn.Module]:
    """Units that compute `what`, in a row; `call` runs one of them."""

    def forward(model: Any, x: torch.Tensor) -> Any:
        x = model.input(x)
        for unit in model.blocks:
            x = torch.tanh(call(unit, x.sin()))
        return model.output(x)

    def build() -> nn.Module:
        units = [
            Formula(what, layer=nn.Linear(4, 4), scale=nn.Parameter(torch.full((4,), 0.8)))
            for _ in range(4)
        ]
        ends = {"input": nn.Linear(INPUT, 4), "output": nn.Linear(4, 4)}
        return Formula(forward, blocks=nn.ModuleList(units), **ends)

    return build


def _relu_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    before = x * 0.5
    return self.layer(x.relu_()) + before


def _in_pieces(self: Any, x: torch.Tensor) -> torch.Tensor:
    x[:, 1:].mul_(0.7)
    x += self.scale * self.layer(x.clone())
    return x


def _both_inputs(self: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    other.mul_(2)
    return self.layer(x) + other * self.scale


def _residual(unit: Any, x: torch.Tensor) -> torch.Tensor:
    y = unit(x)
    return x + y


def _changed_after(unit: Any, x: torch.Tensor) -> torch.Tensor:
    y = unit(x)
    y.mul_(0.5)
    y += 1
    return x * y.reshape(x.shape)


def _part_changed_after(unit: Any, x: torch.Tensor) -> torch.Tensor:
    y = unit(x)
    y[:, :1].mul_(0.5)
    return y + 0.1 * x.reshape(y.shape)


def _two_inputs(unit: Any, x: torch.Tensor) -> torch.Tensor:
    other = x.cos()
    return unit(x, other) + other


# What a unit does with its input, and how it is called.
_IN_PLACE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": (_relu_first, lambda unit, x: unit(x)),
    "relu of a residual": (_relu_first, _residual),
    "pieces": (_in_pieces, lambda unit, x: unit(x)),
    "pieces of a residual, and then by the caller": (_in_pieces, _changed_after),
    "its output": (lambda self, x: self.layer(x).mul_(self.scale), _part_changed_after),
    "a view it returns": (lambda self, x: self.layer(x).view(-1, 2), _changed_after),
    "the input it returns": (lambda self, x: x, _changed_after),
    "the second input alone": (lambda self, x, y: self.layer(y.mul_(self.scale)), _two_inputs),
    "one of two inputs": (_both_inputs, _two_inputs),
    "one input given twice": (_both_inputs, lambda unit, x: unit(x, x)),
}

# -- outputs that are hard to find ----------------------------------------------------------------


class _Answer:
    """A plain object without a dictionary, of which torch knows nothing."""

    __slots__ = ("inner",)

    def __init__(self, value: torch.Tensor) -> None:
        self.inner = {"value": [value]}


class ObjectBlock(Block):
    """A unit that returns a plain object."""

    def forward(self, x: torch.Tensor) -> Any:
        return _Answer(super().forward(x))


class ClosureBlock(Block):
    """A unit that returns its output where nobody can find it."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return lambda: y


class Unpacking(Stack):
    """Blocks that return something else than a tensor."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            x = y() if callable(y) else y.inner["value"][0]
        return x


class Leaking(Block):
    """A unit that returns one of its weights, a view or a copy of it, beside its output."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.up.weight
        returned = {
            "weight": weight,
            "view": weight.t(),
            "detached": weight.detach()[1:],
            "copy": weight.clone(),
        }
        return super().forward(x), {"regularized": [returned[self.what]]}


class Regularized(Stack):
    """Adds up squares of what its blocks return."""

    def __init__(self, what: str) -> None:
        super().__init__(block=lambda _: Leaking(what))

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        penalty = torch.zeros(())
        for block in self.blocks:
            x, extra = block(x)
            penalty = penalty + extra["regularized"][0].square().sum()
        return x + 0.01 * penalty


class _TiedHead(Regularized):
    """The root holds the weight that its only block returns: it is that of its head as well."""

    def __init__(self) -> None:
        super().__init__("weight")
        self.blocks = self.blocks[:1]
        self.tied = self.blocks[0].up.weight


def gradient_penalty(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """A loss with the square of its own gradient."""
    x = batch(step, micro, rank).requires_grad_()
    loss = model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


# -- recomputed regions ---------------------------------------------------------------------------


class _SharedInRegion(Stack):
    """A recomputed region that runs a unit with a unit inside three times."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Block())

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.blocks[1](torch.tanh(self.blocks[0](x)))
        return self.blocks[2](x)

    def run_blocks(self, x: torch.Tensor) -> Any:
        return checkpoint(self._region, x, use_reentrant=self.reentrant)


class _TwiceInRegion(nn.Module):
    """Recomputes two uses of one unit, with another one between or not, as one region."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.between = between
        self.other = nn.Linear(INPUT, INPUT)
        layers = {name: nn.Linear(INPUT, INPUT) for name in ("first", "second", "last")}
        # Weights of its own are used before and after the two units inside it.
        self.around = Formula(self._run, **layers)

    @staticmethod
    def _run(module: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in (module.last, module.first, module.second, module.last):
            x = torch.tanh(layer(x))
        return x

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        x = self.around(x)
        if self.between:
            x = self.other(x)
        return self.around(x) * self.other(x)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._region, x.requires_grad_(), use_reentrant=False)


def _units_of_region(model: Any) -> list[nn.Module]:
    return [model.around.first, model.around.second, model.around, model.other]


class _SharedByUnits(Stack):
    """One module object inside two units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up


# -- several modules as one unit ------------------------------------------------------------------


class _Framed(Stack):
    """Blocks between two layers that are one unit; one of them, or a block, may be recomputed."""

    def __init__(self, recomputed: str = "", use_reentrant: bool = False) -> None:
        super().__init__()
        self.recomputed, self.use_reentrant = recomputed, use_reentrant

    def _run(self, name: str, module: nn.Module, x: torch.Tensor) -> Any:
        if name == self.recomputed:
            return checkpoint(module, x, use_reentrant=self.use_reentrant)
        return module(x)

    def forward(self, x: torch.Tensor) -> Any:
        x = self._run("input", self.input, x.requires_grad_(torch.is_grad_enabled()))
        for block in self.blocks:
            x = self._run("block", block, x)
        return self._run("output", self.output, x)


_FRAMED = [("", False), ("input", False), ("output", False), ("block", True), ("output", True)]

# -- methods that run the forward -----------------------------------------------------------------


class Generating(nn.Module):
    """A method that runs the forward, and computes with the module's own weight around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(INPUT, INPUT), Block(INPUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(x) @ self.layer.weight.t()) @ self.layer.weight

    def generate(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        y = self(self(self.layer(x)))
        if fails:
            raise PlannedFailure
        return self.layer(x) + y


def _generated(register: Any, model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Of the method and of a forward, after a call of the method that fails in some steps."""
    x = batch(step, micro, rank)
    if step == 0:
        register(model, "generate")
    if step == 2:
        with contextlib.suppress(PlannedFailure):
            model.generate(x, fails=True)
    loss: torch.Tensor = model.generate(x).square().mean() + mean_square(model, step, micro, rank)
    return loss


# -- units that run without their root ------------------------------------------------------------


class _Coder(nn.Module):
    """A root with methods that run its units without it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(INPUT, 6), nn.Tanh(), nn.Linear(6, INPUT))
        self.decoder = nn.Sequential(nn.Linear(INPUT, 6), nn.Tanh(), nn.Linear(6, INPUT))
        self.scale = nn.Parameter(torch.ones(INPUT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x)) * self.scale


def _units_of_coder(model: Any) -> list[nn.Module]:
    return [model.encoder[0], model.encoder[2], model.encoder, model.decoder]


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all": lambda model, x: model(x),
    "encode": lambda model, x: model.encoder(x),
    "layer": lambda model, x: model.encoder[0](x)[:, :INPUT],
    "both": lambda model, x: model.decoder(model.encoder(x)),
    "twice, then all": lambda model, x: model.encoder(x) + model.encoder(2 * x) + model(x),
    "all, then one": lambda model, x: model(x) * model.decoder(x),
    "one into all": lambda model, x: model(model.encoder(x)),
}
_TRAINED = ("encode", "all", "layer", "both", "twice, then all", "all, then one", "one into all")


def _without_root(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Another call every time, after an evaluation by another one."""
    number = 3 * step + micro
    with torch.no_grad():
        CALLS[("layer", "encode", "all")[(number + step) % 3]](model, batch(step, 7, rank))
    return CALLS[_TRAINED[number % 7]](model, batch(step, micro, rank)).square().mean()


def _wasted(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """After a forward that no backward follows."""
    CALLS[("encode", "all", "layer")[(step + micro) % 3]](model, batch(step, 8, rank))
    return _without_root(model, step, micro, rank)


def _others_on_ranks(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    how = _TRAINED[(3 * step + micro + 2 * rank) % 7]
    return CALLS[how](model, batch(step, micro, rank)).square().mean()


def _caught(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """A forward that goes on where one of its units raises."""
    model.fails = step in (1, 2)
    return mean_square(model, step, micro, rank)


def _fall_back(model: Any, x: torch.Tensor) -> Any:
    try:
        x = model.first(x[:, 1:] if getattr(model, "fails", False) else x)
    except RuntimeError:
        x = 2 * x
    return model.second(x)


# -- gradients are those of the backwards since the last reset ------------------------------------


def _disturbed(
    act: Callable[..., torch.Tensor], model: Any, step: int, micro: int, rank: int
) -> torch.Tensor:
    """The loss, on a sharded model after something that must not change its gradient."""
    if not isinstance(model, FSDPModule):
        return mean_square(model, step, micro, rank)
    return act(model, lambda: mean_square(model, step, micro, rank))


def _hook_raises(model: Any, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Of a parameter, when its gradient has been accumulated."""
    first = next(iter(model.parameters()))
    loss = loss_of()
    with failing(first.register_post_accumulate_grad_hook(fail)):
        loss.backward()
    return loss.detach() + 0 * loss_of()


def _forward_fails(model: Any, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    with failing(model.blocks[1].register_forward_pre_hook(fail)):
        loss_of()
    return loss_of()


def _backward_fails_between_zeros(model: Any, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    loss_of().backward()
    model.zero_grad(set_to_none=False)
    with failing(model.input.register_full_backward_hook(fail)):
        loss_of().backward()
    model.zero_grad(set_to_none=False)
    return loss_of()


def _backward_fails_beside_a_graph(model: Any, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    handle = model.blocks[1].register_forward_hook(fail_in_backward)
    fails = loss_of()
    handle.remove()
    works = loss_of()
    with contextlib.suppress(PlannedFailure):
        fails.backward()
    model.zero_grad()
    return works


def _reset(set_to_none: bool, model: Any, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Gradients are reset after the forward, when modules hold gathered parameters."""
    loss_of().backward()
    loss = loss_of()
    model.zero_grad(set_to_none)
    return loss


_DISTURBANCES: dict[str, Callable[..., torch.Tensor]] = {
    "a hook of a parameter raises": _hook_raises,
    "a forward fails between micro-batches": _forward_fails,
    "a backward fails between zeros": _backward_fails_between_zeros,
    "a backward fails beside another graph": _backward_fails_beside_a_graph,
    "None after a forward": functools.partial(_reset, True),
    "zeros after a forward": functools.partial(_reset, False),
}

# -- ranks that run different things --------------------------------------------------------------


class _Uneven(Stack):
    """Every block runs as often as `times` says, on this rank."""

    times: tuple[int, ...] = (1, 1, 1)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block, times in zip(self.blocks, self.times, strict=True):
            for _ in range(times):
                x = block(x)
        return x


def _run_unevenly(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    model.times = ((0, 2, 1), (1, 1, 3), (2, 0, 0))[rank % 3]
    return two_forwards(model, step, micro, rank)


def _frozen_at_first() -> Skipping:
    model = Skipping()
    model.blocks[1].requires_grad_(False)
    return model


def _trained_later(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """What was frozen when it was sharded is trained, and rank 1 leaves it out at first."""
    model.blocks[1].requires_grad_(True)
    model.skip = 1 if rank == 1 and step == 0 else None
    return mean_square(model, step, micro, rank)


class _TiedOnSomeRanks(Stack):
    """The root computes with a block's weight too, where `uses` says so."""

    uses = True

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.tied.weight = self.blocks[1].up.weight

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses:
            x = x + self.tied(x)[:, :WIDTH]
        return super().run_blocks(x)


def _tied_on_rank_0(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    model.uses = rank == 0
    return mean_square(model, step, micro, rank)


class _RegionWithBranch(nn.Module):
    """A unit that is one recomputed region; it ends with its inner unit, or on one rank not."""

    branches = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(torch.tanh(x))
        return self.own(torch.tanh(x)) if self.branches else x

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._region, x, use_reentrant=False)


def _branch_on_rank_1(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    model.blocks[0].branches = rank == 1
    return mean_square(model, step, micro, rank)


# -- passes in other orders -----------------------------------------------------------------------


def _other_sizes(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Batches of several sizes."""
    rows = (4, 3, 4, 2, 3)[(step + micro) % 5]
    return model(batch(step, micro, rank)[:rows]).square().mean()


def _ahead(ahead: int, model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """A pipeline's order: some of three forwards run ahead of the backwards."""
    losses = vars(model).setdefault(f"waiting of {rank}", [])
    for number in range(micro + ahead * (micro > 0), min(micro + ahead + 1, 3)):
        losses.append(model(batch(step, number, rank)).square().mean())
    return losses.pop(0)


def _evaluated_before_backward(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    loss = mean_square(model, step, micro, rank)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(batch(step, micro + 30, rank))
    return loss


def _unfrozen(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """What was frozen when it was sharded is evaluated in inference mode, and then trained."""
    model.requires_grad_(True)
    with torch.inference_mode():
        mean_square(model, step, micro + 30, rank)
    return mean_square(model, step, micro, rank)


def _by_hand(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """All units are gathered by hand, and told what to gather ahead."""
    if isinstance(model, FSDPModule):
        for first, second in itertools.pairwise(model.blocks):
            first.set_modules_to_forward_prefetch([second])  # type: ignore[attr-defined]
            second.set_modules_to_backward_prefetch([first])  # type: ignore[attr-defined]
        for part in (model, *model.blocks):
            part.unshard(async_op=True)
    return mean_square(model, step, micro, rank)


def _kept_in_turn(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Weights are kept after a forward in some steps, and after a backward in others."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(step < 2)
        model.set_reshard_after_backward(micro == 2 or step != 1)
    return mean_square(model, step, micro, rank)


# -- layers ---------------------------------------------------------------------------------------


def _again_without_gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    for _ in range(3):
        x = model.frozen(torch.relu(model.trained(x)))
        with torch.no_grad():
            x += torch.relu(model.trained(x))
    return x


def _repeated() -> Formula:
    layers = {name: nn.Linear(INPUT, INPUT) for name in ("first", "frozen", "trained")}
    layers["frozen"].requires_grad_(False)
    return Formula(_again_without_gradients, **layers)


def _biases_alone(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Weights are frozen after sharding, and trained from step 2 on."""
    for name, param in model.named_parameters():
        if "bias" not in name:
            param.requires_grad_(step >= 2)
    return mean_square(model, step, micro, rank)


def _sparse() -> nn.Module:
    """An embedding with sparse gradients, used twice, and a layer."""
    return Formula(
        lambda m, tokens: m.layer(m.table(tokens)) + m.table(tokens.flip(0)),
        table=nn.Embedding(11, 4, sparse=True),
        layer=nn.Linear(4, 4),
    )


def _of_tokens(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    return model(torch.arange(4) * (step + micro + rank + 1) % 11).square().mean()


def _fused(kind: str, times: int, tied: bool = False, **more: Any) -> Pattern:
    """Layers whose kernels add weight gradients to the flat buffer by themselves."""

    def build() -> nn.Module:
        return nn.Sequential(FusedLinear(INPUT, kind, times, tied), FusedLinear(INPUT, kind))

    return Pattern(build, list, num_micro=3, sync="no_sync", **more)


_CODER = functools.partial(Pattern, _Coder, _units_of_coder, num_micro=3)

UNUSUAL: dict[str, Pattern] = {
    **{f"in place: {name}": Pattern(_in_place(*case)) for name, case in _IN_PLACE.items()},
    "outputs in plain objects": Pattern(lambda: Unpacking(block=ObjectBlock)),
    "outputs that cannot be found": Pattern(lambda: Unpacking(block=ClosureBlock), skips=True),
    "a copy of a weight returned": Pattern(lambda: Regularized("copy")),
    "a view of a weight returned that stays": Pattern(
        lambda: Regularized("view"), options={"reshard_after_forward": False}
    ),
    "a weight of the root returned": Pattern(_TiedHead),
    "gradient penalty": Pattern(Stack, loss=gradient_penalty, skips=True),
    "unit recomputed three times, reentrant": Pattern(
        lambda: _SharedInRegion(True), lambda m: [m.blocks[1][2], *m.blocks]
    ),
    "unit recomputed three times, non-reentrant": Pattern(
        lambda: _SharedInRegion(False), lambda m: [m.blocks[1][2], *m.blocks]
    ),
    "units inside a unit recomputed twice": Pattern(
        lambda: _TwiceInRegion(False), _units_of_region
    ),
    "units inside a unit recomputed twice, another between": Pattern(
        lambda: _TwiceInRegion(True), _units_of_region, options={"unshard_prefetch_depth": 2}
    ),
    "nested units recomputed after two forwards": Pattern(
        Nested, lambda m: [u for o in m.outer for u in (o.first, o.second, o)], loss=two_forwards
    ),
    "module inside two units": Pattern(_SharedByUnits),
    **{
        f"first and last layer one unit, {name or 'nothing'} recomputed, {reentrant}": Pattern(
            functools.partial(_Framed, name, reentrant),
            lambda m: [[m.input, m.output], *m.blocks],
            evaluate=mean_output,
        )
        for name, reentrant in _FRAMED
    },
    **{
        f"method that runs the forward, registered by {whose}": Pattern(
            Generating,
            lambda m: [m.block],
            loss=functools.partial(_generated, register),
            evaluate=lambda model, step, rank: model.generate(batch(step, 7, rank)),
        )
        for whose, register in (
            ("ours", register_fsdp_forward_method),
            ("torch", fsdp.register_fsdp_forward_method),
        )
    },
    "units without their root": _CODER(loss=_without_root),
    "units without their root, after wasted forwards": _CODER(loss=_wasted),
    "units without their root, kept": _CODER(
        loss=_without_root, options={"reshard_after_forward": False}
    ),
    "other units without their root on ranks": _CODER(
        loss=_others_on_ranks, optimizer=plain_sgd, skips=True
    ),
    **{
        name: Pattern(
            Stack,
            loss=functools.partial(_disturbed, act),
            num_micro=2 if act is _forward_fails else 1,
            sync="no_sync",
        )
        for name, act in _DISTURBANCES.items()
    },
    "error of a unit caught": Pattern(
        lambda: Formula(_fall_back, first=nn.Linear(INPUT, INPUT), second=nn.Linear(INPUT, INPUT)),
        lambda m: [m.first, m.second],
        loss=_caught,
    ),
    "units used different numbers of times on ranks": Pattern(
        _Uneven, loss=_run_unevenly, skips=True, num_micro=2
    ),
    "units used different numbers of times on ranks, compared": Pattern(
        _Uneven, loss=_run_unevenly, skips=True, options={"check_ranks": "always"}
    ),
    "block trained after sharding, left out by a rank": Pattern(
        _frozen_at_first, loss=_trained_later, optimizer=plain_sgd, skips=True
    ),
    "weight tied on some ranks": Pattern(_TiedOnSomeRanks, loss=_tied_on_rank_0),
    "region that ends differently on ranks": Pattern(
        lambda: Stack(1, block=lambda _: _RegionWithBranch()),
        lambda m: [m.blocks[0].inner, m.blocks[0]],
        loss=_branch_on_rank_1,
        optimizer=plain_sgd,
    ),
    "batches of several sizes": Pattern(Stack, loss=_other_sizes, num_micro=2),
    "one forward ahead of the backwards": Pattern(
        Stack, loss=functools.partial(_ahead, 1), num_micro=3
    ),
    **{
        f"fused weight gradients: {kind}, {times} times": _fused(kind, times)
        for kind in ("add", "overwrite", "late", "none")
        for times in (1, 2)
    },
    **{
        f"fused weight gradients: asked {ahead} forwards ahead": _fused(
            "overwrite", 2, loss=functools.partial(_ahead, ahead)
        )
        for ahead in (1, 2)
    },
    "fused weight gradients: tied": _fused("add", 1, True),
    "evaluation between forward and backward": Pattern(Stack, loss=_evaluated_before_backward),
    "evaluated in inference mode once unfrozen": Pattern(
        lambda: Stack().requires_grad_(False), loss=_unfrozen
    ),
    "units gathered by hand": Pattern(Stack, loss=_by_hand),
    "weights kept in some steps": Pattern(Stack, loss=_kept_in_turn, num_micro=3),
    "accumulation, along the outer axis in the last backward": Pattern(
        Stack, num_micro=3, sync="all_reduce"
    ),
    "accumulation, synchronized by a call": Pattern(Stack, num_micro=2, sync="finalized"),
    "layers run again without gradients": Pattern(
        _repeated, lambda m: [m.first, m.frozen, m.trained]
    ),
    "module without inputs": Pattern(
        lambda: Formula(lambda m: m.weight @ m.weight, weight=nn.Parameter(torch.randn(5, 5))),
        lambda m: [],
        loss=lambda m, step, micro, rank: (rank + 1) * m().square().mean(),
    ),
    "biases trained alone": Pattern(Stack, loss=_biases_alone),
    "biases trained alone, recomputed": Pattern(
        lambda: Checkpointed(use_reentrant=False), loss=_biases_alone
    ),
    **{
        f"parameters without elements, {name}": Pattern(
            Elementless, lambda m: [m.alone], clips=True, optimizer=optimizer
        )
        for name, optimizer in {
            "foreach": functools.partial(torch.optim.AdamW, eps=1e-3, foreach=True),
            "fused": functools.partial(torch.optim.AdamW, eps=1e-3, fused=True),
            "flat": functools.partial(flat_optimizer(torch.optim.AdamW), eps=1e-3),
        }.items()
    },
    "sparse gradients": Pattern(_sparse, lambda m: [m.table], loss=_of_tokens, optimizer=plain_sgd),
}
