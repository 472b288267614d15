"""Entry of `python -m megatron_fsdp_v2_mcore.pretrain_gpt`, run under torchrun."""

from __future__ import annotations

import importlib
import sys

from megatron_fsdp_v2_mcore.launch import launch


def main() -> None:
    """Train with the flags of Megatron and of this package."""
    with launch(sys.argv[1:]) as argv:
        sys.argv[1:] = argv
        # Imported on demand, since a rehearsal must start before Megatron is imported.
        importlib.import_module("megatron_fsdp_v2_mcore.pretrain_gpt.gpt").train()


if __name__ == "__main__":
    main()
