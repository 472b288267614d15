"""Sharded training equals the unsharded reference: every pattern, strategy and mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import fully_shard
from tests.cases import quick_if
from tests.distributed.nccl_double import as_on_cuda
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import MESHES, STRATEGIES, on_mesh, strategies_on
from tests.pages import page, print_at_the_end, table
from tests.parity.patterns import PATTERNS
from tests.ranks import RankPools
from tests.reference.training import Trace, distances, train_reference, train_sharded

TOLERANCE = 1e-6
BUCKET = 4800
"""Bytes that two blocks take, or a little more."""
SWITCHES = ("enable_unshard_prefetch", "enable_async_reduce_grad")


def _sharded(
    pattern: str,
    strategy: str,
    mesh_name: str,
    see: Callable[[nn.Module], None] = lambda module: None,
    **switches: Any,
) -> Trace:
    options = {"sharding_strategy": strategy, **on_mesh(mesh_name), **switches}

    def shard(module: nn.Module) -> None:
        fully_shard(module, **PATTERNS[pattern].options, **options)
        see(module)

    return train_sharded(PATTERNS[pattern], shard)


def _strategies(pattern: str, mesh_name: str) -> list[str]:
    """Strategies that a pattern can be trained with."""
    skips = PATTERNS[pattern].skips and mesh_name != "1"
    return [s for s in strategies_on(mesh_name) if not (skips and s == "optim_grads_params")]


def errors_of_pattern(pattern: str, mesh_name: str) -> dict[str, float]:
    """On every rank: the largest relative error of a pattern, per strategy."""
    size, rank = dist.get_world_size(), dist.get_rank()
    reference = train_reference(PATTERNS[pattern], size, evaluates_rank=rank)
    return {
        strategy: compare(_sharded(pattern, strategy, mesh_name), reference)
        for strategy in _strategies(pattern, mesh_name)
    }


def compare(trace: Trace, reference: Trace) -> float:
    """The largest relative error of losses, evaluations, gradients and parameters."""
    mine, theirs = ([*t.losses, *t.evaluations] for t in (trace, reference))
    assert len(trace.losses) == len(reference.losses)
    errors = [abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True)]
    for found, expected in zip(trace.grads, reference.grads, strict=True):
        assert found.keys() == expected.keys()
        trained = {}
        for name, grad in expected.items():
            (start, end), other = trace.rows[name], found[name]
            if grad is None or not grad.any():
                # Nothing used it: no gradient, or zero where others of its unit have one.
                assert other is None or not other.any(), name
            elif start == end:
                assert other is None, f"{name} has a gradient for an empty shard"
            else:
                assert other is not None, f"{name} has no gradient"
                trained[name] = grad
        errors += distances({n: (trace.rows[n], found[n]) for n in trained}, trained)
    held = {name: (trace.rows[name], param) for name, param in trace.params.items()}
    errors += distances(held, reference.params)
    return max(errors)


def _pool_changes_nothing(plain: Trace, pattern: str, strategy: str, mesh_name: str) -> bool:
    """Whether a training on the traced pool gives the same bits as one without it."""
    roots: list[Any] = []
    pooled = _sharded(pattern, strategy, mesh_name, roots.append, enable_trace_pool=True)
    for report in roots[-1].trace_pool().reports():
        # A test of a pool that was never planned would show nothing.
        assert report.plan is not None or not report.programs
    return _same_bits(plain, pooled)


def _same_bits(first: Trace, second: Trace) -> bool:
    if first.losses != second.losses or first.evaluations != second.evaluations:
        return False
    pairs: list[tuple[Any, Any]] = [(first.params[n], second.params[n]) for n in first.params]
    for mine, theirs in zip(first.grads, second.grads, strict=True):
        pairs += [(mine[name], theirs[name]) for name in mine]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str, str], float]]:
    """Errors by (pattern, strategy, mesh); printed with `--tables`."""
    errors: dict[tuple[str, str, str], float] = {}
    yield errors
    if errors:
        print_at_the_end(request.config, _page(errors))


_ABOUT = (
    "Largest relative error (norm of the difference over norm) of losses, gradients and "
    "parameters over 5 steps, against an unsharded loop, fp32; each is below 1e-06. `make test` "
    "trains each pattern on one mesh in turn, `make test-matrices` on the rest. A tensor that is "
    "small by cancellation is measured against a third of the norm of all of them. Empty: at "
    "ZeRO-3 a unit cannot be skipped on some ranks only, and a replicated optimizer cannot be "
    "sharded along the outer axis. With prefetching and asynchronous reduction switched off "
    "the same bits come out (`test_switches_change_no_bit`)."
)


def _page(errors: dict[tuple[str, str, str], float]) -> str:
    columns = sorted({key[1:] for key in errors}, key=lambda c: (list(MESHES).index(c[1]), c[0]))
    known = {key: f"{error:.0e}" for key, error in errors.items()}
    rows = [[name, *(known.get((name, *column), "") for column in columns)] for name in PATTERNS]
    head = ["pattern", *(f"{s}, {m}" for s, m in columns)]
    return page("Parity matrix", _ABOUT, table(head, rows))


def _cells() -> Iterator[Any]:
    """Every pattern on every mesh; in `make test` on one of them in turn."""
    for number, pattern in enumerate(PATTERNS):
        for place, name in enumerate(MESHES):
            yield quick_if(place == number % len(MESHES), pattern, name)


@pytest.mark.parametrize(("pattern", "mesh_name"), list(_cells()))
def test_a_pattern_trains_like_the_reference(
    pools: RankPools, matrix: dict[tuple[str, str, str], float], pattern: str, mesh_name: str
) -> None:
    ranks = pools(math.prod(MESHES[mesh_name][0]))
    results = ranks.run(errors_of_pattern, pattern, mesh_name)
    for strategy in _strategies(pattern, mesh_name):
        error = max(result[strategy] for result in results)
        matrix[pattern, strategy, mesh_name] = error
        assert error < TOLERANCE, f"{strategy}: {error}"


def _cells_of_nccl() -> Iterator[Any]:
    """Every pattern on every mesh of several ranks; in `make test` four of the cells."""
    names = list(MESHES)[1:]
    for number, pattern in enumerate(PATTERNS):
        for place, name in enumerate(names):
            is_quick = number % 12 == 0 and place == number // 12
            yield quick_if(is_quick, pattern, name)


@pytest.mark.parametrize(("pattern", "mesh_name"), list(_cells_of_nccl()))
@on_ranks("mesh_name")
def test_a_pattern_trains_like_the_reference_over_what_answers_as_nccl(
    pattern: str, mesh_name: str
) -> None:
    with as_on_cuda():
        errors = errors_of_pattern(pattern, mesh_name)
    assert max(errors.values()) < TOLERANCE, errors


def _switched() -> Iterator[Any]:
    """Every pattern at ZeRO-3, which has most to switch, and ZeRO-2; half of it in longer runs."""
    for number, (name, pattern) in enumerate(PATTERNS.items()):
        strategies = [s for s in STRATEGIES[2:] if not (pattern.skips and s == STRATEGIES[-1])]
        for strategy in strategies:
            is_quick = strategy == strategies[-1] and number % 2 == 0
            yield quick_if(is_quick, name, strategy)


@pytest.mark.parametrize(("pattern", "strategy"), list(_switched()))
@on_ranks(3)
def test_switches_change_no_bit(pattern: str, strategy: str) -> None:
    on = _sharded(pattern, strategy, "3")
    # Weights that are gathered for use are what prefetching and the pool can do wrong; then both
    # switches are off at once, too.
    gathers = strategy == "optim_grads_params"
    for switches in [SWITCHES[:1], SWITCHES] if gathers else [SWITCHES]:
        off = _sharded(pattern, strategy, "3", **dict.fromkeys(switches, False))
        assert _same_bits(off, on), switches
    if gathers or PATTERNS[pattern].skips:
        assert _pool_changes_nothing(on, pattern, strategy, "3")
    assert _same_bits(_sharded(pattern, strategy, "3", bucket_bytes=BUCKET), on)


def _bucket_cells() -> Iterator[Any]:
    """Every pattern on every mesh of several ranks; in `make test` every ninth on one of them.

    The others are compared there in buckets by `test_switches_change_no_bit`.
    """
    names = list(MESHES)[1:]
    for number, pattern in enumerate(PATTERNS):
        for place, name in enumerate(names):
            is_quick = number % 9 == 0 and place == (number // 9) % len(names)
            yield quick_if(is_quick, pattern, name)


@pytest.mark.parametrize(("pattern", "mesh_name"), list(_bucket_cells()))
@on_ranks("mesh_name")
def test_buckets_change_no_bit_but_where_an_all_reduce_sums_by_position(
    pattern: str, mesh_name: str
) -> None:
    for strategy in _strategies(pattern, mesh_name):
        plain = _sharded(pattern, strategy, mesh_name)
        bucketed = _sharded(pattern, strategy, mesh_name, bucket_bytes=BUCKET)
        pooled = _sharded(pattern, strategy, mesh_name, bucket_bytes=BUCKET, enable_trace_pool=True)
        # Of two ranks there is one order of summands; along an outer axis sums may be all-reduces.
        if "no_shard" not in (strategy, *MESHES[mesh_name][1:]) or mesh_name == "2":
            assert _same_bits(plain, bucketed), strategy
            assert _same_bits(plain, pooled), strategy
        else:
            for trace in (bucketed, pooled):
                losses = torch.tensor(trace.losses, dtype=torch.float64)
                torch.testing.assert_close(
                    losses, losses.new_tensor(plain.losses), rtol=1e-6, atol=0
                )
                for name, param in plain.params.items():
                    torch.testing.assert_close(trace.params[name], param, rtol=2e-6, atol=1e-6)


@pytest.mark.functional
@on_ranks("mesh_name", pattern=PATTERNS, mesh_name=MESHES)
def test_the_trace_pool_changes_no_bit_in_the_whole_matrix(pattern: str, mesh_name: str) -> None:
    for strategy in _strategies(pattern, mesh_name):
        plain = _sharded(pattern, strategy, mesh_name)
        assert _pool_changes_nothing(plain, pattern, strategy, mesh_name), strategy
