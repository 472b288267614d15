"""Quantized weights of Transformer Engine are sharded, and gathered as quantized bytes."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.runtime.module import unit_of
from megatron_fsdp_v2_for import megatron_fsdp
from tests.cases import longer, quick_only
from tests.distributed.nccl_double import as_on_cuda
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import error_message, step_all
from tests.mcore import quantized
from tests.mcore.te_pools import BLACKWELL_RECIPES, RECIPES
from tests.mcore.trained import TIMEOUT_S

on_te_ranks = functools.partial(on_ranks, pools="recipe_te", timeout_s=TIMEOUT_S)


QUICK = [
    ("tensorwise", "optim_grads_params", 2, 2),
    ("blockwise", "optim_grads_params", 3, 2),
    ("delayed", "optim", 2, 2),
]


@pytest.mark.parametrize(
    ("recipe", "strategy", "ranks", "steps"),
    [
        *QUICK,
        *(
            longer(recipe, strategy, 2 + (row + column) % 2, 2 * ((row + column) % 2))
            for row, recipe in enumerate((*RECIPES, *BLACKWELL_RECIPES))
            for column, strategy in enumerate(("no_shard", "optim_grads_params"))
        ),
    ],
)
@on_te_ranks("ranks")
def test_gathered_bytes_equal_those_of_the_quantized_full_weight(
    recipe: str, strategy: str, ranks: int, steps: int
) -> None:
    """Before the first step, and after two."""
    assert quantized.differing_bytes(recipe, strategy, steps) == []


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [
        ("tensorwise", "optim"),
        longer("tensorwise", "optim_grads_params"),
        longer("mxfp8", "optim"),
        longer("mxfp8", "optim_grads_params"),
    ],
)
@on_te_ranks(2)
def test_a_load_into_a_trained_model_quantizes_the_loaded_weights(
    tmp_path: Path, recipe: str, strategy: str
) -> None:
    folder = str(tmp_path / "saved")
    assert quantized.differing_bytes(recipe, strategy, 1, folder=folder) == []


@pytest.mark.functional
@on_te_ranks(4, recipe=[*RECIPES, *BLACKWELL_RECIPES], strategy=["optim", "optim_grads_params"])
def test_rows_sharded_along_two_axes_use_scales_of_full_weights(recipe: str, strategy: str) -> None:
    with as_on_cuda() if strategy == "optim" else contextlib.nullcontext():
        differing = quantized.differing_bytes(recipe, strategy, 2, instances=2)
    assert differing == []


@on_te_ranks(2, recipe=quick_only((*RECIPES, *BLACKWELL_RECIPES), "tensorwise"))
def test_maxima_of_all_weights_are_reduced_in_one_collective(recipe: str) -> None:
    strategy = "optim" if recipe == "blockwise" else "optim_grads_params"
    coalesced, weights = quantized.maxima_of_a_step(recipe, strategy)
    separate, same = quantized.maxima_of_a_step(recipe, strategy, one_by_one=True)
    # NVFP4 reduces maxima of blocks and of weights. A later forward uses those of delayed scaling.
    per_call = {"nvfp4": 2}.get(recipe, 1)
    # Modules with delayed scaling reduce maxima of inputs and of gradients themselves.
    of_modules = 2 if recipe == "delayed" else 0
    assert coalesced == per_call + of_modules
    # Three layers, each a unit.
    assert separate == 3 * per_call + of_modules
    assert all(map(torch.equal, weights, same))


@pytest.mark.functional
@pytest.mark.parametrize(
    ("width", "options", "text"),
    [
        (64, {"disable_2d_quantization": True}, "in blocks of 1 x 16 cannot be gathered as bytes"),
        (96, {}, "(64, 96) cannot be gathered as NVFP4"),
    ],
)
@on_te_ranks(2, recipe=["nvfp4"])
def test_weights_that_cannot_be_gathered_as_nvfp4_are_rejected(
    recipe: str, width: int, options: dict[str, bool], text: str
) -> None:
    te = quantized.enter(recipe)
    from transformer_engine.common.recipe import NVFP4BlockScaling

    with te.quantized_model_init(recipe=NVFP4BlockScaling(**options)):
        layer = te.Linear(width, 64, params_dtype=torch.bfloat16, device="cpu")
    assert text in error_message(ValueError, lambda: fully_shard(layer, mp_policy=quantized.POLICY))


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        ("tensorwise", 0.5),
        longer("delayed", 0.5),
        longer("blockwise", 0.5),
        # All units except the root, which has no parameters, reshard after the forward.
        longer("mxfp8", 0.5),
        longer("nvfp4", 0.25),
    ],
)
@on_te_ranks(2)
def test_every_use_gathers_a_share_of_the_bytes_of_bf16(recipe: str, share: float) -> None:
    """MXFP8's two payloads together have as many bytes as bf16; each use gathers one of them."""
    for mine, sixteen in zip(*quantized.gathered_bytes(recipe), strict=True):
        # Biases are gathered in bf16.
        assert share * sixteen <= mine <= (share + 0.01) * sixteen


