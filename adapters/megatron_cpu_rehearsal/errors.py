"""Errors that a user of Megatron's command line can cause."""

__all__ = ["FlagError", "RehearsalError"]


class FlagError(ValueError):
    """A flag, or a combination of flags, that is not supported; the message names it."""


class RehearsalError(FlagError):
    """Flags that a CPU cannot run, or a start without a GPU that did not ask for a rehearsal."""
