"""Shards the model of a case."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Replicate, Shard

from megatron_fsdp_v2 import FSDPModule, ShardPlacementResult, fully_shard
from tests.distributed import wrapping
from tests.distributed.nccl_double import as_on_cuda
from tests.random.cases import Case, Options
from tests.random.models import Part, build, roots, units
from tests.random.precision import POLICIES
from tests.sharding import arguments

OTHER_MESH: dict[tuple[int, ...], tuple[int, ...]] = {
    **{(1,): (1, 1), (2,): (1, 2), (3,): (3, 1), (4,): (2, 2)},
    **{(1, 1): (1,), (1, 2): (2,), (2, 1): (2,), (3, 1): (3,), (2, 2): (4,)},
}
"""Another mesh of the same ranks."""


def placement_of(options: Options) -> Callable[[nn.Parameter], Any] | None:
    """Return the `shard_placement_fn` of a sharding."""
    if not options.placement:
        return None
    other = wrapping.mesh_of(*OTHER_MESH[options.mesh])

    def of(param: nn.Parameter) -> Any:
        if options.placement == "columns":
            return Shard(1) if param.ndim > 1 else None
        if options.placement == "replicate":
            return Replicate() if param.ndim < 2 else None
        # Of a linear layer, weight and bias.
        return ShardPlacementResult(None, other) if param.ndim % 2 else None

    return of


def halve(grad: torch.Tensor) -> None:
    """A hook on reduced gradients."""
    grad.mul_(0.5)


def _inside(model: nn.Module, units_of_it: list[nn.Module]) -> list[nn.Module]:
    """Return the modules of the tree that are no units."""
    return [m for m in model.modules() if isinstance(m, Part) and m not in units_of_it]


COMPILED: dict[str, Callable[[Any, list[nn.Module]], Iterable[nn.Module]]] = {
    "": lambda model, units: [],
    "units": lambda model, units: units,
    "units first": lambda model, units: units,
    "roots": lambda model, units: roots(model),
    "inside": _inside,
}
"""What `torch.compile` compiles: takes a model and its units, in the order they are sharded in.

The modules are sharded first, unless the name ends with `first`.
"""


def shard(case: Case, options: Options) -> Any:
    """Build and shard the model of a case."""
    with as_on_cuda() if options.nccl else contextlib.nullcontext():
        return _shard(case, options)


def _compile(modules: Iterable[nn.Module]) -> None:
    # Many kinds of modules share one forward; what exceeds the limit of its graphs runs uncompiled.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    for module in modules:
        module.compile(backend="eager")


def _shard(case: Case, options: Options) -> Any:
    device = "meta" if options.meta else "cpu"
    model = build(case, device)
    given = arguments(
        mesh=wrapping.mesh_of(*options.mesh),
        outer_dp_sharding_strategy=options.outer,
        reshard_after_forward=options.reshard,
        shard_granularity=options.granularity,
        gradient_scaling_factor=options.scale,
        enable_unshard_prefetch=options.prefetch > 0,
        unshard_prefetch_depth=max(1, options.prefetch) if options.ahead is None else None,
        unshard_prefetch_bytes=options.ahead,
        enable_async_reduce_grad=options.asynchronous,
        max_live_grad_buffers=options.live,
        enable_trace_pool=options.pool,
        check_ranks=options.check,
        reduces_once=options.once,
        shard_placement_fn=placement_of(options),
        offload_policy=CPUOffloadPolicy(pin_memory=False) if options.offload else None,
    )
    precision = POLICIES[case.policy]
    has_policy = bool(case.policy) or options.wide
    outermost, sharded = roots(model), list(units(model, case))
    compiled = list(COMPILED[options.compiled](model, sharded))
    if compiled:
        torch._dynamo.reset()
    if options.compiled.endswith("first"):
        _compile(compiled)
    others = set(outermost[1].modules()) if options.second else set()

    def strategy_of(module: nn.Module) -> str:
        return options.second if module in others else options.strategy

    for unit in sharded:
        policy = precision.of(is_root=unit in outermost, wide=options.wide)
        given["sharding_strategy"] = strategy_of(unit)
        fully_shard(unit, mp_policy=policy if has_policy else None, **given)
    if not options.compiled.endswith("first"):
        _compile(compiled)
    if options.replaced:
        for root, fresh in zip(roots(model), roots(build(case, device)), strict=True):
            policy = precision.of(is_root=False, wide=options.wide)
            given["sharding_strategy"] = strategy_of(root)
            root.output = fully_shard(fresh.output, mp_policy=policy, **given)
    for root in roots(model):
        root.set_reshard_after_backward(not options.keep)
        found = [module for module in root.modules() if isinstance(module, FSDPModule)]
        for index, unit in enumerate(found):
            if options.hook:
                unit.set_all_reduce_hook(halve)
            if following := found[index + 1 : index + 1 + options.chosen]:
                unit.set_modules_to_forward_prefetch(following)
            if previous := found[max(0, index - options.chosen) : index]:
                unit.set_modules_to_backward_prefetch(previous[::-1])
    return model
