"""`megatron-fsdp-v2 prove`: its arguments. `proving` does the work."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_fsdp_v2_cli import arguments


class _ProveCommand:
    """`megatron-fsdp-v2 prove`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the job, the runs and the output."""
        parser.usage = (
            "megatron-fsdp-v2 prove [options] -- <training flags>\n"
            "       megatron-fsdp-v2 prove [options] --script job.sh\n"
            "       megatron-fsdp-v2 prove [options] --yaml job.yaml"
        )
        parser.add_argument("flags", nargs="*", help="training flags, after --")
        parser.add_argument(
            "--script",
            type=Path,
            metavar="FILE",
            help="a bash script that starts the job; it is run, but torchrun, python, srun and all "
            "other programs that it starts are only recorded",
        )
        parser.add_argument("--yaml", type=Path, metavar="FILE", help="flags as a YAML file")
        parser.add_argument("--ranks", type=arguments.count, metavar="N", help="ranks of the job")
        parser.add_argument(
            "--local-ranks",
            type=arguments.count,
            metavar="N",
            help="largest number of ranks of a run; default: 8",
        )
        parser.add_argument(
            "--device",
            choices=["cpu", "cuda"],
            default="cpu",
            help="cuda runs on this node's GPUs, without a rehearsal; default: cpu",
        )
        parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with curves")
        parser.add_argument("--json", metavar="FILE", help="write data; - for standard output")

    def run(self, args: argparse.Namespace) -> int:
        """Prove the configuration, and print the report."""
        from megatron_fsdp_v2_mcore.prove import proving

        return proving.run(args)


command = _ProveCommand()
