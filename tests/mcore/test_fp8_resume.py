"""FP8 trainings, and their checkpoints with scales and amax histories of delayed scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from functional_tests.quantized import (
    BLACKWELL,
    DELAYED_GATHERED,
    EVALUATED,
    FORMATS,
    HISTORY,
    MODEL,
)
from megatron_fsdp_v2.checkpoint.exporting import export
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2_mcore.checkpoint.compatibility import Compatibility, check_request
from megatron_fsdp_v2_mcore.checkpoint.name_table import is_fp8_state
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.export import export as to_torch_dist
from tests.docs.blocks import ROOT, blocks_in
from tests.mcore import flags as f
from tests.mcore.checkpoint_values import digest, fp8_digests, merged_digests
from tests.mcore.command_line import torchrun
from tests.mcore.quantized import enter
from tests.mcore.session import Training, distance
from tests.mcore.test_checkpoint_compatibility import REQUESTED, _args, _saved
from tests.mcore.trained import on_te, trained
from tests.ranks import RankPools

MAIN = "--megatron-fsdp-main-params-dtype fp32"
DELAYED, GATHERED = HISTORY, f"{DELAYED_GATHERED} {MAIN}"
COMMON = f"{MODEL} --global-batch-size 12 --train-iters 4"
PADDED = f"{f.TP2_SP} --make-vocab-size-divisible-by 128"
_NO_MORE = "--train-iters 2 --override-opt-param-scheduler"
EXPERTS = f"{f.ALLTOALL} --moe-router-load-balancing-type none --moe-grouped-gemm"

Saved = tuple[Path, Training]


@pytest.fixture(scope="module")
def saved(megatron_te: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of iteration 2 at 2 ranks, ZeRO-3, FP8 weights, and the uninterrupted run."""
    folder = tmp_path_factory.mktemp("fp8")
    flags = [COMMON, f.fsdp(), GATHERED, EVALUATED, f.saving(folder, 2)]
    return folder, trained(megatron_te, 2, *flags)


def _state(folder: Path, iteration: int = 2) -> dict[str, torch.Tensor]:
    """Return the state of delayed scaling in a checkpoint."""
    path = folder / f"iter_{iteration:07d}"
    model = _load_state_dict_from_keys({"model"}, checkpoint_id=path)["model"]
    return {name: value for name, value in model.items() if is_fp8_state(name)}


def _loaded(pools: RankPools, world_size: int, folder: Path, *flags: f.Flags) -> dict[str, str]:
    """Load iteration 2 without training; return digests of the state of delayed scaling."""
    command = [COMMON, *flags, f.loading(folder, 2), _NO_MORE]
    return merged_digests(trained(pools, world_size, *command, probe=fp8_digests).extras)


# --------------------------------------------------------------------------------------- resuming


@pytest.mark.functional
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(3, [f.fsdp(), GATHERED], id="3 ranks"),
        pytest.param(2, [f.fsdp(f.NO_SHARD), GATHERED], id=f.NO_SHARD),
        pytest.param(2, [f.fsdp(), DELAYED, MAIN], id="bf16 weights"),
        pytest.param(2, [f.fsdp(), GATHERED, PADDED], id="tensor"),
        pytest.param(2, [f.fsdp(), GATHERED, f.PP2], id="pipeline"),
    ],
)
def test_scales_are_loaded_at_other_parallel_sizes(
    megatron_te: RankPools, saved: Saved, world_size: int, flags: list[Any]
) -> None:
    folder, uninterrupted = saved
    expected = {name: digest(value) for name, value in _state(folder).items()}
    assert _loaded(megatron_te, world_size, folder, *flags) == expected
    resumed = trained(megatron_te, world_size, COMMON, *flags, f.loading(folder, 2))
    assert distance(resumed.losses, uninterrupted.losses[2:]) < 1e-3


