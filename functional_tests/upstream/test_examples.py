"""The flags of Megatron-LM's examples of its own FSDP are planned, or rejected by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from functional_tests.upstream.configurations import EXAMPLES, read
from tests.mcore import planned

# Building models of this size takes seconds, on the meta device too.
pytestmark = pytest.mark.functional

API = "--use-fsdp-fully-shard-api"
FP8 = ("--fp8-format", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-param-gather")
# The tokenizer, which has this size, is not available.
VOCABULARY = ("--vocab-size", "129280")
LLAMA_RANKS, DEEPSEEK_RANKS = 8, 256
LLAMA_PARAMETERS = 8_030_261_248
# 671.0e9, and the multi-token prediction layer, whose embedding is shared.
DEEPSEEK_PARAMETERS = 682.5e9


def _words(name: str, without: Collection[str] = ()) -> list[str]:
    (flags,) = (each.flags for each in read(EXAMPLES) if name in each.names)
    return [API, *(word for flag in flags if flag not in without for word in (flag, *flags[flag]))]


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """Descriptions of the examples for plans, by name."""
    return planned.described(
        {
            "llama3_8b": (_words("llama3_8b"), LLAMA_RANKS),
            "llama3_8b in bf16": (_words("llama3_8b", FP8), LLAMA_RANKS),
            "deepseek_v3": ([*_words("deepseek_v3"), *VOCABULARY], DEEPSEEK_RANKS),
        }
    )


def _parameters(found: Any) -> int:
    """Return the number of parameters of the full model, from the units of one rank."""
    assert not isinstance(found, str), found
    stage = found.stages[0]
    ranks = max(mesh.num_ranks * mesh.stride for mesh in stage.meshes.values())
    copies = {name: ranks // mesh.num_ranks for name, mesh in stage.meshes.items()}
    return sum(unit.numel * copies[unit.mesh] for unit in stage.units)


def test_llama_in_fp8_is_planned_with_its_matrices_quantized(described: dict[str, Any]) -> None:
    found = described["llama3_8b"]
    assert _parameters(found) == LLAMA_PARAMETERS
    params = [param for unit in found.stages[0].units for param in unit.params]
    quantized = [param for param in params if param.payload is not None]
    # Four matrices in each of 32 layers; embedding, output layer and norms are not quantized.
    assert len(quantized) == 4 * 32
    assert all(len(param.shape) == 2 for param in quantized)


def test_llama_in_bf16_is_planned_with_all_its_parameters(described: dict[str, Any]) -> None:
    assert _parameters(described["llama3_8b in bf16"]) == LLAMA_PARAMETERS


def test_deepseek_is_planned_with_all_its_parameters(described: dict[str, Any]) -> None:
    found = described["deepseek_v3"]
    assert _parameters(found) == pytest.approx(DEEPSEEK_PARAMETERS, rel=2e-3)
    assert found.stages[0].meshes["expert dp"].num_ranks == DEEPSEEK_RANKS // 8
