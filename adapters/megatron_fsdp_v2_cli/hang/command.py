"""`megatron-fsdp-v2 hang`: compare what every rank of a training that hangs has communicated."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_fsdp_v2_cli.hang.files import read
from megatron_fsdp_v2_cli.hang.report import lines


class _HangCommand:
    """`megatron-fsdp-v2 hang`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument(
            "files",
            nargs="+",
            type=Path,
            metavar="FILE",
            help="files rank_<rank>.ring of watch_collectives or --fsdp-hang-reports, or their "
            "folder",
        )
        parser.add_argument(
            "--all",
            action="store_true",
            help="print every place at which ranks are and the numbers of all ranks, however many "
            "there are",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print which rank differs, and what ranks did last."""
        sys.stdout.writelines(f"{line}\n" for line in lines(read(args.files), whole=args.all))
        return 0


command = _HangCommand()
