"""`ShardedModule`: the methods of a sharded module, and functions that find its units.

`fully_shard` gives a module the class `FSDPModule` of `fsdp2.py`, which adds the methods that exist
for programs written for torch's FSDP2.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast, override

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp_v2.dtensor.sharded_rows import plain_attributes, raw_grad
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.group import groups_of
from megatron_fsdp_v2.runtime.context import Context
from megatron_fsdp_v2.runtime.machine import events, reductions, weights
from megatron_fsdp_v2.runtime.machine.state import RootState, UnitState
from megatron_fsdp_v2.runtime.offloading import Offloaded, memory_of
from megatron_fsdp_v2.runtime.rebuilding import abort, rebuild
from megatron_fsdp_v2.runtime.unit import Unit, unit_owning
from megatron_fsdp_v2.runtime.unit_checks import check_is_between_steps

if TYPE_CHECKING:
    # The result of `fully_shard` has the methods of a module too.
    _Module = nn.Module
else:
    _Module = object


class ShardedModule(_Module):
    """Methods of a sharded module.

    Methods of PyTorch's FSDP2 have the same names and meaning here.
    """

    # Libraries resolve the annotations of subclasses, so this annotation names no class that is
    # imported for type checking only.
    _fsdp_unit: Any

    # -- weights ----------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the unit's own parameters and install them. Collective.

        Weights that stayed gathered while an optimizer stepped are gathered again.

        Args:
            async_op: Return a handle instead of waiting; its `wait()` installs the parameters.
        """
        unit = unit_of(self)
        unit.context.check_is_ready()
        events.unshard(unit.state, async_op=async_op)
        if async_op:
            return UnshardHandle(unit)
        weights.wait(unit.state)
        return None

    def reshard(self) -> None:
        """Free the unit's gathered parameters and install the sharded ones."""
        weights.free(unit_of(self).state)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to reshard between forward and backward."""
        set_flags(self, recurse, reshard_after_forward=reshard_after_forward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Set the units to gather when this unit's forward starts, instead of the recorded order.

        Memory grows with their number. An empty list restores the recorded order.
        """
        unit_of(self).settings.forward_prefetch = [unit_of(m).state for m in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Set the units to gather when this unit's backward starts.

        See `set_modules_to_forward_prefetch`.
        """
        unit_of(self).settings.backward_prefetch = [unit_of(m).state for m in modules]

    def trace_pool(self) -> TracePoolAllocator:
        """Return the traced pool that this module and all units of its root share.

        Raises:
            RuntimeError: The root was not sharded with `enable_trace_pool=True`.
        """
        allocator = unit_of(self).context.allocator
        if not isinstance(allocator, TracePoolAllocator):
            raise RuntimeError(
                f"{type(self).__name__} has no trace pool; call fully_shard with "
                "enable_trace_pool=True on its root"
            )
        return allocator

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole parameters by name, gathered unit by unit. Collective.

        For copies into another engine, such as one that generates text: at most two units are
        gathered at a time, while one is read and the next one is gathered. Iterate on all ranks, to
        the end, between two steps.

        Yields:
            Name and value of a parameter, as modules compute with it: with mixed precision, in the
            lower one. A tied parameter is yielded once. The tensor is valid until the next one is
            requested.

        Raises:
            RuntimeError: A backward is under way, or the model is in host memory.
        """
        module = cast("nn.Module", self)
        make_idle(module)
        names = {param: name for name, param in module.named_parameters()}
        found = units_of(self)
        for root in _by_root(found):
            events.begin_reading(root)
        try:
            for unit, following in itertools.zip_longest(found, found[1:]):
                weights.gather(unit.state, WeightUse.BOTH, async_op=True)
                if following is not None:
                    weights.gather(following.state, WeightUse.BOTH, async_op=True)
                weights.wait(unit.state)
                for group in unit.groups:
                    for sharded, whole in zip(
                        group.sharded_params, group.unsharded_params, strict=True
                    ):
                        if sharded in names:
                            yield names.pop(sharded), whole.detach()
                weights.free(unit.state)
        finally:
            for unit in found:
                weights.free(unit.state)
        for param, name in names.items():
            # Of a unit outside the module, or of none.
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            yield name, whole.detach()

    # -- host memory ------------------------------------------------------------------------------

    def offload(self, *optimizers: Optimizer, pin_memory: bool = True) -> int:
        """Move the memory of the model to host memory until `reload`, between two steps.

        Moves main weights, model weights and gradients of all units, also those of other roots
        inside, and frees the blocks of trace pools. Parameters stay the same objects; reading or
        training them raises an error until `reload`. Other tensors are left: buffers of modules,
        and parameters without a unit. Call `torch.cuda.empty_cache()` if another process needs the
        memory. Does nothing if the model is in host memory.

        Args:
            optimizers: Optimizers whose states are moved too.
            pin_memory: Whether the host memory is pinned, which makes copies from a GPU faster.

        Returns:
            Bytes in host memory.

        Raises:
            RuntimeError: The module is not the root, a backward is under way, gradients are not
                synchronized yet, or a step was captured in a CUDA graph, which has its addresses;
                or a root inside is in host memory already, and this one is not.
        """
        contexts = _contexts_of_root(self, "offload")
        if any(context.offloaded is None for context in contexts):
            make_idle(cast("nn.Module", self))
            for context in contexts:
                for unit in context.units():
                    check_is_between_steps(unit, "offload")
                    unit.sync()
                if context.state.has_graph:
                    raise RuntimeError(
                        f"a step of {context.units()[0].name} was captured in a CUDA graph, which "
                        "keeps the addresses of its memory; offload() a model without captures"
                    )
            for context in contexts:
                # A unit below two roots belongs to the context that it refers to.
                own = [unit for unit in context.units() if unit.context is context]
                groups = [group for unit in own for group in unit.groups]
                # The state of an optimizer belongs to no root, and moves once.
                memory = memory_of(groups, optimizers if context is contexts[0] else ())
                context.offloaded = Offloaded(memory, context.device, pin_memory=pin_memory)
                if isinstance(context.allocator, TracePoolAllocator):
                    context.allocator.release()
        return sum(context.offloaded.nbytes for context in contexts)

    def reload(self) -> None:
        """Move everything that `offload` moved back to the device, bit by bit as it was.

        Raises:
            torch.OutOfMemoryError: The device has not enough memory. Nothing has changed, or with
                several roots, the memory of some has moved; call it again.
        """
        for context in contexts_of(self):
            if context.offloaded is not None:
                context.offloaded.reload()
                context.offloaded = None

    # -- restarts ---------------------------------------------------------------------------------

    def abort(self) -> None:
        """Drop everything under way after a failed collective, until `rebuild`. No communication.

        Aborts the process groups that the model communicates in, drops gradients, and frees
        gathered weights, gradient buffers and the block of a trace pool. Parameters keep their
        values. Until `rebuild`, using the model raises an error. Does nothing if it was aborted.

        Gloo cannot abort: on a CPU, collectives under way end with an error when a rank is lost, at
        the latest after the timeout of the process group, and this method waits for that.

        Raises:
            RuntimeError: The module is not the root.
        """
        abort(_contexts_of_root(self, "abort"))

    def rebuild(
        self,
        mesh: DeviceMesh | Mapping[DeviceMesh, DeviceMesh] | None = None,
        *optimizers: Optimizer,
        keep: bool = True,
    ) -> bool:
        """Put the model on other process groups, without building it again. Collective.

        For a model that was aborted after a failure, or between two steps. Modules, parameters,
        hooks and settings stay the same objects; strategies and options are those of `fully_shard`.
        Gradients become None. An error on this rank leaves the model unchanged.

        If every rank holds the same rows as before, such as all ranks of a mesh of the same sizes,
        or the replicas that are left of HSDP, and all are in the same step, parameters and states
        of optimizers keep their values. Otherwise they have none: load a checkpoint before the next
        forward. A rank that joins calls it on a model that is sharded over this rank alone.

        Args:
            mesh: The data-parallel mesh, whose process groups were made since. Default: one axis
                over all ranks. If parameters are sharded over several meshes, such as those of
                experts: the new meshes by the earlier ones.
            optimizers: Optimizers whose states are moved, too.
            keep: Whether values of this rank may be kept. If False on any rank, such as one where
                the step of an optimizer failed midway, no rank keeps them.

        Returns:
            Whether values were kept, on all ranks.

        Raises:
            ValueError: Parameters have a tensor-parallel split, or their weights are gathered by a
                method of their own; a mesh is missing; or the strategies do not fit a mesh.
            RuntimeError: The module is not the root, is in host memory, or a step of it was
                captured in a CUDA graph; or a rank is lost.
        """
        return rebuild(_contexts_of_root(self, "rebuild"), mesh, optimizers, keep=keep)

    # -- gradients --------------------------------------------------------------------------------

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as `torch.nn.Module.zero_grad` does.

        Also discards gradients of backwards without synchronization (`no_sync`), which are not in
        `param.grad` yet; `zero_grad` of an optimizer cannot. Between a forward and its backward,
        some units register gathered parameters; gradients belong to their sharded parameters, which
        this method resets as well. Gradients that were assigned to gathered parameters are dropped.

        Args:
            set_to_none: Whether to set gradients to None instead of zero.
        """
        super().zero_grad(set_to_none)
        units = units_of(self)
        for root, members in _by_root(units).items():
            if root.has_unreduced:
                reductions.discard(root, members)
        _drop_assigned(units)
        # Also units that are not below the module, but gather a tied parameter that is.
        contexts = dict.fromkeys(unit.context for unit in units)
        gathered = [unit for c in contexts for unit in c.units() if unit.state.is_gathered]
        if not gathered:
            return
        shown = {id(param) for param in cast("nn.Module", self).parameters()}
        for group in (group for unit in gathered for group in unit.held_groups):
            pairs = zip(group.unsharded_params, group.sharded_params, strict=True)
            for param in (sharded for other, sharded in pairs if id(other) in shown):
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def reduce_grad(self) -> None:
        """Reduce all gradients of this module and its units into `param.grad`. Collective.

        A synchronized backward has done so already. Call it after backwards without synchronization
        (`no_sync`), or if gradients were computed outside autograd.
        """
        for root, members in _by_root(units_of(self)).items():
            reductions.synchronize(root, members)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer gradient synchronization of this module and its units inside the context.

        The first backward after the context synchronizes the accumulated gradients. With ZeRO-2 and
        ZeRO-3, which shard gradients between micro-batches, every backward inside still reduces
        along the inner axis, so that full gradients take no memory.
        """
        before = [(u.settings, u.settings.requires_gradient_sync) for u in units_of(self)]
        set_flags(self, requires_gradient_sync=False)
        try:
            yield
        finally:
            for settings, flag in before:
                settings.requires_gradient_sync = flag

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether following backwards synchronize gradients. See `no_sync`."""
        flag = requires_gradient_sync
        set_flags(self, recurse, requires_gradient_sync=flag, requires_all_reduce=flag)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one before the optimizer steps.

        Only the last backward synchronizes gradients.
        """
        set_flags(self, is_last_backward=is_last_backward)

    def set_requires_gradient_reduction(
        self, requires_gradient_reduction: bool, *, recurse: bool = True
    ) -> None:
        """Set whether gradients are summed over ranks.

        If False, `param.grad` is this rank's own gradient of its rows, without scaling. To exclude
        a single parameter, set `param.requires_gradient_reduction = False` before `fully_shard`.

        Raises:
            RuntimeError: Gradients are not synchronized yet.
        """
        for unit in units_of(self, recurse=recurse):
            check_is_between_steps(unit, "set_requires_gradient_reduction")
            for group in unit.groups:
                group.change_spec(reduces=requires_gradient_reduction)

    # -- conversions and copies -------------------------------------------------------------------

    @override
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        unit: Unit = self._fsdp_unit
        weights.free(unit.state)
        _check_conversion(unit, fn)
        # The unit's next gather detects changed parameters.
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Reject deep copies.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"a sharded {type(self).__name__} cannot be deep-copied: its parameters are views of "
            "buffers shared with process groups; rebuild the model and load its state dict"
        )

    @override
    def __reduce__(self) -> NoReturn:
        """Reject pickling.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"a sharded {type(self).__name__} cannot be pickled; save its state dict, with "
            "megatron_fsdp_v2.checkpoint.save or torch.distributed.checkpoint"
        )


class UnshardHandle(fsdp.UnshardHandle):
    """Handle of a gather under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @override
    def wait(self) -> None:
        """Wait for the gather and install the parameters."""
        weights.wait(self._unit.state)


