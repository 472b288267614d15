"""Over which ranks Transformer Engine looks for the largest element of a weight it quantizes.

Data-parallel sharding needs nothing of this: a weight is gathered whole before it is quantized. A
tensor-parallel rank has a part of it, and with current scaling a scale of its own, so that what is
computed depends on how many parts there are. With a mesh named, all parts have the scale of the
whole. Transformer Engine is not imported: a module of its kind is known by what it has.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from megatron_fsdp_v2_mcore.formats.products import num_products

__all__ = ["name_amax_mesh"]

_MARKS = ("_get_weight_quantizers", "init_fp8_metadata")


def name_amax_mesh(module: nn.Module, mesh: DeviceMesh) -> list[RemovableHandle]:
    """Have weights below a module quantized with the largest element on all ranks of a mesh.

    Of the formats of Transformer Engine this is for those with one scale that is made of the weight
    itself (`Float8CurrentScaling`). Delayed scaling takes a group where its context is entered
    (`autocast(amax_reduction_group=...)`); blocks have scales of their own, within a part.
    Every rank of the mesh has to run the modules. Call it before or after `fully_shard`.

    Args:
        module: Modules of Transformer Engine at and below it are meant, others left alone.
        mesh: One axis, the tensor-parallel one: `mesh["tp"]`.

    Returns:
        Handles of the hooks; removed, weights have scales of their own again from a new recipe on.

    Raises:
        ValueError: The mesh is none of one axis, or nothing below the module quantizes weights.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f'the mesh for amaxes must have one axis, such as mesh["tp"], got {mesh}')
    found = [below for below in module.modules() if _quantizes_weights(below)]
    if not found:
        raise ValueError(
            f"no module of Transformer Engine is at or below {type(module).__name__}; only its "
            "modules quantize weights"
        )
    hook = functools.partial(_reduce_over, mesh.get_group())
    return [below.register_forward_pre_hook(hook) for below in found]


def _quantizes_weights(module: nn.Module) -> bool:
    """Whether it is of Transformer Engine's kind; attention is and has no weights."""
    has_weights = next(module.parameters(recurse=False), None) is not None
    return has_weights and all(hasattr(module, mark) for mark in _MARKS)


def _reduce_over(group: Any, module: Any, inputs: Any) -> None:
    """Set the group on the quantizers of weights, which a module makes when a recipe is new."""
    del inputs
    # What its forward would do next, which does nothing then.
    module.init_fp8_metadata(num_gemms=num_products(module))
    for quantizer in module._get_weight_quantizers():
        if hasattr(quantizer, "with_amax_reduction"):
            quantizer.with_amax_reduction = True
            quantizer.amax_reduction_group = group