@on_te_ranks(2, recipe=["tensorwise"], keeps=[False, True])
def test_a_program_written_for_megatron_fsdp_trains_quantized_weights(
    recipe: str, keeps: bool
) -> None:
    te, found = quantized.enter(recipe), []
    ours = quantized.sharded(quantized.layers(te, recipe), "optim_grads_params")
    model: Any = megatron_fsdp.fully_shard_model(
        quantized.layers(te, recipe),
        fsdp_unit_modules=[te.Linear],
        mixed_precision_policy=megatron_fsdp.MixedPrecisionPolicy(main_grads_dtype=torch.float32),
        keep_fp8_transpose_cache=keeps,
    ).module
    for each in (ours, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for seed in range(2):
            quantized.step(te, each, recipe, seed)
            step_all(optimizer)
        found.append([param.detach().full_tensor() for param in each.parameters()])
    formats = [group.format for group in unit_of(model[0]).groups]
    kept = {known.keeps_transposes for known in formats if hasattr(known, "keeps_transposes")}
    assert all(map(torch.equal, *found))
    assert kept == {keeps}


@on_te_ranks(2, recipe=["tensorwise"])
def test_frozen_fp8_weight_is_gathered_as_bytes(recipe: str) -> None:
    te = quantized.enter(recipe)
    model = quantized.layers(te, recipe)
    model[1].weight.requires_grad_(False)
    model = quantized.sharded(model, "optim_grads_params")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = model[1].weight.detach().full_tensor().clone()
    for seed in range(2):
        quantized.step(te, model, recipe, seed)
        step_all(optimizer)
    assert torch.equal(model[1].weight.detach().full_tensor(), before)
    # Only the weight of the layer is frozen.
    kinds = [(g.format.payload_dtype, g.spec.requires_grad) for g in unit_of(model[1]).groups]
    assert (torch.uint8, False) in kinds


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"mp_policy": MixedPrecisionPolicy()},
            "parameter weight: a quantized weight needs main weights in fp32",
        ),
        (
            {"mp_policy": quantized.POLICY, "offload_policy": CPUOffloadPolicy()},
            "leave offload_policy out",
        ),
    ],
)
@on_te_ranks(2, recipe=["tensorwise"])
def test_unsupported_policies_of_quantized_weights_are_rejected_by_name(
    recipe: str, options: dict[str, Any], text: str
) -> None:
    te = quantized.enter(recipe)
    model = quantized.layers(te, recipe)
    assert text in error_message(ValueError, lambda: fully_shard(model[0], **options))
    # The rejected call leaves the model unchanged: a valid call shards it.
    quantized.sharded(model, "optim_grads_params")
    quantized.step(te, model, recipe)


@on_te_ranks(2, recipe=["tensorwise"])
def test_quantized_initialization_keeps_weights_quantized(recipe: str) -> None:
    """Main weights have a higher precision, also for modules built on the meta device."""
    te = quantized.enter(recipe)
    options = {"recipe": quantized.recipe_of(recipe), "preserve_high_precision_init_val": True}
    with te.quantized_model_init(**options):
        layer = te.Linear(64, 32, params_dtype=torch.bfloat16, device="meta")
    fully_shard(layer, mp_policy=quantized.POLICY)
    whole = layer.weight.detach().full_tensor()
    layer.unshard()
    assert layer.weight._data.dtype is torch.uint8
    assert not torch.equal(layer.weight.dequantize().float(), whole)
