"""`megatron-fsdp-v2 ckpt`: its arguments. `actions` reads and writes checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from megatron_fsdp_v2_cli import arguments
from megatron_fsdp_v2_cli.parser import Parser

_KINDS = "folder of torch's distributed checkpoint; .safetensors, its index or its folder; or .pt"


class _CheckpointCommand:
    """`megatron-fsdp-v2 ckpt`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the actions and their arguments."""
        actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

        def add(name: str, text: str, **options: Any) -> argparse.ArgumentParser:
            added = actions.add_parser(name, help=text, description=text, **options)
            added.set_defaults(action=name)
            return added

        looks = add("inspect", "names, shapes, dtypes and sizes")
        looks.add_argument("path", help=_KINDS)
        looks.add_argument("--json", action="store_true", help="for programs")
        looks.add_argument("--depth", type=arguments.count, help="parts of names; default: all")
        looks.add_argument("--filter", default="*", metavar="PATTERN", help="such as '*.bias'")
        looks.add_argument("--sizes", action="store_true", help="the largest first")
        checks = add("verify", "read every byte and compare checksums; 1 if damaged")
        checks.add_argument("path", help=_KINDS)
        exports = add("export", "write the model as plain tensors in one file")
        exports.add_argument("path", help="the checkpoint's folder")
        exports.add_argument("out_file", help="what to write: .safetensors or .pt")
        _add_file_options(exports)
        # Its options depend on --to, so that all words, options too, are parsed by the action.
        converts = add("convert", _CONVERT, prefix_chars="\0", add_help=False)
        converts.add_argument("words", nargs="*")

    def run(self, args: argparse.Namespace) -> int:
        """Run an action."""
        if args.action == "convert":
            return _convert(args.words)
        return _act(args.action, args)


_CONVERT = "from one kind of checkpoint to another"


def _act(action: str, args: argparse.Namespace) -> int:
    from megatron_fsdp_v2_cli.ckpt.actions import ACTIONS

    return ACTIONS[action](args)


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        type=arguments.dtype,
        help="of floating-point tensors, such as bf16; default: as they are",
    )
    parser.add_argument(
        "--max-shard-size",
        type=arguments.size,
        metavar="SIZE",
        help="of a .safetensors file, such as 5GB or 500MiB; default: 5GB",
    )
    parser.add_argument("--prefix", help="what names of the model begin with; default: found out")


def _convert(words: Sequence[str]) -> int:
    parser = Parser("megatron-fsdp-v2 ckpt convert", description=_CONVERT, add_help=False)
    parser.add_argument(
        "--to",
        metavar="FORMAT",
        help=f"write a format of another program: {', '.join(_points()) or 'none is installed'}; "
        "its own options are shown by --to FORMAT --help",
    )
    name = parser.parse_known_args(words)[0].to
    parser.add_argument("-h", "--help", action="help")
    # The description of a converter says what it reads and writes.
    written = ".safetensors, .pt, or anything else for a folder"
    parser.add_argument("path", metavar="source", help=None if name else _KINDS)
    parser.add_argument("out_file", metavar="target", help=None if name else written)
    if name is None:
        _add_file_options(parser)
        return _act("convert", parser.parse_args(words))
    converter = find_converter(name)
    converter.configure(parser)
    parsed = parser.parse_args(words)
    return converter.run(Path(parsed.path), Path(parsed.out_file), parsed)


command = _CheckpointCommand()


CONVERTER_GROUP = "megatron_fsdp_v2.checkpoint_converters"


class Converter(Protocol):
    """Writes checkpoints of one format. Its module should not import torch: `run` does."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the format; source and target are added already."""

    def run(self, source: Path, target: Path, args: argparse.Namespace) -> int:
        """Convert, and print a summary to standard output.

        Args:
            source: What to read.
            target: What to write.
            args: The command line with this format's options.

        Returns:
            The exit status.

        Raises:
            ValueError: The conversion is not possible.
        """


def find_converter(name: str) -> Converter:
    """Import the converter to a format.

    Args:
        name: Its name.

    Raises:
        ValueError: No package offers it, or something that it imports is missing.
    """
    point = _points().get(name)
    if point is None:
        known = ", ".join(_points()) or "none: no installed package offers one"
        raise ValueError(f"no format is called {name!r}; known are {known}")
    try:
        return cast(Converter, point.load())
    except ImportError as error:
        missing = error.name or str(error)
        raise ValueError(
            f"the format {name} needs {missing}, which cannot be imported: install this package "
            "with its extra, megatron-fsdp-v2[megatron]"
        ) from error


def _points() -> dict[str, EntryPoint]:
    """Formats of installed packages, without importing them."""
    return {point.name: point for point in sorted(entry_points(group=CONVERTER_GROUP))}
