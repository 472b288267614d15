"""Phases of a unit, and the record of one of its forwards."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from megatron_fsdp_v2.runtime.schedule import FORWARD_NUMBERS

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.unit import Unit

__all__ = ["LEGAL_MOVES", "ForwardRecord", "Phase"]


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


class ForwardRecord:
    """One forward of a unit, held by the hooks in its graph.

    Attributes:
        passed: The forward of the root that it was part of.
        number: Sequence number; forwards that begin later have larger numbers.
        begins: Position of a backward that ends the unit's backward; see `RootPass`.
        ends: Position of a backward that begins the unit's backward.
        is_recomputed: Whether it repeats a forward.
        is_nested: Whether it ran in a pass nested in a backward.
        has_post_backward_hook: False if inputs require gradients, but no hook may mark the end of
            its backward.
    """

    __slots__ = (
        "_unit",
        "begins",
        "ends",
        "has_post_backward_hook",
        "is_nested",
        "is_recomputed",
        "number",
        "passed",
    )

    def __init__(self, unit: Unit) -> None:
        context = unit.context
        self._unit = unit
        self.is_recomputed = unit.is_recomputing
        self.passed = context.backward_pass if self.is_recomputed else context.root_pass
        self.is_nested = context.is_nested
        self.number = next(FORWARD_NUMBERS)
        self.begins = self.ends = context.position if self.is_recomputed else self.number
        self.has_post_backward_hook = True

    def pre_backward(self) -> None:
        """Called when the first gradient reaches an output."""
        self._unit.pre_backward(self)

    def post_backward(self) -> None:
        """Called when the engine has run the unit's last node in the backward."""
        self._unit.post_backward(self)

    def defer_post_backward(self) -> None:
        """Called when the engine has run an input's node; other nodes of the unit may follow."""
        self._unit.context.deferred[self.number] = self

    def finish(self) -> None:
        """End its backward if it is under way; the engine runs other nodes next."""
        if self._unit.phase is Phase.BACKWARD:
            self._unit.post_backward(self)
