"""Parameters that are DTensors already: what tensor parallelism left of them here, and back.

PyTorch's `parallelize_module` turns parameters into DTensors over a tensor-parallel mesh. Data
parallelism shards this rank's part of one; the module goes on computing with a DTensor, whose part
is a view of the gathered buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from megatron_fsdp_v2.dtensor.row_shards import TensorShard

__all__ = ["DTensorPart", "part_of", "tensor_shard_of"]


@dataclass(frozen=True, slots=True)
class DTensorPart:
    """How a part makes up a DTensor over the tensor-parallel mesh.

    Attributes:
        mesh: The tensor-parallel mesh, of one axis.
        placement: Where the whole is along it.
        shape: Shape of the whole.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: tuple[int, ...]

    def whole(self, part: torch.Tensor) -> DTensor:
        """The DTensor of a part, sharing its memory. No communication."""
        return DTensor.from_local(
            part,
            self.mesh,
            [self.placement],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def part_of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient, placed as the parameter is.

        Collective over the tensor-parallel mesh where autograd left it placed otherwise: the
        gradient of a replicated parameter is a partial sum where ranks saw parts of a sequence.
        """
        with torch.no_grad():
            placed = gradient
            if isinstance(gradient, DTensor) and gradient.placements != (self.placement,):
                placed = gradient.redistribute(self.mesh, [self.placement])
            return part_of(placed)


def part_of(param: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a parameter before data parallelism cuts it; without gradient."""
    return param.to_local().detach() if isinstance(param, DTensor) else param.detach()


def tensor_shard_of(name: str, param: DTensor, data: DeviceMesh) -> tuple[TensorShard, DTensorPart]:
    """Read off a DTensor how tensor parallelism cut it. No communication.

    Args:
        name: For errors.
        param: A DTensor over a tensor-parallel mesh.
        data: The data-parallel mesh it is to be sharded over as well.

    Raises:
        ValueError: It is placed in a way that cannot be sharded by rows, or the two meshes are
            not axes of one mesh.
    """
    tensor, placements = param.device_mesh, tuple(param.placements)
    where = f"parameter {name} is a DTensor with placements {placements} over {tensor}"
    if tensor.ndim != 1:
        raise ValueError(
            f"{where}; one tensor-parallel axis is supported: parallelize over a 1-D mesh"
        )
    (placement,) = placements
    if isinstance(placement, Partial):
        raise ValueError(
            f"{where}; what is still to be summed is no parameter: redistribute it to Replicate() "
            "or Shard()"
        )
    is_cut = placement.is_shard()
    if is_cut and type(placement) is not Shard:
        raise ValueError(f"{where}; only Shard and Replicate are supported")
    dim = placement.dim % param.ndim if isinstance(placement, Shard) else None
    if dim is not None and param.shape[dim] % tensor.size():
        raise ValueError(
            f"{where} that cut dimension {dim} of {tuple(param.shape)} into unequal parts; make it "
            f"a multiple of {tensor.size()}"
        )
    both = _joined(where, data, tensor)
    return TensorShard(both, dim), DTensorPart(tensor, placement, tuple(param.shape))


def _joined(where: str, data: DeviceMesh, tensor: DeviceMesh) -> DeviceMesh:
    """The mesh of the data-parallel axes and the tensor-parallel one, with their own groups."""
    advice = (
        "take both from one mesh: mesh = init_device_mesh(device, (dp, tp), mesh_dim_names="
        "('dp', 'tp')), parallelize_module(..., mesh['tp']), fully_shard(..., mesh=mesh['dp'])"
    )
    if data.mesh_dim_names is None or tensor.mesh_dim_names is None:
        raise ValueError(f"{where}, and its mesh or {data} has no names of axes; {advice}")
    shared = {
        rank
        for axis in range(data.ndim)
        for rank in dist.get_process_group_ranks(data.get_group(axis))
    } & set(dist.get_process_group_ranks(tensor.get_group()))
    if shared != {dist.get_rank()}:
        raise ValueError(
            f"{where}, which shares the ranks {sorted(shared)} with the data-parallel mesh {data}; "
            f"{advice}"
        )
    try:
        # Torch has no public way to join axes of one mesh whose own mesh is not at hand.
        return DeviceMesh._concatenate([data, tensor])
    except RuntimeError as error:
        raise ValueError(
            f"{where}, which is not an axis of the same mesh as {data}; {advice}"
        ) from error
