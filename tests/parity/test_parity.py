"""Sharded training equals the unsharded reference: pairs of patterns, strategies and meshes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.comm import backends
from megatron_fsdp_v2.params.autograd import save_activations_on_cpu
from tests.cases import longer, pairwise, quick_if
from tests.distributed.nccl_double import as_on_cuda
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, MESHES, STRATEGIES, on_mesh, strategies_on
from tests.parity.differing import DIFFERING
from tests.parity.direct import DIRECT
from tests.parity.missing import MISSING
from tests.parity.patterns import PATTERNS, Pattern
from tests.parity.unusual import UNUSUAL
from tests.reference.training import (
    Trace,
    compare,
    error_of_params,
    same_bits,
    train_reference,
    train_sharded,
)
from tests.sharding import arguments

TOLERANCE = 1e-6
ALL = PATTERNS | UNUSUAL | DIFFERING | MISSING | DIRECT
SWITCHES = ("enable_unshard_prefetch", "enable_async_reduce_grad")


def train_pattern(
    pattern: str | Pattern,
    strategy: str,
    mesh_name: str,
    on_unit: Callable[[nn.Module], None] = lambda module: None,
    **switches: Any,
) -> Trace:
    """Train a pattern with further options; call `on_unit` with every unit, the root last."""
    options = {"sharding_strategy": strategy, **on_mesh(mesh_name), **switches}
    trained = ALL[pattern] if isinstance(pattern, str) else pattern

    def shard(module: nn.Module) -> None:
        fully_shard(module, **arguments(**trained.options, **options))
        on_unit(module)

    return train_sharded(trained, shard)


def _strategies(pattern: str, mesh_name: str) -> list[str]:
    """Return the strategies that support a pattern."""
    skips = ALL[pattern].skips and mesh_name != "1"
    return [s for s in strategies_on(mesh_name) if not (skips and s == "optim_grads_params")]


def _pool_changes_nothing(plain: Trace, pattern: str, strategy: str, mesh_name: str) -> bool:
    """Return whether training with the trace pool is bitwise identical to training without it."""
    roots: list[Any] = []
    pooled = train_pattern(pattern, strategy, mesh_name, roots.append, enable_trace_pool=True)
    for report in roots[-1].trace_pool().reports():
        # Without a plan, the pool would not be tested.
        assert report.plan is not None or not report.programs
    return same_bits(plain, pooled)


def _cases() -> Iterator[Any]:
    """Yield every pattern on HSDP and on one axis of 2, 3 or 4 ranks in turn.

    `make test` trains two of five patterns on one of these meshes, with the strategy that shards
    most. The longer suites train the other patterns, other strategies on the other mesh, and one
    more on HFSDP or on one rank.
    """
    for number, pattern in enumerate(ALL):
        first, second = (str(2 + number % 3), "HSDP 2x2")[:: 1 if number % 4 else -1]
        *others, most = _strategies(pattern, first)
        yield quick_if(number % 5 < 2, pattern, first, [most], id=f"{pattern}-{first}")
        yield longer(pattern, second, others, id=f"{pattern}-{second}")
        third = ("HFSDP 2x2", "1")[number // 2 % 2]
        strategies = _strategies(pattern, third)
        strategy = strategies[number % len(strategies)]
        yield longer(pattern, third, [strategy], id=f"{pattern}-{third}")


@pytest.mark.parametrize(("pattern", "mesh_name", "strategies"), list(_cases()))
@on_ranks("mesh_name")
def test_pattern_trains_like_the_reference(
    pattern: str, mesh_name: str, strategies: list[str]
) -> None:
    reference = train_reference(ALL[pattern], dist.get_world_size(), dist.get_rank())
    errors = {
        strategy: compare(train_pattern(pattern, strategy, mesh_name), reference)
        for strategy in strategies
    }
    assert max(errors.values()) < TOLERANCE, errors


COLLIDING = ("weights kept in some steps",)
"""Patterns whose buffer uses change between steps: the trace pool raises an error."""


def _strategy_of_switches(pattern: str) -> str:
    """Return the strategy that overlaps most: ZeRO-3, which does not support skipped units."""
    return STRATEGIES[2] if ALL[pattern].skips else STRATEGIES[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [quick_if(number % 16 == 0, pattern) for number, pattern in enumerate(ALL)]
)
@on_ranks(3)
def test_switches_give_bitwise_identical_results(pattern: str) -> None:
    strategy = _strategy_of_switches(pattern)
    on = train_pattern(pattern, strategy, "3")
    # Prefetching affects ZeRO-3, which gathers weights for each use: also switch it off alone.
    for switches in [SWITCHES] if ALL[pattern].skips else [SWITCHES[:1], SWITCHES]:
        off = train_pattern(pattern, strategy, "3", **dict.fromkeys(switches, False))
        assert same_bits(off, on), switches
    if pattern not in COLLIDING:
        assert _pool_changes_nothing(on, pattern, strategy, "3")


# -- options with bitwise identical results -------------------------------------------------------

_POOL = {"enable_trace_pool": True}
_BF16 = {"mp_policy": BF16}
_ON_HOST = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
_WAITS = dict.fromkeys(SWITCHES, False)


@dataclass(frozen=True)
class Row:
    """A training, and a changed training that must give bitwise identical results.

    Attributes:
        pattern: One of the patterns.
        mesh: One of `MESHES`.
        options: Options of both trainings.
        change: Further options of the changed training.
        context: Context of the changed training.
        strategies: Sharding strategies of both trainings.
        is_quick: Whether `make test` runs the row.
    """

    pattern: str
    mesh: str = "2"
    options: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] = field(default_factory=dict)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    strategies: tuple[str, ...] = STRATEGIES[-1:]
    is_quick: bool = True


def _broadcasts() -> AbstractContextManager[Any]:
    return mock.patch.object(backends, "BROADCAST_BYTES", 1)


def _copies() -> AbstractContextManager[Any]:
    """Return a context in which autograd saves copies of all tensors, including weights."""
    return saved_tensors_hooks(torch.clone, lambda packed: packed)


_UNSYNCED, _BETWEEN = "accumulation under no_sync", "evaluation between"
_RECOMPUTED = "checkpointing, non-reentrant"
_KNOBS: dict[str, dict[str, Any]] = {
    "two ahead, one buffer": {"unshard_prefetch_depth": 2, "max_live_grad_buffers": 1},
    "three ahead, four buffers": {"unshard_prefetch_depth": 3, "max_live_grad_buffers": 4},
    "ahead by bytes, pool": {"unshard_prefetch_bytes": 2500, **_POOL},
}
_MULTIPLE_USES = (
    *("module used twice in a forward", "tied parameters across units", "nested units"),
    *("unit skipped on some steps", "checkpointed region of units, non-reentrant"),
    *("checkpointing, reentrant", "exception in a backward"),
)
SAME_BITS: dict[str, Row] = {
    "three ahead, pool": Row(
        _BETWEEN, options=_BF16, change={**_POOL, "unshard_prefetch_depth": 3}
    ),
    "ranks checked before each collective": Row(
        "plain", change={"check_ranks": "always"}, strategies=STRATEGIES
    ),
    "pool, HSDP": Row(_UNSYNCED, "HSDP 2x2", change=_POOL, strategies=STRATEGIES, is_quick=False),
    "pool, HFSDP": Row(
        _UNSYNCED, "HFSDP 2x2", change=_POOL, strategies=STRATEGIES[1:], is_quick=False
    ),
    "one gradient buffer": Row(_UNSYNCED, "HSDP 2x2", change={"max_live_grad_buffers": 1}),
    **{
        f"{text}, {pattern}": Row(pattern, change=change, strategies=STRATEGIES, is_quick=False)
        for text, change in _KNOBS.items()
        for pattern in _MULTIPLE_USES
    },
    "kept after a forward": Row(_RECOMPUTED, change={"reshard_after_forward": False}),
    "broadcasts": Row("plain", "3", context=_broadcasts, strategies=STRATEGIES[1:]),
    "offloaded": Row(_UNSYNCED, change=_ON_HOST, strategies=STRATEGIES),
    "offloaded, zeros": Row("zero_grad to zero", "3", change=_ON_HOST, is_quick=False),
    "offloaded, clipped": Row("clip_grad_norm_", "3", change=_ON_HOST, strategies=STRATEGIES[1:3]),
    "offloaded, one rank": Row(_BETWEEN, "1", change=_ON_HOST, is_quick=False),
    "offloaded, bf16": Row(_BETWEEN, options=_BF16, change=_ON_HOST),
    "offloaded, recomputed": Row(_RECOMPUTED, change=_ON_HOST, is_quick=False),
    "offloaded, pool": Row(_BETWEEN, options=_POOL, change=_ON_HOST, is_quick=False),
    "offloaded, waiting": Row(_UNSYNCED, options=_WAITS, change=_ON_HOST, is_quick=False),
    "offloaded, fused": Row("AdamW, fused", change=_ON_HOST, is_quick=False),
    "offloaded, HSDP": Row(_UNSYNCED, "HSDP 2x2", change=_ON_HOST, is_quick=False),
    "offloaded, HFSDP": Row(_UNSYNCED, "HFSDP 2x2", change=_ON_HOST),
    "saved on the host": Row("plain", context=save_on_cpu),
    "saved on the host, recomputed, pool": Row(_RECOMPUTED, options=_POOL, context=save_on_cpu),
    "saved as copies": Row("plain", context=_copies),
    "saved as copies, recomputed, pool": Row(_RECOMPUTED, options=_POOL, context=_copies),
    "activations on the host": Row("plain", context=save_activations_on_cpu),
    "activations on the host, recomputed, pool": Row(
        _RECOMPUTED, options=_POOL, context=save_activations_on_cpu
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [quick_if(row.is_quick, name) for name, row in SAME_BITS.items()])
@on_ranks(lambda name: math.prod(MESHES[SAME_BITS[name].mesh][0]))
def test_option_gives_bitwise_identical_results(name: str) -> None:
    row = SAME_BITS[name]
    for strategy in row.strategies:
        plain = train_pattern(row.pattern, strategy, row.mesh, **row.options)
        with row.context():
            changed = train_pattern(row.pattern, strategy, row.mesh, **row.options | row.change)
        assert same_bits(plain, changed), strategy


# -- options of reductions, in pairs ---------------------------------------------------------------

_IN_FP32 = {"reduce_scatter_with_fp32_accumulation": True}
_SUMS: dict[str, tuple[dict[str, Any], float, float]] = {
    "fp32": ({}, TOLERANCE, TOLERANCE),
    "bf16": ({"grad_comm_dtype": torch.bfloat16}, 2e-2, 2e-3),
    "bf16 in fp32": ({"grad_comm_dtype": torch.bfloat16, **_IN_FP32}, 2e-2, 2e-3),
    "fp16": ({"grad_comm_dtype": torch.float16}, 1e-2, 3e-4),
}
"""Options of the policy, and the tolerances of gradients and weights."""

_SYNCS = ("of the pattern", "no_sync", "finalized", "all_reduce")
_QUEUES: dict[str, dict[str, Any]] = {
    "two buffers": {},
    "one buffer": {"max_live_grad_buffers": 1},
    "waits": {"enable_async_reduce_grad": False},
}
_PLACES: dict[str, dict[str, Any]] = {"device": {}, "host": _ON_HOST}
_ALLOCATORS: dict[str, dict[str, Any]] = {"plain": {}, "pool": _POOL}
_LEVELS: dict[str, Iterable[str]] = {
    "pattern": ALL,
    "strategy": STRATEGIES,
    "mesh_name": ("3", "HSDP 2x2", "HFSDP 2x2"),
    "sums": _SUMS,
    "sync": _SYNCS,
    "queue": _QUEUES,
    "place": _PLACES,
    "allocator": _ALLOCATORS,
}


def _conflict(levels: Mapping[str, str]) -> bool:
    """Return whether `fully_shard` or the pattern rejects two of these levels."""
    name, strategy = levels.get("pattern", "plain"), levels.get("strategy")
    pattern, is_ddp = ALL[name], strategy == "no_shard"
    return any(
        [
            is_ddp and levels.get("mesh_name") == "HFSDP 2x2",
            is_ddp and levels.get("sums") == "bf16 in fp32",
            pattern.skips and strategy == "optim_grads_params",
            name in COLLIDING and levels.get("allocator") == "pool",
            pattern.sync != "every" and levels.get("sync", _SYNCS[0]) != _SYNCS[0],
        ]
    )


def _pairs() -> Iterator[Any]:
    """Yield cases with all pairs of levels; `make test` runs those of one pattern."""
    for case in pairwise(_LEVELS, _conflict):
        is_quick = case["pattern"] == "unit skipped on some ranks"
        yield quick_if(is_quick, case, id=", ".join(case.values()))


@pytest.mark.parametrize("case", list(_pairs()))
@on_ranks(lambda case: math.prod(MESHES[case["mesh_name"]][0]))
def test_pairs_of_options_with_nccl_train_like_the_reference(case: dict[str, str]) -> None:
    """The process groups are doubles of NCCL, and collectives are issued as on CUDA."""
    pattern = ALL[case["pattern"]]
    if pattern.set_to_none is None:
        # After zeros, gradients of zeros would not differ from None.
        pattern = dataclasses.replace(pattern, set_to_none=True)
    if case["sync"] != _SYNCS[0]:
        micros = max(2, pattern.num_micro)
        pattern = dataclasses.replace(pattern, sync=case["sync"], num_micro=micros)
    policy, of_grads, of_weights = _SUMS[case["sums"]]
    options = _QUEUES[case["queue"]] | _PLACES[case["place"]] | _ALLOCATORS[case["allocator"]]
    options["mp_policy"] = MixedPrecisionPolicy(**policy)
    with as_on_cuda():
        reference = train_reference(pattern, dist.get_world_size(), dist.get_rank())
        trace = train_pattern(pattern, case["strategy"], case["mesh_name"], **options)
    errors = compare(trace, reference), error_of_params(trace, reference)
    assert errors[0] < of_grads and errors[1] < of_weights, errors
