"""Sharded training equals the unsharded reference: every pattern, strategy and mesh."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp_v2 import fully_shard
from tests.parity.patterns import PATTERNS
from tests.ranks import RankPools
from tests.reference.training import Trace, distances, train_reference, train_sharded

TOLERANCE = 1e-6
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MESHES: dict[str, tuple[int, ...]] = {
    "1": (1,),
    "2": (2,),
    "3": (3,),
    "4": (4,),
    "HSDP 2x2": (2, 2),
    "HFSDP 2x2": (2, 2),
}
SWITCHES = ("enable_unshard_prefetch", "enable_async_reduce_grad")


@functools.cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    # Once in a process: every new mesh makes process groups that are never ended.
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def _sharded(
    pattern: str,
    strategy: str,
    mesh_name: str,
    see: Callable[[nn.Module], None] = lambda module: None,
    **switches: bool,
) -> Trace:
    mesh = _mesh(MESHES[mesh_name])
    outer = "optim" if mesh_name.startswith("HFSDP") else "no_shard"

    def shard(module: nn.Module) -> None:
        fully_shard(
            module,
            mesh=mesh,
            sharding_strategy=strategy,
            outer_dp_sharding_strategy=outer,
            **PATTERNS[pattern].options,
            **switches,  # type: ignore[arg-type]
        )
        see(module)

    return train_sharded(PATTERNS[pattern], shard)


def errors_of_pattern(pattern: str, mesh_name: str, strategies: list[str]) -> dict[str, float]:
    """On every rank: the largest relative error of a pattern, per strategy."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = train_reference(PATTERNS[pattern], world_size, evaluates_rank=rank)
    found = {}
    for strategy in strategies:
        trace = _sharded(pattern, strategy, mesh_name)
        found[strategy] = compare(trace, reference)
    return found


def compare(trace: Trace, reference: Trace) -> float:
    """The largest relative error of losses, evaluations, gradients and parameters."""
    errors = [abs(a - b) / abs(b) for a, b in zip(trace.losses, reference.losses, strict=True)]
    errors += [
        abs(a - b) / abs(b) for a, b in zip(trace.evaluations, reference.evaluations, strict=True)
    ]
    for mine, theirs in zip(trace.grads, reference.grads, strict=True):
        assert mine.keys() == theirs.keys()
        trained = {}
        for name, grad in theirs.items():
            (start, end), other = trace.rows[name], mine[name]
            if grad is None or not grad.any():
                # Nothing used it: no gradient, or zero where others of its unit have one.
                assert other is None or not other.any(), name
            elif start == end:
                assert other is None, f"{name} has a gradient for an empty shard"
            else:
                assert other is not None, f"{name} has no gradient"
                trained[name] = grad
        errors += distances({n: (trace.rows[n], mine[n]) for n in trained}, trained)
    held = {name: (trace.rows[name], param) for name, param in trace.params.items()}
    errors += distances(held, reference.params)
    return max(errors)


def bits_of_switches(pattern: str, strategy: str) -> bool:
    """Whether a pattern gives the same bits with every switch off and on, the pool included."""
    on = _sharded(pattern, strategy, str(dist.get_world_size()))
    # Prefetching matters where weights are gathered for use; then both are switched off at once.
    steps = [SWITCHES] if strategy != "optim_grads_params" else [SWITCHES[:1], SWITCHES]
    for switches in steps:
        off = _sharded(
            pattern, strategy, str(dist.get_world_size()), **dict.fromkeys(switches, False)
        )
        if not _same_bits(off, on):
            return False
    # Weights that are gathered for use are what the pool can do wrong.
    gathers = strategy == "optim_grads_params"
    if not gathers and not PATTERNS[pattern].skips:
        return True
    return _pool_changes_nothing(on, pattern, strategy, str(dist.get_world_size()))


def _pool_changes_nothing(plain: Trace, pattern: str, strategy: str, mesh_name: str) -> bool:
    """Whether a training on the traced pool gives the same bits as one without it."""
    roots: list[Any] = []
    pooled = _sharded(pattern, strategy, mesh_name, roots.append, enable_trace_pool=True)
    for report in roots[-1].trace_pool().reports():
        # A test of a pool that was never planned would show nothing.
        assert report.plan is not None or not report.programs
    return _same_bits(plain, pooled)


def bits_of_pool(pattern: str, strategies: list[str], mesh_name: str) -> list[str]:
    """The strategies for which the traced pool changes a bit of a pattern."""
    return [
        strategy
        for strategy in strategies
        if not _pool_changes_nothing(
            _sharded(pattern, strategy, mesh_name), pattern, strategy, mesh_name
        )
    ]


