"""Units that run outside of their root's forward: methods, single layers, several in one loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.wrapping import STRATEGIES, held_error, listen, wrap
from tests.ranks import RankPools

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


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all": lambda model, x: model(x),
    "encode": lambda model, x: model.encode(x),
    "layer": lambda model, x: model.encoder[0](x)[:, :WIDTH],
    "both methods": lambda model, x: model.decode(model.encode(x)),
    "method twice, then all": lambda model, x: model.encode(x) + model.encode(2 * x) + model(x),
    "all, then method": lambda model, x: model(x) * model.decode(x),
    "method into all": lambda model, x: model(model.encode(x)),
}


def pair(strategy: str, **options: Any) -> tuple[Any, Any]:
    """The same model twice: plain, and sharded with units inside of units."""
    torch.manual_seed(0)
    plain = Coder().double()
    torch.manual_seed(0)
    model = Coder().double()
    inner = [model.encoder[0], model.encoder[2], model.encoder, model.decoder]
    return plain, wrap(model, inner, sharding_strategy=strategy, **options)


def data(step: int, rank: int) -> torch.Tensor:
    """Inputs of one rank: `(3, WIDTH)`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def difference(model: nn.Module, plain: nn.Module) -> float:
    """Largest difference of weights, and of gradients (a missing one is zero)."""
    worst = 0.0
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        worst = max(worst, held_error(mine, theirs))
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        if mine.grad is not None:
            worst = max(worst, held_error(mine.grad, expected))
        elif mine.to_local().numel():  # type: ignore[attr-defined]
            worst = max(worst, float(expected.abs().max()))
    return worst


class _Planned(Exception):
    """Raised on purpose."""


def _fail(*args: Any) -> None:
    raise _Planned


class Both:
    """A plain and a sharded model that do the same."""

    def __init__(self, strategy: str, **options: Any) -> None:
        self.plain, self.model = pair(strategy, **options)
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.plain, self.model)
        ]
        self.differences: list[tuple[str, float]] = []

    def do(self, event: str, step: int) -> None:
        """One event: `step`, `fail`, or `train`, `evaluate` or `waste` and a call."""
        kind, _, how = event.partition(" ")
        own = data(step, dist.get_rank())
        if kind == "step":
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        elif kind == "train":
            self.train(how, step)
        elif kind == "evaluate":
            with torch.no_grad():
                error = CALLS[how](self.model, own) - CALLS[how](self.plain, own)
            self.differences.append((event, float(error.abs().max())))
        elif kind == "waste":
            # What may stay gathered until its backward has no rows to compare.
            CALLS[how](self.model, own)
            return
        else:
            handle = self.model.decoder.register_forward_pre_hook(_fail)
            with contextlib.suppress(_Planned):
                CALLS[how](self.model, own)
            handle.remove()
            return
        self.differences.append((event, difference(self.model, self.plain)))

    def train(self, how: str, step: int) -> None:
        """Forward and backward, of the mean over all ranks' data on the plain side."""
        size = dist.get_world_size()
        for rank in range(size):
            (CALLS[how](self.plain, data(step, rank)).square().mean() / size).backward()
        CALLS[how](self.model, data(step, dist.get_rank())).square().mean().backward()


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


def differences(program: list[str], **options: Any) -> dict[str, list[tuple[str, float]]]:
    """By strategy, what differs from the plain model where."""
    found = {}
    for strategy in STRATEGIES:
        both = Both(strategy, **options)
        # Twice: the traced pool plans what it has seen.
        for step, event in enumerate(2 * program):
            both.do(event, step)
        found[strategy] = [entry for entry in both.differences if not entry[1] < 1e-12]
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_units_run_without_their_root_as_in_a_plain_model(pools: RankPools, name: str) -> None:
    for options in ({}, {"enable_trace_pool": True, "reshard_after_forward": False}):
        for found in pools(2).run(differences, PROGRAMS[name], **options):
            assert found == {strategy: [] for strategy in STRATEGIES}


