"""Calls of `fully_shard` with a flat set of options, from all levels of its signature."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_fsdp_v2 import RuntimeOptions, UnitOptions, fully_shard

_OF_UNIT = {option.name for option in fields(UnitOptions)} - {"runtime"}
_OF_ROOT = {option.name for option in fields(RuntimeOptions)}
_OF_ROOT -= {"enable_unshard_prefetch", "enable_async_reduce_grad", "enable_trace_pool"}


def arguments(**options: Any) -> dict[str, Any]:
    """Return arguments of `fully_shard`; fields of `UnitOptions` and `RuntimeOptions` are moved."""
    of_unit, of_root = (
        {name: options.pop(name) for name in names & options.keys()}
        for names in (_OF_UNIT, _OF_ROOT)
    )
    of_unit, of_root = (
        {name: value for name, value in given.items() if value is not None}
        for given in (of_unit, of_root)
    )
    runtime = RuntimeOptions(**of_root) if of_root else None
    if of_unit or runtime:
        options["options"] = UnitOptions(runtime=runtime, **of_unit)
    return options


def shard(module: Any, **options: Any) -> Any:
    """Call `fully_shard` with a flat set of options."""
    return fully_shard(module, **arguments(**options))
