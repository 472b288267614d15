"""Options of a root: given once, applied to all its units; conflicting options raise errors."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fsdp_v2 import RuntimeOptions, UnitOptions, fully_shard
from megatron_fsdp_v2.runtime.module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import error_message, train_own
from tests.reference.models import WIDTH, Stack
from tests.sharding import shard

OTHERS: dict[str, tuple[Any, Any]] = {
    "enable_unshard_prefetch": (False, True),
    "unshard_prefetch_depth": (3, 2),
    "unshard_prefetch_bytes": (1 << 20, 1 << 30),
    "enable_async_reduce_grad": (False, True),
    "max_live_grad_buffers": (1, 3),
    "enable_trace_pool": (True, False),
    "check_ranks": ("always", "never"),
}


def _shard(model: Any, root: dict[str, Any], *units: dict[str, Any]) -> Any:
    """Shard the root with options, and as many blocks as there are options of units."""
    for block, options in zip(model.blocks, units, strict=False):
        shard(block, **options)
    return shard(model, **root)


@on_ranks(1)
def test_option_of_the_root_or_a_unit_applies_to_all_units() -> None:
    for option, (value, _) in OTHERS.items():
        given = {option: value}
        for options in ((given, {}, {}, {}), ({}, {}, given, {})):
            model = _shard(Stack(), *options)
            context = unit_of(model).context
            assert all(unit_of(module).context is context for module in model.blocks)
            assert context.options == RuntimeOptions(**given)


@on_ranks(1)
def test_conflicting_units_are_named_with_option_and_values() -> None:
    for option, (one, other) in OTHERS.items():
        a, b = {option: one}, {option: other}
        root = error_message(ValueError, lambda a=a, b=b: _shard(Stack(), a, b))
        units = error_message(ValueError, lambda a=a, b=b: _shard(Stack(), {}, a, b))
        first, second = f"{option}={one!r} for ", f" and {option}={other!r} for "
        assert root.startswith(f"{first}Stack{second}blocks.0 (Block): units of one root")
        assert units.startswith(f"{first}blocks.0 (Block){second}blocks.1 (Block): units of")
        _shard(Stack(), a, a, {})


@on_ranks(2)
def test_trace_pool_of_the_root_contains_the_buffers_of_all_units() -> None:
    bits, pools = [], []
    given: dict[str, Any] = {"enable_trace_pool": True}
    for options in ((given, given, given), (given, {}, {}), ({}, {}, {})):
        torch.manual_seed(0)
        model: Any = Stack()
        # A frozen unit gets gradient buffers later.
        model.blocks[0].requires_grad_(False)
        fully_shard(model.blocks[1], **options[1])
        # The unit runs before its root exists.
        with torch.no_grad():
            model.blocks[1](torch.ones(2, WIDTH))
        fully_shard(model.blocks[0], **options[2])
        fully_shard(model, **options[0])
        model.blocks[0].requires_grad_(True)
        bits.append(train_own(model, 5))
        if options[0]:
            pools.append(model.trace_pool())
            before = model.trace_pool().num_allocations
            train_own(model, 5)
            pools.append(model.trace_pool().num_allocations - before)
    names = [[name for report in pool.reports() for name in report.names] for pool in pools[::2]]
    assert all(map(torch.equal, bits[0], bits[1]))
    assert all(map(torch.equal, bits[0], bits[2]))
    assert len(names[0]) == len(names[1]) > 5
    assert pools[1::2] == [0, 0]


@on_ranks(1)
def test_argument_takes_precedence_and_conflicting_options_are_rejected() -> None:
    model: Any = Stack()
    options = RuntimeOptions(enable_trace_pool=True, max_live_grad_buffers=3)
    fully_shard(model.blocks[0], options=UnitOptions(runtime=options), enable_trace_pool=False)
    text = error_message(ValueError, lambda: fully_shard(model, options=options))
    fully_shard(model, options=UnitOptions())
    found = unit_of(model).context.options
    assert "enable_trace_pool=True for Stack and enable_trace_pool=False for blocks.0" in text
    assert (found.enable_trace_pool, found.max_live_grad_buffers) == (False, 3)
