"""Parameters that are DTensors over a tensor-parallel mesh.

PyTorch's `parallelize_module` turns parameters into DTensors over a tensor-parallel mesh. Data
parallelism shards the local tensor of each; the module computes with a DTensor whose local tensor
is a view of the gathered buffer.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of


class ComputePlacement(NamedTuple):
    """Placement that a module computes with.

    Attributes:
        spec: Spec of the DTensor.
        data_axes: Axes of its mesh that are data-parallel, which replicate the parameter.
    """

    spec: DTensorSpec
    data_axes: frozenset[int] = frozenset()


def from_part(part: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return the DTensor of this rank's part, contiguous, sharing its memory. No communication."""
    stride = torch.empty(spec.shape, device="meta").stride()
    meta = TensorMeta(spec.shape, stride, part.dtype)
    placed = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(part, placed, requires_grad=False)  # type: ignore[no-untyped-call]


def part_of_gradient(
    gradient: torch.Tensor, compute: ComputePlacement, dtype: torch.dtype
) -> torch.Tensor:
    """Return this rank's part of a gradient, with the placement of the parameter.

    Collective over the tensor-parallel axis if the gradient has another placement: the gradient of
    a replicated parameter is `Partial` if ranks computed on different parts of a sequence. Along
    data-parallel axes the gradient stays this rank's summand. `dtype` is the dtype to sum in if it
    is wider than the gradient's.
    """
    with torch.no_grad():
        if isinstance(gradient, DTensor):
            pairs = enumerate(zip(gradient.placements, compute.spec.placements, strict=True))
            wanted = [has if axis in compute.data_axes else want for axis, (has, want) in pairs]
            if tuple(wanted) != gradient.placements:
                wide = cast("DTensor", _widened(gradient, dtype))
                gradient = wide.redistribute(compute.spec.mesh, wanted)
        return plain_of(gradient).detach()


def summed_gradient(
    gradient: torch.Tensor, tensor: TensorShard, dtype: torch.dtype
) -> torch.Tensor:
    """Return the sum of a plain gradient over the tensor-parallel axis. Collective over it.

    `dtype` is the dtype to sum in if it is wider than the gradient's.
    """
    assert tensor.mesh is not None
    axes = [*[Replicate()] * (tensor.mesh.ndim - 1), Partial()]
    with torch.no_grad():
        wide = _widened(gradient, dtype)
        return DTensor.from_local(wide, tensor.mesh, axes, run_check=False).full_tensor()


def _widened(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, dtype))


def tensor_shard_of(
    name: str, param: DTensor, data: DeviceMesh, data_axes: AbstractSet[str]
) -> tuple[TensorShard | None, ComputePlacement]:
    """Return the tensor-parallel split of a DTensor, and its placement. No communication.

    Args:
        name: Name of the parameter, for errors.
        param: A DTensor over a tensor-parallel mesh, which may have data-parallel axes as well.
        data: The data-parallel mesh to shard it over.
        data_axes: Names of the data-parallel axes of the DTensor's mesh, which replicate it.

    Returns:
        None instead of a split if only data-parallel axes have several ranks.

    Raises:
        ValueError: Its placement cannot be sharded by rows, or the two meshes are not axes of one
            mesh.
    """
    mesh, placements = param.device_mesh, tuple(param.placements)
    where = f"parameter {name} is a DTensor with placements {placements} over {mesh}"
    names = mesh.mesh_dim_names or ()
    held = frozenset(axis for axis, known in enumerate(names) if known in data_axes)
    compute = ComputePlacement(param._spec, held)
    if not all(placements[axis].is_replicate() for axis in held):
        raise ValueError(f"{where}; along data-parallel axes, only Replicate is supported")
    others = [axis for axis in range(mesh.ndim) if axis not in held]
    if len(others) > 1:
        others = [axis for axis in others if mesh.size(axis) > 1] or others[:1]
    if not others:
        return None, compute
    if len(others) > 1 or (mesh.ndim > 1 and not held):
        raise ValueError(
            f"{where}; one tensor-parallel axis is supported: parallelize over a 1-D mesh, or name "
            "the data-parallel axes of a mesh with dp_mesh_dims"
        )
    tensor = mesh[names[others[0]]] if held else mesh
    placement = placements[others[0]]
    if type(placement) not in (Shard, Replicate):
        raise ValueError(
            f"{where}; only Shard and Replicate are supported: redistribute() what is sharded "
            "otherwise or still to be summed"
        )
    dim = placement.dim % param.ndim if isinstance(placement, Shard) else None
    if dim is not None and param.shape[dim] % tensor.size():
        raise ValueError(
            f"{where} that cut dimension {dim} of {tuple(param.shape)} into unequal parts; make it "
            f"a multiple of {tensor.size()}"
        )
    advice = (
        "take both from one mesh: mesh = init_device_mesh(device, (dp, tp), mesh_dim_names="
        "('dp', 'tp')), parallelize_module(..., mesh['tp']), fully_shard(..., mesh=mesh['dp'])"
    )
    if data.mesh_dim_names is None or tensor.mesh_dim_names is None:
        raise ValueError(f"{where}, and its mesh or {data} has no names of axes; {advice}")
    try:
        # Torch has no public function that joins axes without their common mesh.
        both = DeviceMesh._concatenate([data, tensor])
    except RuntimeError as error:
        raise ValueError(
            f"{where}, which is not an axis of the same mesh as {data}; {advice}"
        ) from error
    return TensorShard(both, dim), compute
