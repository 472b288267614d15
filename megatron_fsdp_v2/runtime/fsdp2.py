"""`FSDPModule`: what sharded modules have only for programs that are written for torch's FSDP2.

Libraries, torch's pipelining and `register_fsdp_forward_method` check `isinstance(module,
torch.distributed.fsdp.FSDPModule)`. Methods of that class that access FSDP2's own state are
overridden, here or in `ShardedModule`; methods without an equivalent raise an error that names the
alternative.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Self, cast, override

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

from megatron_fsdp_v2._compiler import not_compiled, uncompiled
from megatron_fsdp_v2.comm.groups import group_of_same_ranks
from megatron_fsdp_v2.runtime.hooks import CALLS, after_forward, post_forward, pre_forward
from megatron_fsdp_v2.runtime.machine import events, reductions, weights
from megatron_fsdp_v2.runtime.module import (
    ShardedModule,
    contexts_of,
    set_flags,
    unit_of,
    units_of,
)
from megatron_fsdp_v2.runtime.options import check_at_least_one
from megatron_fsdp_v2.runtime.unit import Unit
from megatron_fsdp_v2.runtime.unit_checks import check_is_between_steps

# This module looks the function up when it is imported: programs replace `fsdp.fully_shard` by this
# package's function, for libraries that import the function when they shard a model.
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


class FSDPModule(ShardedModule, fsdp.FSDPModule):
    """Methods of a sharded module: those of `ShardedModule`, and the other ones of FSDP2.

    `fully_shard` changes the module's class to a subclass of this mixin and of the original class.
    Methods of PyTorch's FSDP2 have the same names and meaning here, and the module is an instance
    of `torch.distributed.fsdp.FSDPModule`. Methods that are not supported raise a RuntimeError.
    """

    # -- weights ----------------------------------------------------------------------------------

    @override
    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether the module reshards its parameters after a backward.

        If False, the next forward uses the gathered parameters, unless an optimizer stepped in
        between. Until then the module's registered parameters are the gathered ones.
        """
        set_flags(self, recurse, reshard_after_backward=reshard_after_backward)

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
        for context in contexts_of(self):
            context.communicator.wait_event(event)

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
        for unit in units_of(self, recurse=recurse):
            for group in unit.groups:
                axis = group.axes[-1]
                if enable and axis.size > 1 and axis.group not in made:
                    made[axis.group] = group_of_same_ranks(axis.group)
                group.set_gather_group(made.get(axis.group) if enable else None)

    # -- gradients --------------------------------------------------------------------------------

    @override
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether following backwards reduce gradients along the outer axis of a 2-D mesh.

        If False, the next backward with True reduces the accumulated gradients; `no_sync` has the
        same effect at ZeRO-2 and ZeRO-3. No effect on a 1-D mesh.
        """
        set_flags(self, recurse, requires_all_reduce=requires_all_reduce)

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
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the divisor of gradients; the older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    @override
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept either value: reductions always sum, and the stored sums are scaled."""

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

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many units have full gradient buffers at a time, for all units of the root.

        Raises:
            ValueError: `max_input_buffers` is not a whole number of at least 1.
        """
        del recurse
        check_at_least_one("max_input_buffers", max_input_buffers)
        for context in contexts_of(self):
            context.change_options(max_live_grad_buffers=max_input_buffers)

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
        for unit in units_of(self, recurse=recurse):
            for grads in unit.grads():
                grads.on_missing_grad = "zero" if reduce_scatter_unused_params else "none"

    # -- ends of backwards ------------------------------------------------------------------------

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether `finalize_backward`, not the end of a backward, synchronizes gradients.

        Takes precedence over `set_is_last_backward`. Call it on the root; it applies to all units.

        Raises:
            RuntimeError: The module is not the root, or a backward is under way.
        """
        _root_between_passes(self, "set_manual_backward_finalization")
        set_flags(self, is_finalized_manually=enabled)

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
        for context in contexts_of(self):
            root = context.state
            if due := [each for each in root.units if each.syncs_gradients(is_finalized=True)]:
                reductions.synchronize(root, due)
            for each in root.units:
                if each.settings.reshard_after_backward:
                    weights.free(each)
        return GradientReductionHandle() if async_op else None

    def reset_iter_state(self) -> None:
        """Reset the units after an exception in a pass, and drop unreduced gradients.

        The root's next forward resets them automatically. Call this method before other uses of the
        model, such as saving a checkpoint, and, if ranks may run different units (below ZeRO-3), on
        every rank after a backward that failed on some of them. Collective then.

        Raises:
            RuntimeError: The module is not the root.
        """
        _root(self, "reset_iter_state")
        reductions.reset([context.state for context in contexts_of(self)])

    # -- class and state --------------------------------------------------------------------------

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Build a module of the original class, not a sharded one.

        Containers construct their own class, for example for a slice of an `nn.Sequential`.
        """
        classes = cls.__mro__
        original = classes[classes.index(fsdp.FSDPModule) + 1]
        # Python calls `__init__` of the result only if the result is an instance of `cls`.
        return cast(Self, original(*args, **kwargs))

    @override
    def _get_fsdp_state(self) -> Any:
        return ModuleState(self)


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


# From torch 2.15 on.
_TheirReductionHandle: Any = getattr(fsdp, "GradientReductionHandle", object)


class GradientReductionHandle(_TheirReductionHandle):  # type: ignore[misc]
    """Handle that `finalize_backward` returns. The reductions are already done."""

    def wait(self) -> None:
        """Return at once."""


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


def sharded_class(module: nn.Module) -> type:
    """Return the class that a module gets when it is sharded.

    Raises:
        TypeError: Its class cannot have such a subclass.
    """
    cls: type = type(module)
    return _subclass(cls, is_compiled=hasattr(module, "_orig_mod"))


@functools.cache
def _subclass(of: type, *, is_compiled: bool) -> type:
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
    # The result of torch.compile() forwards attributes that are set on it to its module.
    object.__setattr__(module, "__class__", sharded_class(module))
    # Torch's `fully_shard` rejects a module with a state, which prevents sharding twice. Torch's
    # `replicate` skips modules registered under this name; otherwise it would broadcast and reduce
    # shards as whole parameters.
    module.__dict__.setdefault(STATE_KEY, {})[_THEIR_FUNCTION] = ModuleState(module)
    module.__dict__.setdefault(REGISTRY_KEY, {})[_THEIR_FUNCTION.__name__] = RegistryItem()


# -- methods that run as a forward --------------------------------------------------------------


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a sharded module gather its unit, as the module's forward does.

    The weights stay gathered until the method returns, also if it calls the module's forward.
    Equivalent to `torch.distributed.fsdp.register_fsdp_forward_method`, without its reference
    cycle. A module that is not sharded is passed to torch's function, which does nothing.

    Args:
        module: The module.
        method_name: Name of the method.

    Raises:
        ValueError: The module has no such method.
    """
    if not hasattr(module, "_fsdp_unit"):
        fsdp.register_fsdp_forward_method(module, method_name)
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to register")
    function = getattr(method, "__func__", method)
    takes_self = function is not method
    owner = weakref.ref(module)
    begin, end, after = map(uncompiled, (_begin_method, post_forward, after_forward))

    # A compiled function would have another frame on the stack.
    @not_compiled
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        self = owner()  # torch's function has this name too; see `CALLS`
        assert self is not None
        try:
            args, kwargs = begin(self, sys._getframe().f_code, args, kwargs)
            output = function(self, *args, **kwargs) if takes_self else function(*args, **kwargs)
            return end(self, args, output)
        finally:
            after(self, args, None)

    setattr(module, method_name, run)


