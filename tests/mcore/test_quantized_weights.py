"""Quantized weights of Transformer Engine are sharded, and gathered as the bytes they are."""

from __future__ import annotations

import pytest

from tests.mcore import quantized
from tests.ranks import RankPools

TIMEOUT_S = 240.0
RECIPES = ("tensorwise", "delayed", "blockwise")
BLACKWELL_RECIPES = ("mxfp8", "nvfp4")


def _cases() -> list[object]:
    """Recipe, strategy, ranks, steps before the bytes are looked at."""
    quick = {("tensorwise", "optim_grads_params", 2, 2), ("blockwise", "optim_grads_params", 3, 2)}
    quick |= {("delayed", "optim", 2, 2)}
    strategies = ("no_shard", "optim", "optim_grads_params")
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.functional)
        for recipe in RECIPES
        for strategy in strategies
        for case in ((recipe, strategy, ranks, steps) for ranks in (1, 2, 3) for steps in (0, 2))
    ]


@pytest.mark.parametrize(("recipe", "strategy", "ranks", "steps"), _cases())
def test_gathered_bytes_are_those_of_quantizing_the_whole_weight(
    megatron_te: RankPools, recipe: str, strategy: str, ranks: int, steps: int
) -> None:
    run = megatron_te(ranks).run
    for differing in run(quantized.bytes_differ, recipe, strategy, steps, timeout_s=TIMEOUT_S):
        assert differing == []


@pytest.mark.functional
@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_of_a_blackwell_gpu_are_those_of_quantizing_the_whole_weight(
    blackwell_te: RankPools, recipe: str, strategy: str, ranks: int
) -> None:
    run = blackwell_te(ranks).run
    for steps in (0, 2):
        for differing in run(quantized.bytes_differ, recipe, strategy, steps, timeout_s=TIMEOUT_S):
            assert differing == []


def _assert_bytes_of_two_axes(pools: RankPools, recipe: str, strategy: str) -> None:
    run = pools(4).run
    for differing in run(quantized.bytes_differ, recipe, strategy, 2, 2, timeout_s=TIMEOUT_S):
        assert differing == []


@pytest.mark.functional
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_rows_cut_along_two_axes_are_quantized_with_the_scales_of_whole_weights(
    megatron_te: RankPools, recipe: str, strategy: str
) -> None:
    _assert_bytes_of_two_axes(megatron_te, recipe, strategy)


@pytest.mark.functional
@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_rows_of_a_blackwell_gpu_cut_along_two_axes_have_the_scales_of_whole_weights(
    blackwell_te: RankPools, recipe: str, strategy: str
) -> None:
    _assert_bytes_of_two_axes(blackwell_te, recipe, strategy)


@pytest.mark.functional
def test_nvfp4_gathers_a_quarter_of_the_bytes_of_bf16(blackwell_te: RankPools) -> None:
    run = blackwell_te(2).run
    for gathered in run(quantized.gathered_bytes, "nvfp4", timeout_s=TIMEOUT_S):
        for four, sixteen in zip(*gathered, strict=True):
            # Biases travel in bf16.
            assert 0.25 * sixteen <= four <= 0.26 * sixteen


@pytest.mark.functional
def test_what_cannot_be_gathered_as_nvfp4_is_said(blackwell_te: RankPools) -> None:
    for said in blackwell_te(2).run(quantized.nvfp4_rejections, timeout_s=TIMEOUT_S):
        assert "in blocks of 1 x 16 cannot be gathered as bytes" in said["blocks of 1 x 16"]
        assert "(64, 96) cannot be gathered as NVFP4" in said["a width of 96"]


def _assert_half(gathered: tuple[tuple[int, int], tuple[int, int]]) -> None:
    for eight, sixteen in zip(*gathered, strict=True):
        # Biases travel in bf16.
        assert 0.5 * sixteen <= eight <= 0.51 * sixteen


@pytest.mark.parametrize(
    "recipe", ["tensorwise", *(pytest.param(r, marks=pytest.mark.functional) for r in RECIPES[1:])]
)
def test_fp8_gathers_half_the_bytes_of_bf16(megatron_te: RankPools, recipe: str) -> None:
    run = megatron_te(2).run
    for gathered in run(quantized.gathered_bytes, recipe, timeout_s=TIMEOUT_S):
        _assert_half(gathered)


@pytest.mark.functional
def test_mxfp8_gathers_the_form_of_each_use(blackwell_te: RankPools) -> None:
    """Both forms together are as many bytes as bf16, and no use gathers both."""
    for gathered in blackwell_te(2).run(quantized.gathered_bytes, "mxfp8", timeout_s=TIMEOUT_S):
        # All units but the root, which has nothing of its own, drop theirs after the forward.
        _assert_half(gathered)
    run = blackwell_te(2).run
    for eight, sixteen in run(
        quantized.gathered_bytes, "mxfp8", recomputes=True, timeout_s=TIMEOUT_S
    ):
        assert eight[0] <= 0.51 * sixteen[0]
        # What is recomputed needs the form of a forward as well.
        assert eight[1] <= 1.02 * sixteen[1]


def test_a_frozen_fp8_weight_is_gathered_as_bytes_beside_others(megatron_te: RankPools) -> None:
    for is_same, kinds in megatron_te(2).run(quantized.frozen_beside_others, timeout_s=TIMEOUT_S):
        assert is_same
        # The bias of the frozen weight's layer is not frozen, where it has one.
        assert "torch.uint8 False" in kinds


def test_what_cannot_be_done_with_quantized_weights_is_said_by_name(megatron_te: RankPools) -> None:
    for said in megatron_te(2).run(quantized.rejections, timeout_s=TIMEOUT_S):
        assert "parameter weight: a quantized weight needs main weights of fp32" in said.pop(
            "bf16 main weights"
        )
        assert "leave offload_policy out" in said.pop("offload")
        assert not said


def test_what_an_initialization_quantizes_is_kept(megatron_te: RankPools) -> None:
    for is_quantized, is_finer in megatron_te(2).run(quantized.on_meta, timeout_s=TIMEOUT_S):
        assert is_quantized
        assert is_finer
