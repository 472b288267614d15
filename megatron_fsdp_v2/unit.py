"""The life of a unit: unshard, forward, reshard, unshard, backward, reduce, reshard."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, override

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from megatron_fsdp_v2.context import Reduction, in_backward

if TYPE_CHECKING:
    from megatron_fsdp_v2.context import Context
    from megatron_fsdp_v2.mixed_precision import MixedPrecisionPolicy
    from megatron_fsdp_v2.param_group import ParameterGroup

__all__ = ["Phase", "Unit"]


class Phase(enum.Enum):
    """What a unit is doing."""

    RESTING = "resting"
    """Not running; its modules hold sharded parameters unless something is kept gathered."""
    FORWARD = "forward"
    """Inside its forward, for the first time or as a recomputation."""
    BACKWARD = "backward"
    """Between the first gradient of its outputs and the last of its inputs."""


LEGAL_MOVES = {
    (Phase.RESTING, Phase.FORWARD),
    (Phase.FORWARD, Phase.RESTING),
    (Phase.RESTING, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.RESTING),
    # A recomputation may stop in the middle of the forward, once it has all it needs.
    (Phase.FORWARD, Phase.BACKWARD),
}


class Unit:
    """The sharded parameters of one module and what happens to them in a step.

    Attributes:
        groups: Its parameter groups.
        context: What it shares with the other units under its root.
        policy: Dtypes of inputs and outputs.
        phase: What it is doing.
        is_root: Whether its module is the outermost one.
        reshard_after_forward: Whether gathered weights are dropped between forward and backward.
        requires_gradient_sync: Whether its backward is the one that synchronises.
        forward_prefetch: Units to gather when its forward starts, instead of the recorded next.
        backward_prefetch: Likewise for its backward.
        parameter_ids: `id()` of its sharded parameters, which live as long as it does.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParameterGroup],
        context: Context[Unit],
        policy: MixedPrecisionPolicy,
        *,
        reshard_after_forward: bool,
    ) -> None:
        self._module = weakref.ref(module)
        self.groups = list(groups)
        self.context = context
        self.policy = policy
        self.phase = Phase.RESTING
        self.is_root = True
        self.reshard_after_forward = reshard_after_forward
        self.requires_gradient_sync = True
        self.is_last_backward = True
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        self.parameter_ids = frozenset(id(p) for g in groups for p in g.sharded_params)
        self._is_unsharded = False
        context.add_unit(self)

    @property
    def name(self) -> str:
        """Class name of the module and the first of its parameters, for messages."""
        module = self._module()
        first = self.groups[0].names[0] if self.groups else "no parameters"
        return f"{type(module).__name__} ({first}, ...)" if module is not None else "a deleted unit"

    @property
    def is_unsharded(self) -> bool:
        """Whether gathered weights are installed, or on their way."""
        return self._is_unsharded

    @property
    def syncs_gradients(self) -> bool:
        """Whether gradients are brought all the way into `param.grad` in this backward."""
        return self.requires_gradient_sync and self.is_last_backward

    def move(self, phase: Phase) -> None:
        """Change phase.

        Raises:
            RuntimeError: The move is not legal.
        """
        if (self.phase, phase) not in LEGAL_MOVES:
            raise RuntimeError(
                f"unit {self.name} cannot go from {self.phase.value} to {phase.value}; "
                "a module must not be run inside its own forward"
            )
        self.phase = phase

    # -- weights ------------------------------------------------------------------------------

    def unshard(self, *, async_op: bool) -> None:
        """Gather weights, after bringing them up to date outside of a backward. Collective."""
        if self._is_unsharded:
            return
        self._is_unsharded = True
        refreshes = not in_backward()
        for group in self.groups:
            if refreshes:
                group.refresh(self.context.weights_epoch)
            group.ticket = group.weights.gather(async_op=async_op)

    def wait_for_unshard(self) -> None:
        """Have gathered weights in place and installed on the modules."""
        for group in self.groups:
            if group.ticket is not None:
                group.ticket.wait()
                group.ticket = None
                group.install_unsharded()

    def reshard(self) -> None:
        """Install sharded parameters and drop gathered weights. Harmless when resharded."""
        if not self._is_unsharded:
            return
        self._is_unsharded = False
        for group in self.groups:
            if group.ticket is not None:
                group.ticket.wait()
                group.ticket = None
            group.install(group.sharded_params)
            group.weights.release()

    def reshard_if_stale(self) -> None:
        """Drop weights left gathered that an optimizer may have stepped since."""
        epoch = self.context.weights_epoch
        if self._is_unsharded and any(group.is_stale(epoch) for group in self.groups):
            self.reshard()

    # -- forward ------------------------------------------------------------------------------

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the module's forward: gather, cast inputs, watch for the end of the backward."""
        recomputes = in_backward()
        if not recomputes and self.is_root:
            self._begin_pass()
        if self.phase is not Phase.BACKWARD:
            self.move(Phase.FORWARD)
        self.context.arrive(self)
        self.unshard(async_op=False)
        self.wait_for_unshard()
        if not recomputes:
            following = self.context.forward_order.record(self)
            self._prefetch(self.forward_prefetch, following)
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), dtype)
        if torch.is_grad_enabled():
            args, kwargs = _watch_inputs(self, args, kwargs)
        return args, kwargs

    def post_forward(self, output: Any) -> Any:
        """After the module's forward: reshard, watch for the start of the backward."""
        if in_backward():
            if self.phase is Phase.FORWARD:
                self.move(Phase.RESTING)
                self.context.keep_recomputed(self)
        else:
            self.context.backward_order.record(self)
            self.move(Phase.RESTING)
            # The root's backward comes right after its forward; others have to wait.
            keeps = torch.is_grad_enabled() and (self.is_root or not self.reshard_after_forward)
            if not keeps:
                self.reshard()
        if self.policy.output_dtype is not None:
            output = _cast(output, self.policy.output_dtype)
        if torch.is_grad_enabled():
            _watch_outputs(self, output)
        return output

    def _begin_pass(self) -> None:
        """At the root's forward: repair what an exception left behind, start a new order."""
        context = self.context
        units = context.units()
        if context.finalizer_queued or any(u.phase is not Phase.RESTING for u in units):
            context.reductions.abandon()
            context.finalizer_queued = False
            context.forget_recomputed()
            for unit in units:
                unit.phase = Phase.RESTING
                unit.reshard()
                for group in unit.groups:
                    if group.grads is not None:
                        group.grads.abandon()
        for unit in units:
            unit.reshard_if_stale()
        context.begin_forward()

    def _prefetch(self, chosen: list[weakref.ref[Unit]], recorded: Unit | None) -> None:
        if not chosen:
            self.context.prefetch(recorded)
            return
        for ref in chosen:
            self.context.prefetch(ref())

    # -- backward -----------------------------------------------------------------------------

    def pre_backward(self) -> None:
        """Before the module's backward: gather, and see to it that the backward is finished."""
        if self.phase is Phase.BACKWARD:
            return
        context = self.context
        if not context.finalizer_queued:
            context.finalizer_queued = True
            context.backward_order.begin_reversed()
            torch.autograd.Variable._execution_engine.queue_callback(_finalizer(context))
        self.move(Phase.BACKWARD)
        context.forget_recomputed(self)
        context.arrive(self)
        self.unshard(async_op=False)
        self.wait_for_unshard()
        self._prefetch(self.backward_prefetch, context.backward_order.before(self))

    def post_backward(self) -> None:
        """After the module's backward: reduce what arrived, reshard."""
        if self.phase is not Phase.BACKWARD:
            return
        self.reduce_grad(synchronise=self.syncs_gradients)
        self.reshard()
        self.move(Phase.RESTING)

    def reduce_grad(self, *, synchronise: bool) -> None:
        """Reduce gradients that arrived, as far as asked for. Collective.

        Args:
            synchronise: Whether to go all the way into `param.grad`, where gradients are
                otherwise left unreduced between micro-batches.
        """
        asynchronous = self.context.enable_async_reduce_grad
        issued = []
        for group in self.groups:
            grads = group.grads
            if grads is None or not grads.has_gradient:
                continue
            if grads.collects_unsynced and not synchronise:
                continue
            has_outer = grads.has_outer_axis
            ticket = group.reduce_inner(async_op=asynchronous, is_final=not has_outer)
            issued.append(Reduction(group, ticket, has_outer and synchronise, asynchronous))
        self.context.reductions.push(issued)
        if not asynchronous:
            self.context.reductions.drain()

    def finish_gradients(self, *, synchronise: bool) -> None:
        """Reduce what is left, also along the outer axis where that is all that is left."""
        self.reduce_grad(synchronise=synchronise)
        if synchronise:
            for group in self.groups:
                if group.grads is not None and group.grads.has_partial:
                    self.context.reductions.push_outer(group)

    def finish_backward(self) -> None:
        """At the end of a backward: reduce what is left, rest."""
        self.finish_gradients(synchronise=self.syncs_gradients)
        self.reshard()
        self.phase = Phase.RESTING


