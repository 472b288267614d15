"""The public function `fully_shard`: shard a module's own parameters and make it a unit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Concatenate, Literal, Protocol, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.comm.groups import check_gather_group
from megatron_fsdp_v2.comm.rank_checks import reporting_errors
from megatron_fsdp_v2.layout.buffer_layout import Granularity
from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.layout.placement import (
    OuterShardingStrategy,
    Placement,
    ShardingStrategy,
    resolve_placements,
)
from megatron_fsdp_v2.params.buffer import GroupSpec, Offload, ShardGrid
from megatron_fsdp_v2.params.formats import format_of
from megatron_fsdp_v2.params.parameters import OwnedParameter
from megatron_fsdp_v2.runtime.construct import (
    UnitPlan,
    check_modules,
    make_unit,
    outermost,
    own_modules,
    owned_parameters,
    used_parameters,
    with_number_prefixes,
)
from megatron_fsdp_v2.runtime.fsdp2 import FSDPModule
from megatron_fsdp_v2.runtime.meshes import DataMesh, MeshDims, PlacementFunction
from megatron_fsdp_v2.runtime.module import named_units
from megatron_fsdp_v2.runtime.options import (
    RuntimeOptions,
    UnitOptions,
    check_at_least_one,
    given_options,
    merge_options,
)
from megatron_fsdp_v2.runtime.unit import class_names

SMALL_UNIT_BYTES = 16 << 20
"""Bytes of parameters below which a unit's collectives take longer to issue than to run."""


def group_modules(
    modules: Iterable[nn.Module], max_bytes: int = SMALL_UNIT_BYTES
) -> list[list[nn.Module]]:
    """Group modules that run one after the other, for units that are not too small.

    Give each group to `fully_shard` as one unit, which takes one collective where its modules would
    take one each:

        for layers in group_modules(model.layers):
            fully_shard(layers, mesh=mesh)

    If a step uses only some modules of a group, the others are gathered and reduced too. Do not
    group modules that are not all used in every step.

    Args:
        modules: In the order in which their forwards run; none inside another.
        max_bytes: Bytes of parameters that a group may have, not counting units inside the modules.
            A larger module is a group of its own.

    Returns:
        The same modules in the same order.

    Raises:
        ValueError: `max_bytes` is not a whole number of at least 1.
    """
    check_at_least_one("max_bytes", max_bytes)
    groups: list[list[nn.Module]] = []
    left = 0
    for module in modules:
        parts = [part for _, part in own_modules([("", module)])]
        params = {param for part in parts for param in part.parameters(recurse=False)}
        nbytes = sum(param.numel() * param.element_size() for param in params)
        if not groups or nbytes > left:
            groups.append([])
            left = max_bytes
        groups[-1].append(module)
        left -= nbytes
    return groups


class _Sharding[**OptionsP](Protocol):
    """Type of `fully_shard`: as with FSDP2, the result has the methods of `FSDPModule`."""

    @overload
    def __call__(
        self, module: nn.Module, *args: OptionsP.args, **kwargs: OptionsP.kwargs
    ) -> FSDPModule: ...

    @overload
    def __call__(
        self, module: Sequence[nn.Module], *args: OptionsP.args, **kwargs: OptionsP.kwargs
    ) -> Sequence[FSDPModule]: ...


def _typed[**OptionsP](function: Callable[Concatenate[Any, OptionsP], Any]) -> _Sharding[OptionsP]:
    return cast("_Sharding[OptionsP]", function)


