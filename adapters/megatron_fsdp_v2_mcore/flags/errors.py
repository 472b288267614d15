"""Messages about flags of Megatron's command line that are not supported."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from megatron_cpu_rehearsal.errors import FlagError
from megatron_fsdp_v2_cli.parser import did_you_mean

__all__ = [
    "FlagError",
    "flag_of",
    "optimizer_field",
    "parser_errors_as_flag_errors",
    "rejections_as_flag_errors",
]


def flag_of(name: str) -> str:
    """Return the flag of a field of Megatron's arguments, by Megatron's usual naming."""
    return f"--{name.replace('_', '-')}"


def optimizer_field(name: str, value: Any) -> str:
    """Format a field of Megatron's `OptimizerConfig` for a message of a script without flags."""
    return f"OptimizerConfig.{name} = {value!r}"


@contextlib.contextmanager
def rejections_as_flag_errors(beginning: str) -> Iterator[None]:
    """Convert Megatron's errors about a command line to `FlagError`.

    Megatron checks flags with assertions and plain exceptions, some of them while it builds a
    model.

    Args:
        beginning: The beginning of the message.

    Raises:
        FlagError: Megatron raised such an error, which is its cause.
    """
    try:
        yield
    except FlagError:
        raise
    except (AssertionError, ValueError, RuntimeError, ImportError) as error:
        # For an assertion without a message, the message is its source line.
        frames = traceback.extract_tb(error.__traceback__)
        raise FlagError(f"{beginning}: {str(error) or frames[-1].line}") from error


@contextlib.contextmanager
def parser_errors_as_flag_errors() -> Iterator[None]:
    """Convert errors of Megatron's parser, which prints its usage of 700 lines, to `FlagError`.

    Raises:
        FlagError: The parser rejected the command line. The message is the parser's last line.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as leaving:
        usage, found, message = said.getvalue().rpartition(": error: ")
        if leaving.code != 2 or not found:
            raise
        said = io.StringIO()
        message = " ".join(message.split())
        # The usage names all flags, and choices in braces.
        known = re.findall(r"--[a-z][\w-]*", usage)
        choices = re.findall(r"'([^']*)'", message.partition("choose from")[2])
        raise FlagError(message + did_you_mean(message, choices or known)) from None
    finally:
        sys.stderr.write(said.getvalue())
