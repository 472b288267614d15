"""Trains on the ranks of a pool, and compares two trainings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tests.distributed.on_ranks import on_ranks
from tests.mcore.flags import MODEL_FLAGS, Flags, words
from tests.mcore.session import Training, distance, merge_ranks, train
from tests.ranks import RankPools

# The first training of a pool imports Megatron on every rank, eight of which may share two cores.
TIMEOUT_S = 240.0

on_megatron = functools.partial(on_ranks, pools="megatron", timeout_s=TIMEOUT_S)
on_te = functools.partial(on_ranks, pools="megatron_te", timeout_s=TIMEOUT_S)
"""Decorators of tests that run on ranks with Megatron's own layers, or with its default layers."""

_DONE: WeakKeyDictionary[RankPools, dict[Any, Training]] = WeakKeyDictionary()


def trained(
    pools: RankPools, world_size: int, *flags: Flags, iterations: int | None = None, **options: Any
) -> Training:
    """Train the small model on every rank of a pool.

    Args:
        pools: Process groups for Megatron.
        world_size: Number of ranks.
        flags: Added to `MODEL_FLAGS`.
        iterations: Expected number of iterations.
        options: See `run_of_ranks`.

    Returns:
        The merged measurements of all ranks.
    """
    result = run_of_ranks(pools, world_size, [*MODEL_FLAGS, *words(*flags)], **options)
    if iterations is not None:
        assert len(result.losses) == len(result.grad_norms) == iterations
    return result


def run_of_ranks(
    pools: RankPools,
    world_size: int,
    command: Sequence[str],
    *,
    by: Callable[..., Any] = train,
    once: bool = False,
    **options: Any,
) -> Training:
    """Run a command line on every rank of a pool.

    Args:
        pools: Process groups for Megatron.
        world_size: Number of ranks.
        command: All flags except those of the rehearsal.
        by: Function that trains on a rank.
        once: Whether to reuse the result of an equal call, for references of several tests.
        options: Options of `by`.
    """
    done = _DONE.setdefault(pools, {})
    key = (world_size, by, *command, *sorted(options.items()))
    if not once or key not in done:
        done[key] = merge_ranks(pools(world_size).run(by, command, timeout_s=TIMEOUT_S, **options))
    return done[key] if once else done.pop(key)


def assert_close(
    mine: Training, theirs: Training, losses: float = 1e-6, norms: float | None = None
) -> None:
    """Check that two trainings agree up to the order of sums.

    Args:
        mine: One training.
        theirs: The other one.
        losses: Bound of relative differences of losses, including evaluations.
        norms: Bound of relative differences of norms of gradients and parameters; `losses` if None.
    """
    assert mine.losses and mine.grad_norms, "nothing was trained"
    found = first_difference(mine, theirs, losses, losses if norms is None else norms)
    assert not found, found


def first_difference(mine: Training, theirs: Training, losses: float, norms: float) -> str:
    """Name the first iteration that differs by more than these bounds; empty if none does."""
    found = []
    for name, bound in (
        ("losses", losses),
        ("evaluations", losses),
        ("grad_norms", norms),
        ("params_norms", norms),
    ):
        pairs = zip(getattr(mine, name), getattr(theirs, name), strict=True)
        for position, (a, b) in enumerate(pairs, start=1):
            if distance([a], [b]) > bound:
                found.append(f"{name} first at {position}: {a} against {b}")
                break
    return "; ".join(found)


def assert_equal(mine: Training, theirs: Training, after: int = 0) -> None:
    """Check that losses and gradient norms are bitwise identical.

    Args:
        mine: One training.
        theirs: The other one.
        after: Number of iterations of the other one before the first of this one.
    """
    assert mine.losses and mine.grad_norms, "nothing was trained"
    assert (mine.losses, mine.grad_norms) == (theirs.losses[after:], theirs.grad_norms[after:])
