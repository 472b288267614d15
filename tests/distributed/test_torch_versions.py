"""Every torch that is supported runs the core, and warns of nothing that the core calls."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.diagnostics import check_finite, memory_tracker, parameter_norms
from megatron_fsdp_v2.diagnostics.stream_safety import record_streams
from megatron_fsdp_v2.optim import Muon
from tests.ranks import RankPools
from tests.reference.models import Stack

CORE = Path(__file__).parents[2] / "megatron_fsdp_v2"
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def warned_of(strategy: str, folder: str) -> list[str]:
    """Warnings about what will change, in a training with everything around it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
        model: Any = Stack()
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh, sharding_strategy=strategy, check_ranks="always")
        matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
        known = set(map(id, matrices))
        others = [p for p in model.parameters() if id(p) not in known]
        optimizer = Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=0.01)
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
    return [str(w.message) for w in caught if issubclass(w.category, kinds)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_warns_of_nothing_that_will_change(
    pools: RankPools, strategy: str, tmp_path: Path
) -> None:
    assert pools(2).run(warned_of, strategy, str(tmp_path)) == [[]] * 2


def test_names_that_differ_between_versions_are_in_one_file() -> None:
    renamed = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single"}
    renamed |= {"reduce_scatter_single", "_all_gather_base", "_reduce_scatter_base"}
    named = {
        str(file.relative_to(CORE))
        for file in CORE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in renamed
    }
    assert named == set()


def collectives_called() -> list[str]:
    """Names of the gathers that an evaluation calls in torch, where others may replace them."""
    name = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else ""
    name = name or "all_gather_into_tensor"
    calls: list[str] = []
    original = getattr(torch.distributed, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    model = fully_shard(Stack(), mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        model(torch.randn(2, 5))
    setattr(torch.distributed, name, counted)
    try:
        with torch.no_grad():
            model(torch.randn(2, 5))
    finally:
        setattr(torch.distributed, name, original)
    return calls


def test_a_gather_is_one_call_of_the_name_that_torch_has(pools: RankPools) -> None:
    for calls in pools(2).run(collectives_called):
        assert len(calls) == 1
