"""Megatron's own checkpoints go on in sharded runs, and those of sharded runs in Megatron."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mcore.session import MODEL_FLAGS, Training, curves, distance, fsdp, train
from tests.ranks import RankFailure, RankPools

MODEL = [*MODEL_FLAGS, "--global-batch-size", "8"]

DDP = ["--ckpt-format", "torch_dist"]
MEGATRON = [*DDP, "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
IN_BUCKETS = [*DDP, "--use-distributed-optimizer"]

SAVED_AT, LAST = 3, 6
ITERATIONS = ["--train-iters", str(LAST)]

# A rate that moves shows whether the schedule was loaded, as losses show weights and moments.
SWIGLU = "--swiglu --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 0.5"
QK_NORM = "--normalization RMSNorm --qk-layernorm --swiglu"
DEEP = "--num-layers 4"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
DRAFTING = "--mtp-num-layers 1 --position-embedding-type rope --swiglu"
MOE = (
    "--swiglu --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01"
)
ROUNDED = f"{MOE} --bf16 {DROPOUT}"
MIXED = f"{MOE} --moe-layer-freq [0,1]"
MAMBA = "--hybrid-layer-pattern M*-M --mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 2"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
HYBRID = "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"
EP2 = "--expert-model-parallel-size 2"

Curve = Callable[[str, int, list[str], str], tuple[Path, Training]]


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Trainings that saved after some iterations and went on, run once each."""
    done: dict[tuple[Any, ...], tuple[Path, Training]] = {}

    def save(name: str, world_size: int, kind: list[str], flags: str) -> tuple[Path, Training]:
        key = (name, world_size, *kind, flags)
        if key not in done:
            folder = tmp_path_factory.mktemp(name)
            words = [*flags.split(), "--save", str(folder), "--save-interval", str(SAVED_AT)]
            done[key] = folder, _train(megatron, world_size, *kind, *words)
        return done[key]

    return save


def _train(pools: RankPools, world_size: int, *flags: str) -> Training:
    return curves(pools(world_size).run(train, [*MODEL, *ITERATIONS, *flags]))


def _resume(pools: RankPools, world_size: int, folder: Path, *flags: str) -> Training:
    result = _train(pools, world_size, *flags, "--load", str(folder), "--ckpt-step", str(SAVED_AT))
    assert len(result.losses) == LAST - SAVED_AT
    return result


# What Megatron saves, and at what sizes a sharded run goes on with it.
FROM_MEGATRON = {
    "dp2-to-1": (2, MEGATRON, SWIGLU, 1, SWIGLU),
    "dp2-to-dp2": (2, MEGATRON, SWIGLU, 2, SWIGLU),
    "dp2-to-dp4": (2, MEGATRON, SWIGLU, 4, SWIGLU),
    "dp2-to-hybrid": (2, MEGATRON, SWIGLU, 4, f"{SWIGLU} {HYBRID}"),
    "dp2-to-tp2": (2, MEGATRON, SWIGLU, 2, f"{SWIGLU} {TP2}"),
    "tp2-to-dp2": (2, MEGATRON, f"{SWIGLU} {TP2}", 2, SWIGLU),
    "tp2-to-tp2-dp2": (2, MEGATRON, f"{SWIGLU} {TP2}", 4, f"{SWIGLU} {TP2} --sequence-parallel"),
    "plain-optimizer": (2, DDP, QK_NORM, 2, QK_NORM),
    "ep2-to-ep1": (2, MEGATRON, f"{MOE} {EP2}", 2, MOE),
    "ep2-to-ep2-dp2": (2, MEGATRON, f"{MOE} {EP2}", 4, f"{MOE} {EP2}"),
    "pp2-to-dp2": (2, MEGATRON, f"{DEEP} {PP2}", 2, DEEP),
    "pp2-to-pp2-dp2": (2, MEGATRON, f"{DEEP} {PP2}", 4, f"{DEEP} {PP2}"),
    "random-numbers": (2, MEGATRON, DROPOUT, 2, DROPOUT),
    "drafting": (2, MEGATRON, DRAFTING, 2, DRAFTING),
    "dense-and-expert-layers": (2, MEGATRON, MIXED, 2, f"{MIXED} {EP2}"),
    "state-space": (2, MEGATRON, f"{MAMBA} {TP2}", 2, MAMBA),
}


