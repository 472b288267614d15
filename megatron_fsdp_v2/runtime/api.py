"""The public entry: shard a module's own parameters and make it a unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2.comm.gather_groups import check_gather_group
from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.layout.buffer_layout import Granularity
from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.layout.placement import resolve_placements
from megatron_fsdp_v2.runtime.fsdp2_arguments import (
    check_can_offload,
    check_mesh_dims,
    check_shard_placement,
    default_mesh,
    offload_of,
    reshards_after_forward,
)
from megatron_fsdp_v2.runtime.fsdp_module import FSDPModule, named_units
from megatron_fsdp_v2.runtime.options import given_options, options_of_root
from megatron_fsdp_v2.runtime.other_wrappers import check_modules_inside
from megatron_fsdp_v2.runtime.owned_parameters import (
    numbered,
    outermost,
    owned_parameters,
    used_parameters,
)
from megatron_fsdp_v2.runtime.unit_base import class_names
from megatron_fsdp_v2.runtime.unit_plan import UnitPlan, make_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy
    from torch.distributed.fsdp import OffloadPolicy

    from megatron_fsdp_v2.dtensor.row_shards import TensorShard
    from megatron_fsdp_v2.runtime.unit import Unit

__all__ = ["fully_shard"]


def fully_shard[ModuleT: nn.Module | Sequence[nn.Module]](
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    sharding_strategy: str = "optim_grads_params",
    outer_dp_sharding_strategy: str = "no_shard",
    mp_policy: MixedPrecisionPolicy | TheirPolicy | None = None,
    reshard_after_forward: bool | int | None = True,
    ignored_params: AbstractSet[nn.Parameter] | None = None,
    shard_granularity: str = "row",
    gradient_scaling_factor: float | None = None,
    on_missing_grad: str = "zero",
    enable_unshard_prefetch: bool | None = None,
    enable_async_reduce_grad: bool | None = None,
    unshard_prefetch_depth: int | None = None,
    unshard_prefetch_bytes: int | None = None,
    enable_unshard_after_step: bool | None = None,
    max_live_grad_buffers: int | None = None,
    bucket_bytes: int | None = None,
    enable_trace_pool: bool | None = None,
    check_ranks: str | None = None,
    tensor_shards: Mapping[nn.Parameter, TensorShard] | None = None,
    separate_params: AbstractSet[nn.Parameter] | None = None,
    used_params: AbstractSet[nn.Parameter] | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    offload_policy: OffloadPolicy | None = None,
    dp_mesh_dims: object = None,
    gather_group: dist.ProcessGroup | None = None,
) -> ModuleT:
    """Shard the parameters a module owns over a data-parallel mesh, in place.

    Call it bottom-up: on each unit that should be gathered on its own, then on the root. A unit
    owns the parameters below it that no unit inside it owns. Its parameters become DTensors with
    their names and global shapes; build the optimizer from `module.parameters()` afterwards.
    A parameter tied to one of another unit stays tied: it belongs to the unit wrapped first and is
    gathered for both. Parameters on the meta device are given values by `reset_parameters()` of
    their modules, the same on every rank; that is a collective, nothing else here is. Where a
    module has none, they have memory and no values, until a state dict is loaded.

    Gradients are `gradient_scaling_factor` times the sum over data-parallel ranks.

    What is marked "one for a root" holds for all units of a root. Give it to the root alone, or to
    any of them: the others follow. Units that were given different values are an error. None, the
    default in the signature, is not given; where no unit was given a value it is the one said here.

    An error, here or in a function that was given, leaves everything on this rank as it was: the
    module's class, parameters and hooks, the units inside, torch's random numbers. Call it again
    with what was wrong put right. Only what an initialization did beyond the parameters, buffers
    and attributes of its modules stays. Ranks do not tell each other: where one alone fails, the
    others have sharded, or wait for it in the collective that meta parameters take.

    Args:
        module: The unit; its class becomes a subclass of both its own and `FSDPModule`. Or
            several modules that are one unit: gathered before the forward of the first of them
            that runs, until the last one has run.
        mesh: 1-D (dp) or 2-D (outer dp, inner dp) device mesh that this rank is part of. Default:
            one axis over all ranks, on the accelerator if there is one.
        sharding_strategy: `no_shard` (DDP), `optim` (ZeRO-1), `optim_grads` (ZeRO-2) or
            `optim_grads_params` (ZeRO-3), along the inner axis.
        outer_dp_sharding_strategy: `no_shard` (HSDP) or `optim` (HFSDP), along the outer axis of
            a 2-D mesh.
        mp_policy: Dtypes of weights, gradients, inputs and outputs; default: as they are. The
            policy of torch's FSDP2 does as well, and means what it does there.
        reshard_after_forward: Drop gathered weights between forward and backward. The root keeps
            its own, since its backward follows at once. None is True; 1 is False and the number
            of ranks of the (inner) axis True, as with FSDP2.
        ignored_params: Parameters to leave alone.
        shard_granularity: What a shard boundary never cuts: `row`, `block:<rows>` or `tensor`.
        gradient_scaling_factor: Factor of the gradient sum; default `1 / dp_world_size`.
        on_missing_grad: `zero` or `error`: what a parameter without gradient means while others
            of its group have one.
        enable_unshard_prefetch: Gather the next unit while this one computes. One for a root;
            default True.
        enable_async_reduce_grad: Reduce gradients while the next unit computes. One for a root;
            default True.
        unshard_prefetch_depth: Units gathered ahead of the one at work, at least 1. Each costs the
            gathered weights of one more unit; more than one helps where a gather takes longer
            than a unit computes. One for a root; default 1, or any number where
            `unshard_prefetch_bytes` is given.
        unshard_prefetch_bytes: Bytes of gathered weights that the units gathered ahead take at
            most, all together, though the next one is gathered whatever it takes: small units are
            gathered many ahead, large ones one by one. With `unshard_prefetch_depth`, both limit.
            One for a root; default: no limit of bytes.
        enable_unshard_after_step: Have a step of an optimizer gather what the next forward begins
            with (ZeRO-3, on one axis or HSDP), so that what the host does until then overlaps.
            These weights are held meanwhile. Main weights that are changed in between are gathered
            again where torch counts the change; any other change (through `.data`, or by functions
            for lists of tensors) is a RuntimeError in that forward: call `reshard()` after it. One
            for a root; default False.
        max_live_grad_buffers: Units that have full gradient buffers at a time, at least 1. With 1
            every reduction is waited for before the next unit has a gradient; each further one
            costs one more buffer. One for a root; default 2.
        bucket_bytes: Units smaller than this share collectives: those that follow each other are
            gathered in one, up to so many bytes of gathered weights, and reduced in one, up to so
            many bytes of gradients, as DDP's buckets are. Costs as much of both, and changes no
            result where a collective's sums do not depend on where in it a number is. For models
            of many small units. One for a root; default: one collective for every unit.
        enable_trace_pool: Put temporary buffers at planned addresses of one block of memory
            (`TracePoolAllocator`) instead of allocating them. One for a root; default False.
        check_ranks: `once`: at the first use, ranks compare what they sharded and see that
            replicated weights are equal at first (a few integers over the mesh). `always`: before
            every gather and reduction as well, which makes of a hang an error that names the unit.
            `never`: trust. One for a root; default `once`.
        tensor_shards: How tensor parallelism cut parameters, for those it did: they become
            DTensors over its axis as well, of the whole weight's shape. Looked up once they
            have values, by what was given, also where that was on the meta device. DTensors over a
            tensor-parallel mesh say it themselves; `tensor_parallel.tensor_shards` makes it for
            modules of plain tensors.
        separate_params: Parameters that get flat buffers of their own, so that how one is cut
            depends on its shape alone: what pipeline stages hold copies of, each stage beside
            other parameters, has to be sharded the same way.
        used_params: Sharded parameters of units beside this one that it computes with although it
            has them not, such as an output layer that is handed the weight of the embedding: what
            is gathered for it. A module that has a tied parameter itself needs no word of it.
        param_init_fn: Gives values to a module's own parameters and buffers that were on the meta
            device, in place of its `reset_parameters()`.
        shard_placement_fn: As with FSDP2, where it returns None or `Shard(0)`.
        offload_policy: As with FSDP2. `CPUOffloadPolicy(pin_memory)`: main weights, gradients and
            so optimizer states are in host memory, and the optimizer steps there; weights are
            copied to the device for every gather, and gradients from it as they are reduced.
            `OffloadPolicy()` offloads nothing.
        dp_mesh_dims: None; `mesh` has the data-parallel axes and no others.
        gather_group: A process group of the same ranks as the (inner) axis of the mesh, in the same
            order, that weights are gathered in. With NCCL, gathers and reductions then go side by
            side instead of one after the other. None: in that axis's own group.

    Returns:
        What was given as `module`.

    Raises:
        ValueError: An argument is bad, the module is sharded already, or a parameter of it is.
        RuntimeError: A unit inside is in use, or there is no memory.
    """
    offload = offload_of(offload_policy)
    check_mesh_dims(dp_mesh_dims)
    given = given_options(
        enable_unshard_prefetch=enable_unshard_prefetch,
        enable_async_reduce_grad=enable_async_reduce_grad,
        unshard_prefetch_depth=unshard_prefetch_depth,
        unshard_prefetch_bytes=unshard_prefetch_bytes,
        enable_unshard_after_step=enable_unshard_after_step,
        max_live_grad_buffers=max_live_grad_buffers,
        bucket_bytes=bucket_bytes,
        enable_trace_pool=enable_trace_pool,
        check_ranks=check_ranks,
    )
    mesh = default_mesh() if mesh is None else mesh
    modules = outermost(module)
    _validate(modules, mesh, on_missing_grad)
    check_gather_group(gather_group, mesh)
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    policy = MixedPrecisionPolicy.of(mp_policy)
    placements = resolve_placements(sharding_strategy, outer_dp_sharding_strategy, sizes)
    if policy.reduce_scatter_with_fp32_accumulation and sharding_strategy == "no_shard":
        raise ValueError(
            "mp_policy.reduce_scatter_with_fp32_accumulation cannot be used with "
            "sharding_strategy='no_shard', which all-reduces gradients; shard them (optim or "
            "further), or set grad_comm_dtype=torch.float32"
        )
    granularity = Granularity.parse(shard_granularity)
    device = _device_of(mesh)
    owned, tied = owned_parameters(modules, ignored_params or frozenset(), device)
    tied += used_parameters(modules, used_params or frozenset())
    check_shard_placement(shard_placement_fn, owned)
    if offload is not None:
        check_can_offload(owned)
    for parameter in owned:
        parameter.is_separate = parameter.param in (separate_params or frozenset())
    inside = _units_inside(modules)
    given_inside = [(name, unit.given) for name, unit in inside]
    plan = UnitPlan(
        modules=modules,
        given=given,
        options=options_of_root([(class_names(modules), given), *given_inside]),
        policy=policy,
        placements=placements,
        granularity=granularity,
        scale=1.0 / mesh.size() if gradient_scaling_factor is None else gradient_scaling_factor,
        errors_on_missing_grad=on_missing_grad == "error",
        offload=offload,
        reshard_after_forward=reshards_after_forward(reshard_after_forward, mesh),
        mesh=mesh,
        axes=_axes_of(mesh, gather_group),
        device=device,
        owned=owned,
        tied=tied,
        # Not `or`: a mapping that looks things up may take long to tell whether it is empty.
        tensor_shards={} if tensor_shards is None else tensor_shards,
        param_init_fn=param_init_fn,
    )
    _check_is_idle(unit for _, unit in inside)
    make_unit(plan)
    return module


def _axes_of(mesh: DeviceMesh, gather_group: dist.ProcessGroup | None) -> list[Axis]:
    groups = [*[None] * (mesh.ndim - 1), gather_group]
    return [
        Axis(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), group)
        for axis, group in enumerate(groups)
    ]


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("mesh is of device type 'cuda', and there is no CUDA device here")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _validate(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    on_missing_grad: str,
) -> None:
    for module in modules:
        # What torch.compile() made of a module holds it under this name.
        if any(isinstance(m, FSDPModule) for m in (module, getattr(module, "_orig_mod", None))):
            raise ValueError(f"fully_shard was already called on this {type(module).__name__}")
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_list and type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward):
            raise ValueError(
                f"{type(module).__name__} has no forward to gather for; call fully_shard on its "
                "members"
            )
    check_modules_inside(modules, FSDPModule)
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"this is rank {dist.get_rank()}, and mesh has the ranks "
            f"{mesh.mesh.flatten().tolist()}; shard a module on the ranks of its mesh only"
        )
    if on_missing_grad not in ("zero", "error"):
        raise ValueError(f"on_missing_grad must be 'zero' or 'error', got {on_missing_grad!r}")


def _units_inside(modules: Sequence[nn.Module]) -> list[tuple[str, Unit]]:
    """Every unit below some modules, and what to call it in a message."""
    return [
        (f"{prefix}.{name} ({unit.class_name})".removeprefix("."), unit)
        for prefix, module in numbered(modules)
        for name, unit in named_units(module)
    ]


def _check_is_idle(units: Iterable[Unit]) -> None:
    for unit in units:
        if unit.is_unsharded or len(unit.context.reductions):
            raise RuntimeError(
                f"unit {unit.name} is gathered or has a reduction under way; call reshard() on "
                "it, or wrap its parent before the first step"
            )
