"""Uses that weights are gathered for."""

from __future__ import annotations

import enum


class WeightUse(enum.Flag):
    """Uses of gathered weights."""

    FORWARD = enum.auto()
    """A forward, or its recomputation."""
    BACKWARD = enum.auto()
    """A backward: gradients of inputs and weights."""
    BOTH = FORWARD | BACKWARD
