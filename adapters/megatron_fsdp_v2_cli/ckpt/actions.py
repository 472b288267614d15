"""The actions of `megatron-fsdp-v2 ckpt`: inspect, verify, export and convert checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_fsdp_v2._text import listed, readable_size
from megatron_fsdp_v2.checkpoint.exporting import MAX_SHARD_BYTES, Exported, convert, export
from megatron_fsdp_v2.checkpoint.plain_files import SAFETENSORS
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2_cli.ckpt.inspecting import inspect
from megatron_fsdp_v2_cli.ckpt.listing import listing, selected, summary
from megatron_fsdp_v2_cli.conversions import converted
from megatron_fsdp_v2_cli.progress import progress

_SHOWN = 8


def _inspect(args: argparse.Namespace) -> int:
    contents = inspect(args.path)
    if args.json:
        found = selected(contents, args.depth, pattern=args.filter, largest_first=args.sizes)
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
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


def _write(write: Callable[..., Exported], args: argparse.Namespace) -> int:
    args = converted(args)
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


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "inspect": _inspect,
    "verify": _verify,
    "export": partial(_write, export),
    "convert": partial(_write, convert),
}
"""By name; each takes the parsed arguments and returns the exit status."""
