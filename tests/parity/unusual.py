"""Unusual training patterns, in addition to `patterns.PATTERNS`. They have no golden record."""

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
from tests.parity.inputs_outputs import (
    IN_PLACE,
    WRITTEN,
    ClosureBlock,
    ObjectBlock,
    Regularized,
    Routed,
    TiedHead,
    Unpacking,
    gradient_penalty,
    in_place,
)
from tests.parity.patterns import Pattern, batch, mean_output, mean_square, two_forwards
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

# -- forwards inside a backward -------------------------------------------------------------------


def _in_hook(model: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return grad * model(x).mean().detach()


def _last_block(model: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Run a unit whose backward is over."""
    return grad * model.blocks[2](torch.ones(1, WIDTH) * x.mean()).mean()


@torch.enable_grad()
def _with_backward(model: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Run a forward and its backward, which adds to the gradients of parameters."""
    loss = model(x).square().mean()
    loss.backward(grad.sum())
    return grad * loss.detach()


def _hooked(
    run: Callable[..., torch.Tensor], model: Any, step: int, micro: int, rank: int
) -> torch.Tensor:
    """Call `run` with gradients: of the loss, of the model's output, and of a block's input."""
    hook = functools.partial(run, model, batch(step, micro + 40, rank))

    def pre_hook(_: nn.Module, args: Any) -> None:
        args[0].register_hook(hook)

    handle = model.blocks[1].register_forward_pre_hook(pre_hook)
    output = model(batch(step, micro, rank))
    handle.remove()
    output.register_hook(hook)
    loss = output.square().mean()
    loss.register_hook(hook)
    return loss


# -- recomputed regions ---------------------------------------------------------------------------


class _SharedInRegion(Stack):
    """A recomputed region that runs a unit, which contains another unit, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Block())

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.blocks[1](torch.tanh(self.blocks[0](x)))
        return self.blocks[2](x)

    def run_blocks(self, x: torch.Tensor) -> Any:
        return checkpoint(self._region, x, use_reentrant=False)


class _TwiceInRegion(nn.Module):
    """A recomputed region with two uses of a unit and, optionally, another unit between them."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.between = between
        self.other = nn.Linear(INPUT, INPUT)
        layers = {name: nn.Linear(INPUT, INPUT) for name in ("first", "second", "last")}
        # This unit uses its own weights before and after its two inner units.
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
    """A stack in which two units share a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up


# -- several modules as one unit ------------------------------------------------------------------


class _Framed(Stack):
    """First and last layer are one unit, with blocks between them; some modules are recomputed."""

    def __init__(self, recomputed: str, use_reentrant: bool) -> None:
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


_FRAMED = [("", False), ("output", False), ("block", True), ("output", True)]

# -- methods that run the forward -----------------------------------------------------------------


class Generating(nn.Module):
    """A module with a method that runs its forward, and one that its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(INPUT, INPUT), Block(INPUT)

    def forward(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        with contextlib.suppress(PlannedFailure):
            x = self.decode(torch.tanh(self.block(x) @ self.layer.weight.t()), fails=fails)
        return self.decode(x)

    def decode(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        if fails:
            raise PlannedFailure
        return x @ self.layer.weight

    def generate(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        y = self(self(self.layer(x)), fails=fails)
        if fails:
            raise PlannedFailure
        return self.layer(x) + y


def _generated(register: Any, model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Return the loss of methods and a forward; in step 2, methods first fail once."""
    x = batch(step, micro, rank)
    if step == 0:
        register(model, "generate")
        register(model, "decode")
    if step == 2:
        with contextlib.suppress(PlannedFailure):
            model.generate(x, fails=True)
    loss = model(x, fails=step == 2).square().mean()
    return loss + model.generate(x).square().mean() + mean_square(model, step, micro, rank)


# -- units that run without their root ------------------------------------------------------------


def _coder() -> nn.Module:
    """Build a root whose units are also called directly."""
    return Formula(
        lambda m, x: m.decoder(m.encoder(x)) * m.scale,
        encoder=nn.Sequential(nn.Linear(INPUT, 6), nn.Tanh(), nn.Linear(6, INPUT)),
        decoder=nn.Sequential(nn.Linear(INPUT, 6), nn.Tanh(), nn.Linear(6, INPUT)),
        scale=nn.Parameter(torch.ones(INPUT)),
    )


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
    """Run a different call in each micro-batch, after an evaluation with another call."""
    number = 3 * step + micro
    with torch.no_grad():
        CALLS[("layer", "encode", "all")[(number + step) % 3]](model, batch(step, 7, rank))
    return CALLS[_TRAINED[number % 7]](model, batch(step, micro, rank)).square().mean()


def _wasted(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Run `_without_root` after a forward without a backward."""
    CALLS[("encode", "all", "layer")[(step + micro) % 3]](model, batch(step, 8, rank))
    return _without_root(model, step, micro, rank)


def _different_on_ranks(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    how = _TRAINED[(3 * step + micro + 2 * rank) % 7]
    return CALLS[how](model, batch(step, micro, rank)).square().mean()


def _caught(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """In steps 1 and 2, a unit raises an error, and the forward of the root handles it."""
    model.fails = step in (1, 2)
    return mean_square(model, step, micro, rank)


def _fall_back(model: Any, x: torch.Tensor) -> Any:
    try:
        x = model.first(x[:, 1:] if getattr(model, "fails", False) else x)
    except RuntimeError:
        x = 2 * x
    return model.second(x)


# -- failures and resets that must not change later gradients -------------------------------------


def _disturbed(
    act: Callable[..., torch.Tensor], model: Any, step: int, micro: int, rank: int
) -> torch.Tensor:
    """Return the loss; for a sharded model, call `act`, which must not change the gradient."""
    if not isinstance(model, FSDPModule):
        return mean_square(model, step, micro, rank)
    return act(model, lambda: mean_square(model, step, micro, rank))


def _hook_raises(model: Any, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A post-accumulate-grad hook of a parameter raises an error."""
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
    """Reset gradients after the forward, while modules hold gathered parameters."""
    loss_of().backward()
    loss = loss_of()
    model.zero_grad(set_to_none)
    return loss


_DISTURBANCES: dict[str, Callable[..., torch.Tensor]] = {
    "a hook of a parameter raises": _hook_raises,
    "a forward fails between micro-batches": _forward_fails,
    "a backward fails between zeros": _backward_fails_between_zeros,
    "a backward fails beside another graph": _backward_fails_beside_a_graph,
    "gradients set to None after a forward": functools.partial(_reset, True),
    "gradients set to zero after a forward": functools.partial(_reset, False),
}

# -- other orders of forwards and backwards -------------------------------------------------------


def _other_sizes(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Return the loss of a batch whose size depends on the step and micro-batch."""
    rows = (4, 3, 4, 2, 3)[(step + micro) % 5]
    return model(batch(step, micro, rank)[:rows]).square().mean()


def _ahead(ahead: int, model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Run up to `ahead` of three forwards before the backward, as pipeline parallelism does."""
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
    """Evaluate in inference mode, then train, a model that was frozen when it was sharded."""
    model.requires_grad_(True)
    with torch.inference_mode():
        mean_square(model, step, micro + 30, rank)
    return mean_square(model, step, micro, rank)


def _unshard_explicitly(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Unshard all units with explicit calls, and set explicit prefetching."""
    if isinstance(model, FSDPModule):
        for first, second in itertools.pairwise(model.blocks):
            first.set_modules_to_forward_prefetch([second])  # type: ignore[attr-defined]
            second.set_modules_to_backward_prefetch([first])  # type: ignore[attr-defined]
        for part in (model, *model.blocks):
            part.unshard(async_op=True)
    return mean_square(model, step, micro, rank)


def _kept_in_some_steps(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Keep gathered weights after the forward or the backward, depending on the step.

    Before the backward of one micro-batch, some units are gathered and others resharded.
    """
    if not isinstance(model, FSDPModule):
        return mean_square(model, step, micro, rank)
    model.set_reshard_after_forward(step < 2)
    model.set_reshard_after_backward(micro == 2 or step != 1)
    loss = mean_square(model, step, micro, rank)
    for number, block in enumerate(model.blocks if micro == 1 else ()):
        block.reshard() if number % 2 else block.unshard()
    return loss


# -- other models ---------------------------------------------------------------------------------


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


def _train_biases(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Train biases alone until step 1, and all parameters from step 2 on."""
    for name, param in model.named_parameters():
        if "bias" not in name:
            param.requires_grad_(step >= 2)
    return mean_square(model, step, micro, rank)


def _frozen_after_the_first(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Train a block in the first micro-batch alone, which some ranks skip if the model can skip."""
    model.skip = 1 if micro == rank % 2 else None
    model.blocks[1].requires_grad_(micro == 0)
    model.blocks[2].up.requires_grad_(micro != 2)
    return mean_square(model, step, micro, rank)


class _Redirected(Stack):
    """A stack whose forward calls the module again."""

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        return 2 * self(x, again=False) if again else super().forward(x)


def _sparse() -> nn.Module:
    """Build a model with a layer and an embedding, used twice, with sparse gradients."""
    return Formula(
        lambda m, tokens: m.layer(m.table(tokens)) + m.table(tokens.flip(0)),
        table=nn.Embedding(11, 4, sparse=True),
        layer=nn.Linear(4, 4),
    )


def _without_momentum(parameters: Any) -> torch.optim.Optimizer:
    # torch's momentum does not accept the sparse gradients of the reference.
    return torch.optim.SGD(parameters, lr=0.05)


def _of_tokens(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    return model(torch.arange(4) * (step + micro + rank + 1) % 11).square().mean()


def _fused(kind: str, times: int, tied: bool = False, **more: Any) -> Pattern:
    """Return a pattern of layers whose kernels add weight gradients to the flat buffer."""

    def build() -> nn.Module:
        return nn.Sequential(FusedLinear(INPUT, kind, times, tied), FusedLinear(INPUT, kind))

    return Pattern(build, list, num_micro=3, sync="no_sync", **more)


_CODER = functools.partial(Pattern, _coder, _units_of_coder, num_micro=3)

UNUSUAL: dict[str, Pattern] = {
    **{f"in place: {name}": Pattern(in_place(*case)) for name, case in IN_PLACE.items()},
    **{
        f"losses written into a {name}": Pattern(
            functools.partial(Routed, *case), evaluate=mean_output
        )
        for name, case in WRITTEN.items()
    },
    "outputs in plain objects": Pattern(lambda: Unpacking(block=ObjectBlock)),
    "outputs in closures": Pattern(lambda: Unpacking(block=ClosureBlock), skips=True),
    "a forward that calls its own module": Pattern(_Redirected),
    "a copy of a weight returned": Pattern(lambda: Regularized("copy")),
    "a view of a weight returned, weights kept": Pattern(
        lambda: Regularized("view"), options={"reshard_after_forward": False}
    ),
    "a weight of the root returned": Pattern(TiedHead),
    "gradient penalty": Pattern(Stack, loss=gradient_penalty, skips=True),
    **{
        f"in hooks of the backward: {name}{', recomputed' * (build is not Stack)}": Pattern(
            build, loss=functools.partial(_hooked, run)
        )
        for name, run, build in (
            ("model", _in_hook, Stack),
            ("model", _in_hook, functools.partial(Checkpointed, use_reentrant=False)),
            ("model, with gradients", torch.enable_grad()(_in_hook), Stack),
            ("block", _last_block, functools.partial(Checkpointed, use_reentrant=True)),
            ("model and its backward", _with_backward, Stack),
        )
    },
    "unit recomputed three times": Pattern(_SharedInRegion, lambda m: [m.blocks[1][2], *m.blocks]),
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
        f"methods that run the forward, or run in it, registered by {whose}": Pattern(
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
    "units without their root, different on ranks": _CODER(loss=_different_on_ranks, skips=True),
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
    "batches of several sizes": Pattern(Stack, loss=_other_sizes, num_micro=2),
    "one forward ahead of the backwards": Pattern(
        Stack, loss=functools.partial(_ahead, 1), num_micro=3
    ),
    **{
        f"fused weight gradients: {kind}, {times} times": _fused(kind, times)
        for kind, times in (
            ("add", 2),
            ("overwrite", 1),
            ("overwrite", 2),
            ("late", 2),
            ("none", 2),
        )
    },
    "fused weight gradients: 2 forwards ahead": _fused(
        "overwrite", 2, loss=functools.partial(_ahead, 2)
    ),
    "fused weight gradients: tied": _fused("add", 1, True),
    "evaluation between forward and backward": Pattern(Stack, loss=_evaluated_before_backward),
    "evaluated in inference mode once unfrozen": Pattern(
        lambda: Stack().requires_grad_(False), loss=_unfrozen
    ),
    "units gathered by explicit calls": Pattern(Stack, loss=_unshard_explicitly),
    "weights kept in some steps": Pattern(Stack, loss=_kept_in_some_steps, num_micro=3),
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
    **{
        f"frozen during accumulation, {name}": Pattern(
            build, loss=_frozen_after_the_first, num_micro=3, sync=sync, skips=build is Skipping
        )
        for name, build, sync in (
            ("synchronized at the end", Stack, "no_sync"),
            ("along the outer axis at the end", Stack, "all_reduce"),
            ("skipped by some ranks", Skipping, "last_backward"),
        )
    },
    "biases trained alone": Pattern(lambda: Checkpointed(use_reentrant=False), loss=_train_biases),
    **{
        f"parameters without elements, {name}": Pattern(
            Elementless, lambda m: [m.alone], clips=True, optimizer=optimizer
        )
        for name, optimizer in {
            "fused": functools.partial(torch.optim.AdamW, eps=1e-3, fused=True),
            "flat": functools.partial(flat_optimizer(torch.optim.AdamW), eps=1e-3),
        }.items()
    },
    "sparse gradients": Pattern(
        _sparse, lambda m: [m.table], loss=_of_tokens, optimizer=_without_momentum
    ),
}
