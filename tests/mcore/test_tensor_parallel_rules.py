"""How tensor parallelism cuts parameters: what the table says, and what modules say, also late."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2_mcore.model.meshes import Meshes
from tests.mcore.flags import TP2, fsdp
from tests.mcore.trained import on_megatron, trained
from tests.ranks import RankPools


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
def test_a_weight_that_is_marked_when_it_gets_memory_is_a_part_of_a_whole() -> None:
    # Imported where ranks rehearse: Megatron wants a GPU otherwise.
    from megatron_fsdp_v2_mcore.model.tensor_shards import tensor_shards

    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        module: Any = ColumnLinear()
    shards = tensor_shards(module, Meshes(both["dp"], both), None)
    fully_shard(module, mesh=both["dp"], tensor_shards=shards)
    weight, bias = module.weight, module.bias
    shapes = [tuple(param.detach().full_tensor().shape) for param in (weight, bias)]
    assert shapes == [(8, 3), (3,)]
    assert weight.tensor_model_parallel and bias.sequence_parallel


@on_megatron(2)
def test_how_a_parameter_is_cut_is_worked_out_once() -> None:
    """While a model is sharded, unit by unit."""
    from megatron_fsdp_v2_mcore.model import tensor_shards as described

    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))
    with mock.patch.object(described, "cut_of", wraps=described.cut_of) as cut_of:
        shards = described.tensor_shards(model, Meshes(both["dp"], both), None)
        for layer in model:
            fully_shard(layer, mesh=both["dp"], tensor_shards=shards)
    assert cut_of.call_count == len(list(model.parameters()))


def _cut_dims(chunks: Any, optimizer: Any) -> dict[str, int | None]:
    """Dimension that tensor parallelism cuts, by name within the first layer or the model."""
    del optimizer
    found = {}
    for name, param in chunks[0].named_parameters():
        placement = param.placements[-1]
        found[name.removeprefix("module.")] = placement.dim if placement.is_shard() else None
    return found


def test_columns_rows_words_and_norms_of_megatron_are_cut_as_the_table_says(
    megatron: RankPools,
) -> None:
    ranks = trained(megatron, 2, fsdp(), TP2, "--train-iters 1", probe=_cut_dims).extras
    layer = "decoder.layers.0."
    expected = {
        "embedding.word_embeddings.weight": 0,
        "embedding.position_embeddings.weight": None,
        f"{layer}self_attention.linear_qkv.weight": 0,
        f"{layer}self_attention.linear_qkv.bias": 0,
        f"{layer}self_attention.linear_proj.weight": 1,
        f"{layer}self_attention.linear_proj.bias": None,
        f"{layer}mlp.linear_fc1.weight": 0,
        f"{layer}mlp.linear_fc2.weight": 1,
        f"{layer}mlp.linear_fc2.bias": None,
        f"{layer}input_layernorm.weight": None,
    }
    for dims in ranks:
        assert {name: dims.get(name, "absent") for name in expected} == expected