@pytest.mark.functional
def test_experts_keep_their_scales_on_other_ranks(megatron_te: RankPools, tmp_path: Path) -> None:
    flags = [f.fsdp(), GATHERED, EXPERTS]
    # Ranks with two experts each reduce maxima by position. On one rank, each expert has its own.
    trained(megatron_te, 1, COMMON, *flags, f.saving(tmp_path, 2), "--train-iters 2")
    saved_state = _state(tmp_path)
    scales = [
        saved_state[f"decoder.layers.0.mlp.experts.linear_fc1.fp8_state.scale_fwd{i}"]
        for i in range(4)
    ]
    assert not any(torch.equal(scales[0], other) for other in scales[1:])
    expected = {name: digest(value) for name, value in saved_state.items()}
    assert _loaded(megatron_te, 2, tmp_path, *flags, f.EP2) == expected


@pytest.mark.functional
def test_scales_are_loaded_with_another_history_length(
    megatron_te: RankPools, saved: Saved
) -> None:
    folder, _ = saved
    flags = [f.fsdp(), DELAYED, MAIN, "--fp8-amax-history-len 8"]
    found = _loaded(megatron_te, 2, folder, *flags)
    expected = {
        name: digest(value if "scale" in name else torch.zeros(8, value.shape[1]))
        for name, value in _state(folder).items()
    }
    assert found == expected


# --------------------------------------------------------------------------------- the checkpoint


def test_checkpoint_has_delayed_scaling_state_once_per_module(saved: Saved) -> None:
    state = _state(saved[0])
    modules = {name.rpartition(".fp8_state.")[0] for name in state}
    inner = ("self_attention.linear_qkv", "self_attention.linear_proj", *_MLP)
    assert modules == {f"decoder.layers.{i}.{name}" for i in range(2) for name in inner}
    assert len(state) == 4 * len(modules)
    for name, value in state.items():
        columns = 3 if name.endswith("fwd") else 2
        assert tuple(value.shape) == ((4, columns) if "amax" in name else (columns,))
        assert value.dtype == torch.float32 and value.isfinite().all()
        # Input and weight of the forward; gradient of the output in the backward.
        used = value[..., : 2 if name.endswith("fwd") else 1]
        assert (used != 1).all() if "scale" in name else (used.amax(0) > 0).all()


_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")


def test_exports_have_only_weights(saved: Saved, tmp_path: Path) -> None:
    path = saved[0] / "iter_0000002"
    assert not verify(path).problems
    done = export(path, tmp_path / "model.safetensors")
    of_megatron = to_torch_dist(saved[0], tmp_path, 2).path
    stored = dcp.FileSystemReader(of_megatron).read_metadata().state_dict_metadata
    for names in (load_file(done.files[0]).keys(), stored.keys()):
        assert any(name.endswith("mlp.linear_fc1.weight") for name in names)
        assert not any("fp8_state" in name for name in names)
    assert {key for key in done.left_out if key.startswith("model.")} == {
        f"model.{name}" for name in _state(saved[0])
    }


# ------------------------------------------------------------------------------------ mismatches

LAYER = "model.decoder.layers.0.mlp.linear_fc1.fp8_state"
FP8_REQUESTED: dict[str, Any] = {
    f"{LAYER}.scale_fwd": (3,),
    f"{LAYER}.amax_history_fwd": (16, 3),
    f"{LAYER}.scale_bwd": (2,),
    f"{LAYER}.amax_history_bwd": (16, 2),
}
SCALE, MISSING = f"{LAYER}.scale_fwd", f"{LAYER}.scale_bwd"
SOME = {name: shape for name, shape in FP8_REQUESTED.items() if name != MISSING}
HISTORIES = {name: (4, *s[1:]) for name, s in FP8_REQUESTED.items() if "amax" in name}
SHORTER = "have 4 steps, 16 in this run (--fp8-amax-history-len)"
# State in the checkpoint, entries that are not loaded, and the expected text of the only note.
HELD: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "all": (FP8_REQUESTED, set(), ""),
    "none": ({}, set(FP8_REQUESTED), "has no scales of delayed scaling"),
    "some": (SOME, {MISSING}, MISSING),
    "another length": (FP8_REQUESTED | HISTORIES, set(HISTORIES), SHORTER),
    **{
        f"another shape {shape}": (
            FP8_REQUESTED | {SCALE: shape},
            {SCALE},
            f"{SCALE} {shape} of torch.float32, in this run (3,)",
        )
        for shape in [(6,), ()]
    },
}


