"""Megatron's own checkpoints go on in sharded runs, and those of sharded runs in Megatron."""

from __future__ import annotations

import argparse
import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.mcore import flags as f
from tests.mcore.session import Training, distance, train
from tests.mcore.trained import trained
from tests.ranks import RankFailure, RankPools

DDP = "--ckpt-format torch_dist"
IN_BUCKETS = f"{DDP} --use-distributed-optimizer"
MEGATRON = f"{IN_BUCKETS} --dist-ckpt-optim-fully-reshardable"

SHARDED = " ".join(f.fsdp())

SAVED_AT, LAST = 3, 6
STEPS = f"--global-batch-size 8 --train-iters {LAST}"

# A rate that moves shows whether the schedule was loaded, as losses show weights and moments.
SWIGLU = "--swiglu --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 0.5"
QK_NORM = "--normalization RMSNorm --qk-layernorm --swiglu"
DEEP = "--num-layers 4"
DRAFTING = f"{f.MTP} --swiglu"
BF16 = f"{f.ALLTOALL} --bf16"
ROUNDED = f"{BF16} {f.DROPOUT}"
STRATEGY = "--data-parallel-sharding-strategy"
MIXED = f"{f.ALLTOALL} --moe-layer-freq [0,1]"

Curve = Callable[[str, int, str, str], tuple[Path, Training]]


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Trainings that saved after some iterations and went on, run once each."""

    @functools.cache
    def save(name: str, world_size: int, kind: str, flags: str) -> tuple[Path, Training]:
        folder = tmp_path_factory.mktemp(name)
        flags_of_saving = f.saving(folder, SAVED_AT)
        return folder, trained(megatron, world_size, STEPS, kind, flags, flags_of_saving)

    return save


def _check_resumed(
    pools: RankPools, world_size: int, run: tuple[Path, Training], *flags: f.Flags
) -> None:
    """Check that a training goes on with what another one saved as that one went on."""
    folder, uninterrupted = run
    resumed = _resume(pools, world_size, folder, *flags)
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6


def _resume(pools: RankPools, world_size: int, folder: Path, *flags: f.Flags) -> Training:
    load = f.loading(folder, SAVED_AT)
    return trained(pools, world_size, STEPS, *flags, load, iterations=LAST - SAVED_AT)


# What Megatron saves, and at what sizes a sharded run goes on with it.
FROM_MEGATRON = {
    "dp2-to-1": (2, MEGATRON, SWIGLU, 1, SWIGLU),
    "dp2-to-dp2": (2, MEGATRON, SWIGLU, 2, SWIGLU),
    "dp2-to-dp4": (2, MEGATRON, SWIGLU, 4, SWIGLU),
    "dp2-to-hybrid": (2, MEGATRON, SWIGLU, 4, f"{SWIGLU} {f.HFSDP}"),
    "dp2-to-tp2": (2, MEGATRON, SWIGLU, 2, f"{SWIGLU} {f.TP2}"),
    "tp2-to-dp2": (2, MEGATRON, f"{SWIGLU} {f.TP2}", 2, SWIGLU),
    "tp2-to-tp2-dp2": (
        2,
        MEGATRON,
        f"{SWIGLU} {f.TP2}",
        4,
        f"{SWIGLU} {f.TP2} --sequence-parallel",
    ),
    "plain-optimizer": (2, DDP, QK_NORM, 2, QK_NORM),
    "ep2-to-ep1": (2, MEGATRON, f"{f.ALLTOALL} {f.EP2}", 2, f.ALLTOALL),
    "ep2-to-ep2-dp2": (2, MEGATRON, f"{f.ALLTOALL} {f.EP2}", 4, f"{f.ALLTOALL} {f.EP2}"),
    "pp2-to-dp2": (2, MEGATRON, f"{DEEP} {f.PP2}", 2, DEEP),
    "pp2-to-pp2-dp2": (2, MEGATRON, f"{DEEP} {f.PP2}", 4, f"{DEEP} {f.PP2}"),
    "random-numbers": (2, MEGATRON, f.DROPOUT, 2, f.DROPOUT),
    "drafting": (2, MEGATRON, DRAFTING, 2, DRAFTING),
    "dense-and-expert-layers": (2, MEGATRON, MIXED, 2, f"{MIXED} {f.EP2}"),
    # From weights rounded to bf16 alone, Adam's small steps would start elsewhere.
    "bf16-from-main-weights": (2, MEGATRON, BF16, 2, BF16),
    "bf16-from-main-weights-plain-optimizer": (2, DDP, BF16, 2, BF16),
    **{
        f"dp2-to-{s}": (2, MEGATRON, SWIGLU, 2, f"{SWIGLU} {STRATEGY} {s}")
        for s in f.STRATEGIES[:3]
    },
    "state-space": (2, MEGATRON, f"{f.MAMBA} {f.TP2}", 2, f.MAMBA),
}


@pytest.mark.parametrize("name", FROM_MEGATRON)
@pytest.mark.functional
def test_a_sharded_run_goes_on_with_what_megatron_saved(
    megatron: RankPools, saved: Curve, name: str
) -> None:
    world_size, kind, flags, resumed_at, resumed_flags = FROM_MEGATRON[name]
    run = saved("megatron", world_size, kind, flags)
    _check_resumed(megatron, resumed_at, run, f.fsdp(), resumed_flags)


@pytest.mark.functional
def test_megatron_itself_goes_on_with_what_it_saved(megatron: RankPools, saved: Curve) -> None:
    """What it is to be compared with: on a CPU, its optimizer needs mending for that."""
    _check_resumed(megatron, 2, saved("megatron", 2, MEGATRON, SWIGLU), MEGATRON, SWIGLU)


def _train_and_count(flags: list[str]) -> tuple[Training, int]:
    """Train; also return how many elements were read. The probe counts those of the model."""
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import MegatronFolder

    fill, wanted = MegatronFolder.fill, []

    def count(self: Any, blocks: Any) -> Any:
        wanted.extend(block.target.numel() for block in blocks)
        return fill(self, blocks)

    with mock.patch.object(MegatronFolder, "fill", count):
        return train(flags, _num_elements), sum(wanted)


def _num_elements(model: Any, optimizer: Any) -> int:
    del optimizer
    return sum(param.numel() for chunk in model for param in chunk.parameters())


@pytest.mark.functional
def test_a_sharded_run_goes_on_and_a_rank_reads_the_rows_it_holds_and_no_others(
    megatron: RankPools, saved: Curve
) -> None:
    folder, uninterrupted = saved("megatron", 2, MEGATRON, SWIGLU)
    load = f.loading(folder, SAVED_AT)
    results = megatron(2).run(
        _train_and_count, f.words(f.MODEL_FLAGS, STEPS, f.fsdp(), SWIGLU, load)
    )
    resumed, counts = results[0][0], [read for _, read in results]
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6
    # A weight and its two moments.
    assert sum(counts) == 3 * resumed.extras
    assert max(counts) < 0.6 * 3 * resumed.extras


@pytest.mark.functional
def test_state_in_buckets_is_rejected_and_weights_load_without_it(
    megatron: RankPools, saved: Curve
) -> None:
    folder, uninterrupted = saved("buckets", 2, IN_BUCKETS, SWIGLU)
    with pytest.raises(RankFailure, match=r"saved as dp_reshardable.*--dist-ckpt-optim-fully-resh"):
        _resume(megatron, 2, folder, f.fsdp(), SWIGLU)
    fresh = "--no-load-optim --override-opt-param-scheduler"
    resumed = _resume(megatron, 2, folder, f.fsdp(), SWIGLU, fresh)
    # Weights are the saved ones, steps start anew.
    assert distance(resumed.losses[:1], uninterrupted.losses[SAVED_AT : SAVED_AT + 1]) < 1e-6
    assert resumed.losses[1:] != uninterrupted.losses[SAVED_AT + 1 :]


@pytest.mark.functional
def test_weights_alone_are_a_start_for_another_training(megatron: RankPools, saved: Curve) -> None:
    folder, uninterrupted = saved("megatron", 2, MEGATRON, SWIGLU)
    flags = [STEPS, f.fsdp(), SWIGLU, "--finetune", f.loading(folder, SAVED_AT)]
    tuned = trained(megatron, 2, *flags)
    assert len(tuned.losses) == LAST
    assert tuned.losses[0] < uninterrupted.losses[1]


def test_a_checkpoint_of_another_model_is_rejected(megatron: RankPools, saved: Curve) -> None:
    folder, _ = saved("megatron", 2, MEGATRON, SWIGLU)
    with pytest.raises(RankFailure, match=r"of another model: .*linear_fc1.*\(2, 256, 64\), and"):
        _resume(megatron, 2, folder, f.fsdp(), SWIGLU, "--ffn-hidden-size 96")
    with pytest.raises(RankFailure, match=r"not hold decoder\.layers\.self_attention\.q_layer"):
        _resume(megatron, 2, folder, f.fsdp(), SWIGLU, "--qk-layernorm")


class _RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    from megatron_fsdp_v2.checkpoint.writing import FolderWriter
    from megatron_fsdp_v2_mcore import FlagError
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.common import COMMON, common_state
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import MegatronFolder

    writer = FolderWriter(tmp_path)
    writer.add_object(COMMON, [{"args": _RunsCode()}])
    writer.finish()
    with pytest.raises(FlagError, match="cannot be loaded as plain data"):
        common_state(MegatronFolder(tmp_path))
    (tmp_path / "common.pt").write_bytes(pickle.dumps(_RunsCode()))
    with pytest.raises(FlagError, match="cannot be loaded as plain data"):
        common_state(MegatronFolder(tmp_path))


# What a sharded run saves, and at what sizes Megatron's own optimizer goes on with it.
TO_MEGATRON = {
    "dp2": (2, SWIGLU, 2, SWIGLU),
    "dp2-to-tp2": (2, SWIGLU, 2, f"{SWIGLU} {f.TP2}"),
    "tp2-dp2-to-dp2": (4, f"{SWIGLU} {f.TP2}", 2, SWIGLU),
    "ep2": (2, f"{f.ALLTOALL} {f.EP2}", 2, f"{f.ALLTOALL} {f.EP2}"),
    "pp2-to-dp2": (2, f"{DEEP} {f.PP2}", 2, DEEP),
    "random-numbers": (2, f"{f.DROPOUT} {QK_NORM}", 2, f"{f.DROPOUT} {QK_NORM}"),
    "drafting": (2, DRAFTING, 2, DRAFTING),
    "dense-and-expert-layers": (2, MIXED, 2, MIXED),
    "state-space": (2, f"{f.MAMBA} {f.TP2}", 2, f.MAMBA),
}


@pytest.mark.parametrize("name", TO_MEGATRON)
@pytest.mark.functional
def test_megatron_goes_on_with_what_a_sharded_run_saved(
    megatron: RankPools, saved: Curve, tmp_path: Path, name: str
) -> None:
    world_size, flags, resumed_at, resumed_flags = TO_MEGATRON[name]
    run = _exported(saved("sharded", world_size, SHARDED, flags), tmp_path)
    _check_resumed(megatron, resumed_at, run, MEGATRON, resumed_flags)


@pytest.mark.functional
def test_experts_get_an_optimizer_of_their_own_as_the_loading_run_has_it(
    megatron: RankPools, saved: Curve, tmp_path: Path
) -> None:
    run = saved("sharded", 2, SHARDED, f"{f.ALLTOALL} {f.EP2}")
    run = _exported(run, tmp_path, expert_parallel=1)
    _check_resumed(megatron, 2, run, MEGATRON, f.ALLTOALL)


def test_there_and_back_changes_no_bit(megatron: RankPools, saved: Curve, tmp_path: Path) -> None:
    folder, uninterrupted = _exported(saved("sharded", 2, SHARDED, ROUNDED), tmp_path)
    resumed = _resume(megatron, 2, folder, SHARDED, ROUNDED)
    assert resumed.losses == uninterrupted.losses[SAVED_AT:]


def _exported(
    run: tuple[Path, Training], folder: Path, expert_parallel: int | None = None
) -> tuple[Path, Training]:
    """A training whose checkpoint was exported."""
    assert _export(run[0], folder / "exported", expert_parallel=expert_parallel) == 0
    return folder / "exported", run[1]


def _export(
    source: Path, target: Path, iteration: int | None = SAVED_AT, expert_parallel: int | None = None
) -> int:
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.export import to_torch_dist

    parser = argparse.ArgumentParser()
    to_torch_dist.configure(parser)
    words = [] if iteration is None else ["--iteration", str(iteration)]
    if expert_parallel is not None:
        words += ["--expert-model-parallel-size", str(expert_parallel)]
    return to_torch_dist.run(source, target, parser.parse_args(words))


def test_export_says_in_a_sentence_what_it_did_and_why_it_cannot(
    saved: Curve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved("sharded", 2, SHARDED, ROUNDED)
    target = tmp_path / "exported"
    assert _export(folder, target, iteration=None) == 0
    assert "iter_0000006: " in capsys.readouterr().out
    for source, problem in (
        (folder, "is there already"),
        (target, "is a torch_dist checkpoint already"),
        (tmp_path / "nothing", "does not exist"),
    ):
        assert _export(source, target, iteration=None) == 2
        written = capsys.readouterr().err
        assert problem in written
        assert written.count("\n") == 1


def _compare_names(model: Any, optimizer: Any) -> tuple[int, list[str]]:
    """How many names there are, and what the rules say of those where Megatron says otherwise."""
    del optimizer
    from megatron.core import parallel_state
    from megatron.training import get_args

    from megatron_fsdp_v2_mcore.checkpoint.names import canonical_names
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.names import StoredNames
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.stored import stored_blocks

    rules = StoredNames.of(get_args())
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    (chunk,) = model
    while hasattr(chunk, "module"):
        chunk = chunk.module
    (names,) = canonical_names([chunk])
    tensors = dict(chunk.named_parameters()) | dict(chunk.named_buffers())
    by_tensor = {id(tensors[local]): name for local, name in names.items()}
    checked, wrong = 0, []
    for tensor, blocks in stored_blocks(chunk, {"dp_cp_group": group}):
        for key, block in zip(by_tensor[id(tensor)].keys, blocks, strict=True):
            place = rules.place(key)
            checked += 1
            found = place.key, place.shape(block.size), place.offset(block.size)
            if found != (block.key, block.shape, block.offset):
                wrong.append(f"{key}: {found}, Megatron: {block}")
    return checked, wrong


@pytest.mark.parametrize(
    "flags",
    [
        "--swiglu --add-qkv-bias",
        f"{QK_NORM} --untie-embeddings-and-output-weights",
        f"{f.ALLTOALL} --moe-shared-expert-intermediate-size 64 --moe-router-enable-expert-bias"
        " --moe-router-score-function sigmoid --moe-router-load-balancing-type none",
        f"{f.ALLTOALL} --moe-grouped-gemm",
        MIXED,
        f"{DRAFTING} --num-experts 4 --disable-bias-linear",
        f"{f.MAMBA} --swiglu",
    ],
    ids=["dense", "untied", "shared-expert", "grouped", "mixed", "drafting", "state-space"],
)
@pytest.mark.functional
def test_rules_for_names_are_what_megatrons_modules_do(megatron: RankPools, flags: str) -> None:
    steps = "--train-iters 1 --global-batch-size 8"
    for checked, wrong in trained(megatron, 2, steps, f.fsdp(), flags, probe=_compare_names).extras:
        assert checked > 10
        assert not wrong
