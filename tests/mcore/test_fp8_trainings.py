"""Megatron trains in FP8 as under its own DDP, with weights gathered in bf16 or as FP8 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cpu_rehearsal.combinations import check_combinations
from megatron_fsdp_v2_mcore.flags.errors import FlagError
from megatron_fsdp_v2_mcore.flags.settings import check_quantized
from tests.cases import longer, quick_if, quick_rows
from tests.docs.blocks import ROOT, blocks_in
from tests.mcore import flags as f
from tests.mcore.command_line import torchrun
from tests.mcore.flags import FULL_RECOMPUTE, HSDP, PP2, TP2_SP, ZERO3, fsdp, loading, saving, words
from tests.mcore.session import TRANSFORMER_ENGINE, Training, distance
from tests.mcore.te_pools import RECIPES
from tests.mcore.trained import assert_close, assert_equal, trained
from tests.ranks import RankPools

# Blocks of FP8 have 128 elements, so no dimension has fewer. Norms of gradients that are added up
# in another order would differ in the last bit, and a bit of a bf16 weight in one of FP8.
COMMON = words(
    TRANSFORMER_ENGINE,
    "--bf16 --hidden-size 128 --ffn-hidden-size 256 --seq-length 64 --max-position-embeddings 64",
    "--global-batch-size 8 --train-iters 4 --log-params-norm",
)
EXACT: dict[str, Any] = {"exact_norms": True}
GATHERED = "--fp8-param-gather"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 128 "
    "--disable-bias-linear --swiglu --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --moe-router-padding-for-fp8"
)
EXPERTS_FP4 = EXPERTS.replace(
    "--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization"
)
NVFP4 = "--fp4-format e2m1 --fp4-recipe nvfp4"
GATHERED_FP4 = "--fp4-param-gather"
# Of bf16: it decides which GPU is rehearsed and, without --fp8-format, nothing else.
BLACKWELL = "--fp8-recipe mxfp8"


def _fp8(recipe: str) -> str:
    return f"--fp8-format hybrid --fp8-recipe {recipe}"


FORMATS = {name: _fp8(name) for name in (*RECIPES, "mxfp8")} | {"nvfp4": NVFP4}
GATHERS = {name: GATHERED for name in FORMATS} | {"nvfp4": GATHERED_FP4}
"""Flags by recipe: what weights are quantized to, and what has them gathered so."""
# Megatron gathers no MXFP8 weights as bytes: it gathers bf16 and quantizes that on every rank.
MEGATRONS = {"mxfp8": "--reuse-grad-buf-for-mxfp8-param-ag"}


def _run(pools: RankPools, ranks: int, *flags: str | Sequence[str]) -> Training:
    return trained(pools, ranks, COMMON, *flags, **EXACT)


def _assert_equal(mine: Training, theirs: Training) -> None:
    assert len(mine.losses) == len(theirs.losses) == 4
    assert distance(mine.losses, theirs.losses) <= 1e-6
    assert distance(mine.params_norms, theirs.params_norms) <= 1e-6


_QUICK = ("tensorwise", ZERO3)


@pytest.mark.parametrize(
    ("recipe", "strategy", "is_gathered"),
    [
        quick_if((r, s) == _QUICK and not is_gathered, r, s, is_gathered)
        for r in FORMATS
        for s in f.STRATEGIES
        for is_gathered in (False, True)
    ],
)
def test_quantized_products_train_as_under_megatrons_ddp(
    recipe_te: RankPools, recipe: str, strategy: str, is_gathered: bool
) -> None:
    theirs = _run(recipe_te, 2, FORMATS[recipe])
    mine = _run(
        recipe_te, 2, FORMATS[recipe], fsdp(strategy), GATHERS[recipe] if is_gathered else ""
    )
    _assert_equal(mine, theirs)
    if recipe in RECIPES:
        assert distance(mine.grad_norms, theirs.grad_norms) <= 1e-6
    if recipe == "nvfp4":
        assert distance(theirs.losses, _run(recipe_te, 2, BLACKWELL).losses) > 1e-3, "not in FP4"


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    quick_rows([(r, s) for r in FORMATS for s in (f.ZERO1, ZERO3)], [("tensorwise", ZERO3)]),
)
def test_main_weights_of_all_ranks_are_those_that_the_first_rank_drew(
    recipe_te: RankPools, recipe: str, strategy: str
) -> None:
    flags = [FORMATS[recipe], "--data-parallel-random-init"]
    mine = _run(recipe_te, 2, *flags, fsdp(strategy), GATHERS[recipe])
    _assert_equal(mine, _run(recipe_te, 2, *flags))


@pytest.mark.parametrize(
    ("recipe", "strategy", "overlap"),
    [
        quick_if((r, s, overlap) == (*_QUICK, ""), r, s, overlap)
        for r in FORMATS
        for s in (f.ZERO1, f.ZERO2, ZERO3)
        for overlap in ("", f.OVERLAP)
    ],
)
def test_quantized_gathers_train_as_those_of_megatrons_distributed_optimizer(
    recipe_te: RankPools, recipe: str, strategy: str, overlap: str
) -> None:
    """To the bit, with one micro-batch on two ranks: a sum of two has one order."""
    common = [FORMATS[recipe], GATHERS[recipe], "--global-batch-size 4", overlap]
    theirs = _run(recipe_te, 2, *common, "--use-distributed-optimizer", MEGATRONS.get(recipe, ""))
    mine = _run(recipe_te, 2, *common, fsdp(strategy))
    assert_equal(mine, theirs)
    assert mine.losses[-1] < mine.losses[0]


@pytest.mark.functional
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", f.STRATEGIES)
@pytest.mark.parametrize("gathers", ["", GATHERED], ids=["bf16 gathers", "FP8 gathers"])
def test_per_token_losses_of_four_micro_batches_train_as_under_megatrons_ddp(
    recipe_te: RankPools, recipe: str, strategy: str, gathers: str
) -> None:
    """To the bit where gradients are reduced once a step, as under DDP.

    ZeRO-2 and ZeRO-3 reduce each micro-batch and add up what is reduced. A gradient's last bit
    becomes a step of an FP8 number here and there, as that of the norm does in Megatron, whose
    distributed optimizer is up to 3e-5 from its DDP so (seeds 2 to 7, norms added up in fp32).
    """
    # Gradients are divided by a number of tokens that is no power of two.
    steps = "--micro-batch-size 1 --seq-length 96 --max-position-embeddings 96"
    common = [FORMATS[recipe], "--calculate-per-token-loss", steps]
    theirs = _run(recipe_te, 2, *common)
    mine = _run(recipe_te, 2, *common, fsdp(strategy), gathers)
    if strategy in (f.NO_SHARD, f.ZERO1):
        assert_equal(mine, theirs)
    else:
        assert_close(mine, theirs, losses=1e-4, norms=1e-2)


_GQA_SWIGLU = f"{f.GATED} --disable-bias-linear"


@pytest.mark.functional
@pytest.mark.parametrize(
    ("recipe", "ranks", "more"),
    [
        pytest.param("tensorwise", 2, FULL_RECOMPUTE, id="tensorwise, recompute"),
        pytest.param("tensorwise", 2, TP2_SP, id="tensorwise, TP2 SP"),
        pytest.param("tensorwise", 4, TP2_SP, id="tensorwise, TP2 SP, DP2"),
        pytest.param("delayed", 2, EXPERTS, id="delayed, MoE"),
        pytest.param("tensorwise", 2, EXPERTS, id="tensorwise, MoE"),
        pytest.param("delayed", 2, _GQA_SWIGLU, id="delayed, GQA SwiGLU"),
        pytest.param("delayed", 2, PP2, id="delayed, PP2"),
        pytest.param("tensorwise", 4, PP2, id="tensorwise, PP2, DP2"),
        pytest.param("mxfp8", 2, FULL_RECOMPUTE, id="mxfp8, recompute"),
        pytest.param("mxfp8", 2, EXPERTS, id="mxfp8, MoE"),
        pytest.param("mxfp8", 2, PP2, id="mxfp8, PP2"),
        pytest.param("nvfp4", 2, FULL_RECOMPUTE, id="nvfp4, recompute"),
        pytest.param("nvfp4", 2, EXPERTS_FP4, id="nvfp4, MoE"),
        pytest.param("nvfp4", 2, PP2, id="nvfp4, PP2"),
        pytest.param("nvfp4", 4, "", id="nvfp4, DP4"),
        pytest.param("nvfp4", 2, _GQA_SWIGLU, id="nvfp4, GQA SwiGLU"),
        pytest.param("nvfp4", 2, "--tensor-model-parallel-size 2", id="nvfp4, TP2"),
    ],
)
def test_quantized_weights_train_other_models(
    recipe_te: RankPools, recipe: str, ranks: int, more: str
) -> None:
    theirs = _run(recipe_te, ranks, FORMATS[recipe], more)
    _assert_equal(
        _run(recipe_te, ranks, FORMATS[recipe], fsdp(ZERO3), GATHERS[recipe], more), theirs
    )


@pytest.mark.functional
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(f"{f.OVERLAP} --fsdp-trace-pool", id="overlap, pool"),
        pytest.param("--keep-fp8-transpose-cache", id="transposes kept"),
        pytest.param("--init-model-with-meta-device", id="meta device"),
    ],
)
def test_how_weights_are_gathered_changes_no_bit(
    recipe_te: RankPools, recipe: str, more: str
) -> None:
    common = [FORMATS[recipe], fsdp(ZERO3), GATHERS[recipe]]
    assert _run(recipe_te, 2, *common, more).losses == _run(recipe_te, 2, *common).losses


@pytest.mark.functional
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(4, HSDP, id="HSDP"),
        pytest.param(2, "--optimizer-cpu-offload --use-precision-aware-optimizer", id="offload"),
    ],
)
def test_sums_and_adam_of_another_kind_change_next_to_nothing(
    megatron_te: RankPools, ranks: int, more: str
) -> None:
    """Sums over four ranks are made in another order; the CPU's Adam is torch's."""
    common = [_fp8("delayed"), fsdp(ZERO3), GATHERED]
    plain, other = (_run(megatron_te, ranks, *common, which) for which in ("", more))
    assert distance(other.losses, plain.losses) < 1e-3


@pytest.mark.functional
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        *(
            pytest.param(recipe, more, id=f"{recipe}, {name}")
            for recipe in ("tensorwise", "nvfp4")
            for name, more in {
                "first and last layer in bf16": "--first-last-layers-bf16 --num-layers 4",
                "Muon": "--optimizer muon --muon-fp32-matmul-prec high",
            }.items()
        ),
        pytest.param("tensorwise", f.GATED, id="tensorwise, GQA SwiGLU"),
    ],
)
def test_quantized_gathers_are_bf16_gathers_to_the_bit(
    recipe_te: RankPools, recipe: str, more: str
) -> None:
    common = [FORMATS[recipe], fsdp(ZERO3), more]
    gathered = _run(recipe_te, 2, *common, GATHERS[recipe])
    assert gathered.losses == _run(recipe_te, 2, *common).losses


@pytest.mark.functional
@pytest.mark.parametrize("gathers", ["", GATHERED_FP4], ids=["bf16 gathers", "FP4 gathers"])
def test_nvfp4_trains_without_fused_weight_gradients(blackwell_te: RankPools, gathers: str) -> None:
    """Weights gathered in bf16 are quantized again in the backward then, to the same numbers."""
    common = [NVFP4, "--no-gradient-accumulation-fusion"]
    theirs = _run(blackwell_te, 2, *common)
    _assert_equal(_run(blackwell_te, 2, *common, fsdp(ZERO3), gathers), theirs)


@pytest.mark.functional
@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [
        *((recipe, strategy) for recipe in RECIPES for strategy in (f.ZERO1, f.ZERO2, ZERO3)),
        ("mxfp8", ZERO3),
        ("nvfp4", ZERO3),
    ],
)
def test_main_weights_sharded_over_instances_too_train_as_over_one(
    recipe_te: RankPools, recipe: str, strategy: str
) -> None:
    common = [FORMATS[recipe], GATHERS[recipe], fsdp(strategy)]
    one, two = (_run(recipe_te, 4, *common, axes) for axes in (HSDP, f.HFSDP))
    # Along the outer axis gradients are scattered instead of reduced whole, of equal sums.
    _assert_equal(two, one)


@pytest.mark.functional
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_nvfp4_has_main_weights(
    blackwell_te: RankPools, tmp_path: Path, ranks: int
) -> None:
    """So a run in bf16 loads it; at the same size training goes on to the bit."""
    flags = [NVFP4, fsdp(ZERO3), GATHERED_FP4]
    whole = _run(blackwell_te, 2, *flags, saving(tmp_path, 2))
    resumed = _run(blackwell_te, ranks, *flags, loading(tmp_path, 2))
    assert distance(resumed.losses, whole.losses[2:]) <= (0 if ranks == 2 else 1e-2)
    in_bf16 = _run(blackwell_te, ranks, BLACKWELL, fsdp(f.ZERO1), loading(tmp_path, 2))
    assert distance(in_bf16.losses, whole.losses[2:]) < 1e-2


@pytest.fixture(scope="module")
def saved(
    megatron_te: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Training]:
    """A checkpoint of iteration 2 of an FP8 run at 2 ranks, and the run that went on."""
    folder = tmp_path_factory.mktemp("fp8")
    flags = [_fp8("tensorwise"), fsdp(ZERO3), GATHERED, saving(folder, 2)]
    return folder, _run(megatron_te, 2, *flags)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, [_fp8("tensorwise"), fsdp(ZERO3), GATHERED], id="as it was"),
        longer(2, [_fp8("tensorwise"), fsdp(ZERO3)], id="gathered in bf16"),
        longer(1, [_fp8("tensorwise"), fsdp(f.ZERO1), GATHERED], id="one rank, ZeRO-1"),
        longer(4, [_fp8("tensorwise"), fsdp(ZERO3), GATHERED], id="four ranks"),
    ],
)
def test_a_checkpoint_of_an_fp8_run_goes_on_at_any_size(
    megatron_te: RankPools, saved: tuple[Path, Training], ranks: int, flags: list[Any]
) -> None:
    folder, whole = saved
    resumed = _run(megatron_te, ranks, *flags, loading(folder, 2))
    bound = 0 if ranks == 2 else 1e-4
    assert distance(resumed.losses, whole.losses[2:]) <= bound


@pytest.mark.functional
def test_main_weights_are_what_a_checkpoint_has(
    megatron_te: RankPools, saved: tuple[Path, Training], tmp_path: Path
) -> None:
    """So a run in bf16 loads one of FP8, another TP size does, and the other way round."""
    folder, whole = saved
    for more in ([fsdp(ZERO3)], [_fp8("tensorwise"), fsdp(ZERO3), GATHERED, TP2_SP]):
        resumed = _run(megatron_te, 2, *more, loading(folder, 2))
        assert distance(resumed.losses, whole.losses[2:]) < 1e-3
    plain = _run(megatron_te, 2, fsdp(ZERO3), saving(tmp_path, 2))
    resumed = _run(megatron_te, 2, _fp8("tensorwise"), fsdp(ZERO3), GATHERED, loading(tmp_path, 2))
    assert distance(resumed.losses, plain.losses[2:]) < 1e-3


@pytest.mark.functional
def test_the_command_on_the_page_trains() -> None:
    page = "docs/fp8.md"
    blocks = blocks_in(page, (ROOT / page).read_text())
    (command,) = (block.code for block in blocks if block.language == "bash")
    launcher, _, script = command.replace("\\\n", " ").partition(" -m ")
    assert launcher.split() == ["torchrun", "--nproc-per-node", "2"]
    module, *flags = script.split()
    run = torchrun(2, module, flags)
    assert run.code == 0, run.output[-3000:]
    assert sorted(run.losses) == [1, 2, 3, 4]
    assert run.losses[4] < run.losses[1]


class _Flags:
    fp8_param_gather = True
    fp4_param_gather = False
    megatron_fsdp_main_params_dtype: Any = "fp32"


def _gathering(kind: str) -> Any:
    flags = _Flags()
    flags.fp8_param_gather, flags.fp4_param_gather = kind == "fp8", kind == "fp4"
    check_quantized(flags)
    return flags


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", None])
def test_quantized_weights_need_finer_main_weights(kind: str, dtype: str | None) -> None:
    flags = _gathering(kind)
    flags.megatron_fsdp_main_params_dtype = dtype
    said = f"^--{kind}-param-gather quantizes .* use --megatron-fsdp-main-params-dtype fp32"
    with pytest.raises(FlagError, match=said):
        check_quantized(flags)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_weights_drawn_on_the_cpu_have_no_finer_values(kind: str) -> None:
    flags = _gathering(kind)
    flags.use_cpu_initialization = True
    said = f"^--use-cpu-initialization cannot be used with --{kind}-param-gather"
    with pytest.raises(FlagError, match=said):
        check_quantized(flags)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8", "fp4": None}, "--fp8-recipe mxfp8"),
        ({"fp8": None, "fp8_recipe": "delayed", "fp4": "e2m1"}, "--fp4-format"),
    ],
    ids=["MXFP8", "NVFP4"],
)
def test_activations_in_blocks_are_not_gathered_on_a_cpu(given: dict[str, Any], said: str) -> None:
    args = SimpleNamespace(**given, num_experts=None, sequence_parallel=True)
    with pytest.raises(FlagError, match=f"^{said} with --sequence-parallel cannot be used"):
        check_combinations(args)
