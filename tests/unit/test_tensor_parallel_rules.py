"""Tensor-parallel rules for Megatron and Transformer Engine, without their modules."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2.tensor_parallel import tensor_shard_by_rules
from megatron_fsdp_v2_mcore.model.tensor_parallel_rules import (
    MEGATRON_RULES,
    TRANSFORMER_ENGINE_RULES,
)


def test_rules_by_path_match_nothing_without_an_import_of_the_package() -> None:
    assert "transformer_engine.pytorch" not in sys.modules
    with pytest.raises(ValueError, match="no rule matches its module"):
        tensor_shard_by_rules(
            nn.Linear(2, 2), "weight", torch.ones(2, 2), TRANSFORMER_ENGINE_RULES, None
        )


def test_attributes_of_megatron_are_read_also_on_stacked_experts() -> None:
    for shape, stacked, marked, dim in (((4, 6), False, 1, 1), ((2, 4, 6), True, 0, 1)):
        layer: Any = nn.Module()
        layer.single_grouped_weight = stacked
        layer.weight, layer.bias = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(4))
        layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, marked
        found = tensor_shard_by_rules(layer, "weight", layer.weight, MEGATRON_RULES, None)
        assert (found.dim, found.pieces) == (dim, ())
        if not stacked:
            assert (
                tensor_shard_by_rules(layer, "bias", layer.bias, MEGATRON_RULES, None).dim is None
            )
