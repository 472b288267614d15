"""Every torch that is supported runs the core, and warns of nothing that the core calls."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.diagnostics import check_finite, memory_tracker, parameter_norms
from tests.distributed.checkpoint_trainings import block_muon
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, batch, wrap
from tests.reference.models import Stack
from tests.stream_safety import record_streams

CORE = Path(__file__).parents[2] / "megatron_fsdp_v2"


@on_ranks(2, strategy=STRATEGIES)
def test_a_training_warns_of_nothing_that_will_change(strategy: str, tmp_path: Path) -> None:
    """Warnings about what will change, in a training with everything around it."""
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


def test_names_that_differ_between_versions_are_in_one_file() -> None:
    renamed = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single"}
    renamed |= {"reduce_scatter_single", "_all_gather_base", "_reduce_scatter_base"}
    named = {
        str(file.relative_to(CORE))
        for file in CORE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in renamed
        # What a backend has itself is called by torch, in every version by the same name.
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert named == set()


@on_ranks(2)
def test_a_gather_is_one_call_of_the_name_that_torch_has() -> None:
    name = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else ""
    name = name or "all_gather_into_tensor"
    calls: list[str] = []
    original = getattr(torch.distributed, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    model = wrap(Stack(), [])
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        model(batch(0))
        patch.setattr(torch.distributed, name, counted)
        model(batch(0))
    assert len(calls) == 1
