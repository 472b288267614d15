"""Command line `megatron-fsdp-v2`.

Subcommands are entry points of the group `megatron_fsdp_v2.commands`. An adapter adds its own to
that group, so the core offers them without importing an adapter.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Protocol, cast

PROGRAM = "megatron-fsdp-v2"
COMMAND_GROUP = "megatron_fsdp_v2.commands"


class Command(Protocol):
    """A subcommand, the object of an entry point of the group `megatron_fsdp_v2.commands`.

    Attributes:
        help: One line for the list of subcommands.
    """

    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's arguments to its parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the subcommand and return the exit status."""


class UnavailableCommand:
    """Placeholder for a subcommand whose package cannot be imported; running it prints an error.

    Attributes:
        help: One line for the list of subcommands.
    """

    def __init__(self, name: str, reason: ImportError) -> None:
        """Store the import error.

        Args:
            name: The subcommand.
            reason: The exception raised by the import.
        """
        missing = reason.name or str(reason)
        self.help = f"(unavailable: {missing} cannot be imported)"
        self._sentence = (
            f"{PROGRAM} {name} needs {missing}, which cannot be imported: "
            "install this package with its extra, megatron-fsdp-v2[megatron]."
        )

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Accept any arguments, since the error is in the installation.

        Args:
            parser: The parser of the subcommand.
        """
        parser.set_defaults(any_arguments=True)

    def run(self, args: argparse.Namespace) -> int:
        """Print the error to standard error.

        Args:
            args: Ignored.

        Returns:
            2, the exit status of a command that could not start.
        """
        del args
        sys.stderr.write(self._sentence + "\n")
        return 2


def discover_commands() -> dict[str, EntryPoint]:
    """Find the subcommands of installed packages without importing them.

    Returns:
        The entry points by subcommand name, sorted by name.
    """
    return {point.name: point for point in sorted(entry_points(group=COMMAND_GROUP))}


def load_command(point: EntryPoint) -> Command:
    """Import one subcommand.

    Args:
        point: Its entry point.

    Returns:
        The subcommand, or an `UnavailableCommand` if one of its imports is missing.
    """
    try:
        return cast(Command, point.load())
    except ImportError as error:
        return UnavailableCommand(point.name, error)


def installed_version() -> str:
    """Return the program's name and installed version.

    Returns:
        The name and the version; the name alone if the package is not installed.
    """
    try:
        return f"{PROGRAM} {version(PROGRAM)}"
    except PackageNotFoundError:
        return f"{PROGRAM} (not installed: no version)"


def build_parser(
    commands: Mapping[str, EntryPoint], arguments: Sequence[str]
) -> argparse.ArgumentParser:
    """Build the parser for one command line.

    Args:
        commands: The available subcommands.
        arguments: The command line. If it names a subcommand, only that subcommand is imported:
            others may need packages that take seconds to import.

    Returns:
        The parser. After parsing, the attribute `run` is the function to call if a subcommand was
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
    """Run the command line.

    Args:
        argv: The arguments without the program's name; None for the arguments of the process.

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
