"""Which parameters a unit owns, which it shares with others, and whether they can be sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.dtensor.tp_params import tensor_shard_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.params.formats import DenseFormat, format_of
from megatron_fsdp_v2.params.parameter_hooks import tensor_hook_rejection
from megatron_fsdp_v2.params.registration import OwnedParameter, find_owner_slot
from megatron_fsdp_v2.runtime.fsdp_module import FSDPModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from megatron_fsdp_v2.dtensor.row_shards import TensorShard
    from megatron_fsdp_v2.params.group import GroupSpec, ParameterGroup
    from megatron_fsdp_v2.runtime.unit_base import UnitBase

__all__ = [
    "TiedParameter",
    "describe_tensor_shard",
    "numbered",
    "outermost",
    "own_modules",
    "owned_parameters",
    "register_tied",
    "tied_groups_of",
    "used_parameters",
]


type TiedParameter = tuple[OwnedParameter, ParameterGroup, int]


def owned_parameters(
    modules: Sequence[nn.Module], ignored: AbstractSet[nn.Parameter], device: torch.device
) -> tuple[list[OwnedParameter], list[TiedParameter]]:
    """The parameters below some modules that no unit inside has, each once, with all its places.

    Returns:
        Those it owns, and those tied to one that another unit has sharded, with where.
    """
    ignored_ids = {id(param) for param in ignored}
    found: dict[int, OwnedParameter] = {}
    for prefix, below in own_modules(numbered(modules)):
        for attribute, param in below._parameters.items():
            if param is None or id(param) in ignored_ids:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if id(param) not in found:
                found[id(param)] = OwnedParameter(name, param)
            found[id(param)].sites.append((below, attribute))
    owned, tied = [], []
    for parameter in found.values():
        slot = find_owner_slot(parameter.param)
        shared = _owner_of(parameter.param, modules)
        if slot is not None:
            tied.append((parameter, cast("ParameterGroup", slot[0]), slot[1].index))
        elif shared is not None:
            tied.append((parameter, *shared))
        else:
            _check_parameter(parameter.name, parameter.param, device)
            owned.append(parameter)
    return owned, tied


def used_parameters(
    modules: Sequence[nn.Module], used: AbstractSet[nn.Parameter]
) -> list[TiedParameter]:
    """Parameters that some modules compute with and do not have, as if tied to one nowhere.

    Raises:
        ValueError: One is not sharded, or by a unit that contains one of the modules.
    """
    tied: list[TiedParameter] = []
    for param in used:
        owner = _owner_of(param, modules)
        if owner is None:
            raise ValueError(
                f"used_params has a parameter of shape {tuple(param.shape)} that no unit beside "
                "this one has sharded; call fully_shard on the module that has it first, and take "
                "the parameter from there afterwards"
            )
        group, index = owner
        tied.append((OwnedParameter(group.names[index], param), group, index))
    return tied


def _owner_of(
    param: nn.Parameter, modules: Sequence[nn.Module]
) -> tuple[ParameterGroup, int] | None:
    """Who sharded a parameter that modules share with a unit beside them, and its index there.

    None for one that is not sharded, or by a unit that contains a module: that is a mistake.
    """
    if not isinstance(param, UnevenDTensor):
        return None
    group = cast("ParameterGroup | None", param.row_shards.holders.group())
    unit = None if group is None else cast("UnitBase | None", group.watcher())
    owners = [owner for ref in (() if unit is None else unit.modules) if (owner := ref())]
    below = {id(part) for owner in owners for part in owner.modules()}
    if group is None or not owners or any(id(module) in below for module in modules):
        return None
    return group, next(i for i, known in enumerate(group.sharded_params) if known is param)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are its own: not of one that only stands for others."""
    # Torch's own kinds without memory, such as fake tensors, are meant to have none.
    is_torchs = type(tensor).__module__.partition(".")[0] == "torch"
    if is_torchs or tensor.is_meta or not tensor.numel():
        return True
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:
        # What torch answers where there is none.
        return False


def _check_parameter(name: str, param: nn.Parameter, device: torch.device) -> None:
    if isinstance(param, UnevenDTensor):
        raise ValueError(
            f"parameter {name} is sharded already, by a unit that contains it; wrap inner units "
            "before outer ones"
        )
    local = param._local_tensor if isinstance(param, DTensor) else param
    known = format_of(param)
    if known is None or (known is DenseFormat and not _has_memory(local)):
        raise ValueError(
            f"parameter {name} is a {type(local).__name__}, which is made of other tensors or says "
            "how it is gathered (fsdp_pre_all_gather), and no weight format that is registered "
            "takes it. Make it a plain tensor, with mp_policy for the dtype to compute with, or "
            "leave it out with ignored_params"
        )
    if param.dim() == 0:
        raise ValueError(
            f"parameter {name} is 0-dim and has no rows to shard; make it of shape (1,)"
        )
    if param.requires_grad and (param.is_complex() or param.dtype.itemsize == 1):
        kind = "complex" if param.is_complex() else "of 8 bits"
        raise ValueError(
            f"parameter {name} is {kind} ({param.dtype}) and trained, which cannot be reduced over "
            "ranks and stepped; train a real one and convert it in the forward (torch.view_as_"
            "complex for complex numbers), freeze it, or leave it out with ignored_params"
        )
    refusal = tensor_hook_rejection(f"parameter {name}", param)
    if refusal:
        raise ValueError(refusal)
    if not param.is_leaf:
        raise ValueError(
            f"parameter {name} is not a leaf tensor: it was computed from others, and its gradient "
            "would go there; register an nn.Parameter"
        )
    if not param.is_meta and param.device.type not in ("cpu", device.type):
        raise ValueError(
            f"parameter {name} is on {param.device}, the mesh on {device.type!r}; move the module "
            "or make the mesh of the module's device type"
        )


