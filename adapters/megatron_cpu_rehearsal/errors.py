"""Errors that a user of Megatron's command line can cause."""

__all__ = ["FlagError", "RehearsalError"]


class FlagError(ValueError):
    """A flag, or a combination of flags, that is not supported; the message names it."""


class RehearsalError(FlagError):
    """A flag is not supported on a CPU, or no GPU is available and no rehearsal was requested."""
