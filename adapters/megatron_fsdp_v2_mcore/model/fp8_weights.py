"""What Transformer Engine's modules keep of weights in FP8, beside the weights themselves."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.params.formats import DenseFormat
from megatron_fsdp_v2.params.group import ParameterGroup

__all__ = ["limit_copies"]


def limit_copies(module: nn.Module, *, keeps_weights: bool, keeps_transposes: bool) -> None:
    """Have modules keep no whole copies of weights whose unit is gathered for every use.

    A module with weights in bf16 would keep them quantized from the first micro-batch to the last:
    the whole model in FP8 on every rank. As under FSDP2, it quantizes them again in the backward
    instead, where Transformer Engine can: not with fused weight gradients, which its way for FSDP2
    does not find. One with quantized weights would keep transposed ones.

    Args:
        module: A sharded module; all of Transformer Engine's in it are found.
        keeps_weights: Whether quantized copies are kept all the same.
        keeps_transposes: Likewise for transposed ones.
    """
    for part in module.modules():
        found = map(_group_of, part.parameters(recurse=False))
        for group in {id(group): group for group in found if group is not None}.values():
            weight_format: Any = group.weights.format
            if hasattr(weight_format, "keeps_transposes"):
                weight_format.keeps_transposes = keeps_transposes
            elif isinstance(weight_format, DenseFormat) and hasattr(type(part), "is_fsdp2"):
                keeps = keeps_weights or getattr(part, "fuse_wgrad_accumulation", False)
                # Transformer Engine's own name for modules whose weights come and go.
                marked: Any = part
                marked._is_fsdp2 = group.weights.gathers_for_use and not keeps


def _group_of(param: nn.Parameter) -> ParameterGroup | None:
    if not isinstance(param, UnevenDTensor):
        return None
    return cast("ParameterGroup | None", param.row_shards.holders.group())
