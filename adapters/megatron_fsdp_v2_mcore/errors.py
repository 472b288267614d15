"""Errors a user of Megatron's command line can cause."""

from __future__ import annotations

__all__ = ["FlagError"]


class FlagError(ValueError):
    """A flag, or a combination of flags, that this package cannot honour; the message names it."""
