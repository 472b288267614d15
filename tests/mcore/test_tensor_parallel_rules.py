"""What the table says of Megatron's own modules, on a model that trains."""

from __future__ import annotations

from typing import Any

from tests.mcore.session import MODEL_FLAGS, Training, fsdp, train
from tests.ranks import RankPools

FLAGS = [*MODEL_FLAGS, "--train-iters", "1", "--tensor-model-parallel-size", "2"]


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
    words = [*FLAGS, *fsdp("optim_grads_params")]
    results: list[Training] = megatron(2).run(train, words, _cut_dims)
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
    for result in results:
        dims: dict[str, int | None] = result.extras
        assert {name: dims.get(name, "absent") for name in expected} == expected