def _same_bits(first: Trace, second: Trace) -> bool:
    if first.losses != second.losses or first.evaluations != second.evaluations:
        return False
    pairs: list[tuple[Any, Any]] = [(first.params[n], second.params[n]) for n in first.params]
    for mine, theirs in zip(first.grads, second.grads, strict=True):
        pairs += [(mine[name], theirs[name]) for name in mine]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str, str], float]]:
    """Errors by (pattern, strategy, mesh); written to the docs on request."""
    errors: dict[tuple[str, str, str], float] = {}
    yield errors
    if request.config.getoption("--write-docs"):
        _write_table(errors, Path(request.config.rootpath) / "docs" / "parity_matrix.md")


_ABOUT = (
    "Largest relative error (norm of the difference over norm) of losses, gradients and "
    "parameters over 5 steps, against an unsharded loop, fp32. Generated by `pytest "
    "tests/parity --write-docs`; the tests assert that each is below 1e-06: `make test` on "
    "one mesh for each pattern in turn, `make test-matrices` with the rest. A tensor that is "
    "small by cancellation is measured against a third of the norm of all of them. Empty: at "
    "ZeRO-3 a unit cannot be skipped on some ranks only, and a replicated optimizer cannot be "
    "sharded along the outer axis. With prefetching and asynchronous reduction switched off "
    "the same bits come out (`test_switches_change_no_bit`)."
)


def _write_table(errors: dict[tuple[str, str, str], float], path: Path) -> None:
    columns = sorted({key[1:] for key in errors}, key=lambda c: (list(MESHES).index(c[1]), c[0]))
    lines = [
        "# Parity matrix",
        "",
        *textwrap.wrap(_ABOUT, 90),
        "",
        "| pattern | " + " | ".join(f"{s}, {m}" for s, m in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for pattern in PATTERNS:
        cells = [
            f"{errors[pattern, s, m]:.0e}" if (pattern, s, m) in errors else "" for s, m in columns
        ]
        lines.append(f"| {pattern} | " + " | ".join(cells) + " |")
    path.write_text("\n".join(lines) + "\n")


def _cells() -> Iterator[Any]:
    """Every pattern on every mesh; in `make test` on one of them in turn."""
    for number, pattern in enumerate(PATTERNS):
        for place, name in enumerate(MESHES):
            marks = [] if place == number % len(MESHES) else [pytest.mark.functional]
            yield pytest.param(pattern, name, marks=marks)


@pytest.mark.parametrize(("pattern", "mesh_name"), list(_cells()))
def test_a_pattern_trains_like_the_reference(
    pools: RankPools, matrix: dict[tuple[str, str, str], float], pattern: str, mesh_name: str
) -> None:
    world_size = 4 if "x" in mesh_name else int(mesh_name)
    strategies = [s for s in STRATEGIES if not (mesh_name.startswith("HFSDP") and s == "no_shard")]
    if PATTERNS[pattern].skips and world_size > 1:
        strategies.remove("optim_grads_params")
    results = pools(world_size).run(errors_of_pattern, pattern, mesh_name, strategies)
    for strategy in strategies:
        error = max(result[strategy] for result in results)
        matrix[pattern, strategy, mesh_name] = error
        assert error < TOLERANCE, f"{strategy}: {error}"


def _switched() -> Iterator[Any]:
    """Every pattern at ZeRO-3, which has most to switch, and ZeRO-2; half of it in longer runs."""
    for number, (name, pattern) in enumerate(PATTERNS.items()):
        strategies = [s for s in STRATEGIES[2:] if not (pattern.skips and s == STRATEGIES[-1])]
        for strategy in strategies:
            is_quick = strategy == strategies[-1] and number % 2 == 0
            marks = [] if is_quick else [pytest.mark.functional]
            yield pytest.param(name, strategy, marks=marks)


@pytest.mark.parametrize(("pattern", "strategy"), list(_switched()))
def test_switches_change_no_bit(pools: RankPools, pattern: str, strategy: str) -> None:
    assert all(pools(3).run(bits_of_switches, pattern, strategy))


@pytest.mark.functional
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_trace_pool_changes_no_bit_in_the_whole_matrix(
    pools: RankPools, pattern: str, mesh_name: str
) -> None:
    ranks = pools(math.prod(MESHES[mesh_name]))
    strategies = [s for s in STRATEGIES if not (mesh_name.startswith("HFSDP") and s == "no_shard")]
    if PATTERNS[pattern].skips and ranks.world_size > 1:
        strategies.remove("optim_grads_params")
    assert ranks.run(bits_of_pool, pattern, strategies, mesh_name) == [[]] * ranks.world_size
