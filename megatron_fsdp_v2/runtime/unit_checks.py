"""Checks of units in use: CUDA graph captures, views of freed weights, agreement of ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from megatron_fsdp_v2._text import readable_size
from megatron_fsdp_v2.comm.rank_checks import UnitRecord, checksum, compare_steps, compare_units
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.params.group import ParameterGroup, groups_of, one_per_mesh
from megatron_fsdp_v2.runtime.machine.state import Phase, RootState
from megatron_fsdp_v2.runtime.materialize import check_has_values
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from megatron_fsdp_v2.runtime.unit_groups import UnitGroups


def check_capture(units: Sequence[UnitGroups], options: RuntimeOptions, state: RootState) -> None:
    """Check that a pass or step can be captured in a CUDA graph.

    Args:
        units: All units of the root, its own first.
        options: Options of the root.
        state: State of the root.

    Raises:
        RuntimeError: The pass or step needs decisions of the host, or waits for the device.
    """
    groups = [group for unit in units for group in unit.groups]
    reasons = {
        "ranks compare what they sharded at the first use: run a step before the capture": (
            not state.is_checked and any(a.size > 1 for group in groups for a in group.axes)
        ),
        "check_ranks='always' compares on the host: leave it at 'once'": (
            options.check_ranks == "always"
        ),
        "enable_trace_pool may change addresses between steps: leave it off": (
            options.enable_trace_pool
        ),
        "weights are offloaded, and the host waits for gradients": any(
            group.spec.offload is not None for group in groups
        ),
        "weights are quantized, with scales that the host keeps": state.has_formats,
        "a schedule runs parts of modules": state.is_scheduled,
        "gradients of an earlier backward are not synchronized yet": (
            not state.is_captured and any(group.has_unreduced for group in groups)
        ),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise RuntimeError(
            f"{units[0].name} cannot be captured in a CUDA graph: {'; '.join(found)}"
        )


def check_transform(unit: UnitGroups) -> None:
    """Check that a pass begins outside of transforms of `torch.func` that differentiate.

    They cannot record writes to buffers outside of them: gathers and refreshes.

    Args:
        unit: The unit that the pass begins with.

    Raises:
        RuntimeError: The pass runs inside `torch.func.vjp`, `jvp`, `grad` or a similar function.
    """
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() != torch._C._functorch.TransformType.Vmap:
        raise RuntimeError(
            f"{unit.name} runs inside torch.func.{transform.key().name.lower()} or a function "
            "based on it (vjp, jacrev, jvp, ...), which cannot differentiate a sharded module; use "
            "torch.autograd.grad, or torch.autograd.forward_ad for forward-mode derivatives"
        )


def note_ignored(module: nn.Module) -> None:
    """Record the parameters of a module that no unit owns, for `check_owned`."""
    names = [
        name
        for name, param in module._parameters.items()
        if not isinstance(param, UnevenDTensor | None)
    ]
    if names:
        module._fsdp_ignored = names  # type: ignore[assignment]


def check_owned(groups: Iterable[ParameterGroup], roots: Iterable[nn.Module]) -> bool:
    """Check that no trained parameter was registered after sharding that no unit would reduce.

    Args:
        groups: Groups that the units of the root gather.
        roots: Modules of the root.

    Returns:
        Whether no frozen parameter was registered either, which may be trained later.

    Raises:
        RuntimeError: There is one.
    """
    is_complete = True
    sites = {(id(m), name) for group in groups for _, m, name in group.parameters.sites()}
    for name, module in (named for root in roots for named in root.named_modules()):
        known = vars(module).get("_fsdp_ignored", ())
        for attribute, param in module._parameters.items():
            if (
                param is None
                or (id(module), attribute) in sites
                or attribute in known
                or not getattr(param, "requires_gradient_reduction", True)
                or _is_owned_there(param, module, attribute)
            ):
                continue
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name}.{attribute} was registered after fully_shard, so no unit "
                    "shards it or reduces its gradient. Call fully_shard on its module too, "
                    "register it before fully_shard, freeze it, or, to reduce its gradient "
                    "yourself, set its attribute requires_gradient_reduction to False"
                )
            is_complete = False
    return is_complete


def _is_owned_there(param: torch.Tensor, module: nn.Module, attribute: str) -> bool:
    """Return whether a unit of another root owns a parameter of this module.

    Such a unit, sharded by itself and put in the place of another one, gathers and reduces its
    parameters as a root of its own.
    """
    return any(
        (below, name) == (module, attribute)
        and (param is group.sharded_params[i] or param is group.unsharded_params[i])
        for group in groups_of(module)
        for i, below, name in group.parameters.sites()
    )


def check_units(units: Sequence[UnitGroups], *, compares_ranks: bool) -> None:
    """Check at the first use that all ranks sharded the model identically. Collective.

    Args:
        units: All units of a root, its own first.
        compares_ranks: Whether ranks compare the units.

    Raises:
        RuntimeError: Ranks differ, a unit shares a parameter with a unit of another root, or a
            parameter or buffer that was on the meta device has no values.
    """
    for unit in units:
        unit.join_tied()
        for group in unit.tied_groups:
            if not any(group in other.groups for other in units):
                raise RuntimeError(
                    f"{unit.name} shares a parameter with {group.name}, which belongs to "
                    "another root; call fully_shard on a module that contains both"
                )
    if units[0].state.is_root:
        _warn_of_large_root(units)
    if compares_ranks:
        for unit in units:
            # Converted or replaced parameters (`to_empty()`) are compared with their values.
            unit.sync()
        for group in one_per_mesh(group for unit in units for group in unit.groups):
            there = [
                (unit, [each for each in unit.groups if each.spec.mesh == group.spec.mesh])
                for unit in units
            ]
            records = [_record(unit, groups) for unit, groups in there if groups]
            compare_units(records, group.axes, group.device)
    # Of all units, and not at a unit's own first use: a rank may skip that.
    for unit in units:
        check_has_values(unit.name, unit.unset, unit.groups)
        unit.unset = ()


NOTABLE_NBYTES = 64 << 20
"""Gathered bytes of a root above which `check_units` may warn of its size."""


def _warn_of_large_root(units: Sequence[UnitGroups]) -> None:
    """Warn if a root owns more bytes of parameters than its largest unit.

    The root's parameters stay gathered, and their gradients unsharded, while any unit inside
    computes. A model in which only the layers are units has this problem: the root owns the
    embedding and the output layer.

    Args:
        units: All units, the root first.
    """
    root, *others = units
    sizes = {unit: sum(_nbytes(g, g.layout.numel) for g in unit.groups) for unit in units}
    largest = max(others, key=lambda unit: sizes[unit], default=None)
    if largest is None or sizes[root] <= max(sizes[largest], NOTABLE_NBYTES):
        return
    modules: Counter[str] = Counter()
    for group in root.groups:
        for name, slot in zip(group.names, group.layout.slots, strict=True):
            modules[name.rpartition(".")[0]] += _nbytes(group, slot.numel)
    parts = [f"{name} ({readable_size(n)})" for name, n in modules.most_common(3) if name]
    warnings.warn(
        f"the root, {root.name}, has {readable_size(sizes[root])} of weights itself, and its "
        f"largest unit, {largest.name}, has {readable_size(sizes[largest])}. A root's weights stay "
        "gathered, and their gradients whole, while anything inside it computes: call fully_shard "
        f"on what has most of them before the root{': ' + ', '.join(parts) if parts else ''}",
        stacklevel=2,
    )


def _nbytes(group: ParameterGroup, numel: int) -> int:
    """Return the bytes of gathered weights in the first payload of their format."""
    gathered = group.gathered_weight
    return numel // gathered.packing * gathered.tensor.element_size()


def _record(unit: UnitGroups, groups: Sequence[ParameterGroup]) -> UnitRecord:
    """Describe a unit's groups on one mesh."""
    options = [unit.class_name]
    copies = [0] * len(groups[0].axes)
    for group in groups:
        options += [",".join(group.names), group.layout.fingerprint, repr(group.spec)]
        options.append(type(group.format).__qualname__)
        if group.axes[-1].gather_group is not None:
            options.append("gathered in a group of its own")
        for axis in group.spec.replicated_axes:
            if group.axes[axis].size > 1:
                copies[axis] += checksum(group.main_weight.tensor)
    return UnitRecord(unit.name, " ".join(options), tuple(copies))


