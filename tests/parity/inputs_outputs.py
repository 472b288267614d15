"""Modules whose units change their inputs or outputs, or return more than visible tensors."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.parity.patterns import batch
from tests.reference.models import INPUT, WIDTH, Block, Formula, Stack

# -- in-place operations on inputs and outputs ----------------------------------------------------


def in_place(what: Callable[..., Any], call: Callable[..., Any]) -> Callable[[], nn.Module]:
    """Return a builder of a sequence of units whose forward is `what`; `call` runs a unit."""

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


# The forward of a unit, and a function that calls the unit.
IN_PLACE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu of a residual": (_relu_first, _residual),
    "pieces of a residual, and then by the caller": (_in_pieces, _changed_after),
    "its output": (lambda self, x: self.layer(x).mul_(self.scale), _part_changed_after),
    "a view it returns": (lambda self, x: self.layer(x).view(-1, 2), _changed_after),
    "the input it returns": (lambda self, x: x, _changed_after),
    "the second input alone": (lambda self, x, y: self.layer(y.mul_(self.scale)), _two_inputs),
    "one input given twice": (_both_inputs, lambda unit, x: unit(x, x)),
}

# -- what a forward writes into its arguments -----------------------------------------------------


@dataclasses.dataclass
class _State:
    """A mutable argument."""

    aux: Any
    more: Any = None


@dataclasses.dataclass(frozen=True)
class _Frozen:
    losses: list[torch.Tensor]


class _Router(Block):
    """A unit that writes a loss of its output into an argument, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, state: Any, add: Callable[[Any, torch.Tensor], None]) -> Any:
        y = super().forward(x)
        # Small, as such losses are: next to a large one, the outputs would lose digits.
        add(state, 0.1 * self.gate(y).logsumexp(1).square().mean())
        return y


def _add_to_item(state: Any, loss: torch.Tensor) -> None:
    state["aux"] = state.get("aux", 0) + loss
    state.setdefault("outputs", []).append(loss)


def _add_to_field(state: Any, loss: torch.Tensor) -> None:
    state.aux += loss
    state.more["losses"] = (*state.more.get("losses", ()), loss)


# An argument, a function that writes a loss into it, and a function that reads the losses.
WRITTEN: dict[str, tuple[Callable[[], Any], Callable[..., Any], Callable[[Any], Any]]] = {
    "list": (list, list.append, sum),
    "ordered dict in a list": (
        lambda: [collections.OrderedDict()],
        lambda state, loss: _add_to_item(state[0], loss),
        lambda state: state[0]["aux"] + sum(state[0]["outputs"]),
    ),
    "dataclass": (
        lambda: _State(torch.zeros(()), {}),
        _add_to_field,
        lambda state: state.aux + sum(state.more["losses"]),
    ),
    "list in a frozen dataclass": (
        lambda: _Frozen([]),
        lambda state, loss: state.losses.append(loss),
        lambda state: sum(state.losses),
    ),
}


class Routed(Stack):
    """A stack of routers; its output includes their losses."""

    def __init__(self, build: Callable[[], Any], add: Any, read: Any) -> None:
        super().__init__(block=lambda _: _Router())
        self.build, self.add, self.read = build, add, read

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        state = self.build()
        for block in self.blocks:
            x = block(x, state, add=self.add)
        return x + self.read(state)


# -- outputs without visible tensors --------------------------------------------------------------


class _Answer:
    """A plain object with slots, which is not registered with torch's pytree."""

    __slots__ = ("inner",)

    def __init__(self, value: torch.Tensor) -> None:
        self.inner = {"value": [value]}


class ObjectBlock(Block):
    """A unit that returns a plain object."""

    def forward(self, x: torch.Tensor) -> Any:
        return _Answer(super().forward(x))


class ClosureBlock(Block):
    """A unit that returns a closure over its output."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return lambda: y


class Unpacking(Stack):
    """A stack of blocks that return an object or a closure instead of a tensor."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            x = y() if callable(y) else y.inner["value"][0]
        return x


class Leaking(Block):
    """A unit that returns its output, and a weight, a view of it or a copy."""

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
    """A stack that adds the squares of the weights that its blocks return."""

    def __init__(self, what: str) -> None:
        super().__init__(block=lambda _: Leaking(what))

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        penalty = torch.zeros(())
        for block in self.blocks:
            x, extra = block(x)
            penalty = penalty + extra["regularized"][0].square().sum()
        return x + 0.01 * penalty


class TiedHead(Regularized):
    """A stack whose block returns a weight that is tied to the root."""

    def __init__(self) -> None:
        super().__init__("weight")
        self.blocks = self.blocks[:1]
        self.tied = self.blocks[0].up.weight


def gradient_penalty(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Return the loss plus the squared norm of its gradient with respect to the inputs."""
    x = batch(step, micro, rank).requires_grad_()
    loss = model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()
