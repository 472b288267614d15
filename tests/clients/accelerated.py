"""A training script as accelerate's guides write it, for `accelerate launch`.

accelerate shards on accelerators only, so one function sets what it would find there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from torch.utils.data import DataLoader

import megatron_fsdp_v2_for.accelerate
from tests.clients.differences import full_parameters, results_of
from tests.clients.test_accelerate import (
    BATCH,
    MICRO_BATCHES,
    epoch,
    llama,
    optimizer_of,
    texts,
)


def accelerator_of_the_configuration() -> Any:
    """Return `Accelerator()` as on an accelerator."""
    PartialState(cpu=True).distributed_type = DistributedType.FSDP
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator


def main(strategy: str, results: Path) -> None:
    """Train two epochs, and save losses, norms and parameters on rank 0."""
    megatron_fsdp_v2_for.accelerate.install(sharding_strategy=strategy)
    accelerator = accelerator_of_the_configuration()
    model = llama()
    optimizer, schedule = optimizer_of(model)
    loader = DataLoader(texts(), batch_size=BATCH)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, norms = [], []
    for _ in range(2):
        found = epoch(accelerator, model, optimizer, loader, schedule)
        losses += found[0]
        norms += found[1]
    parameters = full_parameters(model)
    if accelerator.is_main_process:
        torch.save(results_of(losses, norms, parameters), results)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
