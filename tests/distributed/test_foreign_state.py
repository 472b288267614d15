"""Optimizers that keep their state as plain DTensors: saved and loaded like any other's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron_fsdp_v2 import checkpoint
from tests.distributed.checkpoint_trainings import Sharding, net, train
from tests.ranks import RankPools
from tests.reference.wrapping_adam import WrappingAdam


def losses_around_a_save(
    folder: str, way: str, strategy: str, *, first: bool, on: bool
) -> list[float]:
    """Losses of steps 3 to 5, with a save before them here, or in other ranks."""
    model = net(Sharding((2,), strategy) if first else Sharding((3,)))
    optimizer = WrappingAdam(model.parameters(), lr=0.05)
    if first:
        train(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer) if way == "torch" else ({}, {})
    loaded = {"model": weights, "optimizer": state}
    if first and way == "torch":
        dcp.save(loaded, checkpoint_id=folder)
    elif first:
        checkpoint.save(folder, model, optimizer)
    elif way == "torch":
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
    else:
        checkpoint.load(folder, model, optimizer)
    return train(model, optimizer, 3, first=3) if on else []


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("way", ["ours", "torch"])
def test_training_goes_on_at_another_size(
    pools: RankPools, tmp_path: Path, way: str, strategy: str
) -> None:
    folder = str(tmp_path / "saved")
    expected = pools(2).run(losses_around_a_save, folder, way, strategy, first=True, on=True)
    found = pools(3).run(losses_around_a_save, folder, way, strategy, first=False, on=True)
    for losses in found:
        assert losses == pytest.approx(expected[0], rel=1e-6)
