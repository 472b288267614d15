"""torchtitan: the trainer shards with this package instead of FSDP2.

    import megatron_fsdp_v2_for.torchtitan

    megatron_fsdp_v2_for.torchtitan.install(sharding_strategy="optim_grads_params")
    torchtitan.train.main()

Experiments that have their own copy of the call continue to use FSDP2, except for the backend of
transformers' models. So does flux in torchtitan 0.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatron_cpu_rehearsal.patching import Patch
from megatron_fsdp_v2_for.adapter import Adapter

__all__ = ["PATCHES", "install", "uninstall"]

_patch = functools.partial(Patch, reason="torchtitan imports FSDP2's function by name")
_options = functools.partial(_patch, wrap="megatron_fsdp_v2_for.adapter:with_options")
_annotated = functools.partial(_patch, wrap="megatron_fsdp_v2_for.spmd_annotations:with_shards")
PATCHES = {
    "0.2": (
        _options("torchtitan.models.llama3.infra.parallelize:fully_shard"),
        # Also the function of qwen3, deepseek_v3 and gpt_oss.
        _options("torchtitan.models.llama4.infra.parallelize:fully_shard"),
    ),
    "0.3": (
        Patch(
            "torchtitan.models.common.decoder:Decoder.parallelize",
            reason="torchtitan ties weights after it shards them",
            wrap="megatron_fsdp_v2_for.torchtitan:ties_before",
            parameters=("self", "parallel_dims"),
        ),
        _annotated("torchtitan.distributed.fsdp:fully_shard"),
        # These modules need transformers.
        _annotated("torchtitan.models.flux.parallelize:fully_shard", optional=True),
        _annotated(
            "torchtitan.experiments.transformers_modeling_backend.parallelize:fully_shard",
            optional=True,
        ),
    ),
}
"""Patches by version of torchtitan."""

_ADAPTER = Adapter("torchtitan", PATCHES)
install, uninstall = _ADAPTER.install, _ADAPTER.uninstall


def ties_before(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the method that replaces a decoder's parameters, which ties the new ones.

    The decoder's initialization does so again, after its modules were sharded.
    """

    def parallelize(self: Any, parallel_dims: Any) -> None:
        original(self, parallel_dims)
        if self.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight

    return parallelize
