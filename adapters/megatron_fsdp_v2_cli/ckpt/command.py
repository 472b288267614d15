"""`megatron-fsdp-v2 ckpt`: inspect, verify, export and convert checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from megatron_fsdp_v2._text import listed, readable_size
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import MAX_SHARD_BYTES, Exported, convert, export
from megatron_fsdp_v2.checkpoint.plain_files import SAFETENSORS
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2_cli import arguments
from megatron_fsdp_v2_cli.ckpt.inspecting import inspect
from megatron_fsdp_v2_cli.ckpt.listing import listing, summary
from megatron_fsdp_v2_cli.progress import progress

_KINDS = "folder of torch's distributed checkpoint; .safetensors, its index or its folder; or .pt"
_SHOWN = 8


class _CheckpointCommand:
    """`megatron-fsdp-v2 ckpt`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the actions and their arguments."""
        actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

        def add(name: str, text: str, action: Any, **options: Any) -> argparse.ArgumentParser:
            added = actions.add_parser(name, help=text, description=text, **options)
            added.set_defaults(action=action)
            return added

        looks = add("inspect", "names, shapes, dtypes and sizes", _inspect)
        looks.add_argument("path", help=_KINDS)
        looks.add_argument("--json", action="store_true", help="for programs")
        looks.add_argument("--depth", type=arguments.count, help="parts of names; default: all")
        looks.add_argument("--filter", default="*", metavar="PATTERN", help="such as '*.bias'")
        looks.add_argument("--sizes", action="store_true", help="the largest first")
        checks = add("verify", "read every byte and compare checksums; 1 if damaged", _verify)
        checks.add_argument("path", help=_KINDS)
        text = "write the model as plain tensors in one file"
        exports = add("export", text, partial(_write, export))
        exports.add_argument("path", help="the checkpoint's folder")
        exports.add_argument("out_file", help="what to write: .safetensors or .pt")
        _add_file_options(exports)
        # Its options depend on --to, so that all words, options too, are parsed by the action.
        text = "from one kind of checkpoint to another"
        converts = add("convert", text, _convert, prefix_chars="\0", add_help=False)
        converts.add_argument("words", nargs="*")

    def run(self, args: argparse.Namespace) -> int:
        """Run an action."""
        status: int = args.action(args)
        return status


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


def _inspect(args: argparse.Namespace) -> int:
    contents = inspect(args.path)
    if args.json:
        sys.stdout.write(json.dumps(contents, indent=2) + "\n")
        return 0
    lines = listing(contents, args.depth, pattern=args.filter, largest_first=args.sizes)
    sys.stdout.writelines(f"{line}\n" for line in (*summary(contents), "", *lines))
    return 0


def _verify(args: argparse.Namespace) -> int:
    with progress("verify") as advance:
        report = verify(args.path, advance=advance)
    for line in (*report.problems, *report.notes):
        sys.stdout.write(f"{line}\n")
    count = len(report.problems)
    # Without checksums a damaged element cannot be detected.
    verdict = "undamaged" if report.nbytes else "nothing wrong was found"
    if count:
        verdict = f"DAMAGED ({count} problem{'s' * (count > 1)})"
    sys.stdout.write(
        f"{report.path}: {verdict}; {report.num_files} files, {readable_size(report.nbytes)} "
        "compared with checksums\n"
    )
    return int(not report.is_good)


def _convert(args: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser("megatron-fsdp-v2 ckpt convert", add_help=False)
    parser.add_argument(
        "--to",
        metavar="FORMAT",
        help=f"write a format of another program: {', '.join(_points()) or 'none is installed'}; "
        "its own options are shown by --to FORMAT --help",
    )
    name = parser.parse_known_args(args.words)[0].to
    parser.add_argument("-h", "--help", action="help")
    # The description of a converter says what it reads and writes.
    written = ".safetensors, .pt, or anything else for a folder"
    parser.add_argument("path", metavar="source", help=None if name else _KINDS)
    parser.add_argument("out_file", metavar="target", help=None if name else written)
    if name is None:
        _add_file_options(parser)
        return _write(convert, parser.parse_args(args.words))
    converter = find_converter(name)
    converter.configure(parser)
    parsed = parser.parse_args(args.words)
    return converter.run(Path(parsed.path), Path(parsed.out_file), parsed)


def _write(write: Callable[..., Exported], args: argparse.Namespace) -> int:
    if args.max_shard_size is not None and Path(args.out_file).suffix != SAFETENSORS:
        raise ValueError(
            f"--max-shard-size splits {SAFETENSORS} files; leave it out for {args.out_file}"
        )
    with progress("write") as advance:
        done = write(
            args.path,
            args.out_file,
            dtype=args.dtype,
            max_shard_bytes=args.max_shard_size or MAX_SHARD_BYTES,
            prefix=args.prefix,
            advance=advance,
        )
    *others, shown = done.files
    beside = f" and {len(others)} files beside it" if others else ""
    sys.stdout.write(f"{shown}{beside}: {done.num_tensors} tensors, {readable_size(done.nbytes)}\n")
    if done.left_out:
        parts = Counter(name.partition(".")[0] for name in done.left_out)
        counts = [f"{part} ({n} entries)" if n > 1 else part for part, n in parts.items()]
        sys.stdout.write(f"not of the model, and left out: {listed(counts, _SHOWN)}\n")
    return 0


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
            The exit status.

        Raises:
            ValueError: The conversion is not possible.
        """


def find_converter(name: str) -> Converter:
    """Import the converter to a format.

    Args:
        name: Its name.

    Raises:
        CheckpointError: No package offers it, or something that it imports is missing.
    """
    point = _points().get(name)
    if point is None:
        known = ", ".join(_points()) or "none: no installed package offers one"
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
    """Formats of installed packages, without importing them."""
    return {point.name: point for point in sorted(entry_points(group=CONVERTER_GROUP))}