def _finalizer(context: Context[Unit]) -> Any:
    """The callback that the autograd engine runs at the end of a backward."""

    def finalize() -> None:
        for unit in reversed(context.units()):
            unit.finish_backward()
        context.reductions.drain()
        context.forget_recomputed()
        context.weights_epoch += 1
        context.finalizer_queued = False

    return finalize


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


class _PostBackward(torch.autograd.Function):
    """Identity on a unit's inputs; its backward runs after the rest of the unit's backward.

    The engine runs ready nodes latest-made first and gradient accumulation before all others, so
    when this earliest node of the unit runs, the unit's own gradients have arrived.
    """

    @staticmethod
    @override
    def forward(ctx: Any, unit: Unit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        return inputs

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.unit.post_backward()
        return (None, *grads)


def _watch_inputs(unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Route the inputs that require gradients through `_PostBackward`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    tree_map_only(torch.Tensor, note, (args, kwargs))
    if not found:
        return args, kwargs
    routed = iter(_PostBackward.apply(unit, *found))  # type: ignore[no-untyped-call]
    result: tuple[Any, Any] = tree_map_only(
        torch.Tensor, lambda t: next(routed) if t.requires_grad else t, (args, kwargs)
    )
    return result


def _watch_outputs(unit: Unit, output: Any) -> None:
    """Call `pre_backward` when the first gradient reaches one of the outputs."""

    def hook(grad: torch.Tensor) -> None:
        del grad
        unit.pre_backward()

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, tuple | list | set | frozenset):
        return [t for item in value for t in tensors_in(item)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [t for name in value.__dataclass_fields__ for t in tensors_in(getattr(value, name))]
    return []
