"""Transformer Engine's modules without Megatron: tensor-parallel, sharded, in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_fsdp_v2_mcore.model.amax_mesh import name_amax_mesh
from tests.mcore import te_tensor_parallel
from tests.mcore.flags import STRATEGIES
from tests.mcore.trained import longer
from tests.ranks import RankPools

TIMEOUT_S = 240.0


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


def test_records_of_past_scales_are_in_no_checkpoint_and_in_the_way_of_none(
    megatron_te: RankPools, tmp_path: Path
) -> None:
    results = megatron_te(2).run(te_tensor_parallel.extra_state, str(tmp_path), timeout_s=TIMEOUT_S)
    for lengths, saved, back in results:
        assert any(lengths)
        assert not saved
        assert back == [True, True]


def test_with_a_mesh_named_every_part_has_the_scale_of_the_whole(megatron_te: RankPools) -> None:
    def out(tp: int, *, names_mesh: bool) -> torch.Tensor:
        function = te_tensor_parallel.output_in_fp8
        found, said = megatron_te(2).run(function, tp, names_mesh=names_mesh, timeout_s=TIMEOUT_S)[
            0
        ]
        # Neither naming one nor leaving it out.
        assert not [line for line in said if "amax" in line or "mesh" in line]
        return found

    whole = out(1, names_mesh=False)
    assert torch.equal(out(2, names_mesh=True), whole)
    assert not torch.equal(out(2, names_mesh=False), whole)


def test_experts_stacked_in_a_grouped_tensor_are_rejected_by_name(megatron_te: RankPools) -> None:
    for said in megatron_te(2).run(te_tensor_parallel.shard_grouped_tensor, timeout_s=TIMEOUT_S):
        assert said.startswith("parameter weight is a GroupedTensor, which is made of other tensor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, longer(torch.uint8)], ids=str)
def test_state_with_scales_is_not_saved_without_them(
    megatron_te: RankPools, tmp_path: Path, dtype: torch.dtype
) -> None:
    function, folder = te_tensor_parallel.save_with_scales, str(tmp_path / "checkpoint")
    for said in megatron_te(2).run(function, folder, dtype, timeout_s=TIMEOUT_S):
        assert len(said) == 2
        assert all(f"FusedAdam keeps exp_avg in {dtype}, which has scales" in line for line in said)


def test_attention_beside_layers_has_no_weights_to_reduce_an_amax_of(
    megatron_te: RankPools,
) -> None:
    run = megatron_te(2).run
    assert run(te_tensor_parallel.attend_with_an_amax_mesh, timeout_s=TIMEOUT_S) == [1, 1]


def test_a_mesh_for_amaxes_that_nothing_could_use_is_rejected() -> None:
    with pytest.raises(ValueError, match="the mesh for amaxes must have one axis"):
        name_amax_mesh(nn.Linear(2, 2), None)  # type: ignore[arg-type]
