"""Shards the model of a case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Replicate, Shard

from megatron_fsdp_v2 import FSDPModule, MixedPrecisionPolicy, ShardPlacementResult, fully_shard
from tests.distributed import wrapping
from tests.distributed.nccl_double import as_on_cuda
from tests.random.cases import Case, Options
from tests.random.models import build, roots, units
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


def shard(case: Case, options: Options) -> Any:
    """Build and shard the model of a case."""
    with as_on_cuda() if options.nccl else contextlib.nullcontext():
        return _shard(case, options)


def _shard(case: Case, options: Options) -> Any:
    device = "meta" if options.meta else "cpu"
    model = build(case, device)
    given = arguments(
        mesh=wrapping.mesh_of(*options.mesh),
        sharding_strategy=options.strategy,
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
        mp_policy=MixedPrecisionPolicy(grad_comm_dtype=torch.float64) if options.wide else None,
    )
    for unit in units(model, case):
        fully_shard(unit, **given)
    if options.replaced:
        for root, fresh in zip(roots(model), roots(build(case, device)), strict=True):
            root.output = fully_shard(fresh.output, **given)
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