@_typed
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    sharding_strategy: ShardingStrategy = "optim_grads_params",
    outer_dp_sharding_strategy: OuterShardingStrategy = "no_shard",
    mp_policy: MixedPrecisionPolicy | TheirPolicy | None = None,
    reshard_after_forward: bool | int | None = True,
    ignored_params: AbstractSet[nn.Parameter] | None = None,
    shard_granularity: str = "row",
    gradient_scaling_factor: float | None = None,
    on_missing_grad: Literal["none", "zero", "error"] = "none",
    enable_unshard_prefetch: bool | None = None,
    enable_async_reduce_grad: bool | None = None,
    enable_trace_pool: bool | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    offload_policy: OffloadPolicy | None = None,
    dp_mesh_dims: MeshDims | None = None,
    options: RuntimeOptions | UnitOptions | None = None,
) -> Any:
    """Shard the parameters a module owns over a data-parallel mesh, in place.

    Call it bottom-up: on each module to gather separately, then on the root. A unit owns the
    parameters below it that no unit inside it owns. Its parameters become DTensors with their names
    and global shapes; build the optimizer from `module.parameters()` afterwards. A parameter tied
    to one of another unit stays tied: it belongs to the unit sharded first and is gathered for
    both. Parameters on the meta device are initialized by `reset_parameters()` of their modules,
    identically on every rank. Parameters of a module without this method get memory but no values
    until a state dict is loaded. Where only some ranks have values (a program may load a model on
    rank 0), the other ranks get these values. Buffers move to the device.

    Collective: ranks compare the parameters of the unit before anything else is communicated
    (unless `check_ranks` is `never`), and values of the meta device are broadcast.

    Gradients are `gradient_scaling_factor` times the sum over data-parallel ranks.

    The three switches `enable_...` and the `RuntimeOptions` are shared by all units of a root. Give
    them to the root alone, or to any of its units: the others follow. Different values given to two
    units are an error.

    An error, raised here or by a function passed as an argument, leaves this rank unchanged: the
    module's class, parameters and hooks, the units inside, torch's random number generators. Side
    effects of an initialization outside the parameters, buffers and attributes of its modules
    remain. A parameter that cannot be sharded, or differs between ranks, is an error on every rank.
    Ranks do not notify each other of later errors: if only one rank fails, the other ranks finish,
    or wait for it in the broadcast of meta parameters.

    Args:
        module: The unit; its class becomes a subclass of both its own and `FSDPModule`. Or several
            modules that form one unit: gathered from the first forward of one of them until all
            have run.
        mesh: 1-D (dp) or 2-D (outer dp, inner dp) device mesh that this rank is part of. Default:
            one axis over all ranks, on the accelerator if there is one.
        sharding_strategy: `no_shard` (DDP), `optim` (ZeRO-1), `optim_grads` (ZeRO-2) or
            `optim_grads_params` (ZeRO-3), along the inner axis.
        outer_dp_sharding_strategy: `no_shard` (HSDP) or `optim` (HFSDP), along the outer axis of a
            2-D mesh.
        mp_policy: Dtypes of weights, gradients, inputs and outputs; default: unchanged.
            The policy of torch's FSDP2 is accepted with the same meaning.
        reshard_after_forward: Drop gathered weights between forward and backward. The root keeps
            its own weights, since its backward follows at once. None means True; as with FSDP2, 1
            means False, and the number of ranks of the (inner) axis means True.
        ignored_params: Parameters that are not sharded.
        shard_granularity: The block that a shard boundary never splits: `row`, `block:<rows>` or
            `tensor`.
        gradient_scaling_factor: Factor of the gradient sum; default `1 / dp_world_size`.
        on_missing_grad: What becomes of a parameter that no rank had a gradient of, though its unit
            has run. `none`: its gradient stays None, and an optimizer skips it, as in a plain loop.
            `zero`: it is zeros if others of its group have a gradient, as with Megatron's DDP.
            `error`: an error, if others of its group have a gradient on this rank. With `none`, a
            rank that lacks a gradient waits for the device at the end of a backward.
        enable_unshard_prefetch: Gather the next unit while the current one computes; default True.
        enable_async_reduce_grad: Reduce the gradients of a unit while the next one computes;
            default True.
        enable_trace_pool: Place temporary buffers at planned addresses in one block of memory
            (`TracePoolAllocator`); default False.
        shard_placement_fn: As with FSDP2: returns the placement of a parameter, or a
            `ShardPlacementResult(placement, mesh_info)` to shard it on another mesh than the unit.
            Parameters are always sharded by rows. `Shard(dim)` of another dimension is accepted if
            every rank then holds as much as with that dimension; `Replicate()` means `no_shard` for
            this parameter.
        offload_policy: As with FSDP2. `CPUOffloadPolicy(pin_memory)`: main weights, gradients and
            therefore optimizer states are in host memory, and the optimizer steps there. Weights
            are copied to the device for every gather, and reduced gradients are copied to the host.
            `OffloadPolicy()` offloads nothing.
        dp_mesh_dims: As with FSDP2: a `DataParallelMeshDims` that names the data-parallel axes of
            `mesh`, whose other axes shard or replicate DTensors. Without `shard`, the strategy is
            `no_shard`. None: all axes of `mesh` are data-parallel.
        options: A `RuntimeOptions`: further options that all units of a root share. Or a
            `UnitOptions`: rarely used options of this unit, with a `RuntimeOptions` inside if
            needed. A `RuntimeOptions` sets all of its options; the three arguments above take
            precedence.

    Returns:
        The argument `module`.

    Raises:
        TypeError: An argument does not exist; for an option, the message names its new place.
        ValueError: An argument is invalid, or the module or one of its parameters is sharded
            already.
        RuntimeError: Ranks differ, a unit inside is in use, or memory is exhausted.
    """
    offload = _offload_of(offload_policy)
    if options is None or isinstance(options, RuntimeOptions):
        of_unit = UnitOptions(runtime=options)
    elif isinstance(options, UnitOptions):
        of_unit = options
    else:
        raise ValueError(f"options must be a RuntimeOptions or a UnitOptions, got {options!r}")
    root_options = given_options(
        of_unit.runtime,
        enable_unshard_prefetch=enable_unshard_prefetch,
        enable_async_reduce_grad=enable_async_reduce_grad,
        enable_trace_pool=enable_trace_pool,
    )
    modules = outermost(module)
    check_modules(modules)
    data = DataMesh.of(mesh, dp_mesh_dims)
    if not data.is_sharded and sharding_strategy not in ("no_shard", "optim_grads_params"):
        raise ValueError(
            f"dp_mesh_dims={dp_mesh_dims!r} names no axis to shard along, and sharding_strategy="
            f"{sharding_strategy!r} shards; name one, or use sharding_strategy='no_shard'"
        )
    if on_missing_grad not in ("none", "zero", "error"):
        raise ValueError(
            f"on_missing_grad must be 'none', 'zero' or 'error', got {on_missing_grad!r}"
        )
    check_gather_group(of_unit.gather_group, data.mesh)
    policy = MixedPrecisionPolicy.of(mp_policy)
    granularity = Granularity.parse(shard_granularity)
    reduces_once = of_unit.reduces_once

    @functools.cache
    def spec_on(there: DataMesh) -> GroupSpec:
        mesh, strategies = there.mesh, (sharding_strategy, outer_dp_sharding_strategy)
        if not there.is_sharded:
            strategies = ("no_shard", "no_shard")
        sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
        placements = resolve_placements(*strategies, sizes)
        if reduces_once:
            inner = dataclasses.replace(placements[-1], unreduced_grad=Placement.PARTIAL)
            placements = (*placements[:-1], inner)
        if policy.reduce_scatter_with_fp32_accumulation and strategies[0] == "no_shard":
            raise ValueError(
                "mp_policy.reduce_scatter_with_fp32_accumulation cannot be used with "
                "sharding_strategy='no_shard', which all-reduces gradients; shard them (optim or "
                "further), or set grad_comm_dtype=torch.float32"
            )
        return GroupSpec(
            policy.resolve(torch.float32),
            requires_grad=True,
            placements=placements,
            granularity=granularity,
            scale=1.0 / mesh.size() if gradient_scaling_factor is None else gradient_scaling_factor,
            on_missing_grad=on_missing_grad,
            mesh=mesh,
            grid=ShardGrid.of(mesh, placements),
            offload=offload,
        )

    device, spec = _device_of(data.mesh), spec_on(data)
    reshards = _reshards_after_forward(reshard_after_forward, spec.grid.axes[-1].size)
    inside = [
        (f"{prefix}.{name} ({unit.class_name})".removeprefix("."), unit)
        for prefix, below in with_number_prefixes(modules)
        for name, unit in named_units(below)
    ]
    given = [(class_names(modules), root_options)]
    given += [(name, unit.root_options) for name, unit in inside]
    merged = merge_options(given)
    compared_axes = spec.grid.axes if merged.check_ranks != "never" else ()
    with reporting_errors(class_names(modules), compared_axes, device):
        owned, tied = owned_parameters(modules, ignored_params or frozenset(), device)
        tied += used_parameters(modules, of_unit.used_params)
        for parameter in owned:
            there = data
            if shard_placement_fn is not None:
                there = DataMesh.of_parameter(parameter, shard_placement_fn, data)
                parameter.spec = spec_on(there)
            parameter.data_axes = there.names
            if parameter.param not in of_unit.tensor_shards:
                _check_mesh(parameter, there)
            _check_offload(parameter, offload)
            parameter.is_separate = parameter.param in of_unit.separate_params
        for _, unit in inside:
            if unit.is_unsharded or unit.state.root.is_reducing:
                raise RuntimeError(
                    f"unit {unit.name} is gathered or has a reduction under way; call reshard() on "
                    "it, or wrap its parent before the first step"
                )
    plan = UnitPlan(
        modules=modules,
        root_options=root_options,
        options=merged,
        policy=policy,
        spec=spec,
        spec_on=spec_on.__wrapped__,
        reshard_after_forward=reshards,
        device=device,
        owned=owned,
        tied=tied,
        selects_meshes=shard_placement_fn is not None,
        unit_options=of_unit,
        compared_axes=compared_axes,
    )
    make_unit(plan)
    return module


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("mesh is of device type 'cuda', and there is no CUDA device here")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