def compare_unit(
    units: Iterable[UnitGroups], unit: UnitGroups, action: str, *, along_all: bool = False
) -> None:
    """Check that every rank is about to issue the same collectives of a unit. Collective.

    Args:
        units: All units of the root.
        unit: Unit whose parameters or gradients are about to be communicated.
        action: `gather` or `reduce`.
        along_all: Whether collectives along every axis of the mesh follow: a reduction along the
            outer axis, or a refresh of weights whose main weights it shards.

    Raises:
        RuntimeError: A rank is about to issue another collective.
    """
    groups = unit.held_groups if action == "gather" else unit.groups
    if not groups:
        return
    steps = [f"{known} {u.name}" for u in units for known in ("gather", "reduce")]
    code = steps.index(f"{action} {unit.name}")
    for group in one_per_mesh(groups):
        for axis in group.axes if along_all else group.axes[-1:]:
            # With a separate gather group, gathers pair with gathers, reductions with reductions.
            compared = axis.for_gathers() if action == "gather" else axis
            compare_steps(code, steps, compared, group.device)


def compare_gather(
    units: Iterable[UnitGroups], unit: UnitGroups, groups: Iterable[ParameterGroup]
) -> None:
    """Check that every rank is about to gather the same unit. Collective.

    A refresh before the gather communicates along all axes, so ranks then compare along all axes.

    Args:
        units: All units of the root.
        unit: The unit.
        groups: Its groups that are gathered.

    Raises:
        RuntimeError: A rank is about to issue another collective.
    """
    root = unit.state.root
    refreshes = root.refreshes and any(
        not group.is_refreshed_locally and group.is_stale(root.weight_version) for group in groups
    )
    compare_unit(units, unit, "gather", along_all=refreshes)


