"""FP8 copies of weights that Transformer Engine's modules cache."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_fsdp_v2.params.formats import DenseFormat
from megatron_fsdp_v2.params.group import group_of


def limit_weight_caches(module: nn.Module, *, keeps_weights: bool, keeps_transposes: bool) -> None:
    """Disable the caching of full weight copies in modules whose unit is gathered for every use.

    A module with bf16 weights would cache their quantized values from the first micro-batch to the
    last, so that every rank would hold the whole model in FP8. As under FSDP2, the module instead
    quantizes its weights again in the backward. Transformer Engine does not support this with fused
    weight gradients; modules that use them keep their copies. A module with quantized weights would
    cache their transposes.

    Args:
        module: A sharded module. All Transformer Engine modules in it are changed.
        keeps_weights: Whether modules keep quantized copies of their weights.
        keeps_transposes: Whether modules keep transposes of quantized weights.
    """
    for part in module.modules():
        found = map(group_of, part.parameters(recurse=False))
        for group in {id(group): group for group in found if group is not None}.values():
            weight_format: Any = group.format
            if hasattr(weight_format, "keeps_transposes"):
                weight_format.keeps_transposes = keeps_transposes
            elif isinstance(weight_format, DenseFormat) and hasattr(type(part), "is_fsdp2"):
                keeps = keeps_weights or getattr(part, "fuse_wgrad_accumulation", False)
                # Transformer Engine reads this attribute to quantize again in the backward.
                te_module: Any = part
                te_module._is_fsdp2 = group.gathers_for_use and not keeps