def _begin_method(module: Any, code: CodeType, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Begin a method that runs as a forward and may call the module's forward.

    Args:
        module: The sharded module.
        code: Code of the function that calls the method.
        args: Positional arguments of the method.
        kwargs: Keyword arguments of the method.

    Returns:
        The arguments for the method.
    """
    CALLS.add(code)
    return pre_forward(module, args, kwargs)


class ModuleState:
    """Substitute for FSDP2's state of a module, for the functions of torch that read that state.

    These are `FSDPModule._apply`, `register_fsdp_forward_method`, `share_comm_ctx` (without effect:
    all models on a device share their streams) and `torch.distributed.pipelining`.
    """

    def __init__(self, module: Any) -> None:
        # Weak, since the module holds this object.
        self._module: Callable[[], Any] = weakref.ref(module)
        # Empty, so that torch's pipelining ends no unit's backward.
        self._state_ctx = types.SimpleNamespace(all_states=())
        self._comm_ctx: Any = None
        # FSDP2's parameter groups: one per module in some versions of torch, several in others.
        self._fsdp_param_group = None
        self._fsdp_param_groups: Sequence[Any] = ()

    def __getattr__(self, name: str) -> Any:
        """Reject all other attributes of FSDP2's state.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(
            f"a module that megatron_fsdp_v2 sharded has no {name!r} of FSDP2's internals; the "
            "caller supports torch's fully_shard only"
        )

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        return _begin_method(module, sys._getframe(1).f_code, args, kwargs)

    def _post_forward(self, module: Any, args: Any, output: Any) -> Any:
        return post_forward(module, args, output)

    def _root_post_backward_final_callback(self) -> None:
        """After the last backward of a pipeline stage: reduce gradients into `param.grad`."""
        module = self._module()
        if module is None:
            return
        module.reduce_grad()
        for part in module.modules():
            if hasattr(part, "_fsdp_unit"):
                part.reshard()
