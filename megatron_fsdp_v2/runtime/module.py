"""FSDPModule: the mixin class of sharded modules, a subclass of torch's `FSDPModule`.

Libraries, torch's pipelining and `register_fsdp_forward_method` check `isinstance(module,
torch.distributed.fsdp.FSDPModule)`. Methods of the base class that access FSDP2's own state are
overridden here; methods without an equivalent raise an error that names the alternative.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self, cast, override

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

from megatron_fsdp_v2.comm.groups import group_of_same_ranks
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.group import groups_of
from megatron_fsdp_v2.runtime.hooks import ModuleState
from megatron_fsdp_v2.runtime.machine import events, reductions, weights
from megatron_fsdp_v2.runtime.options import check_at_least_one
from megatron_fsdp_v2.runtime.unit import Unit, unit_owning
from megatron_fsdp_v2.runtime.unit_checks import check_is_between_steps

# Looked up at import: programs replace `fsdp.fully_shard` by this package's function, for libraries
# that import it when they shard a model.
_THEIR_FUNCTION = fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]

REJECTED_METHODS = {
    "set_all_gather_layout": "gathered weights are views of one flat buffer, in its layout",
    "set_allocate_memory_from_process_group_for_comm": "buffers come from torch's allocator, or "
    "with fully_shard(enable_trace_pool=True) from one block of memory",
    "set_custom_all_gather": "collectives are those of the mesh's process groups",
    "set_custom_reduce_scatter": "collectives are those of the mesh's process groups",
    "set_keep_unsharded_storage": "fully_shard(enable_trace_pool=True) gathers weights at the same "
    "addresses in every step",
    "set_symm_mem_for_comm": "buffers come from torch's allocator, or with "
    "fully_shard(enable_trace_pool=True) from one block of memory, which "
    "runtime.registered_pool.register_pool(model) registers with NCCL",
    "_set_unshard_async_op": "set_modules_to_forward_prefetch says what is gathered ahead",
}
"""Methods of FSDP2, of all versions, that raise an error here, each with its alternative."""


class FSDPModule(fsdp.FSDPModule):
    """Methods of a sharded module.

    `fully_shard` changes the module's class to a subclass of this mixin and of the original class.
    Methods of PyTorch's FSDP2 have the same names and meaning here, and the module is an instance
    of `torch.distributed.fsdp.FSDPModule`. Methods that are not supported raise a RuntimeError.
    """

    # Libraries resolve the annotations of subclasses, so this annotation names no class that is
    # imported for type checking only.
    _fsdp_unit: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Build a module of the original class, not a sharded one.

        Containers construct their own class, for example for a slice of an `nn.Sequential`.
        """
        classes = cls.__mro__
        original = classes[classes.index(fsdp.FSDPModule) + 1]
        # Python calls `__init__` of the result only if the result is an instance of `cls`.
        return cast(Self, original(*args, **kwargs))

    # -- weights ------------------------------------------------------------------------------

    @override
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the unit's own parameters and install them. Collective.

        Args:
            async_op: Return a handle instead of waiting; its `wait()` installs the parameters.
        """
        unit = unit_of(self)
        events.graph_replayed(unit.state.root)
        weights.gather(unit.state, WeightUse.BOTH, async_op=async_op)
        if async_op:
            return UnshardHandle(unit)
        weights.wait(unit.state)
        return None

    @override
    def reshard(self) -> None:
        """Free the unit's gathered parameters and install the sharded ones."""
        weights.free(unit_of(self).state)

    @override
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to reshard between forward and backward."""
        _set(self, recurse, reshard_after_forward=reshard_after_forward)

    @override
    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether the module reshards its parameters after a backward.

        If False, the next forward uses the gathered parameters, unless an optimizer stepped in
        between. Until then the module's registered parameters are the gathered ones.
        """
        _set(self, recurse, reshard_after_backward=reshard_after_backward)

    @override
    def set_modules_to_forward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Set the units to gather when this unit's forward starts, instead of the recorded order.

        Memory grows with their number. An empty list restores the recorded order.
        """
        unit_of(self).settings.forward_prefetch = [unit_of(m).state for m in modules]

    @override
    def set_modules_to_backward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Set the units to gather when this unit's backward starts.

        See `set_modules_to_forward_prefetch`.
        """
        unit_of(self).settings.backward_prefetch = [unit_of(m).state for m in modules]

    @override
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accept either value: every unit is gathered in its backward.

        In FSDP2, `False` skips that gather. Here `False` only warns, since the unit cannot check
        that skipping is safe. Results are the same.
        """
        if not unshard_in_backward:
            warnings.warn(
                f"{unit_of(self).name} is gathered in its backward all the same, after "
                "set_unshard_in_backward(False); no result depends on it",
                stacklevel=2,
            )

    @override
    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the current stream, and gathers queued after this call, wait for an event.

        For an optimizer that steps on another stream. The stream of the latest pass waits too, on
        which memory of gradients is allocated. No-op on a CPU, which has no streams.

        Args:
            event: Recorded after the optimizer's step.
        """
        unit_of(self).context.communicator.wait_event(event)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether weights are gathered in another process group than gradients are reduced in.

        With NCCL, gathers and reductions then run concurrently. Creates one process group per set
        of ranks that weights are sharded over, unless `fully_shard` was given a `gather_group`.
        Call it between steps. Collective.

        Raises:
            ValueError: `enable` is neither True nor False.
        """
        if not isinstance(enable, bool):
            raise ValueError(f"enable must be True or False, got {enable!r}")
        inner = [group.axes[-1] for group in unit_of(self).context.groups()]
        made = {axis.group: axis.gather_group for axis in inner if axis.gather_group is not None}
        for unit in _units(self, recurse=recurse):
            for group in unit.groups:
                axis = group.axes[-1]
                if enable and axis.size > 1 and axis.group not in made:
                    made[axis.group] = group_of_same_ranks(axis.group)
                group.set_gather_group(made.get(axis.group) if enable else None)

    # -- gradients ----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as `torch.nn.Module.zero_grad` does.

        Between a forward and its backward, some units register gathered parameters; gradients
        belong to their sharded parameters, which this method resets as well.

        Args:
            set_to_none: Whether to set gradients to None instead of zero.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        gathered = [unit for unit in unit_of(self).context.units() if unit.is_unsharded]
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
        _synchronize(_units(self))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer gradient synchronization of this module and its units inside the context.

        The first backward after the context synchronizes the accumulated gradients. With ZeRO-2 and
        ZeRO-3, which shard gradients between micro-batches, every backward inside still reduces
        along the inner axis, so that full gradients take no memory.
        """
        before = [(u.settings, u.settings.requires_gradient_sync) for u in _units(self)]
        _set(self, requires_gradient_sync=False)
        try:
            yield
        finally:
            for settings, flag in before:
                settings.requires_gradient_sync = flag

    @override
    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether following backwards synchronize gradients. See `no_sync`."""
        flag = requires_gradient_sync
        _set(self, recurse, requires_gradient_sync=flag, requires_all_reduce=flag)

    @override
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether following backwards reduce gradients along the outer axis of a 2-D mesh.

        If False, the next backward with True reduces the accumulated gradients; `no_sync` has the
        same effect at ZeRO-2 and ZeRO-3. No effect on a 1-D mesh.
        """
        _set(self, recurse, requires_all_reduce=requires_all_reduce)

    @override
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one before the optimizer steps.

        Only the last backward synchronizes gradients.
        """
        _set(self, is_last_backward=is_last_backward)

    def set_requires_gradient_reduction(
        self, requires_gradient_reduction: bool, *, recurse: bool = True
    ) -> None:
        """Set whether gradients are summed over ranks.

        If False, `param.grad` is this rank's own gradient of its rows, without scaling. To exclude
        a single parameter, set `param.requires_gradient_reduction = False` before `fully_shard`.

        Raises:
            RuntimeError: Gradients are not synchronized yet.
        """
        for unit in _units(self, recurse=recurse):
            check_is_between_steps(unit, "set_requires_gradient_reduction")
            for group in unit.groups:
                group.change_spec(reduces=requires_gradient_reduction)

    @override
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of this unit's gradient sum over data-parallel ranks.

        Replaces `gradient_scaling_factor`, and may change between steps. All ranks must pass the
        same value. Units inside this one keep their own factors.

        Raises:
            ValueError: The factor is not a positive number.
            RuntimeError: Gradients are not synchronized yet.
        """
        if not isinstance(factor, int | float) or not 0 < factor < float("inf"):
            raise ValueError(f"a gradient divide factor must be a positive number, got {factor!r}")
        unit = unit_of(self)
        check_is_between_steps(unit, "set_gradient_divide_factor")
        for group in unit.groups:
            group.change_spec(scale=1.0 / factor)

    @override
    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object] | None, *, stream: Any = None
    ) -> None:
        """Set a function that may change this unit's reduced gradients, such as sum them further.

        Each backward that synchronizes gradients calls it once per parameter group, with a flat
        tensor: the gradient that this rank holds, summed over the mesh and scaled, before it is
        added to `param.grad`. The tensor includes padding, and the gradients of earlier backwards
        that did not synchronize. All ranks call the hooks of their units in one order. With a hook,
        a parameter without a gradient on any rank of the mesh gets zeros. Units inside this one
        keep their own hooks.

        Args:
            hook: Changes the tensor in place; None removes the hook.
            stream: Stream of a 1-D mesh to call the hook in. Default: an internal stream.

        Raises:
            ValueError: The mesh is 2-D and `stream` is given; or parameters of the unit are sharded
                over different meshes.
            RuntimeError: Gradients are not synchronized yet.
        """
        unit = unit_of(self)
        check_is_between_steps(unit, "set_all_reduce_hook")
        if len({group.spec.mesh for group in unit.groups}) > 1:
            raise ValueError(
                f"parameters of {unit.name} are sharded over different meshes, between which a "
                "hook cannot distinguish; give those of each mesh a unit of their own"
            )
        if stream is not None and any(len(group.axes) > 1 for group in unit.groups):
            raise ValueError(
                f"the mesh of {unit.name} is 2-D, so its hook runs in the stream of reductions "
                "along the outer axis; leave stream out"
            )
        for group in unit.groups:
            group.grads.set_hook(hook, stream)

    @override
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the divisor of gradients; the older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    @override
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept either value: reductions always sum, and the stored sums are scaled."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many units have full gradient buffers at a time, for all units of the root.

        Raises:
            ValueError: `max_input_buffers` is not a whole number of at least 1.
        """
        del recurse
        check_at_least_one("max_input_buffers", max_input_buffers)
        unit_of(self).context.change_options(max_live_grad_buffers=max_input_buffers)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set the gradient of a parameter that no rank used: zeros (True) or None (False).

        See `on_missing_grad` of `fully_shard`. Every rank must set the same value.

        Args:
            reduce_scatter_unused_params: Whether the gradient is zeros if other parameters of the
                unit have one.
            recurse: Whether to set it for all units inside.
        """
        for unit in _units(self, recurse=recurse):
            for grads in unit.grads():
                grads.on_missing_grad = "zero" if reduce_scatter_unused_params else "none"

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether backwards leave synchronization to `finalize_backward`.

        Takes precedence over `set_is_last_backward`. Call it on the root; it applies to all units.

        Raises:
            RuntimeError: The module is not the root, or a backward is under way.
        """
        unit = _root_between_passes(self, "set_manual_backward_finalization")
        for each in unit.context.units():
            each.settings.is_finalized_manually = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards since `set_manual_backward_finalization(True)`. Collective.

        Reduces gradients into `param.grad` and reshards, according to the current values of
        `set_requires_gradient_sync` and `set_reshard_after_backward`.

        Args:
            async_op: Return a handle. Unlike with FSDP2, the reductions are already done.

        Raises:
            RuntimeError: The module is not the root, a backward is under way, or
                `set_manual_backward_finalization(True)` was not called.
        """
        unit = _root_between_passes(self, "finalize_backward")
        if not unit.settings.is_finalized_manually:
            raise RuntimeError(
                f"backwards of {unit.name} synchronize gradients at their end; call "
                "set_manual_backward_finalization(True) before the first backward that "
                "finalize_backward should end"
            )
        units = unit.context.units()
        due = [each for each in units if each.state.syncs_when_finalized]
        if due:
            _synchronize(due)
        for each in units:
            if each.settings.reshard_after_backward:
                weights.free(each.state)
        return GradientReductionHandle() if async_op else None

    def reset_iter_state(self) -> None:
        """Reset the units after an exception in a pass, and drop unreduced gradients.

        The root's next forward resets them automatically. Call this method before other uses of the
        model, such as saving a checkpoint.

        Raises:
            RuntimeError: The module is not the root.
        """
        reductions.repair(_root(self, "reset_iter_state").state.root)

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

    # -- overridden methods of nn.Module and torch's FSDPModule -------------------------------

    @override
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        unit: Unit = self._fsdp_unit
        weights.free(unit.state)
        _check_conversion(unit, fn)
        # The unit's next gather detects changed parameters.
        return super(fsdp.FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]

    @override
    def _get_fsdp_state(self) -> Any:
        return ModuleState(self)

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


