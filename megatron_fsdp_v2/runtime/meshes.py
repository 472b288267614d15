"""Data-parallel meshes of a unit and of single parameters, from the arguments of `fully_shard`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from megatron_fsdp_v2.params.parameters import OwnedParameter


@dataclass
class _DataParallelMeshDims:
    """Names of the data-parallel axes of a mesh, as in torch 2.15.

    Attributes:
        shard: Axes that shard parameters; the axes of a tuple are flattened into one.
        replicate: Axes that replicate parameters (HSDP); the axes of a tuple are flattened.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


if TYPE_CHECKING:
    DataParallelMeshDims = _DataParallelMeshDims
else:
    DataParallelMeshDims = getattr(fsdp, "DataParallelMeshDims", _DataParallelMeshDims)
    """Torch's class, or one with the same fields before torch 2.15."""


class MeshDims(Protocol):
    """What `fully_shard` reads of a `DataParallelMeshDims`, of torch or of this package."""

    @property
    def shard(self) -> str | tuple[str, ...] | None:
        """Axes that shard parameters."""

    @property
    def replicate(self) -> str | tuple[str, ...] | None:
        """Axes that replicate parameters."""


class ShardPlacementResult(NamedTuple):
    """Result of a `shard_placement_fn` that also selects the mesh of a parameter.

    Attributes:
        placement: `Shard`, `Replicate` or None.
        mesh_info: The data-parallel mesh, or torch's `FSDPMeshInfo` of it.
    """

    placement: Placement | None
    mesh_info: object


class _PlacementAndMesh(Protocol):
    """A `ShardPlacementResult`, of torch or of this package."""

    @property
    def placement(self) -> Placement | None:
        """`Shard`, `Replicate` or None."""

    @property
    def mesh_info(self) -> object:
        """The data-parallel mesh, or torch's `FSDPMeshInfo` of it."""


type PlacementFunction = Callable[[nn.Parameter], Placement | _PlacementAndMesh | None]
"""Returns the placement of a parameter, and perhaps its mesh."""


class DataMesh(NamedTuple):
    """A mesh whose axes are all data-parallel.

    Attributes:
        mesh: 1-D (dp) or 2-D (outer dp, inner dp).
        is_sharded: Whether the inner axis shards parameters. Otherwise every axis replicates them.
        names: Names of its axes in the mesh that it was taken from, if that has others.
        is_part: Whether some of the others have several ranks, so that only a DTensor says what
            they do with a parameter.
    """

    mesh: DeviceMesh
    is_sharded: bool = True
    names: frozenset[str] = frozenset()
    is_part: bool = False

    @classmethod
    def of(cls, mesh: object, dims: MeshDims | None) -> DataMesh:
        """Return the data-parallel axes of a mesh.

        Flattens several axes into one, which is collective over the mesh the first time.

        Args:
            mesh: A mesh that this rank is part of; None for one axis over all ranks.
            dims: A `DataParallelMeshDims` with the names of the axes; None if all axes are
                data-parallel.

        Raises:
            ValueError: The mesh has no such axes.
        """
        found = _checked(_default_mesh() if mesh is None else mesh)
        if dims is None:
            return cls(found)
        if not (hasattr(dims, "shard") and hasattr(dims, "replicate")):
            raise ValueError(
                "dp_mesh_dims must be a DataParallelMeshDims(shard=..., replicate=...) with names "
                f"of axes of mesh, got {dims!r}"
            )
        kinds = _names(dims.replicate), _names(dims.shard)
        known, names = found.mesh_dim_names or (), [*kinds[0], *kinds[1]]
        in_order = all(tuple(n for n in known if n in kind) == kind for kind in kinds)
        if not names or len({*names}) < len(names) or not in_order:
            raise ValueError(
                f"dp_mesh_dims={dims!r} must name axes of mesh, each once and in the order of the "
                f"mesh, whose axes are {known}"
            )
        axes = [
            found[kind[0]] if len(kind) == 1 else found[kind]._flatten("_".join(kind))
            for kind in kinds
            if kind
        ]
        data = axes[0] if len(axes) == 1 else DeviceMesh._concatenate(axes)
        return cls(data, bool(kinds[1]), frozenset(names), data.size() < found.size())

    @classmethod
    def of_parameter(
        cls, parameter: OwnedParameter, placement_fn: PlacementFunction, unit: DataMesh
    ) -> DataMesh:
        """Return the mesh that `shard_placement_fn` gives a parameter.

        Args:
            parameter: The parameter, whose `has_equal_shares` is set.
            placement_fn: Returns a placement, or a placement and a mesh.
            unit: Mesh of the unit.

        Raises:
            ValueError: The result is no placement that parameters can have.
        """
        found, where = placement_fn(parameter.param), unit
        placement: Any = found
        if found is not None and not isinstance(found, Placement) and hasattr(found, "mesh_info"):
            placement, where = found.placement, _of_info(parameter.name, found.mesh_info)
        if where.mesh.device_type != unit.mesh.device_type:
            raise ValueError(
                f"shard_placement_fn gives parameter {parameter.name} a mesh of device type "
                f"{where.mesh.device_type!r}, and that of its unit is {unit.mesh.device_type!r}"
            )
        if isinstance(placement, Replicate):
            return where._replace(is_sharded=False)
        dims, is_shard = parameter.param.dim(), isinstance(placement, Shard)
        if placement is not None and not (is_shard and -dims <= placement.dim < dims):
            raise ValueError(
                f"shard_placement_fn returns {placement} for parameter {parameter.name} of "
                f"{dims} dimensions; return None, Shard(dim) or Replicate(), or one of them in a "
                "ShardPlacementResult(placement, mesh_info)"
            )
        parameter.has_equal_shares = is_shard and placement.dim % dims > 0
        return where


def _of_info(name: str, info: Any) -> DataMesh:
    """Return the mesh of a `FSDPMeshInfo` or `HSDPMeshInfo` of torch, or of a mesh itself."""
    if isinstance(info, DeviceMesh):
        return DataMesh(_checked(info))
    mesh = _checked(getattr(info, "mesh", info))
    dims = tuple(getattr(info, f"{kind}_mesh_dim", None) for kind in ("replicate", "shard"))
    if dims not in ([(None, 0), (0, None)] if mesh.ndim == 1 else [(0, 1)]):
        raise ValueError(
            f"shard_placement_fn gives parameter {name} the mesh {mesh} with the axes {dims} "
            "(replicate, shard); give a mesh of these axes alone, in this order"
        )
    whole, named = getattr(info, "spmd_mesh", None), getattr(info, "dp_mesh_dims", None)
    if whole is None or named is None:
        return DataMesh(mesh, dims[1] is not None)
    names = frozenset(_names(named.replicate) + _names(named.shard))
    return DataMesh(mesh, dims[1] is not None, names, mesh.size() < whole.size())


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


# Per default process group, since a program may destroy it and initialize another one.
_MESHES: weakref.WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = weakref.WeakKeyDictionary()


def _default_mesh() -> DeviceMesh:
    """One axis over all ranks, of the accelerator's device type if there is one, else the CPU's.

    Starts the default process group from the environment if there is none yet, as FSDP2 does.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    group = dist.group.WORLD
    assert group is not None
    mesh = _MESHES.get(group)
    if mesh is None:
        device = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if device is None else device.type
        mesh = _MESHES[group] = init_device_mesh(device_type, (dist.get_world_size(),))
    return mesh


def _checked(mesh: object) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"this is rank {dist.get_rank()}, and mesh has the ranks "
            f"{mesh.mesh.flatten().tolist()}; shard a module on the ranks of its mesh only"
        )
    return mesh
