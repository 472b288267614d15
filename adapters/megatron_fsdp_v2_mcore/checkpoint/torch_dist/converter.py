"""`megatron-fsdp-v2 ckpt convert --to torch_dist`: its arguments. `export` does the work."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


class _TorchDistConverter:
    """`megatron-fsdp-v2 ckpt convert --to torch_dist`; see `Converter`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this format."""
        parser.description = (
            "Export a checkpoint of a sharded run for Megatron's own optimizer: source is the "
            "folder that the run passed to --save; target is the folder to pass to --load, with "
            "--ckpt-format torch_dist."
        )
        parser.add_argument("--iteration", type=int, help="default: the latest")
        parser.add_argument(
            "--expert-model-parallel-size",
            type=int,
            help="size in the run that will load it; default: size in the run that saved it",
        )

    def run(self, source: Path, target: Path, args: argparse.Namespace) -> int:
        """Export, and print a summary."""
        from megatron_fsdp_v2._text import readable_size
        from megatron_fsdp_v2_mcore.checkpoint.torch_dist.export import export

        result = export(source, target, args.iteration, args.expert_model_parallel_size)
        sys.stdout.write(
            f"{result.path}: {result.num_tensors} tensors, {readable_size(result.num_bytes)}\n"
        )
        if result.omitted_optimizer is not None:
            sys.stdout.write(
                f"the state of --optimizer {result.omitted_optimizer} is not exported: load it "
                "with --no-load-optim or --finetune\n"
            )
        return 0


to_torch_dist = _TorchDistConverter()
