"""The comparison of two trainings, value by value, and the first difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, override

import torch

Tensors = dict[str, torch.Tensor]
"""Values of a rank by the parameter's name in a checkpoint."""

Options = dict[str, dict[str, float]]
"""Numbers in the parameter groups of an optimizer, by the parameter's name and the option's."""

INITIAL, LOADED, STATE, LOSS = "initial weight", "loaded weight", "loaded state", "loss"
GRADIENT, NORM, OPTION = "gradient", "gradient norm", "optimizer option"
WEIGHT, REPLICA = "weight", "replica"
KINDS = (INITIAL, LOADED, STATE, LOSS, GRADIENT, OPTION, NORM, WEIGHT, REPLICA)
"""Compared values, in the order in which an iteration computes them."""

_FIRST_NOISE, _NOISE = 1e-4, 1e-2
"""A gradient below this part of the iteration's largest one is compared as if it had this size: the
gradient of a key's bias is zero up to rounding. In the first iteration both sides compute the same
gradients and only sum them in another order."""

_TRUSTED = 1e-3
"""Weights are compared where the gradient is at least this part of the largest one, and ten times
its bound: Adam divides a gradient by its own size, so that rounding would decide the update."""


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences.

    Attributes:
        loss: Of losses in the first iteration.
        norm: Of the gradient norm in the first iteration.
        gradient: Of gradients in the first iteration, relative to the parameter's largest one.
        later_loss: Of losses in later iterations.
        later_norm: Of gradient norms in later iterations.
        later_gradient: Of gradients in later iterations.
        weight: Of weights, relative to their updates so far.
        rounding: Part of the parameter's largest weight that counts as an update.
    """

    loss: float = 2e-6
    norm: float = 2e-6
    gradient: float = 2e-5
    later_loss: float = 5e-6
    later_norm: float = 2e-5
    later_gradient: float = 1e-3
    weight: float = 0.05
    rounding: float = 1e-6

    def of(self, kind: str, iteration: int) -> float:
        """Return the bound of a kind of value."""
        if kind in (INITIAL, LOADED, STATE, REPLICA, OPTION):
            return 0.0
        first = {LOSS: self.loss, NORM: self.norm, GRADIENT: self.gradient, WEIGHT: self.weight}
        later = {LOSS: self.later_loss, NORM: self.later_norm, GRADIENT: self.later_gradient}
        return (first if iteration == 1 else first | later)[kind]


EXACT = Bounds(*(0.0,) * 7)


@dataclass(frozen=True)
class Difference:
    """The largest difference of one kind of value in an iteration.

    Attributes:
        kind: One of `KINDS`.
        iteration: Number of the iteration, from 1; 0 before the first.
        name: The parameter; empty for losses and norms.
        mine: Our value.
        theirs: The other one.
        relative: Relative difference.
        factor: If all values of the parameter differ by one factor, this factor.
    """

    kind: str
    iteration: int
    name: str
    mine: float
    theirs: float
    relative: float
    factor: float | None = None

    @property
    def order(self) -> tuple[int, int, float]:
        """Sorts what is computed first, and the largest difference of it, to the front."""
        return self.iteration, KINDS.index(self.kind), -self.relative

    @override
    def __str__(self) -> str:
        where = f" of {self.name}" if self.name else ""
        when = f" of iteration {self.iteration}" if self.iteration else ""
        factor = f", {self.factor:.4g} times all its values" if self.factor else ""
        return (
            f"{self.kind}{where}{when}: {self.mine:.9g} against {self.theirs:.9g}, "
            f"a relative difference of {self.relative:.1e}{factor}"
        )


@dataclass
class Record:
    """Values of a rank in a training.

    Attributes:
        weights: Weights before the first iteration and after every iteration.
        grads: Gradients before clipping, of every iteration.
        first_rows: First row of each parameter's values within this rank's part of it.
        options: Options of the optimizer, of every iteration.
    """

    weights: list[Tensors] = field(default_factory=list)
    grads: list[Tensors] = field(default_factory=list)
    first_rows: dict[str, int] = field(default_factory=dict)
    options: list[Options] = field(default_factory=list)


def relative(mine: float, theirs: float) -> float:
    """Return the relative difference of two numbers."""
    if mine == theirs:
        return 0.0
    if not math.isfinite(mine) or not math.isfinite(theirs):
        return math.inf
    return abs(mine - theirs) / max(abs(theirs), 1e-30)


def numbers(
    kind: str, mine: Sequence[float], theirs: Sequence[float], bounds: Bounds, first: int = 1
) -> list[Difference]:
    """Return the differences of losses or norms that exceed the bounds.

    Args:
        kind: Kind of the values.
        mine: Our value in every iteration.
        theirs: The other values.
        bounds: Allowed differences.
        first: Number of the first iteration.
    """
    if len(mine) != len(theirs):
        return [Difference(kind, first, "", len(mine), len(theirs), math.inf)]
    return [
        Difference(kind, iteration, "", a, b, relative(a, b))
        for iteration, (a, b) in enumerate(zip(mine, theirs, strict=True), start=first)
        if relative(a, b) > bounds.of(kind, iteration)
    ]


def records(mine: Record, theirs: Record, bounds: Bounds, num_before: int = 0) -> list[Difference]:
    """Return the differences of weights and gradients that exceed the bounds.

    Args:
        mine: Values of a rank.
        theirs: Values of the same rank in the other training, of at least the same rows.
        bounds: Allowed differences.
        num_before: Iterations of the other training before the first of this one.
    """
    first_rows = {name: row - theirs.first_rows[name] for name, row in mine.first_rows.items()}
    before = theirs.weights[num_before]
    kind = LOADED if num_before else INITIAL
    found = _differ(kind, num_before, mine.weights[0], before, first_rows, bounds)
    found += options(mine.options, theirs.options[num_before:], num_before + 1)
    steps = zip(
        *(mine.grads, theirs.grads[num_before:]),
        *(mine.weights[1:], theirs.weights[num_before + 1 :]),
        strict=True,
    )
    for iteration, (my_grads, grads, my_weights, weights) in enumerate(steps, start=num_before + 1):
        floor = (_FIRST_NOISE if iteration == 1 else _NOISE) * _largest(grads.values())
        scales = {name: max(_largest([grad]), floor) for name, grad in grads.items()}
        found += _differ(GRADIENT, iteration, my_grads, grads, first_rows, bounds, scales)
        start, trusted = theirs.weights[0], _trusted(theirs.grads[:iteration], bounds)
        scales = {
            name: _largest([weight - start[name]]) + bounds.rounding * _largest([weight])
            for name, weight in weights.items()
        }
        found += _differ(
            *(WEIGHT, iteration, my_weights, weights, first_rows, bounds, scales, trusted)
        )
    return found


def options(mine: Sequence[Options], theirs: Sequence[Options], first: int = 1) -> list[Difference]:
    """Return the differences of options that both optimizers have.

    Args:
        mine: Options of every iteration.
        theirs: The other options of the same iterations, of no other parameters.
        first: Number of the first iteration.
    """
    found = []
    for iteration, (own, other) in enumerate(zip(mine, theirs, strict=True), start=first):
        for name in other:
            if name not in own:
                where = f"{name} (parameter groups)"
                found.append(Difference(OPTION, iteration, where, 0, 1, math.inf))
                continue
            for option in own[name].keys() & other[name].keys():
                a, b = own[name][option], other[name][option]
                if gap := relative(a, b):
                    where = f"{name} ({option})"
                    found.append(Difference(OPTION, iteration, where, a, b, gap))
    return found


def replicas(mine: Sequence[Tensors], first: Sequence[Tensors]) -> list[Difference]:
    """Return the differences between a rank's weights and those of the first rank of its group.

    Args:
        mine: Weights before the first iteration and after every iteration.
        first: The same weights of the first rank, which should be equal.
    """
    found = []
    for iteration, (own, other) in enumerate(zip(mine, first, strict=True)):
        rows, scales = dict.fromkeys(own, 0), {name: _largest([own[name]]) for name in own}
        found += _differ(REPLICA, iteration, own, other, rows, EXACT, scales)
    return found


def whole(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], kind: str = LOADED
) -> list[Difference]:
    """Return the differences of whole tensors, which must be bitwise identical.

    Args:
        mine: Our tensors by name.
        theirs: The other tensors.
        kind: `LOADED` or `STATE`.
    """
    found = [
        Difference(kind, 0, name, math.nan, math.nan, math.inf) for name in mine.keys() ^ theirs
    ]
    for name in mine.keys() & theirs.keys():
        a, b = (torch.from_numpy(side[name]) for side in (mine, theirs))
        if a.shape != b.shape:
            found.append(Difference(kind, 0, name, a.numel(), b.numel(), math.inf))
        else:
            found += _differ(kind, 0, {name: a}, {name: b}, {name: 0}, EXACT)
    return found


def _trusted(grads: Sequence[Tensors], bounds: Bounds) -> Tensors | None:
    """Return where no gradient was so small that rounding determines its update.

    Everywhere (None) if both trainings have the same gradients.
    """
    if not bounds.gradient:
        return None
    found: Tensors = {}
    part = max(_TRUSTED, 10 * bounds.gradient)
    for of_iteration in grads:
        largest = _largest(of_iteration.values())
        for name, grad in of_iteration.items():
            limit = part * max(_largest([grad]), _NOISE * largest)
            is_large = grad.abs() >= limit
            found[name] = is_large & found[name] if name in found else is_large
    return found


def _differ(
    kind: str,
    iteration: int,
    mine: Tensors,
    theirs: Tensors,
    first_rows: Mapping[str, int],
    bounds: Bounds,
    scales: Mapping[str, float] | None = None,
    trusted: Tensors | None = None,
) -> list[Difference]:
    """Return the largest difference of each parameter that exceeds the bound, beside its scale."""
    bound = bounds.of(kind, iteration)
    found = []
    for name, own in mine.items():
        if not own.numel():
            continue
        rows = slice(first_rows[name], first_rows[name] + own.shape[0]) if own.dim() else ...
        other = theirs[name][rows]
        gap = (own - other).abs()
        if trusted is not None:
            gap = gap * trusted[name][rows]
        where = int(gap.nan_to_num(nan=math.inf).argmax())
        size = float(gap.flatten()[where]) / max(scales[name] if scales else 1.0, 1e-30)
        if not size <= bound:
            a, b = float(own.flatten()[where]), float(other.flatten()[where])
            found.append(Difference(kind, iteration, name, a, b, size, _factor(own, other)))
    return found


def _factor(mine: torch.Tensor, theirs: torch.Tensor) -> float | None:
    """Return the factor between two tensors, if there is one other than 1."""
    total = float((theirs * theirs).sum())
    factor = float((mine * theirs).sum()) / total if total else 0.0
    is_one = float((mine - factor * theirs).abs().max()) <= 1e-3 * _largest([mine])
    is_told = is_one and math.isfinite(factor) and abs(factor - 1) > 1e-3
    return factor if factor and is_told else None


def _largest(tensors: Iterable[Any]) -> float:
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)