# -- arguments of FSDP2 with another meaning or other limits ----------------------------------


def _reshards_after_forward(given: object, shards: int) -> bool:
    """Whether gathered weights are dropped between forward and backward.

    Args:
        given: A bool; None for the default; or the number of ranks that FSDP2 would reshard to: 1
            or all ranks of the axis.
        shards: Ranks along the (inner) axis of the mesh.
    """
    if given is None:
        return True
    if isinstance(given, bool):
        return given
    if isinstance(given, int) and given in (1, shards):
        return given != 1
    raise ValueError(
        f"reshard_after_forward must be True, False or None, got {given!r}; gathered weights are "
        f"kept (1) or resharded over all {shards} ranks of the axis ({shards}); to reshard over "
        "fewer ranks, make these ranks the inner axis of a 2-D mesh"
    )


def _offload_of(policy: object) -> Offload | None:
    """Convert an offload policy of FSDP2; None if it offloads nothing."""
    if policy is None or type(policy) is OffloadPolicy:
        return None
    if isinstance(policy, CPUOffloadPolicy):
        return Offload(pin_memory=bool(policy.pin_memory))
    raise ValueError(
        f"offload_policy={policy!r} cannot be honored; give torch.distributed.fsdp's "
        "CPUOffloadPolicy() to have weights, gradients and optimizer states in host memory, or "
        "OffloadPolicy() or None to have them on the device"
    )


def _check_mesh(parameter: OwnedParameter, data: DataMesh) -> None:
    if data.is_part and not isinstance(parameter.param, DTensor):
        raise ValueError(
            f"parameter {parameter.name} is a plain tensor, and mesh has further axes than those "
            "that dp_mesh_dims names, which may shard or replicate it; make it a DTensor over mesh "
            "(distribute_tensor), describe it in tensor_shards of UnitOptions, or give the "
            "data-parallel axes alone as the mesh"
        )


def _check_offload(parameter: OwnedParameter, offload: Offload | None) -> None:
    found = None if offload is None else format_of(parameter.param)
    if found is not None and found.communicates:
        raise ValueError(
            f"parameter {parameter.name} is a {type(parameter.param).__name__}, whose scales "
            "ranks find together from main weights on the device; leave offload_policy out, or "
            "give this module a unit of its own without it"
        )
