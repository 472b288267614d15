"""Tensor-parallel shards of modules that mark their parameters in `reset_parameters`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import UnitOptions, fully_shard
from megatron_fsdp_v2_mcore.model.meshes import Meshes
from tests.mcore.trained import on_megatron


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
