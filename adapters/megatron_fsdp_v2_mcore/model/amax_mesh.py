"""The ranks over which Transformer Engine reduces the amax of a weight that it quantizes.

Data-parallel sharding does not need this reduction: a weight is gathered before it is quantized.
Each tensor-parallel rank quantizes its own shard of a weight. With current scaling, the shard has a
separate scale, so that results depend on the tensor-parallel size. With a mesh set, all shards use
the scale of the whole weight. This file recognizes Transformer Engine's modules by their attributes
and does not import Transformer Engine.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from megatron_fsdp_v2_mcore.formats.delayed_scaling import allocate

_QUANTIZER_ATTRIBUTES = ("_get_weight_quantizers", "init_fp8_metadata")


def name_amax_mesh(module: nn.Module, mesh: DeviceMesh) -> list[RemovableHandle]:
    """Quantize the weights below a module with the amax over all ranks of a mesh.

    The function affects formats with a single scale that is computed from the weight itself
    (`Float8CurrentScaling`). Delayed scaling takes the group from its context
    (`autocast(amax_reduction_group=...)`); block formats have scales of blocks within a shard.
    Every rank of the mesh must run the modules. Call the function before or after `fully_shard`.

    Args:
        module: Hooks are registered on all modules of Transformer Engine at and below this module.
        mesh: The tensor-parallel mesh, with one axis: `mesh["tp"]`.

    Returns:
        Handles of the hooks. After their removal, each shard has a separate scale again once its
        module uses a new recipe.

    Raises:
        ValueError: The mesh does not have exactly one axis, or no module quantizes weights.
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
    """Whether a module is of Transformer Engine and has weights; attention modules have none."""
    has_weights = next(module.parameters(recurse=False), None) is not None
    return has_weights and all(hasattr(module, name) for name in _QUANTIZER_ATTRIBUTES)


def _reduce_over(group: Any, module: Any, inputs: Any) -> None:
    """Set the group on the quantizers of weights, which a module creates for every new recipe."""
    del inputs
    # The quantizers must exist. The forward's own call of `init_fp8_metadata` then has no effect.
    allocate(module)
    for quantizer in module._get_weight_quantizers():
        if hasattr(quantizer, "with_amax_reduction"):
            quantizer.with_amax_reduction = True
            quantizer.amax_reduction_group = group
