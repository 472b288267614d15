"""The public entry: shard a module's own parameters and make it a unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fsdp_v2.allocator import PlainAllocator
from megatron_fsdp_v2.comm import Axis, communicator_for
from megatron_fsdp_v2.context import Context
from megatron_fsdp_v2.fsdp_module import FSDPModule, swap_class, unit_of
from megatron_fsdp_v2.hooks import install_hooks, watch_optimizers
from megatron_fsdp_v2.layout import Granularity
from megatron_fsdp_v2.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.param_group import GroupSpec, OwnedParameter, ParameterGroup
from megatron_fsdp_v2.placement import resolve_placements
from megatron_fsdp_v2.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.unit import Unit

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

__all__ = ["fully_shard"]

_TAKEN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Original parameters that outlive their sharding, because another unit holds them too, say."""


def fully_shard[ModuleT: nn.Module](
    module: ModuleT,
    *,
    mesh: DeviceMesh,
    sharding_strategy: str = "optim_grads_params",
    outer_dp_sharding_strategy: str = "no_shard",
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    ignored_params: AbstractSet[nn.Parameter] | None = None,
    shard_granularity: str = "row",
    gradient_scaling_factor: float | None = None,
    on_missing_grad: str = "zero",
    enable_unshard_prefetch: bool = True,
    enable_async_reduce_grad: bool = True,
    enable_trace_pool: bool = False,
) -> ModuleT:
    """Shard the parameters a module owns over a data-parallel mesh, in place.

    Call it bottom-up: on each unit that should be gathered on its own, then on the root. A unit
    owns the parameters below it that no unit inside it owns. Its parameters become DTensors with
    their names and global shapes; build the optimizer from `module.parameters()` afterwards.

    Gradients are `gradient_scaling_factor` times the sum over data-parallel ranks.

    Args:
        module: The unit; its class becomes a subclass of both its own and `FSDPModule`.
        mesh: 1-D (dp) or 2-D (outer dp, inner dp) device mesh that this rank is part of.
        sharding_strategy: `no_shard` (DDP), `optim` (ZeRO-1), `optim_grads` (ZeRO-2) or
            `optim_grads_params` (ZeRO-3), along the inner axis.
        outer_dp_sharding_strategy: `no_shard` (HSDP) or `optim` (HFSDP), along the outer axis of
            a 2-D mesh.
        mp_policy: Dtypes of weights, gradients, inputs and outputs; default: as they are.
        reshard_after_forward: Drop gathered weights between forward and backward. The root keeps
            its own, since its backward follows at once.
        ignored_params: Parameters to leave alone.
        shard_granularity: What a shard boundary never cuts: `row`, `block:<rows>` or `tensor`.
        gradient_scaling_factor: Factor of the gradient sum; default `1 / dp_world_size`.
        on_missing_grad: `zero` or `error`: what a parameter without gradient means while others
            of its group have one.
        enable_unshard_prefetch: Gather the next unit while this one computes.
        enable_async_reduce_grad: Reduce gradients while the next unit computes.
        enable_trace_pool: Not built yet; must be False.

    Returns:
        The same module.

    Raises:
        ValueError: An argument is bad, the module is sharded already, or a parameter of it is.
    """
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    _validate(module, mesh, on_missing_grad, enable_trace_pool)
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    placements = resolve_placements(sharding_strategy, outer_dp_sharding_strategy, sizes)
    granularity = Granularity.parse(shard_granularity)
    scale = 1.0 / mesh.size() if gradient_scaling_factor is None else gradient_scaling_factor
    owned = _owned_parameters(module, ignored_params or frozenset())
    device = _device_of(mesh)
    axes = [
        Axis(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis))
        for axis in range(mesh.ndim)
    ]
    inner_units = [unit_of(m) for m in module.modules() if isinstance(m, FSDPModule)]
    context = _joint_context(inner_units, device, enable_unshard_prefetch, enable_async_reduce_grad)
    groups = []
    for number, (spec, members) in enumerate(
        _grouped(owned, policy, placements, granularity, scale, on_missing_grad == "error")
    ):
        groups.append(
            ParameterGroup(
                f"{type(module).__name__}/{number}",
                members,
                spec,
                mesh,
                axes,
                device,
                context.communicator,
                context.allocator,
                context.reductions.make_room,
            )
        )
    for parameter in owned:
        _TAKEN[parameter.param] = f"{parameter.name} of {type(module).__name__}"
    unit = Unit(module, groups, context, policy, reshard_after_forward=reshard_after_forward)
    for inner in inner_units:
        inner.is_root = False
    swap_class(module)
    module._fsdp_unit = unit  # type: ignore[assignment]
    install_hooks(module)
    watch_optimizers(context)
    return module