@pytest.mark.parametrize("name", FROM_MEGATRON)
@pytest.mark.functional
def test_a_sharded_run_goes_on_with_what_megatron_saved(
    megatron: RankPools, saved: Curve, name: str
) -> None:
    world_size, kind, flags, resumed_at, resumed_flags = FROM_MEGATRON[name]
    folder, uninterrupted = saved("megatron", world_size, kind, flags)
    resumed = _resume(megatron, resumed_at, folder, *fsdp(), *resumed_flags.split())
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6


@pytest.mark.functional
def test_megatron_itself_goes_on_with_what_it_saved(megatron: RankPools, saved: Curve) -> None:
    """What it is to be compared with: on a CPU, its optimizer needs mending for that."""
    folder, uninterrupted = saved("megatron", 2, MEGATRON, SWIGLU)
    resumed = _resume(megatron, 2, folder, *MEGATRON, *SWIGLU.split())
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6


@pytest.mark.parametrize("kind", [MEGATRON, DDP], ids=["distributed", "plain"])
@pytest.mark.functional
def test_main_weights_in_fp32_are_what_a_bf16_run_goes_on_with(
    megatron: RankPools, saved: Curve, kind: list[str]
) -> None:
    """From weights rounded to bf16 alone, Adam's small steps would start elsewhere."""
    folder, uninterrupted = saved("bf16", 2, kind, f"{MOE} --bf16")
    resumed = _resume(megatron, 2, folder, *fsdp(), *MOE.split(), "--bf16")
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.functional
def test_every_strategy_loads_it(megatron: RankPools, saved: Curve, strategy: str) -> None:
    folder, uninterrupted = saved("megatron", 2, MEGATRON, SWIGLU)
    resumed = _resume(megatron, 2, folder, *fsdp(strategy), *SWIGLU.split())
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6


def _train_and_count(flags: list[str]) -> tuple[Training, int]:
    """Train; also return how many elements were read. The probe counts those of the model."""
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import MegatronFolder

    fill, wanted = MegatronFolder.fill, []

    def count(self: Any, blocks: Any) -> Any:
        wanted.extend(block.target.numel() for block in blocks)
        return fill(self, blocks)

    MegatronFolder.fill = count
    try:
        training = train(flags, _num_elements)
    finally:
        MegatronFolder.fill = fill
    return training, sum(wanted)


def _num_elements(model: Any, optimizer: Any) -> int:
    del optimizer
    return sum(param.numel() for chunk in model for param in chunk.parameters())


@pytest.mark.functional
def test_a_sharded_run_goes_on_and_a_rank_reads_the_rows_it_holds_and_no_others(
    megatron: RankPools, saved: Curve
) -> None:
    folder, uninterrupted = saved("megatron", 2, MEGATRON, SWIGLU)
    load = ["--load", str(folder), "--ckpt-step", str(SAVED_AT)]
    flags = [*MODEL, *ITERATIONS, *fsdp(), *SWIGLU.split(), *load]
    results = megatron(2).run(_train_and_count, flags)
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
        _resume(megatron, 2, folder, *fsdp(), *SWIGLU.split())
    fresh = ["--no-load-optim", "--override-opt-param-scheduler"]
    resumed = _resume(megatron, 2, folder, *fsdp(), *SWIGLU.split(), *fresh)
    # Weights are the saved ones, steps start anew.
    assert distance(resumed.losses[:1], uninterrupted.losses[SAVED_AT : SAVED_AT + 1]) < 1e-6
    assert resumed.losses[1:] != uninterrupted.losses[SAVED_AT + 1 :]


@pytest.mark.functional
def test_weights_alone_are_a_start_for_another_training(megatron: RankPools, saved: Curve) -> None:
    folder, uninterrupted = saved("megatron", 2, MEGATRON, SWIGLU)
    flags = [*fsdp(), *SWIGLU.split(), "--finetune", "--load", str(folder)]
    tuned = _train(megatron, 2, *flags, "--ckpt-step", str(SAVED_AT))
    assert len(tuned.losses) == LAST
    assert tuned.losses[0] < uninterrupted.losses[1]


