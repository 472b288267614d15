"""`megatron-fsdp-v2 ckpt`: inspect, verify, export and convert checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, cast, override

import torch

from megatron_fsdp_v2._text import listed, parse_size, readable_size
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import MAX_SHARD_BYTES, Exported, convert, export
from megatron_fsdp_v2.checkpoint.inspecting import inspect, tree
from megatron_fsdp_v2.checkpoint.plain_tensors import DTYPES, Progress
from megatron_fsdp_v2.checkpoint.verifying import verify

__all__ = ["CONVERTER_GROUP", "Converter", "command", "find_converter"]

_KINDS = "folder of torch's distributed checkpoint; .safetensors, its index or its folder; or .pt"
_SHOWN = 8


class _CheckpointCommand:
    """`megatron-fsdp-v2 ckpt`."""

    help = "look into a checkpoint, verify, export or convert it"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the actions and their arguments."""
        actions = parser.add_subparsers(
            title="actions", metavar="ACTION", required=True, parser_class=_ActionParser
        )
        add = _adder(actions)
        looks = add("inspect", "names, shapes, dtypes and sizes", _inspect)
        looks.add_argument("path", help=_KINDS)
        looks.add_argument("--json", action="store_true", help="for programs")
        looks.add_argument("--depth", type=int, help="parts of names to show; default: all")
        checks = add("verify", "read every byte and compare checksums; 1 if damaged", _verify)
        checks.add_argument("path", help=_KINDS)
        exports = add("export", "write the model as plain tensors in one file", _export)
        exports.add_argument("path", help="the checkpoint's folder")
        exports.add_argument("out_file", help="what to write: .safetensors or .pt")
        converts = add("convert", "from one kind of checkpoint to another", _convert)
        converts.add_argument("path", metavar="source", help=_KINDS)
        converts.add_argument(
            "out_file", metavar="target", help=".safetensors, .pt, or anything else for a folder"
        )
        names = _converter_names()
        converts.add_argument(
            "--to",
            metavar="FORMAT",
            help=f"write a format of another program: {', '.join(names) or 'none is installed'}; "
            "its own options are shown by --to FORMAT --help",
        )
        _add_file_options(exports)
        converts.complete = _complete_convert

    def run(self, args: argparse.Namespace) -> int:
        """Run an action; on an error print one sentence to standard error and return 2."""
        try:
            status: int = args.action(args)
        except (CheckpointError, ValueError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            return 2
        return status


class _ActionParser(argparse.ArgumentParser):
    """Adds options that depend on the rest of the command line.

    Attributes:
        complete: Adds them, given the command line.
    """

    complete: Callable[[argparse.ArgumentParser, Sequence[str]], None] | None = None

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line, after adding these options."""
        if self.complete is not None:
            complete, self.complete = self.complete, None
            complete(self, args or ())
        return super().parse_known_args(args, namespace)


def _complete_convert(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the options of the format of `--to`, or those of files."""
    first = argparse.ArgumentParser(prog=parser.prog, add_help=False)
    first.add_argument("--to")
    name = first.parse_known_args(list(words))[0].to
    if name is None:
        _add_file_options(parser)
        return
    try:
        converter = find_converter(name)
    except CheckpointError as error:
        parser.error(str(error))
    converter.configure(parser)
    parser.set_defaults(action=partial(_convert_to, converter))


def _convert_to(converter: Converter, args: argparse.Namespace) -> int:
    return converter.run(Path(args.path), Path(args.out_file), args)


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        type=_dtype,
        help=f"of floating-point tensors, {', '.join(_NAMES)}; default: as they are",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default=MAX_SHARD_BYTES,
        metavar="SIZE",
        help="of a .safetensors file, such as 5GB or 500MiB; default: 5GB",
    )
    parser.add_argument("--prefix", help="what names of the model begin with; default: found out")


_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def _adder(
    actions: argparse._SubParsersAction[_ActionParser],
) -> Callable[[str, str, Callable[[argparse.Namespace], int]], _ActionParser]:
    def add(name: str, text: str, action: Callable[[argparse.Namespace], int]) -> _ActionParser:
        parser = actions.add_parser(name, help=text, description=text)
        parser.set_defaults(action=action)
        return parser

    return add