def _check_conversion(unit: Unit, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Check that a conversion (`half()`, `to()`) keeps the dtype and device of parameters.

    Raises:
        ValueError: The conversion changes a parameter's dtype or device.
    """
    for group in unit.groups:
        main = group.main_weight.tensor
        with torch.no_grad():
            becomes = convert(torch.empty(0, dtype=main.dtype, device=main.device))
        if becomes.dtype != main.dtype:
            raise ValueError(
                f"the parameters of unit {unit.name} are {main.dtype} and cannot become "
                f"{becomes.dtype} once they are sharded: convert the model before fully_shard, or "
                "set the dtype to compute with by mp_policy=MixedPrecisionPolicy(param_dtype=...)"
            )
        if becomes.device != main.device:
            raise ValueError(
                f"the parameters of unit {unit.name} stay on {main.device}, where their mesh is, "
                f"and cannot move to {becomes.device}: save a state dict and load it into a model "
                "that is sharded there"
            )


def unit_of(module: object) -> Unit:
    """Return the unit of a sharded module.

    Raises:
        ValueError: `fully_shard` was not called on the module.
    """
    unit: Unit | None = getattr(module, "_fsdp_unit", None)
    if unit is None:
        raise ValueError(
            f"{type(module).__name__} is not sharded; call fully_shard(module, mesh=...) on it"
        )
    return unit


def named_units(root: object) -> list[tuple[str, Unit]]:
    """Return every unit at or below a module with its first name, parents first."""
    found: dict[Unit, str] = {}
    for name, module in cast(nn.Module, root).named_modules():
        if isinstance(module, ShardedModule):
            found.setdefault(module._fsdp_unit, name)
    return [(name, unit) for unit, name in found.items()]


def units_of(module: object, *, recurse: bool = True) -> list[Unit]:
    """Return a module's unit, and the units below it if `recurse` is set."""
    return [unit for _, unit in named_units(module)] if recurse else [unit_of(module)]


def contexts_of(module: object) -> list[Context[Unit]]:
    """Return the context of a module, and those of the roots inside.

    Modules inside that were sharded later are roots of their own.
    """
    inside = (unit.context for unit in units_of(module) if unit.state.is_root)
    return list(dict.fromkeys((unit_of(module).context, *inside)))


def _contexts_of_root(module: object, method: str) -> list[Any]:
    """Return the contexts below a root that have parameters.

    Raises:
        RuntimeError: The module is not a root.
    """
    unit = unit_of(module)
    if not unit.is_root:
        raise RuntimeError(f"{unit.name} is not the root; call {method} on the root")
    return [context for context in contexts_of(module) if context.device is not None]


def _by_root(units: Iterable[Unit]) -> dict[RootState, list[UnitState]]:
    """Return the states of units by the root that they belong to."""
    found: dict[RootState, list[UnitState]] = {}
    for unit in units:
        found.setdefault(unit.state.root, []).append(unit.state)
    return found


def set_flags(module: object, recurse: bool = True, **flags: bool) -> None:
    """Set `settings` of a module's unit, and of the units below it if `recurse` is set."""
    for unit in units_of(module, recurse=recurse):
        for name, flag in flags.items():
            setattr(unit.settings, name, flag)


def make_idle(root: nn.Module) -> None:
    """Reshard every unit of the roots that a module belongs to, also after an exception.

    Call it between passes, before reading or writing sharded parameters. Pending backwards gather
    again. Waits for collectives under way and issues none. No-op for modules without sharded
    parameters.

    Raises:
        RuntimeError: A backward is under way.
    """
    owners = (unit_owning(group) for module in root.modules() for group in groups_of(module))
    units = [*units_of(root), *filter(None, owners)]
    contexts = dict.fromkeys(unit.context for unit in units)
    for context in contexts:
        context.check_is_ready()
    if any(events.is_in_backward(context.state) for context in contexts):
        raise RuntimeError("a backward is under way; do this between two steps")
    for context in contexts:
        events.make_idle(context.state)


def _drop_assigned(units: Iterable[Unit]) -> None:
    """Discard gradients that were assigned to gathered parameters."""
    with plain_attributes():
        for unit in units:
            for group in unit.groups:
                for param in group.parameters.gathered:
                    if raw_grad(param) is not None:
                        param.grad = None


@contextlib.contextmanager
def showing_sharded(root: nn.Module) -> Iterator[None]:
    """Register sharded parameters inside the context, without communication.

    Gathered weights are kept and registered again afterwards. No-op for modules without units.
    """
    pairs = [(group, module) for module in root.modules() for group in groups_of(module)]
    hidden = [(group, module) for group, module in pairs if group.show_sharded(module)]
    try:
        yield
    finally:
        for group, module in hidden:
            group.show_gathered(module)
