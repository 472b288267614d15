"""nemo-automodel: its Megatron-FSDP strategy shards with this package.

    import megatron_fsdp_v2_for.automodel

    megatron_fsdp_v2_for.automodel.install()

Call it before a recipe builds its model. `distributed.strategy` of the recipe is `megatron_fsdp`,
and its `zero_dp_strategy` selects the sharding unless `install` is given one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatron_cpu_rehearsal.patching import Patch
from megatron_fsdp_v2_for import megatron_fsdp
from megatron_fsdp_v2_for.adapter import Adapter

__all__ = ["PATCHES", "install", "uninstall"]

_OURS = "megatron_fsdp_v2_for.megatron_fsdp"
_patch = functools.partial(Patch, reason="automodel imports a name of megatron-fsdp")
_shard = functools.partial(_patch, wrap="megatron_fsdp_v2_for.automodel:with_options")
_ROOM = "nemo_automodel.components.distributed"
PATCHES = {
    "0.7": (
        _shard(f"{_ROOM}.parallelizer:megatron_fsdp_fully_shard"),
        _shard(f"{_ROOM}.parallelizer:megatron_fsdp_fully_shard_model"),
        _patch(
            f"{_ROOM}.parallelizer:MegatronFSDPMixedPrecisionPolicy",
            replace=f"{_OURS}:MixedPrecisionPolicy",
        ),
        _patch(f"{_ROOM}.megatron_fsdp:MegatronFSDP", replace=f"{_OURS}:MegatronFSDP"),
        _patch(
            f"{_ROOM}.megatron_fsdp:megatron_fsdp_fully_shard_optimizer",
            replace=f"{_OURS}:fully_shard_optimizer",
        ),
    ),
}
"""Patches by version of automodel."""

_ADAPTER = Adapter("nemo-automodel", PATCHES)
uninstall = _ADAPTER.uninstall


def install(sharding_strategy: str | None = None, **options: Any) -> None:
    """Make automodel shard with this package, in place of an earlier installation.

    Args:
        sharding_strategy: Replaces `zero_dp_strategy` of recipes. None: the recipes' own.
        options: Further arguments of `megatron_fsdp_v2_for.megatron_fsdp.fully_shard_model`.

    Raises:
        RuntimeError: See `Adapter.install`.
    """
    _ADAPTER.install(sharding_strategy, **options)


def with_options(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return this package's function of the same name, with arguments that automodel lacks."""
    ours = getattr(megatron_fsdp, original.__name__)
    given = {name: value for name, value in options.items() if name != "sharding_strategy"}
    if options["sharding_strategy"] is not None:
        given["zero_dp_strategy"] = options["sharding_strategy"]

    @functools.wraps(ours)
    def shard(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **{**kwargs, **given})

    return shard