def _absent_scales(result: Compatibility) -> set[str]:
    return {".".join(keys) for keys in result.absent}


@pytest.mark.parametrize("what", HELD)
def test_matching_scales_are_loaded_and_reinitialized_state_is_noted(
    tmp_path: Path, what: str
) -> None:
    held, without, text = HELD[what]
    requested = {**REQUESTED, **FP8_REQUESTED}
    result = check_request(_saved(tmp_path, **held), requested, _args(), _args())
    assert (result.problem, _absent_scales(result)) == ("", without)
    assert [text in note and "reinitialized" in note for note in result.notes] == [True] * bool(
        text
    )


def test_unrequested_scales_are_ignored(tmp_path: Path) -> None:
    result = check_request(_saved(tmp_path, **FP8_REQUESTED), REQUESTED, _args(), _args())
    assert (result.problem, result.notes) == ("", [])


def test_scales_of_another_dtype_are_named_and_reinitialized(tmp_path: Path) -> None:
    key = f"{LAYER}.scale_fwd"
    entries: dict[str, Any] = {k: torch.ones(s) for k, s in FP8_REQUESTED.items()}
    entries[key] = entries[key].long()
    dcp.save(entries, checkpoint_id=str(tmp_path), no_dist=True)
    result = check_request(str(tmp_path), FP8_REQUESTED, _args(), _args())
    assert (result.problem, _absent_scales(result)) == ("", {key})
    assert "of torch.int64" in result.notes[0]


# ------------------------------------------------------------------------ without a training loop


@on_te(2)
def test_damaged_scale_is_an_error_and_keeps_the_state() -> None:
    """The error is raised on every rank, although only one rank read the damaged value."""
    te = enter("delayed")
    from transformer_engine.common.recipe import DelayedScaling

    from megatron_fsdp_v2_mcore.checkpoint import fp8_state
    from megatron_fsdp_v2_mcore.flags.errors import FlagError
    from megatron_fsdp_v2_mcore.formats import delayed_scaling

    layer = te.Linear(16, 16, device="cpu")
    with torch.no_grad(), te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=7)):
        delayed_scaling.allocate(layer)
    before = {name: value.clone() for name, value in delayed_scaling.live_state(layer).items()}
    good = {name: value + 1 for name, value in fp8_state.tensors_to_load([layer]).items()}
    for value in good.values():
        value.fill_(2.0)
    for name, number in [
        ("scale_fwd", 0.0),
        ("scale_bwd", float("nan")),
        ("scale_fwd", float("inf")),
        ("amax_history_fwd", -1.0),
    ]:
        read = {key: value.clone() for key, value in good.items()}
        if dist.get_rank() == 0:
            read[f"fp8_state.{name}"].view(-1)[1] = number
        with pytest.raises(FlagError, match=r"is damaged: model\.fp8_state\."):
            fp8_state.restore([layer], read)
        state = delayed_scaling.live_state(layer)
        assert all(torch.equal(state[key], value) for key, value in before.items())
    fp8_state.restore([layer], good)
    assert all((value == 2).all() for value in delayed_scaling.live_state(layer).values())


@pytest.mark.functional
@pytest.mark.parametrize("recipe", FORMATS)
def test_training_with_quantized_products_is_close_to_bf16(
    recipe_te: RankPools, recipe: str
) -> None:
    """Under Megatron's DDP, with which the functional matrix compares sharded trainings."""
    gpu = BLACKWELL if recipe in ("mxfp8", "nvfp4") else ""
    plain, quantized = (
        trained(recipe_te, 2, MODEL, "--train-iters 4", which) for which in (gpu, FORMATS[recipe])
    )
    assert 1e-6 < distance(quantized.losses, plain.losses) < (0.1 if recipe == "nvfp4" else 1e-2)
    assert quantized.losses[-1] < quantized.losses[0]


@pytest.mark.functional
def test_command_of_the_page_trains() -> None:
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
