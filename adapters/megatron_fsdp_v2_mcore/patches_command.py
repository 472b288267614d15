"""`megatron-fsdp-v2 patches`: its arguments. `patches_table` does the work."""

from __future__ import annotations

import argparse


class _PatchesCommand:
    """`megatron-fsdp-v2 patches`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's arguments."""
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(self, args: argparse.Namespace) -> int:
        """Print the table. Return 1 if a patch does not fit, 2 if Megatron is not installed."""
        from megatron_fsdp_v2_mcore import patches_table

        return patches_table.run(as_json=args.json)


command = _PatchesCommand()