def check_is_between_steps(unit: UnitGroups, method: str) -> None:
    """Check that a unit has no unreduced gradients.

    Args:
        unit: The unit.
        method: Name of the method called, for the error message.

    Raises:
        RuntimeError: Gradients are not synchronized yet.
    """
    if any(group.has_unreduced for group in unit.groups):
        raise RuntimeError(
            f"{unit.name} has gradients that are not synchronized yet; call {method} between steps"
        )


def check_is_gathered(unit: UnitGroups, groups: Sequence[ParameterGroup]) -> None:
    """Check that weights were gathered for the part of the backward that just ran.

    Raises:
        RuntimeError: They were not.
    """
    if all(group.is_ready for group in groups):
        return
    raise RuntimeError(
        f"the backward of {unit.name} ran before a gradient reached one of its outputs, so its "
        "weights were not gathered and the result is wrong: it returns tensors inside an "
        "object that is not searched (containers, dataclasses and attributes of objects are "
        "searched), or stores tensors that are used outside its forward (under torch.autocast, "
        "torch stores casts of weights: call torch.clear_autocast_cache() between passes). Return "
        "these tensors, or use sharding_strategy='optim_grads'"
    )


def check_outputs(
    unit: UnitGroups, tensors: Iterable[torch.Tensor], units: Callable[[], Sequence[UnitGroups]]
) -> None:
    """Check that a forward returns no view of weights that are freed at its end.

    Most operations of torch do not check whether a tensor has memory: they crash or read freed
    memory.

    Args:
        unit: Unit whose forward ends; its weights are still gathered.
        tensors: Tensors that it returns, in its output or in its arguments, such as by appending to
            a list.
        units: Returns all units of the root.

    Raises:
        RuntimeError: An output is a view of a weight.
    """
    dropped = [group for group in unit.held_groups if group.gathers_for_use]
    for tensor in tensors:
        local = plain_of(tensor)
        if not torch._C._has_storage(local):
            continue
        for group in dropped:
            name = group.gathered_name_at(local)
            if name is not None and local.numel() and not _is_held_around(group, unit, units()):
                raise RuntimeError(
                    f"the forward of {unit.name} returns its weight {name}, or a view of it, and "
                    "frees gathered weights when it ends: a use of this output would read freed "
                    "memory. Return a copy (weight.clone()) or a result computed from the weight, "
                    "or keep the weights until the backward with reshard_after_forward=False or "
                    "sharding_strategy='optim_grads'"
                )


def _is_held_around(group: ParameterGroup, unit: UnitGroups, units: Sequence[UnitGroups]) -> bool:
    """Return whether an enclosing unit that is running holds the same weights."""
    return any(
        group in other.held_groups
        and other.state.is_gathered
        and other.state.phase is not Phase.IDLE
        for other in units
        if other is not unit
    )
