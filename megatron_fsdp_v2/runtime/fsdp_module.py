"""FSDPModule: the mixin a sharded module's class gains."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast, override

import torch
from torch import nn
from torch.distributed import fsdp

from megatron_fsdp_v2._compiler import runs_as_written, uncompiled
from megatron_fsdp_v2.comm.gather_groups import group_of_same_ranks
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.autograd import in_backward
from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2.runtime.end_of_backward import needs_repair, repair, synchronize_gradients
from megatron_fsdp_v2.runtime.hooks import begin_method, end_method, fail_method
from megatron_fsdp_v2.runtime.options import check_at_least_one
from megatron_fsdp_v2.runtime.torch_fsdp import TorchFSDPModule, show_state
from megatron_fsdp_v2.runtime.unit_checks import check_unchanged

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.unit import Unit

__all__ = [
    "FSDPModule",
    "make_idle",
    "named_units",
    "register_fsdp_forward_method",
    "swap_class",
    "unit_of",
]


class FSDPModule(TorchFSDPModule):
    """Methods of a module that `fully_shard` was called on.

    A plain mixin, not an `nn.Module`: the module's class becomes a subclass of this and of the
    class it had. Names and meaning follow PyTorch's FSDP2 where it has them, and the module is an
    instance of `torch.distributed.fsdp.FSDPModule`; what that has and this has not is rejected.
    """

    # Libraries resolve the annotations of their subclasses, so this one names nothing of ours.
    _fsdp_unit: Any

    @override
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the unit's own parameters and install them. Collective.

        Args:
            async_op: Return a handle whose `wait()` installs them, instead of waiting.
        """
        unit = unit_of(self)
        if unit.is_gathered_after_step:
            # Nobody checks that these are the weights of now but a forward.
            unit.reshard()
        unit.context.note_replays()
        unit.unshard(WeightUse.BOTH, async_op=async_op)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    @override
    def reshard(self) -> None:
        """Drop the unit's gathered parameters and install the sharded ones."""
        unit_of(self).reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as `torch.nn.Module.zero_grad` does.

        Between a forward and its backward the gathered parameters of some units stand where the
        sharded ones do otherwise, which is where gradients are; those are reset as well.

        Args:
            set_to_none: Whether to drop gradients, instead of setting them to zero.
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
        """Bring all gradients of this module and its units into `param.grad`. Collective.

        A synchronized backward has done so already. Call it after backwards that were not
        synchronized (`no_sync`), or where autograd was bypassed.
        """
        synchronize_gradients(unit_of(self).context, _units(self))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer gradient synchronization of this module and its units.

        Gradients of the backwards inside, and of the first one after, are the same in the end.
        Where gradients are sharded between micro-batches (ZeRO-2, ZeRO-3), the inner axis is
        still reduced in every backward, to keep full gradients out of memory.
        """
        units = _units(self)
        before = [unit.requires_gradient_sync for unit in units]
        for unit in units:
            unit.requires_gradient_sync = False
        try:
            yield
        finally:
            for unit, flag in zip(units, before, strict=True):
                unit.requires_gradient_sync = flag

    @override
    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether following backwards synchronize gradients. See `no_sync`."""
        for unit in _units(self, recurse=recurse):
            unit.requires_gradient_sync = requires_gradient_sync
            unit.requires_all_reduce = requires_gradient_sync

    @override
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether following backwards reduce gradients along the outer axis of a 2-D mesh.

        With False they leave that to the next one that does, and so does `no_sync` at ZeRO-2 and
        ZeRO-3. Nothing changes on a 1-D mesh.
        """
        for unit in _units(self, recurse=recurse):
            unit.requires_all_reduce = requires_all_reduce

    @override
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Have this unit's gradients be the sum over data-parallel ranks, divided by this.

        It takes the place of `gradient_scaling_factor`, and may change between steps. The same on
        all ranks; units inside have factors of their own.

        Raises:
            ValueError: The factor is not a positive number.
            RuntimeError: Gradients are waiting to be synchronized.
        """
        if not isinstance(factor, int | float) or not 0 < factor < float("inf"):
            raise ValueError(f"a gradient divide factor must be a positive number, got {factor!r}")
        unit = unit_of(self)
        unit.check_is_between_steps("set_gradient_divide_factor")
        for group in unit.groups:
            group.set_scale(1.0 / factor)

    @override
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """See `set_gradient_divide_factor`, its newer name."""
        self.set_gradient_divide_factor(factor)

    @override
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept whatever is said: reductions only add; sums are scaled where they are stored."""

    @override
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accept whatever is said: a unit is gathered in its backward always.

        `False` allows to leave that out. It is not made use of, with a warning, since nothing could
        check that it is safe; no result depends on it.
        """
        if not unshard_in_backward:
            warnings.warn(
                f"{unit_of(self).name} is gathered in its backward all the same, after "
                "set_unshard_in_backward(False); no result depends on it",
                stacklevel=2,
            )

    @override
    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have what this thread's stream does next wait for an event, gathers included.

        For an optimizer that steps on another stream. Nothing happens on a CPU, which has none.

        Args:
            event: Recorded after the optimizer's step.
        """
        devices = {group.device.type for group in unit_of(self).groups}
        if devices - {"cpu"}:
            event.wait()

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set `max_live_grad_buffers` of `fully_shard`, which units of one root share.

        Raises:
            ValueError: It is not a whole number of at least 1.
        """
        del recurse
        check_at_least_one("max_input_buffers", max_input_buffers)
        context = unit_of(self).context
        context.reductions.max_live_grad_buffers = max_input_buffers
        for unit in context.units():
            # A root that is wrapped around them later has the same.
            unit.given["max_live_grad_buffers"] = max_input_buffers

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Say whether weights are gathered in another process group than gradients are reduced in.

        With NCCL the two then go side by side. One group is made for every set of ranks that
        weights are sharded over, unless `fully_shard` was given one (`gather_group`). To be called
        between steps. Collective.

        Raises:
            ValueError: It is neither True nor False.
        """
        if not isinstance(enable, bool):
            raise ValueError(f"enable must be True or False, got {enable!r}")
        everyone = [g for unit in unit_of(self).context.units() for g in unit.groups]
        inner = [group.axes[-1] for group in everyone]
        made = {axis.group: axis.gather_group for axis in inner if axis.gather_group is not None}
        for unit in _units(self, recurse=recurse):
            for group in unit.groups:
                axis = group.axes[-1]
                if enable and axis.size > 1 and axis.group not in made:
                    made[axis.group] = group_of_same_ranks(axis.group)
                group.gather_in(made.get(axis.group) if enable else None)

    @override
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last one before the optimizer steps.

        A backward that is not the last leaves synchronization to the one that is.
        """
        for unit in _units(self):
            unit.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Say whether backwards leave synchronization to `finalize_backward`.

        It takes precedence over `set_is_last_backward`. Of the root, for all its units.

        Raises:
            RuntimeError: The module is not the root, or a backward is under way.
        """
        unit = self._root_between_passes("set_manual_backward_finalization")
        for each in unit.context.units():
            each.is_finalized_manually = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards since `set_manual_backward_finalization(True)`. Collective.

        Brings gradients into `param.grad` and drops gathered parameters, as far as
        `set_requires_gradient_sync` and `set_reshard_after_backward` say by now.

        Args:
            async_op: Return a handle. Nothing is left to wait for by then, other than with FSDP2.

        Raises:
            RuntimeError: The module is not the root, a backward is under way, or backwards
                synchronize by themselves.
        """
        unit = self._root_between_passes("finalize_backward")
        if not unit.is_finalized_manually:
            raise RuntimeError(
                f"backwards of {unit.name} synchronize by themselves; call "
                "set_manual_backward_finalization(True) before the first of those that "
                "finalize_backward is to end"
            )
        units = unit.context.units()
        due = [each for each in units if each.syncs_when_finalized]
        if due:
            synchronize_gradients(unit.context, due)
        for each in units:
            if each.reshard_after_backward:
                each.reshard()
        return GradientReductionHandle() if async_op else None

    def _root_between_passes(self, method: str) -> Unit:
        unit = unit_of(self)
        if not unit.is_root:
            raise RuntimeError(f"{unit.name} is not the root; call {method} on the root")
        if in_backward():
            raise RuntimeError(f"a backward is under way; call {method} when it is over")
        return unit

    def set_requires_gradient_reduction(
        self, requires_gradient_reduction: bool, *, recurse: bool = True
    ) -> None:
        """Say whether gradients are summed over ranks at all.

        A parameter that opts out gets this rank's own gradient of the rows it holds, unscaled. One
        parameter opts out by `param.requires_gradient_reduction = False` before `fully_shard`.

        Raises:
            RuntimeError: Gradients are waiting to be synchronized.
        """
        for unit in _units(self, recurse=recurse):
            unit.check_is_between_steps("set_requires_gradient_reduction")
            for grads in unit.grads():
                grads.reduces = requires_gradient_reduction

    @override
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether gathered parameters are dropped between forward and backward."""
        for unit in _units(self, recurse=recurse):
            unit.reshard_after_forward = reshard_after_forward

    @override
    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Say whether gathered parameters are dropped after a backward.

        Kept ones serve the forward that follows, unless an optimizer has stepped in between.
        Until then the module's parameters are those it computes with, not the sharded ones.
        """
        for unit in _units(self, recurse=recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accept what is so here always: a parameter without gradient is reduced with its unit.

        Raises:
            RuntimeError: Asked to leave such parameters out.
        """
        del recurse
        if not reduce_scatter_unused_params:
            raise RuntimeError(
                f"a unit of {type(self).__name__} reduces the gradients of all its parameters; "
                "set_reduce_scatter_unused_params(False) cannot be honored"
            )

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception ended, and gradients not yet reduced.

        The root's next forward does so by itself; before anything else happens, such as saving a
        checkpoint, it can be asked for.

        Raises:
            RuntimeError: The module is not the root.
        """
        unit = unit_of(self)
        if not unit.is_root:
            raise RuntimeError(f"{unit.name} is not the root; call reset_iter_state on the root")
        repair(unit.context)

    @override
    def set_modules_to_forward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Gather these units when this unit's forward starts, instead of the recorded next one.

        Memory grows with their number. An empty list brings the recorded order back.
        """
        unit_of(self).forward_prefetch = [weakref.ref(unit_of(m)) for m in modules]

    @override
    def set_modules_to_backward_prefetch(self, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Gather these units when this unit's backward starts. See the forward's twin."""
        unit_of(self).backward_prefetch = [weakref.ref(unit_of(m)) for m in modules]

    def trace_pool(self) -> TracePoolAllocator:
        """The traced pool that this module and all units of its root share.

        Raises:
            RuntimeError: The root was not wrapped with `enable_trace_pool=True`.
        """
        allocator = unit_of(self).context.allocator
        if not isinstance(allocator, TracePoolAllocator):
            raise RuntimeError(
                f"{type(self).__name__} has no trace pool; call fully_shard with "
                "enable_trace_pool=True on its root"
            )
        return allocator

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Reject.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"a sharded {type(self).__name__} cannot be deep-copied: its parameters are views of "
            "buffers shared with process groups; rebuild the model and load its state dict"
        )

    @override
    def __reduce__(self) -> NoReturn:
        """Reject.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"a sharded {type(self).__name__} cannot be pickled; save its state dict, with "
            "megatron_fsdp_v2.checkpoint.save or torch.distributed.checkpoint"
        )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a sharded module gather its unit, as its forward does.

    The weights stay gathered until it returns, also where it runs the module's forward inside.
    Torch's function of this name does so as well. This one leaves no reference cycle behind. It
    does nothing to a module that is not sharded.

    Args:
        module: The module.
        method_name: Name of one of its methods.

    Raises:
        ValueError: It has no such method.
    """
    if not isinstance(module, FSDPModule):
        fsdp.register_fsdp_forward_method(module, method_name)
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to register")
    function = getattr(method, "__func__", method)
    takes_self = function is not method
    owner = weakref.ref(module)

    begin, end = uncompiled(begin_method), uncompiled(end_method)

    # The frame it runs in is looked for later, and compiling would make another one of it.
    @runs_as_written
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        current = owner()
        assert current is not None
        # A frame in a local variable of its own would be a reference cycle.
        try:
            args, kwargs = begin(current, sys._getframe(), args, kwargs)
            output = function(current, *args, **kwargs) if takes_self else function(*args, **kwargs)
        except BaseException:
            uncompiled(fail_method)(current, sys._getframe())
            raise
        return end(current, sys._getframe(), output)

    setattr(module, method_name, run)


