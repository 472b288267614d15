"""Parameters with annotations of `spmd_types`, which are plain tensors and compute as such.

FSDP2 of torch 2.15 stores such a parameter as a DTensor over the whole mesh, and sums its gradient
over the axes where the annotation is `R`: every rank has all of the parameter and computed with it
on its part of the data. A `TensorShard` describes the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import spmd_types
from spmd_types.runtime import get_local_type, get_partition_spec
from spmd_types.types import partition_spec_to_shard_types
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import UnitOptions, fully_shard
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.dtensor.tp_params import tensor_shard_of
from megatron_fsdp_v2.runtime.meshes import DataMesh

__all__ = ["with_shards"]


def with_shards(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a replacement of FSDP2's `fully_shard` that understands annotations.

    Args:
        original: FSDP2's function.
        options: Arguments of this package's `fully_shard` that the framework does not give.
    """

    def sharded(module: Any, **given: Any) -> Any:
        of_unit = options.get("options")
        if not isinstance(of_unit, UnitOptions):
            of_unit = UnitOptions(runtime=of_unit)
        shards = {**of_unit.tensor_shards, **dict(_tensor_shards(module, given))}
        # Only the modules around the output layer are a list. The loss runs this layer once per
        # chunk of tokens, and synchronizes its gradient in the last of these backwards.
        once = of_unit.reduces_once or isinstance(module, list)
        of_unit = dataclasses.replace(of_unit, tensor_shards=shards, reduces_once=once)
        return fully_shard(module, **given, **{**options, "options": of_unit})

    return sharded


def _tensor_shards(
    given: nn.Module | list[nn.Module], arguments: Mapping[str, Any]
) -> Iterator[tuple[nn.Parameter, TensorShard]]:
    """Yield annotated parameters of modules that axes besides the data-parallel ones split."""
    modules = given if isinstance(given, list | tuple) else [given]
    names = {param: name for module in modules for name, param in module.named_parameters()}
    for param, name in names.items():
        if isinstance(param, DTensor) or not (types := dict(get_local_type(param))):
            continue
        if (spec := get_partition_spec(param)) is not None:
            types.update(partition_spec_to_shard_types(spec))
        whole, dims = arguments.get("mesh"), arguments.get("dp_mesh_dims")
        if place := arguments.get("shard_placement_fn"):
            info = getattr(place(param), "mesh_info", None)
            whole, dims = (whole, dims) if info is None else (info.spmd_mesh, info.dp_mesh_dims)
        if whole is None or dims is None:
            continue
        data = DataMesh.of(whole, dims)
        kinds = {
            axis: types.get(spmd_types.MeshAxis.of(whole.get_group(axis)))
            for axis in whole.mesh_dim_names
            if axis not in data.names
        }
        # `fully_shard` rejects a parameter without annotations of these axes, by its name.
        if not kinds or None in kinds.values():
            continue
        placements = [
            spmd_types.spmd_type_to_dtensor_placement(kinds.get(axis, spmd_types.R))
            for axis in whole.mesh_dim_names
        ]
        dtensor = DTensor.from_local(param.detach(), whole, placements, run_check=False)
        tensor, _ = tensor_shard_of(name, dtensor, data.mesh, data.names)
        if tensor is not None:
            sums = spmd_types.R in kinds.values()
            yield param, dataclasses.replace(tensor, sums_gradients=sums)