def describe_tensor_shard(
    parameter: OwnedParameter, mesh: DeviceMesh, shards: Mapping[nn.Parameter, TensorShard]
) -> None:
    """Note how tensor parallelism cut a parameter: as a DTensor says it, or the caller."""
    given = parameter.param if parameter.stood_in is None else parameter.stood_in
    tensor = parameter.tensor = shards.get(given)
    if isinstance(parameter.param, DTensor):
        if tensor is not None:
            raise ValueError(
                f"parameter {parameter.name} is a DTensor, which says how it is cut; leave it out "
                "of tensor_shards"
            )
        parameter.tensor, parameter.dtensor = tensor_shard_of(parameter.name, parameter.param, mesh)
    elif tensor is not None:
        _check_tensor_shard(parameter, tensor, mesh)


def _check_tensor_shard(parameter: OwnedParameter, tensor: TensorShard, mesh: DeviceMesh) -> None:
    leading = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    if tensor.mesh is not None and (
        tensor.mesh.ndim != mesh.ndim + 1
        or leading
        != [dist.get_process_group_ranks(tensor.mesh.get_group(a)) for a in range(mesh.ndim)]
    ):
        raise ValueError(
            f"the mesh of the tensor shard of parameter {parameter.name} must have the axes of "
            f"the data-parallel mesh and one more, got {tensor.mesh}"
        )
    shape = tuple(parameter.param.shape)
    if tensor.dim is not None and not 0 <= tensor.dim < len(shape):
        raise ValueError(
            f"parameter {parameter.name} of shape {shape} has no dimension {tensor.dim} to be cut"
        )
    if tensor.pieces and sum(tensor.pieces) != shape[tensor.dim or 0]:
        raise ValueError(
            f"the pieces {tensor.pieces} of parameter {parameter.name} must add up to the "
            f"{shape[tensor.dim or 0]} rows or columns of this rank's part"
        )


def tied_groups_of(
    tied: Sequence[TiedParameter], spec_of: Callable[[nn.Parameter], GroupSpec], mesh: DeviceMesh
) -> list[ParameterGroup]:
    """The groups of other units that hold parameters tied to some here."""
    tied_groups: list[ParameterGroup] = []
    for parameter, group, index in tied:
        where = f"parameter {parameter.name} is tied to {group.names[index]} of {group.name}"
        spec = spec_of(parameter.param)
        if isinstance(parameter.param, UnevenDTensor):
            # Sharded already, it has the dtype of its main weights.
            spec = dataclasses.replace(spec, dtypes=group.spec.dtypes)
        if group.mesh != mesh or group.spec != spec:
            raise ValueError(
                f"{where}, which was sharded with another mesh, strategy, granularity, scaling or "
                "precision; use the same for both"
            )
        if group.weights.is_held:
            raise RuntimeError(f"{where}, which is gathered; call reshard() on its module first")
        if group not in tied_groups:
            tied_groups.append(group)
    return tied_groups


def own_modules(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Modules and everything below them up to the next unit, with names, parents first."""
    for prefix, module in named:
        yield prefix, module
        for name, child in module.named_children():
            if not isinstance(child, FSDPModule):
                yield from own_modules([(f"{prefix}.{name}" if prefix else name, child)])


def numbered(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """What comes before names in each of several modules: its number; nothing where it is one."""
    return [("" if len(modules) == 1 else str(i), module) for i, module in enumerate(modules)]


def outermost(given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules to shard, each once, without those that are inside another one of them."""
    modules: list[nn.Module] = []
    for module in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard needs an nn.Module, got {type(module).__name__}")
        modules.append(module)
    if not modules:
        raise ValueError("fully_shard needs an nn.Module or some of them, got an empty list")
    inside = {id(m) for module in modules for m in module.modules() if m is not module}
    return [m for m in dict.fromkeys(modules) if id(m) not in inside]


def register_tied(tied: Sequence[TiedParameter], undo: ExitStack) -> None:
    """Register parameters that other units have sharded where they are tied to, too.

    Args:
        tied: Those parameters, with where they are.
        undo: Takes back the note of it that their groups have. Modules are the caller's to restore.
    """
    for parameter, group, index in tied:
        for below, attribute in parameter.sites:
            group.registrations.add(index, below, attribute, undo)
            below._parameters[attribute] = group.sharded_params[index]
