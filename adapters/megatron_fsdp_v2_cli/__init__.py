"""Command line `megatron-fsdp-v2`.

A command line is parsed before torch is imported, which takes seconds: the module of a command is
imported if the command line names the command, has its arguments alone, and imports what does the
work when the command runs. The core reads no command lines: its commands are in this package.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from megatron_fsdp_v2_cli.parser import Parser

__all__ = ["COMMANDS", "Command", "build_parser", "main"]

PROGRAM = "megatron-fsdp-v2"

COMMANDS = {
    "ckpt": (
        "inspect, verify, export or convert a checkpoint",
        "megatron_fsdp_v2_cli.ckpt.command",
    ),
    "hang": (
        "which rank of a training that hangs differs from the others, and at which unit",
        "megatron_fsdp_v2_cli.hang.command",
    ),
    "patches": (
        "list where Megatron is patched, why, and whether each patch fits",
        "megatron_fsdp_v2_mcore.patches_command",
    ),
    "plan": (
        "memory, communication and time of a training before it runs",
        "megatron_fsdp_v2_cli.plan.command",
    ),
    "prove": (
        "prove on a few CPU ranks that a configuration trains as Megatron's own DDP does",
        "megatron_fsdp_v2_mcore.prove.command",
    ),
    "trace": (
        "timeline of a step from torch's profiler: computation, communication, what is exposed",
        "megatron_fsdp_v2_trace.command",
    ),
}
"""Commands: one line of help, and the module whose attribute `command` is the `Command`.

These modules import neither torch nor Megatron.
"""

_ENDED_BY_PIPE = 141
"""Exit status of a program that SIGPIPE ends, as shells report it."""
_INTERRUPTED = 130


class Command(Protocol):
    """A command; see `COMMANDS`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to its parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Import what does the work, run the command and return the exit status.

        Raises:
            ImportError: A package is missing; `main` names it.
            ValueError: The input is invalid; `main` prints the message.
            OSError: A file cannot be read or written; likewise.
        """


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser for one command line.

    Args:
        words: The command line. The command that it names is imported.

    Returns:
        The parser. After parsing, the attribute `run` is the function to call, if a command was
        named.

    Raises:
        ImportError: The command needs a package that cannot be imported.
    """
    parser = Parser(prog=PROGRAM, description="Tools for training with per-module fully_shard().")
    parser.add_argument("--version", action="version", version=_installed_version())
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    named = next((word for word in words if not word.startswith("-")), "")
    for name, (text, module) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text)
        if name == named:
            command: Command = importlib.import_module(module).command
            command.configure(subparser)
            subparser.set_defaults(run=command.run)
    return parser


def _installed_version() -> str:
    try:
        return f"{PROGRAM} {version(PROGRAM)}"
    except PackageNotFoundError:
        return f"{PROGRAM} (not installed: no version)"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        words: The arguments without the program's name; None for the arguments of the process.

    Returns:
        The exit status: that of the command; 2 after an error, with one sentence on standard error.
    """
    # Megatron warns of optional packages that it does not find; torch of a missing CUDA.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    given = list(sys.argv[1:] if words is None else words)
    try:
        if any("\0" in word for word in given):
            raise ValueError("a word of the command line contains a null byte")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.")
            status = _run(given)
        # A closed pipe is found when buffered output is written.
        sys.stdout.flush()
    except BrokenPipeError:
        # Python writes what is left at its end, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ENDED_BY_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ImportError as error:
        missing = error.name or str(error)
        sys.stderr.write(
            f"{PROGRAM} {' '.join(given[:1])} needs {missing}, which cannot be imported: install "
            f"this package with its extra, {PROGRAM}[megatron]\n"
        )
        return 2
    except OSError as error:
        sys.stderr.write(f"{_described(error)}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except RecursionError as error:
        sys.stderr.write(f"{PROGRAM} {' '.join(given)}: a file is nested too deeply ({error})\n")
        return 2
    return status


def _described(error: OSError) -> str:
    """Describe an error of a file without its number, such as "run.json: is a directory"."""
    if error.filename is None or not error.strerror:
        return error.strerror or str(error)
    return f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"


def _run(words: Sequence[str]) -> int:
    completing = os.environ.get("COMP_LINE", "").split()[1:]
    parser = build_parser(completing or words)
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        hint = " (training flags follow --)" if hasattr(args, "flags") else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
