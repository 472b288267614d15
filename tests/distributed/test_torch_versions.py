"""Every supported version of torch runs the core without deprecation warnings."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.diagnostics import check_finite, memory_tracker, parameter_norms
from tests.cases import quick_only
from tests.distributed.checkpoint_trainings import block_muon
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, wrap
from tests.reference.models import Stack
from tests.stream_safety import record_streams


@on_ranks(2, strategy=quick_only(STRATEGIES, "optim", "optim_grads_params"))
def test_training_emits_no_deprecation_warnings(strategy: str, tmp_path: Path) -> None:
    """A training with diagnostics, clipping and checkpoints."""
    folder = str(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
        model = wrap(Stack(), mesh=mesh, sharding_strategy=strategy, check_ranks="always")
        optimizer = block_muon(model, lr=0.01)
        for _ in range(2):
            with record_streams(model), memory_tracker(model, optimizer):
                model(torch.randn(2, 5)).square().mean().backward()
                check_finite(model)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        parameter_norms(model)
        checkpoint.save(f"{folder}/saved", model, optimizer)
        checkpoint.load(f"{folder}/saved", model, optimizer)
        for param in model.parameters():
            param.full_tensor()
    kinds = (FutureWarning, DeprecationWarning, PendingDeprecationWarning)
    assert [str(w.message) for w in caught if issubclass(w.category, kinds)] == []
