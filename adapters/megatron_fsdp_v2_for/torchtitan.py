"""torchtitan: the trainer shards with this package instead of FSDP2.

    import megatron_fsdp_v2_for.torchtitan

    megatron_fsdp_v2_for.torchtitan.install(sharding_strategy="optim_grads_params")
    torchtitan.train.main()

Models that have their own copy of the call (flux, the experiments) continue to use FSDP2.
"""

from __future__ import annotations

import functools

from megatron_cpu_rehearsal.patching import Patch
from megatron_fsdp_v2_for.adapter import Adapter

__all__ = ["PATCHES", "install", "uninstall"]

_patch = functools.partial(
    Patch,
    reason="torchtitan imports FSDP2's function by name",
    wrap="megatron_fsdp_v2_for.adapter:with_options",
)
PATCHES = {
    "0.2": (
        _patch("torchtitan.models.llama3.infra.parallelize:fully_shard"),
        # Also the function of qwen3, deepseek_v3 and gpt_oss.
        _patch("torchtitan.models.llama4.infra.parallelize:fully_shard"),
    ),
}
"""Patches by version of torchtitan."""

_ADAPTER = Adapter("torchtitan", PATCHES)
install, uninstall = _ADAPTER.install, _ADAPTER.uninstall
