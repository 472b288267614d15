"""Tensor-parallel shards and replicas of Megatron's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import UnitOptions, fully_shard
from megatron_fsdp_v2_mcore.model.meshes import Meshes
from tests.mcore import flags as f
from tests.mcore import session
from tests.mcore.trained import on_megatron, trained
from tests.ranks import RankFailure, RankPools


class ColumnLinear(nn.Module):
    """Marks its weight in `reset_parameters`, as Transformer Engine's `Linear` does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        self.bias = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(self.weight.detach().fill_(2.0))
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.partition_dim = 0  # type: ignore[attr-defined]
        self.bias = nn.Parameter(self.bias.detach().fill_(1.0))
        self.bias.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + self.bias.sum()


@on_megatron(2)
def test_weight_marked_in_reset_parameters_is_a_tensor_parallel_shard() -> None:
    # Imported in a rehearsal: without one, Megatron requires a GPU.
    from megatron_fsdp_v2_mcore.model.tensor_shards import tensor_shards

    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        module: Any = ColumnLinear()
    shards = tensor_shards(module, Meshes(both["dp"], both), None)
    fully_shard(module, mesh=both["dp"], options=UnitOptions(tensor_shards=shards))
    weight, bias = module.weight, module.bias
    shapes = [tuple(param.detach().full_tensor().shape) for param in (weight, bias)]
    assert shapes == [(8, 3), (3,)]
    assert weight.tensor_model_parallel and bias.sequence_parallel


def train_with_other_weights(name: str, *flags: f.Flags) -> None:
    """Run a training in which a parameter is larger on the last rank."""
    gpt = session.enter_rehearsal()["gpt"]
    build = gpt.build_model

    def build_model(*args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = build(*args, **kwargs)
        if session.rank() == torch.distributed.get_world_size() - 1:
            with torch.no_grad():
                model.get_parameter(name).add_(1.0)
        return model

    with mock.patch.object(gpt, "build_model", build_model):
        session.train(f.words(f.MODEL_FLAGS, "--train-iters 1", f.fsdp(), *flags))


@pytest.mark.parametrize(
    ("flags", "name", "said"),
    [
        (f.TP2, "decoder.layers.1.input_layernorm.weight", r"layers\.1\.input_layernorm\.weight"),
        (f.PP2, "output_layer.weight", "the shared embedding"),
    ],
)
def test_replicas_that_differ_before_the_first_step_are_named(
    megatron: RankPools, flags: str, name: str, said: str
) -> None:
    message = f"RuntimeError: replicas differ: .*{said} of rank 1 and of rank 0 before the first"
    with pytest.raises(RankFailure, match=message):
        megatron(2).run(train_with_other_weights, name, flags)


def test_replicas_that_differ_at_a_save_need_a_flag(megatron: RankPools, tmp_path: Path) -> None:
    # Megatron sums gradients of the shared rotary key with sequence parallelism only.
    save = f"{f.LATENT} {f.TP2} --train-iters 1 --save {tmp_path} --save-interval 1"
    message = "replicas differ: .*linear_kv_down_proj.* before a save; .*differing-replicas"
    with pytest.raises(RankFailure, match=message):
        trained(megatron, 2, f.fsdp(), save)
    trained(megatron, 2, f.fsdp(), save, "--fsdp-save-differing-replicas", iterations=1)
    assert (tmp_path / "iter_0000001").is_dir()
