"""Units that run outside of their root's forward: methods, single layers, several in one loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    batch,
    gradient_error,
    listen,
    pair,
    step_all,
    weight_error,
)
from tests.reference.failing import fail, failing
from tests.reference.models import Formula

WIDTH = 5


class Coder(nn.Module):
    """A root with methods that run its units without it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def encode(self, x: torch.Tensor) -> Any:
        return self.encoder(x)

    def decode(self, x: torch.Tensor) -> Any:
        return self.decoder(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x)) * self.scale


def _units(model: Any) -> list[nn.Module]:
    return [model.encoder[0], model.encoder[2], model.encoder, model.decoder]


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all": lambda model, x: model(x),
    "encode": lambda model, x: model.encode(x),
    "layer": lambda model, x: model.encoder[0](x)[:, :WIDTH],
    "both methods": lambda model, x: model.decode(model.encode(x)),
    "method twice, then all": lambda model, x: model.encode(x) + model.encode(2 * x) + model(x),
    "all, then method": lambda model, x: model(x) * model.decode(x),
    "method into all": lambda model, x: model(model.encode(x)),
}


def difference(model: nn.Module, plain: nn.Module) -> float:
    """Largest difference of weights, and of gradients."""
    return max(weight_error(model, plain), gradient_error(model, plain))


def square(how: str) -> Callable[[Any, int, int], torch.Tensor]:
    """The loss of a call for one rank's data."""
    return lambda model, rank, step: CALLS[how](model, data(step, rank)).square().mean()


def data(step: int, rank: int) -> torch.Tensor:
    """Inputs of one rank: `(3, WIDTH)`."""
    return batch(rank, step, rows=3, dtype=torch.float64)


class Both:
    """A plain and a sharded model that do the same."""

    def __init__(self, strategy: str, **options: Any) -> None:
        options["sharding_strategy"] = strategy
        self.plain, self.model = pair(lambda: Coder().double(), _units, **options)
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.plain, self.model)
        ]
        self.differences: list[tuple[str, float]] = []

    def do(self, event: str, step: int) -> None:
        """One event: `step`, `fail`, or `train`, `evaluate` or `waste` and a call."""
        kind, _, how = event.partition(" ")
        own = data(step, dist.get_rank())
        if kind == "step":
            step_all(*self.optimizers)
        elif kind == "train":
            backward_both(self.plain, self.model, step, square(how))
        elif kind == "evaluate":
            with torch.no_grad():
                error = CALLS[how](self.model, own) - CALLS[how](self.plain, own)
            self.differences.append((event, float(error.abs().max())))
        elif kind == "waste":
            # What may stay gathered until its backward has no rows to compare.
            CALLS[how](self.model, own)
            return
        else:
            with failing(self.model.decoder.register_forward_pre_hook(fail)):
                CALLS[how](self.model, own)
            return
        self.differences.append((event, difference(self.model, self.plain)))


PROGRAMS = {
    "a method before the root ever ran": [
        *("train encode", "step", "train all", "step", "evaluate layer", "train encode"),
        *("train all", "step", "evaluate all"),
    ],
    "a layer after a backward, before and after a step": [
        *("train all", "evaluate layer", "train layer", "evaluate encode", "step"),
        *("evaluate layer", "evaluate encode", "train layer", "step", "evaluate all"),
    ],
    "several in one loss": [
        *("train both methods", "step", "train method twice, then all", "step"),
        *("train all, then method", "train method into all", "step", "train both methods"),
        *("evaluate both methods", "step", "train all", "step", "evaluate all"),
    ],
    "after an exception": [
        *("train all", "fail all", "train both methods", "step", "fail encode", "fail all"),
        *("evaluate both methods", "train encode", "fail all", "evaluate layer", "train all"),
        *("step", "evaluate all"),
    ],
    "after forwards that no backward followed": [
        *("waste encode", "train all", "step", "evaluate layer", "waste all", "waste layer"),
        *("train encode", "step", "train both methods", "step", "evaluate all"),
    ],
}