def different_calls() -> dict[str, list[float]]:
    """By strategy: differences after losses of which every rank makes another one."""
    found = {}
    for strategy in STRATEGIES[:3]:
        both, size, rank = Both(strategy), dist.get_world_size(), dist.get_rank()
        found[strategy] = []
        losses = [
            ("encode", "method twice, then all", "all"),
            ("all, then method", "all", "layer"),
            ("all", "both methods", "method into all"),
        ]
        for step, calls in enumerate(2 * losses):
            for other in range(size):
                loss = CALLS[calls[other % 3]](both.plain, data(step, other)).square().mean()
                (loss / size).backward()
            CALLS[calls[rank % 3]](both.model, data(step, rank)).square().mean().backward()
            both.do("step", step)
            # Evaluations after the first one communicate nothing.
            both.do("evaluate encode", step)
            for how in ["layer", "all"][: rank % 3]:
                both.do(f"evaluate {how}", step)
        found[strategy] = [error for _, error in both.differences]
    return found


def test_below_zero_3_ranks_may_run_different_units_outside_of_their_root(
    pools: RankPools,
) -> None:
    for found in pools(3).run(different_calls):
        for strategy, errors in found.items():
            assert max(errors) < 1e-12, strategy


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


def falls_back(strategy: str) -> list[float]:
    """Differences where a unit raises and the forward around it goes on."""
    torch.manual_seed(0)
    plain = _FallsBack().double()
    torch.manual_seed(0)
    built = _FallsBack().double()
    model = wrap(built, [built.first, built.second], sharding_strategy=strategy)
    found = []
    for step, fails in enumerate([False, True, True, False]):
        for rank in range(dist.get_world_size()):
            loss = plain(data(step, rank), fails).square().mean()
            (loss / dist.get_world_size()).backward()
        model(data(step, dist.get_rank()), fails).square().mean().backward()
        found.append(difference(model, plain))
    return found


def test_a_forward_may_catch_what_one_of_its_units_raises(pools: RankPools) -> None:
    for strategy in STRATEGIES:
        for errors in pools(2).run(falls_back, strategy):
            assert max(errors) < 1e-12, strategy


def gathers_of_a_step(evaluates: bool) -> tuple[int, bool]:
    """All-gathers of the last of three steps, and whether all parameters are sharded after it."""
    _, model = pair("optim_grads_params")
    wire = listen(model)
    for step in range(3):
        if evaluates:
            with torch.no_grad():
                model.encode(data(step, 0))
        before = wire.count("all_gather")
        model(data(step, dist.get_rank())).square().mean().backward()
    count = wire.count("all_gather") - before
    return count, all(hasattr(param, "local_rows") for param in model.parameters())


def test_units_alone_leave_the_order_of_the_root_and_nothing_gathered(pools: RankPools) -> None:
    assert pools(2).run(gathers_of_a_step, True) == pools(2).run(gathers_of_a_step, False)


class _Around(nn.Module):
    """A unit with weights of its own, used after the two units inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(torch.tanh(self.last(x))))))
        return torch.tanh(self.last(x))


class _TwiceInARegion(nn.Module):
    """Recomputes two uses of one unit, with another one between or not, as one region."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.around = _Around()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        x = self.around(x)
        if self.between:
            x = self.other(x)
        return self.around(x) * self.other(x)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._region, x, use_reentrant=False)


def recomputed_twice(between: bool, depth: int) -> float:
    """Largest difference over two steps at ZeRO-3."""
    torch.manual_seed(0)
    plain = _TwiceInARegion(between).double()
    torch.manual_seed(0)
    built = _TwiceInARegion(between).double()
    units = [built.around.first, built.around.second, built.around, built.other]
    model = wrap(built, units, unshard_prefetch_depth=depth)
    worst = 0.0
    for step in range(2):
        for rank in range(dist.get_world_size()):
            (plain(data(step, rank)).square().mean() / dist.get_world_size()).backward()
        model(data(step, dist.get_rank()).requires_grad_()).square().mean().backward()
        worst = max(worst, difference(model, plain))
    return worst


@pytest.mark.parametrize("between", [False, True])
def test_a_unit_with_units_inside_is_recomputed_twice_in_one_region(
    pools: RankPools, between: bool
) -> None:
    for depth in (1, 2):
        assert max(pools(2).run(recomputed_twice, between, depth)) < 1e-12