# From torch 2.15 on.
_TheirReductionHandle: Any = getattr(fsdp, "GradientReductionHandle", object)


class GradientReductionHandle(_TheirReductionHandle):  # type: ignore[misc]
    """Gradients that `finalize_backward` has reduced."""

    def wait(self) -> None:
        """Nothing: gradients are there."""


class UnshardHandle(fsdp.UnshardHandle):
    """A gather under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @override
    def wait(self) -> None:
        """Have the parameters in place and installed."""
        self._unit.wait_for_unshard()


def unit_of(module: object) -> Unit:
    """The unit of a sharded module.

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
    """Every unit at or below a module with its (first) name, parents first."""
    found: dict[Unit, str] = {}
    for name, module in cast(nn.Module, root).named_modules():
        if isinstance(module, FSDPModule):
            found.setdefault(unit_of(module), name)
    return [(name, unit) for unit, name in found.items()]


def make_idle(root: nn.Module) -> None:
    """Have every module below hold its sharded parameters, whatever ran or failed before.

    To be called between passes, by whoever reads or writes sharded parameters. Backwards that are
    still to come gather again. No communication but waiting for what is under way. Nothing happens
    to modules without units.

    Raises:
        RuntimeError: A backward is under way.
    """
    contexts = {unit.context for _, unit in named_units(root)}
    if contexts and in_backward():
        raise RuntimeError("a backward is under way; do this between two steps")
    for context in contexts:
        if needs_repair(context):
            repair(context)
        # Whoever reads parameters waits for the device anyway.
        check_unchanged(context, wait=True)
        context.gathers.drop_prefetched()
        for unit in context.units():
            unit.reshard()


def _units(module: FSDPModule, *, recurse: bool = True) -> list[Unit]:
    return [unit for _, unit in named_units(module)] if recurse else [unit_of(module)]


_CLASSES: dict[type, type] = {}


def swap_class(module: nn.Module) -> None:
    """Give a module a class that is both its own and `FSDPModule`; one class per class."""
    cls = type(module)
    sharded = _CLASSES.get(cls)
    if sharded is None:
        # Libraries keep what they know of a class by how it prints, which its full name decides.
        names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        if hasattr(module, "_orig_mod"):
            # What torch.compile() makes of a module has a length, which raises for most modules,
            # and the compiler asks whether objects are true.
            names["__bool__"] = lambda self: True
        sharded = type(f"FSDP{cls.__name__}", (FSDPModule, cls), names)
        _CLASSES[cls] = sharded
    module.__class__ = sharded
    show_state(module)
