"""State of a unit: its phase, the settings of a user, and its forward under way."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from megatron_fsdp_v2.params.autograd import Inputs, ReplacedTensors
from megatron_fsdp_v2.runtime.backward import ForwardRecord

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.unit import Unit


class Phase(enum.Enum):
    """Phase of a unit."""

    IDLE = "idle"
    """Not running. Its modules hold sharded parameters unless weights are kept gathered."""
    FORWARD = "forward"
    """In its forward, or in a recomputation of it."""
    BACKWARD = "backward"
    """Between the first gradient of its outputs and the last gradient of its inputs."""

    # Faster than the `__hash__` of enums, which is written in Python.
    __hash__ = object.__hash__


LEGAL_MOVES = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD},
    # In a unit of several modules, a backward may begin before the last module has run.
    Phase.FORWARD: {Phase.IDLE, Phase.BACKWARD},
    Phase.BACKWARD: {Phase.IDLE},
}


@dataclass(slots=True)
class UnitSettings:
    """Options of a unit that a user sets between passes.

    Attributes:
        reshard_after_forward: Whether to reshard between forward and backward.
        reshard_after_backward: Whether to reshard after a backward.
        requires_gradient_sync: Whether its backward synchronizes gradients.
        requires_all_reduce: Whether its backward also reduces gradients along the outer axis, if
            there is one.
        is_last_backward: Whether the next backward is the last before the optimizer steps.
        is_finalized_manually: Whether backwards leave synchronization to `finalize_backward`.
        forward_prefetch: Units to gather when its forward starts, instead of the recorded order.
        backward_prefetch: Units to gather when its backward starts, instead of the recorded order.
    """

    reshard_after_forward: bool
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    is_last_backward: bool = True
    is_finalized_manually: bool = False
    forward_prefetch: Sequence[weakref.ref[Unit]] = ()
    backward_prefetch: Sequence[weakref.ref[Unit]] = ()


@dataclass(slots=True)
class RunningForward:
    """A unit's forward under way, or the next one.

    Attributes:
        has_begun: Whether it is under way.
        is_recomputation: Whether it repeats an earlier forward.
        is_gathered_around: Whether weights were already gathered for a backward when it began.
        replaced: Tensors replaced in its arguments.
        record: Its record; None without gradients.
        inputs: Its inputs that require gradients.
        since: Number of its first autograd node.
        pending_modules: With several modules, the `id()`s of those that have not run.
        method_frame: Frame that calls a method registered as a forward, while the method runs.
    """

    has_begun: bool = False
    is_recomputation: bool = False
    is_gathered_around: bool = False
    replaced: ReplacedTensors = field(default_factory=ReplacedTensors)
    record: ForwardRecord | None = None
    inputs: Inputs = field(default_factory=Inputs)
    since: int = 0
    pending_modules: set[int] = field(default_factory=set)
    method_frame: FrameType | None = None
