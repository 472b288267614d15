"""Options of a root: given once, followed by its units, and never silently overruled."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.comm.rank_checks import CheckRanks
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from tests.distributed.wrapping import batch, mesh_of, said
from tests.ranks import RankPools
from tests.reference.models import WIDTH, Stack

OTHERS: dict[str, tuple[Any, Any]] = {
    "enable_unshard_prefetch": (False, True),
    "unshard_prefetch_depth": (3, 2),
    "enable_async_reduce_grad": (False, True),
    "max_live_grad_buffers": (1, 3),
    "enable_trace_pool": (True, False),
    "check_ranks": ("always", "never"),
}


def _shard(model: Any, root: dict[str, Any], *units: dict[str, Any]) -> Any:
    """Shard a model with options for the root and its blocks; missing ones are not given."""
    mesh = mesh_of(dist.get_world_size())
    for block, options in zip(model.blocks, units, strict=False):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **root)


def followed() -> dict[str, bool]:
    """By option and who is given it, whether all units have it."""
    found = {}
    for option, (value, _) in OTHERS.items():
        given = {option: value}
        for who, options in {"root": (given, {}, {}, {}), "unit": ({}, {}, given, {})}.items():
            model = _shard(Stack(), *options)
            expected = RuntimeOptions(
                **{option: CheckRanks(value) if option == "check_ranks" else value}
            )
            contexts = {id(unit_of(module).context) for module in [model, *model.blocks]}
            context = unit_of(model).context
            live = context.reductions.max_live_grad_buffers
            found[f"{option} of the {who}"] = (
                context.options == expected
                and len(contexts) == 1
                and live == expected.max_live_grad_buffers
            )
    return found


def test_units_follow_whoever_was_given_an_option(pools: RankPools) -> None:
    for found in pools(1).run(followed):
        assert len(found) == 2 * len(OTHERS)
        assert all(found.values()), found


def contradictions() -> dict[str, list[str]]:
    """What is said where the root and a unit, or two units, were given different values."""
    found = {}
    for option, values in OTHERS.items():
        one, other = ({option: value} for value in values)
        found[option] = [
            said(ValueError, lambda a=one, b=other: _shard(Stack(), a, b)),
            said(ValueError, lambda a=one, b=other: _shard(Stack(), {}, a, b)),
        ]
        _shard(Stack(), one, one, {})
    return found


def test_contradicting_units_are_named_with_option_and_values(pools: RankPools) -> None:
    for found in pools(1).run(contradictions):
        for option, (one, other) in OTHERS.items():
            root, units = found[option]
            first, second = f"{option}={one!r} for ", f" and {option}={other!r} for "
            assert root.startswith(f"{first}Stack{second}blocks.0 (Block): units of one root")
            assert units.startswith(f"{first}blocks.0 (Block){second}blocks.1 (Block): units of")


def _bits(model: Any) -> list[bytes]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        model(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.to_local().detach().numpy().tobytes() for param in model.parameters()]


def pool_given_to_the_root_alone() -> tuple[bool, int, int, list[int]]:
    """Whether training is as ever; buffers of the pool where all were given it and the root alone.

    Last, whether units allocate anything in the steps after a plan was made.
    """
    bits, pools = [], []
    given: dict[str, Any] = {"enable_trace_pool": True}
    for options in ((given, given, given), (given, {}, {}), ({}, {}, {})):
        torch.manual_seed(0)
        model = Stack()
        # One that is frozen gets gradient buffers later.
        model.blocks[0].requires_grad_(False)
        fully_shard(model.blocks[1], mesh=mesh_of(dist.get_world_size()), **options[1])
        # It runs before its root is known.
        with torch.no_grad():
            model.blocks[1](torch.ones(2, WIDTH))
        fully_shard(model.blocks[0], mesh=mesh_of(dist.get_world_size()), **options[2])
        fully_shard(model, mesh=mesh_of(dist.get_world_size()), **options[0])
        model.blocks[0].requires_grad_(True)
        bits.append(_bits(model))
        if options[0]:
            pools.append(model.trace_pool())
            before = model.trace_pool().num_allocations
            _bits(model)
            pools.append(model.trace_pool().num_allocations - before)
    names = [[name for report in pool.reports() for name in report.names] for pool in pools[::2]]
    return bits[0] == bits[1] == bits[2], len(names[0]), len(names[1]), pools[1::2]


def test_a_pool_given_to_the_root_alone_takes_in_the_buffers_of_all_units(
    pools: RankPools,
) -> None:
    for same, everywhere, alone, allocations in pools(2).run(pool_given_to_the_root_alone):
        assert same
        assert everywhere == alone > 5
        assert allocations == [0, 0]
