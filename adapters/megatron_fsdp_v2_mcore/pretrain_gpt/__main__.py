"""Entry of `python -m megatron_fsdp_v2_mcore.pretrain_gpt`, run under torchrun."""

from __future__ import annotations

import importlib
import sys

from megatron_fsdp_v2_mcore.launch import launch


def main() -> None:
    """Train as the command line says, in Megatron's flags and ours."""
    with launch(sys.argv[1:]) as argv:
        sys.argv[1:] = argv
        # By name, since a rehearsal has to be under way before Megatron is imported.
        importlib.import_module("megatron_fsdp_v2_mcore.pretrain_gpt.gpt").train()


if __name__ == "__main__":
    main()
