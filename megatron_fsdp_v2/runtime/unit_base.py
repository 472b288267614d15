"""What a unit is: its parameter groups, its phase, and what it does without asking others."""

from __future__ import annotations

import enum
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.params.autograd import cast_floats, in_backward
from megatron_fsdp_v2.params.formats import WeightUse

if TYPE_CHECKING:
    from types import FrameType

    from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
    from megatron_fsdp_v2.params.grads import GroupGrads
    from megatron_fsdp_v2.params.group import ParameterGroup

__all__ = ["Phase", "UnitBase", "class_names"]


class Phase(enum.Enum):
    """What a unit is doing."""

    IDLE = "idle"
    """Not running; its modules hold sharded parameters unless something is kept gathered."""
    FORWARD = "forward"
    """Inside its forward, for the first time or as a recomputation."""
    BACKWARD = "backward"
    """Between the first gradient of its outputs and the last of its inputs."""

    # That of enums is a Python function.
    __hash__ = object.__hash__


LEGAL_MOVES = {
    (Phase.IDLE, Phase.FORWARD),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.IDLE),
    # A recomputation may stop in the middle of the forward, once it has all it needs.
    (Phase.FORWARD, Phase.BACKWARD),
}


class UnitBase(ABC):
    """The sharded parameters of one module, and what is done with them there alone.

    What a step does with them, and with those of other units, is in `Unit`.

    Attributes:
        fqn: Name of its module under the root; empty for the root.
        fqns: That, or the names of its modules where it has several.
        class_name: Class of its module, as it was before it was sharded.
        modules: Its module, weakly, or several that are gathered together.
        left_to_run: Of several modules, those whose forward is still to come in this pass.
        method_frame: Of whoever calls a method that runs as its forward, while that runs.
        groups: Its parameter groups, which it reduces.
        tied_groups: Groups of other units that hold a parameter tied to one of its own; gathered
            with it, reduced by their owner.
        held_groups: Groups it gathers: its own and those it shares.
        policy: Dtypes of inputs and outputs.
        given: Options of its root that it was given, by name; it follows the root in the others.
        phase: What it is doing.
        is_root: Whether its module is the outermost one.
        is_under_way: Whether a forward of it began and has not come to its end.
        reshard_after_forward: Whether gathered weights are dropped between forward and backward.
        reshard_after_backward: Whether they are dropped after a backward.
        requires_gradient_sync: Whether its backward is the one that synchronizes.
        requires_all_reduce: Likewise, where there is an outer axis to synchronize along.
        is_last_backward: Whether the next backward is the last before the optimizer steps.
        is_finalized_manually: Whether no backward is, since `finalize_backward` is called after it.
        forward_prefetch: Units to gather when its forward starts, instead of the recorded next.
        backward_prefetch: Likewise for its backward.
        unset: Names of parameters and buffers that had no values when it was made, and how to
            look each one up.
        num_users: Forwards and backwards that a schedule says are using it.
        has_one_form: Whether weights gathered for one use are there for every use.
        is_gathered_after_step: Whether it was gathered by an optimizer's step, and not used since.
        hidden_groups: Those whose gathered parameters a state dict under way has put aside.
        is_recomputed: Whether its forward ran again in the latest backward.
        num_awaited: Forwards whose backward is still to come; some may never come.
        has_pending_reduction: Whether its next reduction takes place also where no gradient
            arrived.
        is_unsharded: Whether gathered weights are installed, or on their way.
        observer: Receives its phases.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        tied_groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
        *,
        reshard_after_forward: bool,
        given: Mapping[str, Any],
    ) -> None:
        self.fqn = ""
        self.fqns: Sequence[str] = ("",)
        self.class_name = class_names(modules)
        self.modules = [weakref.ref(module) for module in modules]
        self.left_to_run: set[int] = set()
        self.method_frame: FrameType | None = None
        self.groups = list(groups)
        self.tied_groups = list(tied_groups)
        self.held_groups = [*self.groups, *self.tied_groups]
        self.hidden_groups: Sequence[ParameterGroup] = ()
        self.policy = policy
        self.given = dict(given)
        self.phase = Phase.IDLE
        self.is_root = True
        self.is_under_way = False
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.is_last_backward = True
        self.is_finalized_manually = False
        self.forward_prefetch: list[weakref.ref[UnitBase]] = []
        self.backward_prefetch: list[weakref.ref[UnitBase]] = []
        self.unset: Sequence[tuple[str, Callable[[], torch.Tensor | None]]] = ()
        self.num_users = 0
        self.observer = Observer()
        self.is_gathered_after_step = False
        self.is_recomputed = False
        self._was_recomputed = False
        self.is_unsharded = False
        self.has_one_form = all(group.weights.has_one_payload for group in self.held_groups)
        self.num_awaited = 0
        self.has_pending_reduction = False

    @property
    def name(self) -> str:
        """Name and class of the module, for messages."""
        return f"{self.fqn or 'the root'} ({self.class_name})"

    def grads(self) -> list[GroupGrads]:
        """Those of its groups that are trained."""
        return [group.grads for group in self.groups if group.grads is not None]

    @functools.cached_property
    def gathered_nbytes(self) -> int:
        """Bytes of gathered weights that one use of it takes; 0 where nothing is gathered."""
        return sum(group.weights.gathered_nbytes for group in self.held_groups)

    @property
    def is_expected_back(self) -> bool:
        """Whether its backward is under way, or to be expected after a forward."""
        return self.num_awaited > 0 or self.phase is Phase.BACKWARD

    @property
    def is_idle(self) -> bool:
        """Whether neither its forward nor its backward is under way."""
        return self.phase is Phase.IDLE

    @property
    def drops_after_forward(self) -> bool:
        """Whether the end of a forward, run as things are now, drops gathered weights."""
        if in_backward():
            return False
        # The root's backward comes right after its forward; others have to wait.
        return not (torch.is_grad_enabled() and (self.is_root or not self.reshard_after_forward))

    @property
    def skips_safely(self) -> bool:
        """Whether a rank may leave it out while others run it: no use of it is a collective."""
        return not any(group.weights.gathers_for_use for group in self.groups)

    @property
    def syncs_gradients(self) -> bool:
        """Whether gradients are brought all the way into `param.grad` in this backward."""
        is_last = self.is_last_backward and not self.is_finalized_manually
        return is_last and self.syncs_when_finalized

    @property
    def syncs_when_finalized(self) -> bool:
        """Likewise by whoever ends a backward that was not the last."""
        has_outer_axis = not self.requires_all_reduce and any(len(g.axes) > 1 for g in self.groups)
        return self.requires_gradient_sync and not has_outer_axis

    def is_stepped(self, stepped: AbstractSet[int]) -> bool:
        """Whether it can be gathered once these parameters were stepped.

        Args:
            stepped: Their `id()`s.
        """
        return all(
            group.weights.is_made_of_main
            and all(id(p) in stepped for p in group.sharded_params if p.requires_grad)
            for group in self.held_groups
        )

    def note_unstepped(self, stepped: AbstractSet[int], weight_version: int) -> None:
        """Leave weights that an earlier optimizer's step had gathered as they are.

        Args:
            stepped: `id()`s of the parameters of the optimizer that stepped now.
            weight_version: Of the weights as they are now.
        """
        for group in self.held_groups:
            if not any(id(param) in stepped for param in group.sharded_params):
                group.note_unstepped(weight_version)

    def is_inside(self, other: UnitBase) -> bool:
        """Whether its module is below another unit's."""
        return self is not other and any(
            f"{mine}.".startswith(f"{theirs}." if theirs else "")
            for mine in self.fqns
            for theirs in other.fqns
        )

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

    @abstractmethod
    def unshard(self, uses: WeightUse, *, async_op: bool) -> None:
        """Gather weights, after bringing them up to date outside of a backward. Collective.

        Args:
            uses: What they are to be used for.
            async_op: Whether to return before they are there.
        """

    def prefetch(self) -> None:
        """Start gathering ahead of use, unless what is live is in the way; then use gathers."""
        if self.is_unsharded and self.has_one_form:
            return
        uses = WeightUse.FORWARD
        if in_backward():
            # What is recomputed is so before anything else.
            uses = WeightUse.BOTH if self.is_recomputed else WeightUse.BACKWARD
        # All are asked: each one that has no room is noted for the next plan.
        if all([group.weights.has_room(uses) for group in self.held_groups]):
            self.unshard(uses, async_op=True)

    def wait_for_unshard(self) -> None:
        """Have gathered weights in place and installed on the modules."""
        with self.in_range("wait_for_unshard"):
            for group in self.held_groups:
                group.wait_for_unshard()

    def reshard(self) -> None:
        """Install sharded parameters and drop gathered weights. Idempotent."""
        if not self.is_unsharded:
            return
        with self.in_range("reshard"):
            self.is_unsharded = self.is_gathered_after_step = False
            for group in self.held_groups:
                group.reshard()

    def reshard_if_stale(self, weight_version: int) -> None:
        """Drop weights left gathered that were stepped, frozen or unfrozen since.

        Args:
            weight_version: Of the weights as they are now.
        """
        if not self.is_unsharded:
            return
        if any(
            group.is_stale(weight_version) or group.members.is_refrozen()
            for group in self.held_groups
        ):
            self.reshard()

    def reshard_if_replaced(self) -> None:
        """Take in parameters that were assigned while weights were gathered."""
        if self.is_unsharded and any([group.changes.is_replaced() for group in self.held_groups]):
            for group in self.held_groups:
                group.changes.sync()
            self.reshard()

    @abstractmethod
    def end_forward(self) -> None:
        """Reshard, and expect a backward, after a forward."""

    # -- dtypes of the policy -----------------------------------------------------------------

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Forward inputs in the dtypes of the policy."""
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), dtype)
        return args, kwargs

    def cast_outputs(self, output: Any) -> Any:
        """Forward outputs in the dtype of the policy."""
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floats(output, dtype)

    # -- gradients ----------------------------------------------------------------------------

    def end_backward(self) -> None:
        """Rest, after a backward."""
        if self.phase is Phase.BACKWARD:
            # Its inputs need no gradients, so nothing told the end of its backward.
            self.num_awaited = max(0, self.num_awaited - 1)
        self.phase = Phase.IDLE
        self.left_to_run.clear()

    def forget_failure(self) -> None:
        """Rest, whatever was under way."""
        self.phase = Phase.IDLE
        self.left_to_run.clear()
        self.num_awaited = 0
        self.num_users = 0
        self.has_pending_reduction = False

    def check_is_between_steps(self, method: str) -> None:
        """See that no gradient waits for what is about to change.

        Args:
            method: What was called, for a message.

        Raises:
            RuntimeError: Gradients are waiting to be synchronized.
        """
        for group in self.groups:
            if group.has_unreduced:
                raise RuntimeError(
                    f"{self.name} has gradients that are not synchronized yet; call {method} "
                    "between steps"
                )

    def in_range(self, name: str) -> AbstractContextManager[Any]:
        """Emit a phase of the unit around a block."""
        return self.observer.phase(self.fqn, name)

    def report_to(self, observer: Observer) -> None:
        """Have the events of the unit and of its groups go to an observer."""
        self.observer = observer
        for group in self.groups:
            group.report_to(observer)


def class_names(modules: Sequence[nn.Module]) -> str:
    """What to call a unit that has no name yet."""
    return ", ".join(type(module).__name__ for module in modules)
