"""Command line `megatron-fsdp-v2`.

The subcommands are found through the entry-point group `megatron_fsdp_v2.commands`. An adapter adds
its own to that group, and so the core offers them without importing an adapter.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Protocol, cast

PROGRAM = "megatron-fsdp-v2"
COMMAND_GROUP = "megatron_fsdp_v2.commands"


class Command(Protocol):
    """A subcommand: what an entry point of the group `megatron_fsdp_v2.commands` resolves to.

    Attributes:
        help: One line for the list of subcommands.
    """

    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the subcommand's arguments to its parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Runs the subcommand and returns the exit status."""


class UnavailableCommand:
    """Stands in for a subcommand whose package cannot be imported, and says so when it is run.

    Attributes:
        help: One line for the list of subcommands.
    """

    def __init__(self, name: str, reason: ImportError) -> None:
        """Remembers what is missing.

        Args:
            name: The subcommand.
            reason: What importing it raised.
        """
        missing = reason.name or str(reason)
        self.help = f"(unavailable: {missing} cannot be imported)"
        self._sentence = (
            f"{PROGRAM} {name} needs {missing}, which cannot be imported: "
            "install this package with its extra, megatron-fsdp-v2[megatron]."
        )

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Accepts any arguments: what is wrong is the installation, not what was typed.

        Args:
            parser: The parser of the subcommand.
        """
        parser.set_defaults(any_arguments=True)

    def run(self, args: argparse.Namespace) -> int:
        """Writes the one sentence to standard error.

        Args:
            args: Not looked at.

        Returns:
            2, the status of a command that could not start.
        """
        del args
        sys.stderr.write(self._sentence + "\n")
        return 2


def discover_commands() -> dict[str, EntryPoint]:
    """Finds the subcommands that installed packages offer, without importing them.

    Returns:
        The entry points by subcommand name, sorted by name.
    """
    return {point.name: point for point in sorted(entry_points(group=COMMAND_GROUP))}


def load_command(point: EntryPoint) -> Command:
    """Imports one subcommand.

    Args:
        point: Its entry point.

    Returns:
        The subcommand, or an `UnavailableCommand` if something it imports is missing.
    """
    try:
        return cast(Command, point.load())
    except ImportError as error:
        return UnavailableCommand(point.name, error)


def installed_version() -> str:
    """Says which version of the package is installed.

    Returns:
        The program's name and the version; a tree that is run without being installed has none.
    """
    try:
        return f"{PROGRAM} {version(PROGRAM)}"
    except PackageNotFoundError:
        return f"{PROGRAM} (not installed: no version)"


def build_parser(
    commands: Mapping[str, EntryPoint], arguments: Sequence[str]
) -> argparse.ArgumentParser:
    """Builds the parser for one command line.

    Args:
        commands: The subcommands on offer.
        arguments: The command line. If it names a subcommand, only that one is imported: the others
            may need packages that take seconds to import.

    Returns:
        The parser; after parsing, the attribute `run` holds what to call, if a subcommand was
        named.
    """
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Tools for training with per-module fully_shard()."
    )
    parser.add_argument("--version", action="version", version=installed_version())
    named = next((word for word in arguments if not word.startswith("-")), "")
    chosen = {named: commands[named]} if named in commands else commands
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, point in chosen.items():
        command = load_command(point)
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        command.configure(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments, without the program's name; those of the process if None.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(discover_commands(), arguments)
    args, unknown = parser.parse_known_args(arguments)
    if unknown and not hasattr(args, "any_arguments"):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