def _rejected(name: str, instead: str) -> Callable[..., Any]:
    def reject(self: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise RuntimeError(
            f"{type(self).__name__} was sharded by megatron_fsdp_v2, which has no {name}: {instead}"
        )

    reject.__name__ = name
    reject.__doc__ = f"Reject: {instead}.\n\n        Raises:\n            RuntimeError: Always."
    return reject


for _name, _instead in REJECTED_METHODS.items():
    setattr(FSDPModule, _name, _rejected(_name, _instead))


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


# From torch 2.15 on.
_TheirReductionHandle: Any = getattr(fsdp, "GradientReductionHandle", object)


class GradientReductionHandle(_TheirReductionHandle):  # type: ignore[misc]
    """Handle that `finalize_backward` returns; its gradients are already reduced."""

    def wait(self) -> None:
        """Return at once."""


class UnshardHandle(fsdp.UnshardHandle):
    """Handle of a gather under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @override
    def wait(self) -> None:
        """Wait for the gather and install the parameters."""
        weights.wait(self._unit.state)


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
        if isinstance(module, FSDPModule):
            found.setdefault(unit_of(module), name)
    return [(name, unit) for unit, name in found.items()]


def make_idle(root: nn.Module) -> None:
    """Reshard every unit of the roots that a module belongs to, also after an exception.

    Call it between passes, before reading or writing sharded parameters. Pending backwards gather
    again. Waits for collectives under way and issues none. No-op for modules without sharded
    parameters.

    Raises:
        RuntimeError: A backward is under way.
    """
    contexts = {unit.context for unit in _units_of(root)}
    if any(events.is_in_backward(context.state) for context in contexts):
        raise RuntimeError("a backward is under way; do this between two steps")
    for context in contexts:
        events.make_idle(context.state)


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


def _units_of(root: nn.Module) -> Iterator[Unit]:
    """Yield the units at or below a module, and those that own parameters registered there."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield unit_of(module)
        yield from filter(None, map(unit_owning, groups_of(module)))


def _units(module: object, *, recurse: bool = True) -> list[Unit]:
    return [unit for _, unit in named_units(module)] if recurse else [unit_of(module)]


def _synchronize(units: Sequence[Unit]) -> None:
    """Reduce all gradients of some units of one root into `param.grad`. Collective."""
    reductions.synchronize(units[0].state.root, [unit.state for unit in units])


def _set(module: object, recurse: bool = True, **flags: bool) -> None:
    """Set `settings` of a module's unit, and of the units below it if `recurse` is set."""
    for unit in _units(module, recurse=recurse):
        for name, flag in flags.items():
            setattr(unit.settings, name, flag)


def _root(module: object, method: str) -> Unit:
    unit = unit_of(module)
    if not unit.is_root:
        raise RuntimeError(f"{unit.name} is not the root; call {method} on the root")
    return unit


def _root_between_passes(module: object, method: str) -> Unit:
    unit = _root(module, method)
    if events.is_in_backward(unit.state.root):
        raise RuntimeError(f"a backward is under way; call {method} when it is over")
    return unit


@functools.cache
def _sharded_class(of: type, *, is_compiled: bool) -> type:
    """Return a subclass of `FSDPModule` and of a module's class."""
    # Libraries look classes up by their full names.
    names: dict[str, Any] = {"__module__": of.__module__, "__qualname__": of.__qualname__}
    if is_compiled:
        # The result of torch.compile() has a `__len__` that raises for most modules, and the
        # compiler evaluates the truth of objects.
        names["__bool__"] = lambda self: True
    return type(f"FSDP{of.__name__}", (FSDPModule, of), names)


def swap_class(module: nn.Module) -> None:
    """Change a module's class to its sharded class."""
    cls: type = type(module)
    module.__class__ = _sharded_class(cls, is_compiled=hasattr(module, "_orig_mod"))
    # Torch's `fully_shard` rejects a module with a state, which prevents sharding twice. Torch's
    # `replicate` skips modules registered under this name; otherwise it would broadcast and reduce
    # shards as whole parameters.
    module.__dict__.setdefault(STATE_KEY, {})[_THEIR_FUNCTION] = ModuleState(module)
    module.__dict__.setdefault(REGISTRY_KEY, {})[_THEIR_FUNCTION.__name__] = RegistryItem()