def _validate(
    module: nn.Module, mesh: DeviceMesh, on_missing_grad: str, enable_trace_pool: bool
) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"fully_shard needs an nn.Module, got {type(module).__name__}")
    if isinstance(module, FSDPModule):
        raise ValueError(f"fully_shard was already called on this {type(module).__name__}")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and not _has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward to gather for; call fully_shard on its members"
        )
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if on_missing_grad not in ("zero", "error"):
        raise ValueError(f"on_missing_grad must be 'zero' or 'error', got {on_missing_grad!r}")
    if enable_trace_pool:
        raise ValueError("enable_trace_pool=True is not built yet; leave it False")


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _joint_context(
    inner_units: list[Unit],
    device: torch.device,
    enable_unshard_prefetch: bool,
    enable_async_reduce_grad: bool,
) -> Context[Unit]:
    """One context for a unit and all units inside it; theirs are replaced."""
    context: Context[Unit] = Context(
        communicator_for(device),
        PlainAllocator(),
        enable_unshard_prefetch=enable_unshard_prefetch,
        enable_async_reduce_grad=enable_async_reduce_grad,
    )
    for unit in inner_units:
        if unit.is_unsharded or len(unit.context.reductions):
            raise RuntimeError(
                f"unit {unit.name} is gathered or has a reduction under way; call reshard() on "
                "it, or wrap its parent before the first step"
            )
        unit.context = context
        context.add_unit(unit)
        for group in unit.groups:
            group.make_room = context.reductions.make_room
    return context


def _own_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and everything below it up to the next unit, with names."""
    yield "", module
    for name, child in module.named_children():
        if isinstance(child, FSDPModule):
            continue
        for suffix, below in _own_modules(child):
            yield f"{name}.{suffix}" if suffix else name, below


def _owned_parameters(
    module: nn.Module, ignored: AbstractSet[nn.Parameter]
) -> list[OwnedParameter]:
    """The parameters a module owns, each once, with every site it is registered at."""
    ignored_ids = {id(param) for param in ignored}
    found: dict[int, OwnedParameter] = {}
    for prefix, below in _own_modules(module):
        for attribute, param in below._parameters.items():
            if param is None or id(param) in ignored_ids:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if id(param) not in found:
                _check_parameter(name, param)
                found[id(param)] = OwnedParameter(name, param)
            found[id(param)].sites.append((below, attribute))
    return list(found.values())


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if isinstance(param, UnevenDTensor):
        raise ValueError(
            f"parameter {name} is sharded already, by a unit that contains it; wrap inner units "
            "before outer ones"
        )
    if param in _TAKEN:
        raise ValueError(
            f"parameter {name} is tied to {_TAKEN[param]}, which another unit has sharded already; "
            "tied parameters must belong to one unit: wrap a module that contains both, or leave "
            "both to the root"
        )
    if param.dim() == 0:
        raise ValueError(
            f"parameter {name} is 0-dim and has no rows to shard; make it of shape (1,)"
        )
    if not param.is_leaf:
        raise ValueError(f"parameter {name} is not a leaf tensor")
    if param.is_meta:
        raise ValueError(f"parameter {name} is on the meta device; materialise it first")


def _grouped(
    owned: Iterable[OwnedParameter],
    policy: MixedPrecisionPolicy,
    placements: tuple[Any, ...],
    granularity: Granularity,
    scale: float,
    errors_on_missing_grad: bool,
) -> Iterator[tuple[GroupSpec, list[OwnedParameter]]]:
    """Parameters that can share buffers, in order of first appearance."""
    groups: dict[GroupSpec, list[OwnedParameter]] = {}
    for parameter in owned:
        spec = GroupSpec(
            dtypes=policy.resolve(parameter.param.dtype),
            requires_grad=parameter.param.requires_grad,
            placements=placements,
            granularity=granularity,
            scale=scale,
            errors_on_missing_grad=errors_on_missing_grad,
        )
        groups.setdefault(spec, []).append(parameter)
    yield from groups.items()
