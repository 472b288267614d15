"""Nodes of the graph of a world, and the order of its uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp_v2.runtime.machine.state import Forward
from tests.machine.executors import Unit, require


@dataclass
class Node:
    """One forward in the graph: the forwards of other units that it called, in order."""

    unit: int
    forward: Forward | None
    is_checkpointed: bool
    children: list[Node] = field(default_factory=list)
    version: int = -1
    has_own: bool = True  # Whether its own weights are used.
    use: tuple[Any, int, bool] | None = None  # of a parameter itself, in place of a forward

    @property
    def passed(self) -> Any:
        """The pass that it is part of."""
        if self.use is not None:
            return self.use[0]
        assert self.forward is not None
        return self.forward.passed


@dataclass
class Order:
    """Uses of units in a pass, each predicted if the pass repeats the last one so far."""

    expected: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def following(self) -> list[int]:
        """Return the uses that are expected of the next pass."""
        return self.used or self.expected

    def use(self, unit: Unit, *, was_gathered: bool) -> None:
        """Check that a use that begins, and that repeats the last pass, was gathered ahead."""
        self.used.append(unit.number)
        is_known = self.expected[: len(self.used)] == self.used and len(self.used) > 1
        if is_known and unit.world.predicts():
            require(was_gathered, f"{unit.name} is not gathered ahead of its use")
