"""Transformer Engine's modules without Megatron: tensor-parallel, sharded, in checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2_mcore.model.amax_mesh import name_amax_mesh
from tests.cases import longer
from tests.distributed.checkpoint_trainings import WAYS
from tests.distributed.wrapping import said
from tests.mcore import te_tensor_parallel
from tests.mcore.flags import STRATEGIES
from tests.mcore.session import entered_te
from tests.mcore.te_tensor_parallel import output_in_fp8, quantized, weights_of
from tests.mcore.trained import TIMEOUT_S, on_te
from tests.ranks import RankPools

EXTRA = "_extra_state"


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "strategy"),
    [
        ((1, 2), (2, 1), "optim_grads_params"),
        *(longer((1, 2), (1, 2), strategy) for strategy in STRATEGIES),
        longer((2, 1), (1, 2), "no_shard"),
        longer((2, 2), (4, 1), "optim_grads"),
        longer((2, 2), (1, 2), "optim_grads_params"),
        longer((2, 2), (1, 1), "optim"),
        longer((1, 1), (2, 2), "optim_grads_params"),
    ],
)
def test_every_module_comes_back_bit_for_bit_at_any_size_and_goes_on(
    megatron_te: RankPools,
    tmp_path: Path,
    saved_at: tuple[int, int],
    loaded_at: tuple[int, int],
    strategy: str,
) -> None:
    ranks = saved_at[0] * saved_at[1]
    folder = str(tmp_path / "checkpoint")
    saves = megatron_te(ranks).run(te_tensor_parallel.save, folder, *saved_at, timeout_s=TIMEOUT_S)
    saved, losses, absent_stayed = saves[0]
    assert absent_stayed
    assert len(set(losses)) == len(losses) == 2 * te_tensor_parallel.STEPS
    loads = megatron_te(loaded_at[0] * loaded_at[1]).run(
        te_tensor_parallel.load, folder, *loaded_at, strategy, timeout_s=TIMEOUT_S
    )
    for loaded, following in loads:
        assert loaded == saved
        assert following == pytest.approx(losses[te_tensor_parallel.STEPS :], rel=1e-5)


@on_te(2, way=WAYS)
def test_records_of_past_scales_are_in_no_checkpoint_and_in_the_way_of_none(
    tmp_path: Path, way: str
) -> None:
    model, path = quantized(), tmp_path / "saved"
    lengths = [value.numel() for key, value in model.state_dict().items() if EXTRA in key]
    if way == "ours":
        checkpoint.save(path, model)
    else:
        dcp.save(weights_of(model), checkpoint_id=str(path))
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    before = [param.detach().full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
    # A longer record of past scales.
    other = quantized(16)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    if way == "ours":
        checkpoint.load(path, other)
    else:
        state = weights_of(other)
        dcp.load(state, checkpoint_id=str(path))
        set_model_state_dict(other, state, options=StateDictOptions(strict=False))
    after = [param.detach().full_tensor() for param in other.parameters()]  # type: ignore[attr-defined]
    assert any(lengths)
    assert not [name for name in names if EXTRA in name]
    assert all(map(torch.equal, before, after))


@on_te(2)
def test_with_a_mesh_named_every_part_has_the_scale_of_the_whole() -> None:
    results = [
        output_in_fp8(tp, names_mesh=names_mesh)
        for tp, names_mesh in ((1, False), (2, True), (2, False))
    ]
    whole, named, not_named = (found for found, _ in results)
    # Neither naming one nor leaving it out.
    assert not [line for _, said in results for line in said if "amax" in line or "mesh" in line]
    assert torch.equal(named, whole)
    assert not torch.equal(not_named, whole)


@on_te(2)
def test_experts_stacked_in_a_grouped_tensor_are_rejected_by_name() -> None:
    te = entered_te()
    with mock.patch.dict(os.environ, NVTE_GROUPED_LINEAR_SINGLE_PARAM="1"):
        experts = te.GroupedLinear(2, 32, 32, bias=False, single_grouped_weight=True, device="cpu")
    assert type(experts.weight).__name__ == "GroupedTensor"
    text = said(ValueError, lambda: fully_shard(experts))
    assert text.startswith("parameter weight is a GroupedTensor, which is made of other tensor")
    assert type(experts) is te.GroupedLinear


@pytest.mark.parametrize("dtype", [torch.bfloat16, longer(torch.uint8)], ids=str)
@on_te(2)
def test_state_with_scales_is_not_saved_without_them(tmp_path: Path, dtype: torch.dtype) -> None:
    model, mesh = te_tensor_parallel.sharded(2, 1)
    optimizer = te_tensor_parallel.optimizer_of(model)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    scaled = te_tensor_parallel.optimizer_of(model, exp_avg_dtype=dtype)
    te_tensor_parallel.train(model, mesh, scaled, range(1))
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises((ValueError, RuntimeError), match=f"exp_avg in {dtype}, which has scal"):
            call(tmp_path / "saved", model, scaled)


@on_te(2)
def test_attention_beside_layers_has_no_weights_to_reduce_an_amax_of() -> None:
    te = entered_te()
    from transformer_engine.common.recipe import Float8CurrentScaling

    layer = te.Linear(32, 32, bias=False, device="cpu")
    attention = te.DotProductAttention(2, 16, attention_dropout=0.0)
    mesh = te_tensor_parallel.mesh_of(1, 2)["tp"]
    hooks = name_amax_mesh(nn.ModuleList([layer, attention]), mesh)
    with torch.no_grad(), te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        x = layer(torch.randn(16, 32)).view(16, 1, 2, 16)
        assert attention(x, x, x).shape == (16, 1, 32)
    assert len(hooks) == 1


def test_a_mesh_for_amaxes_that_nothing_could_use_is_rejected() -> None:
    with pytest.raises(ValueError, match="the mesh for amaxes must have one axis"):
        name_amax_mesh(nn.Linear(2, 2), None)  # type: ignore[arg-type]