def _dtype(text: str) -> torch.dtype:
    if text not in _NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_NAMES)}")
    return _NAMES[text]


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _inspect(args: argparse.Namespace) -> int:
    contents = inspect(args.path)
    if args.json:
        sys.stdout.write(json.dumps(contents.as_dict(), indent=2) + "\n")
        return 0
    sys.stdout.writelines(f"{line}\n" for line in tree(contents, args.depth))
    return 0


def _verify(args: argparse.Namespace) -> int:
    report = verify(args.path, _progress("read"))
    for line in (*report.problems, *report.notes):
        sys.stdout.write(f"{line}\n")
    count = len(report.problems)
    # Undamaged is what has been compared; where nothing could be, nothing was found.
    verdict = "undamaged" if report.nbytes else "nothing wrong was found"
    if count:
        verdict = f"DAMAGED ({count} problem{'s' * (count > 1)})"
    sys.stdout.write(
        f"{report.path}: {verdict}; {report.num_files} files, {readable_size(report.nbytes)} "
        "compared with checksums\n"
    )
    return int(not report.is_good)


def _export(args: argparse.Namespace) -> int:
    return _written_by(export, args)


def _convert(args: argparse.Namespace) -> int:
    return _written_by(convert, args)


def _written_by(write: Callable[..., Exported], args: argparse.Namespace) -> int:
    return _report(
        write(
            args.path,
            args.out_file,
            dtype=args.dtype,
            max_shard_bytes=args.max_shard_size,
            prefix=args.prefix,
            progress=_progress("written"),
        )
    )


def _report(done: Exported) -> int:
    files = [str(Path(path)) for path in done.files]
    shown = files[-1] if len(files) == 1 else f"{files[-1]} and {len(files) - 1} files beside it"
    sys.stdout.write(
        f"{shown}: {done.num_tensors} tensors, {readable_size(done.nbytes)}, one at a time (the "
        f"largest has {readable_size(done.largest)})\n"
    )
    if done.left_out:
        names = listed(done.left_out, _SHOWN)
        sys.stdout.write(f"not of the model, and left out: {names}\n")
    return 0


def _progress(verb: str) -> Progress | None:
    """Show progress on a terminal; None if standard error is not one."""
    if not sys.stderr.isatty():
        return None
    shown = [-1]

    def show(done: int, total: int) -> None:
        percent = 100 * done // total if total else 100
        if percent != shown[0]:
            shown[0] = percent
            end = "\n" if done >= total else ""
            sys.stderr.write(f"\r{percent:3d} % of {readable_size(total)} {verb}{end}")
            sys.stderr.flush()

    return show


command = _CheckpointCommand()


CONVERTER_GROUP = "megatron_fsdp_v2.checkpoint_converters"


class Converter(Protocol):
    """Writes checkpoints of one format."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the format; source and target are added already."""

    def run(self, source: Path, target: Path, args: argparse.Namespace) -> int:
        """Convert, and print a summary to standard output.

        Args:
            source: What to read.
            target: What to write.
            args: The command line with this format's options.

        Returns:
            The exit status: 2, after one sentence on standard error, if it fails.
        """
        ...


def _converter_names() -> list[str]:
    """Return the formats of installed packages, without importing them."""
    return sorted(_points())


def find_converter(name: str) -> Converter:
    """Import the converter to a format.

    Args:
        name: One of `_converter_names()`.

    Raises:
        CheckpointError: No package offers it, or something that it imports is missing.
    """
    point = _points().get(name)
    if point is None:
        known = ", ".join(_converter_names()) or "none: no installed package offers one"
        raise CheckpointError(f"no format is called {name!r}; known are {known}")
    try:
        return cast(Converter, point.load())
    except ImportError as error:
        missing = error.name or str(error)
        raise CheckpointError(
            f"the format {name} needs {missing}, which cannot be imported: install this package "
            "with its extra, megatron-fsdp-v2[megatron]"
        ) from error


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=CONVERTER_GROUP)}
