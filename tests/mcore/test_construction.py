"""Construction of models: initial weights on the meta device, and process groups of gathers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.cases import quick_if
from tests.mcore import flags as f
from tests.mcore.checkpoint_values import digests, merged_digests
from tests.mcore.session import enter_rehearsal
from tests.mcore.trained import on_megatron, trained
from tests.ranks import RankPools

ONE_STEP = "--global-batch-size 8 --train-iters 1 --lr 0"
META = "--init-model-with-meta-device"


TENSOR = f"{f.TP2} --init-method-std 0.05"


MOE = f"{f.ALLTOALL} --moe-grouped-gemm"
GATE = "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate"
BUILT: dict[str, str] = {
    "combined": f"{MOE} {f.EP2} {TENSOR} --sequence-parallel {f.UNTIED} --bf16",
    "pipeline-tied": f.PP2,
    "virtual-stages": f"{MOE} {f.VPP2}",
    "shared-expert-gate": f"{MOE} {GATE} --bf16",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [quick_if(name == "shared-expert-gate", BUILT[name], id=name) for name in BUILT]
)
def test_model_built_on_the_meta_device_starts_from_the_same_weights(
    megatron: RankPools, flags: str
) -> None:
    """Weights are bitwise identical, and so are later random numbers: dropout changes the loss."""
    batch = "--global-batch-size 16" if "pipeline" in flags else ""
    words = [ONE_STEP, f.fsdp(), flags, "--hidden-dropout 0.1", batch]
    real, late = (trained(megatron, 4, *words, meta, probe=digests) for meta in ("", META))
    # All ranks hold shards of the same full weight, whatever random numbers each rank drew.
    assert merged_digests(late.extras) == merged_digests(real.extras)
    assert real.losses == late.losses


@on_megatron(2)
def test_first_rank_logs_that_initial_values_may_differ() -> None:
    """The layer's class claims to be one of Transformer Engine's."""
    enter_rehearsal()
    from megatron_fsdp_v2_mcore.model import initialize

    kind = type("Linear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch"})
    said: dict[str, list[str]] = {}
    for device in ("meta", "cpu"):
        with torch.device(device):
            chunk = torch.nn.Sequential(kind(4, 4))
        with mock.patch.object(initialize._logger, "log") as log:
            initialize.initializer(SimpleNamespace(), chunk)
        said[device] = [str(call.args[1]) for call in log.mock_calls]
    assert len(said["meta"]) == (dist.get_rank() == 0)
    assert all("initial values differ from those without the flag" in line for line in said["meta"])
    assert said["cpu"] == []


@on_megatron(2)
def test_matching_gather_group_of_a_collection_is_used() -> None:
    """A collection has a matching group, none, or a group of other ranks."""
    from megatron_fsdp_v2_mcore.model.meshes import Meshes, gather_groups

    mesh = init_device_mesh("cpu", (2,))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    given = dist.new_group([0, 1])
    found: list[Any] = []
    for group, are_made in ((None, False), (None, True), (given, False), (alone, False)):
        collection = SimpleNamespace(dp_cp_ag=group)
        made = gather_groups(collection, Meshes(mesh, None), None, creates=are_made).get(mesh)
        again = gather_groups(collection, Meshes(mesh, None), None, creates=are_made).get(mesh)
        assert made is again
        found.append(None if made is None else (made is given, made.size()))
    assert found == [None, (False, 2), (True, 2), (False, 2)]
