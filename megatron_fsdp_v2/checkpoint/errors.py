"""What is wrong with a checkpoint, in one sentence for the user."""

from __future__ import annotations

__all__ = ["CheckpointError", "ReplacedError"]


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, damaged, of another model or not to be trusted."""


class ReplacedError(CheckpointError):
    """Another checkpoint took the place of the one that was being read."""