def test_a_checkpoint_of_another_model_is_rejected(megatron: RankPools, saved: Curve) -> None:
    folder, _ = saved("megatron", 2, MEGATRON, SWIGLU)
    with pytest.raises(RankFailure, match=r"of another model: .*linear_fc1.*\(2, 256, 64\), and"):
        _resume(megatron, 2, folder, *fsdp(), *SWIGLU.split(), "--ffn-hidden-size", "96")
    with pytest.raises(RankFailure, match=r"not hold decoder\.layers\.self_attention\.q_layer"):
        _resume(megatron, 2, folder, *fsdp(), *SWIGLU.split(), "--qk-layernorm")


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
    "dp2-to-tp2": (2, SWIGLU, 2, f"{SWIGLU} {TP2}"),
    "tp2-dp2-to-dp2": (4, f"{SWIGLU} {TP2}", 2, SWIGLU),
    "ep2": (2, f"{MOE} {EP2}", 2, f"{MOE} {EP2}"),
    "pp2-to-dp2": (2, f"{DEEP} {PP2}", 2, DEEP),
    "random-numbers": (2, f"{DROPOUT} {QK_NORM}", 2, f"{DROPOUT} {QK_NORM}"),
    "drafting": (2, DRAFTING, 2, DRAFTING),
    "dense-and-expert-layers": (2, MIXED, 2, MIXED),
    "state-space": (2, f"{MAMBA} {TP2}", 2, MAMBA),
}


@pytest.mark.parametrize("name", TO_MEGATRON)
@pytest.mark.functional
def test_megatron_goes_on_with_what_a_sharded_run_saved(
    megatron: RankPools, saved: Curve, tmp_path: Path, name: str
) -> None:
    world_size, flags, resumed_at, resumed_flags = TO_MEGATRON[name]
    folder, uninterrupted = saved("sharded", world_size, fsdp(), flags)
    assert _export(folder, tmp_path / "exported") == 0
    words = [*MEGATRON, *resumed_flags.split()]
    resumed = _resume(megatron, resumed_at, tmp_path / "exported", *words)
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6


@pytest.mark.functional
def test_experts_get_an_optimizer_of_their_own_as_the_loading_run_has_it(
    megatron: RankPools, saved: Curve, tmp_path: Path
) -> None:
    folder, uninterrupted = saved("sharded", 2, fsdp(), f"{MOE} {EP2}")
    assert _export(folder, tmp_path / "exported", expert_parallel=1) == 0
    resumed = _resume(megatron, 2, tmp_path / "exported", *MEGATRON, *MOE.split())
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6


def test_there_and_back_changes_no_bit(megatron: RankPools, saved: Curve, tmp_path: Path) -> None:
    folder, uninterrupted = saved("sharded", 2, fsdp(), ROUNDED)
    assert _export(folder, tmp_path / "exported") == 0
    resumed = _resume(megatron, 2, tmp_path / "exported", *fsdp(), *ROUNDED.split())
    assert resumed.losses == uninterrupted.losses[SAVED_AT:]


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
    folder, _ = saved("sharded", 2, fsdp(), ROUNDED)
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
        f"{MOE} --moe-shared-expert-intermediate-size 64 --moe-router-enable-expert-bias"
        " --moe-router-score-function sigmoid --moe-router-load-balancing-type none",
        f"{MOE} --moe-grouped-gemm",
        MIXED,
        f"{DRAFTING} --num-experts 4 --disable-bias-linear",
        f"{MAMBA} --swiglu",
    ],
    ids=["dense", "untied", "shared-expert", "grouped", "mixed", "drafting", "state-space"],
)
@pytest.mark.functional
def test_rules_for_names_are_what_megatrons_modules_do(megatron: RankPools, flags: str) -> None:
    words = [*MODEL, "--train-iters", "1", *fsdp(), *flags.split()]
    for result in megatron(2).run(train, words, _compare_names):
        checked, wrong = result.extras
        assert checked > 10
        assert not wrong
