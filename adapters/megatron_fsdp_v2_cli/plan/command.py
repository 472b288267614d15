"""`megatron-fsdp-v2 plan`: its arguments are in `arguments`, and `planning` does the work."""

from __future__ import annotations

import argparse

from megatron_fsdp_v2_cli.plan import arguments


class _PlanCommand:
    """`megatron-fsdp-v2 plan`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the model, the machine, the compared strategies and the output."""
        arguments.configure(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Print the plan."""
        from megatron_fsdp_v2_cli.plan import planning

        return planning.run(args)


command = _PlanCommand()