@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
@on_ranks(2, strategy=STRATEGIES, name=PROGRAMS)
def test_units_run_without_their_root_as_in_a_plain_model(
    strategy: str, name: str, pool: bool
) -> None:
    options = {"enable_trace_pool": True, "reshard_after_forward": False} if pool else {}
    both = Both(strategy, **options)
    # Twice: the traced pool plans what it has seen.
    for step, event in enumerate(2 * PROGRAMS[name]):
        both.do(event, step)
    assert [entry for entry in both.differences if not entry[1] < 1e-12] == []


@on_ranks(3, strategy=STRATEGIES[:3])
def test_below_zero_3_ranks_may_run_different_units_outside_of_their_root(strategy: str) -> None:
    both = Both(strategy)
    losses = [
        ("encode", "method twice, then all", "all"),
        ("all, then method", "all", "layer"),
        ("all", "both methods", "method into all"),
    ]
    for number, calls in enumerate(2 * losses):

        def loss(model: Any, rank: int, step: int, calls: Any = calls) -> torch.Tensor:
            return square(calls[rank])(model, rank, step)

        backward_both(both.plain, both.model, number, loss)
        both.do("step", number)
        # Evaluations after the first one communicate nothing.
        both.do("evaluate encode", number)
        for how in ["layer", "all"][: dist.get_rank()]:
            both.do(f"evaluate {how}", number)
    assert max(error for _, error in both.differences) < 1e-12


class _FallsBack(nn.Module):
    """Goes on where one of its units raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, fails: bool) -> Any:
        try:
            x = self.first(x if not fails else x[:, 1:])
        except RuntimeError:
            x = 2 * x
        return self.second(x)


@on_ranks(2, strategy=STRATEGIES)
def test_a_forward_may_catch_what_one_of_its_units_raises(strategy: str) -> None:
    options = {"sharding_strategy": strategy}
    plain, model = pair(lambda: _FallsBack().double(), lambda m: [m.first, m.second], **options)

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(data(step, rank), step in (1, 2)).square().mean()

    for step in range(4):
        backward_both(plain, model, step, loss)
        assert difference(model, plain) < 1e-12, step


@on_ranks(2)
def test_units_alone_leave_the_order_of_the_root_and_nothing_gathered() -> None:
    counts = []
    for evaluates in (False, True):
        model = Both("optim_grads_params").model
        wire = listen(model)
        for step in range(3):
            if evaluates:
                with torch.no_grad():
                    model.encode(data(step, 0))
            before = wire.count("all_gather")
            model(data(step, dist.get_rank())).square().mean().backward()
        counts.append(wire.count("all_gather") - before)
        assert all(hasattr(param, "local_rows") for param in model.parameters())
    assert counts[0] == counts[1]


def _around() -> Formula:
    """A unit with weights of its own, used before and after the two units inside it."""

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in (module.last, module.first, module.second, module.last):
            x = torch.tanh(layer(x))
        return x

    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second", "last")}
    return Formula(forward, **layers)


class _TwiceInARegion(nn.Module):
    """Recomputes two uses of one unit, with another one between or not, as one region."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.around = _around()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        x = self.around(x)
        if self.between:
            x = self.other(x)
        return self.around(x) * self.other(x)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._region, x, use_reentrant=False)


@on_ranks(2, between=[False, True], depth=[1, 2])
def test_a_unit_with_units_inside_is_recomputed_twice_in_one_region(
    between: bool, depth: int
) -> None:
    def units(model: Any) -> list[nn.Module]:
        return [model.around.first, model.around.second, model.around, model.other]

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(data(step, rank).requires_grad_()).square().mean()

    plain, model = pair(
        lambda: _TwiceInARegion(between).double(), units, unshard_prefetch_depth=depth
    )
    for step in range(2):
        backward_both(plain, model, step, loss)
        assert difference(model, plain) < 1e-12, step
