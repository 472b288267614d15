"""Tables for Megatron's and Transformer Engine's modules, by stubs of their classes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2.tensor_parallel import cut_of
from megatron_fsdp_v2_mcore.model.tensor_parallel_rules import (
    MEGATRON_RULES,
    TRANSFORMER_ENGINE_RULES,
)


def _layer(cls: type[nn.Module], shapes: dict[str, tuple[int, ...]], **options: Any) -> nn.Module:
    layer = cls()
    for name, shape in shapes.items():
        layer.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    for name, value in options.items():
        setattr(layer, name, value)
    return layer


def _dims(layer: nn.Module, rules: Any) -> dict[str, Any]:
    """Dimension that is cut by name, with the pieces where there are several."""
    found = {}
    for name, param in layer.named_parameters():
        shard = cut_of(layer, name, param, rules, None)
        found[name] = (shard.dim, shard.pieces) if shard.pieces else shard.dim
    return found


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stub for `transformer_engine.pytorch`, as if it had been imported."""
    package: Any = ModuleType("transformer_engine.pytorch")
    for name in ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNormMLP", "RMSNorm"):
        setattr(package, name, type(name, (nn.Module,), {}))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    return package


def test_linear_layers_of_transformer_engine_are_cut_by_their_mode(engine: Any) -> None:
    shapes = {"weight": (4, 6), "bias": (4,)}
    fused = {"layer_norm_weight": (6,), **shapes}
    column = _layer(engine.LayerNormLinear, fused, parallel_mode="column")
    row = _layer(engine.Linear, shapes, parallel_mode="row")
    whole = _layer(engine.Linear, shapes, parallel_mode=None)
    rules = TRANSFORMER_ENGINE_RULES
    assert _dims(column, rules) == {"layer_norm_weight": None, "weight": 0, "bias": 0}
    assert _dims(row, rules) == {"weight": 1, "bias": None}
    assert _dims(whole, rules) == {"weight": None, "bias": None}


def test_experts_of_transformer_engine_are_cut_alike_stacked_or_not(engine: Any) -> None:
    numbered = {"weight0": (4, 6), "weight1": (4, 6), "bias0": (4,), "bias1": (4,)}
    stacked = {"weight": (2, 4, 6), "bias": (2, 4)}
    rules = TRANSFORMER_ENGINE_RULES

    def dims(shapes: dict[str, tuple[int, ...]], mode: str) -> dict[str, Any]:
        return _dims(_layer(engine.GroupedLinear, shapes, parallel_mode=mode), rules)

    assert dims(numbered, "column") == {"weight0": 0, "weight1": 0, "bias0": 0, "bias1": 0}
    assert dims(stacked, "column") == {"weight": 1, "bias": 1}
    assert dims(stacked, "row") == {"weight": 2, "bias": None}


def test_a_gated_mlp_of_transformer_engine_has_two_pieces(engine: Any) -> None:
    shapes = {"layer_norm_weight": (6,), "fc1_weight": (8, 6), "fc2_weight": (6, 4)}
    gated = _layer(engine.LayerNormMLP, shapes, activation="swiglu", set_parallel_mode=True)
    plain = _layer(engine.LayerNormMLP, shapes, activation="gelu", set_parallel_mode=True)
    expected = {"layer_norm_weight": None, "fc1_weight": (0, (4, 4)), "fc2_weight": 1}
    assert _dims(gated, TRANSFORMER_ENGINE_RULES) == expected
    assert _dims(plain, TRANSFORMER_ENGINE_RULES) == {**expected, "fc1_weight": 0}


def test_rules_by_path_match_nothing_where_the_package_is_not_imported() -> None:
    assert "transformer_engine.pytorch" not in sys.modules
    with pytest.raises(ValueError, match="no rule matches its module"):
        cut_of(nn.Linear(2, 2), "weight", torch.ones(2, 2), TRANSFORMER_ENGINE_RULES, None)


def test_marks_of_megatron_are_read_also_on_stacked_experts() -> None:
    shapes = {"weight": (4, 6), "bias": (4,)}
    marked = _layer(nn.Module, shapes)
    marked.weight.tensor_model_parallel, marked.weight.partition_dim = True, 1  # type: ignore[union-attr,assignment]
    assert _dims(marked, MEGATRON_RULES) == {"weight": 1, "bias": None}
    stacked = _layer(nn.Module, {"weight": (2, 4, 6)}, single_grouped_weight=True)
    stacked.weight.tensor_model_parallel, stacked.weight.partition_dim = True, 0  # type: ignore[union-attr,assignment]
    assert _dims(stacked, MEGATRON_RULES) == {"weight": 1}
