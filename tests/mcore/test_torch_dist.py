"""`torch_dist` checkpoints of Megatron's own: loading, rejection and export.

The functional matrix has runs that continue from them, and from exports.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_fsdp_v2.checkpoint import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import open_source
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.foreign import load_object
from megatron_fsdp_v2.checkpoint.writing import pickled, write_folder
from megatron_fsdp_v2_cli import main
from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.session import Training, distance, train
from tests.mcore.trained import assert_equal, trained
from tests.ranks import RankFailure, RankPools

IN_BUCKETS = "--ckpt-format torch_dist --use-distributed-optimizer"
MEGATRON = f"{IN_BUCKETS} --dist-ckpt-optim-fully-reshardable"

SHARDED = " ".join(f.fsdp())

SAVED_AT, LAST = 3, 6
STEPS = f"--global-batch-size 8 --train-iters {LAST}"

# A changing learning rate shows whether the schedule was loaded; losses show weights and moments.
SWIGLU = "--swiglu --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 0.5"
ROUNDED = f"{f.ALLTOALL} --bf16 {f.DROPOUT}"
AWARE = "--use-precision-aware-optimizer"

Curve = Callable[[str, int, str, str], tuple[Path, Training]]


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Trainings that save after some iterations and continue; each of them runs once."""

    @functools.cache
    def save(name: str, world_size: int, kind: str, flags: str) -> tuple[Path, Training]:
        folder = tmp_path_factory.mktemp(name)
        flags_of_saving = f.saving(folder, SAVED_AT)
        return folder, trained(megatron, world_size, STEPS, kind, flags, flags_of_saving)

    return save


def _resume(pools: RankPools, world_size: int, folder: Path, *flags: f.Flags) -> Training:
    load = f.loading(folder, SAVED_AT)
    return trained(pools, world_size, STEPS, *flags, load, iterations=LAST - SAVED_AT)


def _train_and_count(flags: list[str]) -> tuple[Training, int]:
    """Train; also return the number of elements read. The probe counts those of the model."""
    fill, wanted = CheckpointFolder.fill, []

    def count(self: Any, blocks: Any) -> Any:
        wanted.extend(block.target.numel() for block in blocks)
        return fill(self, blocks)

    with mock.patch.object(CheckpointFolder, "fill", count):
        return train(flags, _num_elements), sum(wanted)


def _num_elements(model: Any, optimizer: Any) -> int:
    return sum(param.numel() for chunk in model for param in chunk.parameters())


@pytest.mark.functional
def test_ranks_of_a_resumed_sharded_run_read_only_their_own_rows(
    megatron: RankPools, saved: Curve
) -> None:
    folder, uninterrupted = saved("megatron", 2, MEGATRON, SWIGLU)
    load = f.loading(folder, SAVED_AT)
    results = megatron(2).run(
        _train_and_count, f.words(f.MODEL_FLAGS, STEPS, f.fsdp(), SWIGLU, load)
    )
    resumed, counts = results[0][0], [read for _, read in results]
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6
    # A weight, its main weight and two moments.
    assert sum(counts) == 4 * resumed.extras
    assert max(counts) < 0.6 * 4 * resumed.extras


def _train_and_report(flags: list[str]) -> tuple[Training, dict[str, int]]:
    """Train; also return the numbers of replaced elements of main weights."""
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist import loading

    with mock.patch.object(loading, "_report", return_value=None) as report:
        training = train(flags)
    return training, dict(report.call_args.args[1]) if report.called else {}


@pytest.mark.parametrize("precision", ["", longer("--bf16")])
def test_wrong_main_weights_of_megatrons_are_replaced(
    megatron: RankPools, saved: Curve, precision: str
) -> None:
    """Megatron saves the main weight of an embedding that stages share at a wrong place."""
    folder, uninterrupted = saved("stages", 2, MEGATRON, f"{f.PP2} {precision}")
    load = f.loading(folder, SAVED_AT)
    command = f.words(f.MODEL_FLAGS, STEPS, f.fsdp(), precision, load)
    for training, counts in megatron(2).run(_train_and_report, command):
        assert list(counts) == ["embedding.word_embeddings.weight"]
        assert 0.99 < counts["embedding.word_embeddings.weight"] / (256 * 64) <= 1
        # Later losses differ by 4e-3: the moments of the embedding are at a wrong place as well.
        expected = uninterrupted.losses[SAVED_AT]
        assert distance(training.losses[:1], [expected]) < 1e-6


def _rebuilt(chunks: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """Return the bits of the main weights of Megatron's precision-aware optimizer on one rank.

    The upper half of a main weight is that of the weight, whose bits are one more if it was rounded
    away from zero, as it is where the lower half has its first bit set.
    """
    (inner,) = optimizer.chained_optimizers
    found = {}
    for name, param in chunks[0].named_parameters():
        group, position = inner.model_param_group_index_map[param]
        lower = inner.optimizer.state[inner.optimizer.param_groups[group]["params"][position]]
        low = lower["master_param"].numpy().view(np.uint16).astype(np.uint32)
        high = param.detach().flatten().view(torch.int16).numpy().view(np.uint16)
        found[name.replace("module.", "")] = (high - (low >> 15) << 16 | low).astype(np.uint32)
    return found


def _bits(chunks: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """Return the bits of the main weights of a sharded run. Collective."""
    del optimizer
    return {
        name.replace("module.", ""): param.detach().full_tensor().flatten().numpy().view(np.uint32)
        for name, param in chunks[0].named_parameters()
    }


@pytest.mark.functional
def test_main_weights_are_rebuilt_from_remainders(megatron_te: RankPools, tmp_path: Path) -> None:
    """Megatron's precision-aware Adam saves the lower halves of main weights alone."""
    flags = f.words(f.TRANSFORMER_ENGINE, STEPS, f"--bf16 {AWARE}")
    until = f"--train-iters {SAVED_AT} --override-opt_param-scheduler"
    whole = trained(megatron_te, 1, flags, MEGATRON, f.saving(tmp_path, SAVED_AT))
    saved = trained(megatron_te, 1, flags, MEGATRON, until, probe=_rebuilt)
    load = f.words(flags, f.fsdp(), f.loading(tmp_path, SAVED_AT))
    (expected,) = saved.extras
    for found in trained(megatron_te, 2, load, until, probe=_bits).extras:
        np.testing.assert_equal(found, expected)
    on_ranks = megatron_te(2).run(_train_and_report, f.words(f.MODEL_FLAGS, load))
    resumed = on_ranks[0][0]
    assert [counts for _, counts in on_ranks] == [{}, {}]
    assert distance(resumed.losses, whole.losses[SAVED_AT:]) < 5e-5


@pytest.mark.functional
def test_state_in_buckets_is_rejected_and_weights_load_without_it(
    megatron: RankPools, saved: Curve
) -> None:
    folder, uninterrupted = saved("buckets", 2, IN_BUCKETS, SWIGLU)
    with pytest.raises(RankFailure, match=r"saved as dp_reshardable.*--dist-ckpt-optim-fully-resh"):
        _resume(megatron, 2, folder, f.fsdp(), SWIGLU)
    fresh = "--no-load-optim --override-opt-param-scheduler"
    resumed = _resume(megatron, 2, folder, f.fsdp(), SWIGLU, fresh)
    # Weights are loaded, and the optimizer state is new.
    assert distance(resumed.losses[:1], uninterrupted.losses[SAVED_AT : SAVED_AT + 1]) < 1e-6
    assert resumed.losses[1:] != uninterrupted.losses[SAVED_AT + 1 :]


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_rejected(megatron: RankPools, saved: Curve) -> None:
    folder, _ = saved("megatron", 2, MEGATRON, SWIGLU)
    with pytest.raises(
        RankFailure, match=r"of another model: .*linear_fc1.*\(2, 256, 64\), in this run"
    ):
        _resume(megatron, 2, folder, f.fsdp(), SWIGLU, "--ffn-hidden-size 96")
    with pytest.raises(RankFailure, match=r"not contain decoder\.layers\.self_attention\.q_layer"):
        _resume(megatron, 2, folder, f.fsdp(), SWIGLU, "--qk-layernorm")


class _RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("common", [{}, {"args": None}, {"args": {"num_layers": 2}}, None])
def test_a_checkpoint_without_arguments_is_rejected(tmp_path: Path, common: Any) -> None:
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import COMMON

    write_folder(tmp_path, {COMMON: pickled([common])})
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(CheckpointError, match="has no arguments of a Megatron run"):
        open_source(tmp_path)


def test_only_objects_that_megatron_saves_are_loaded(tmp_path: Path) -> None:
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig

    file, kind, config = tmp_path / "x.pt", ModelType.encoder_or_decoder, OptimizerConfig(lr=0.5)
    numbers = np.random.get_state()
    torch.save(argparse.Namespace(kind=kind, config=config, rng=numbers, at=Path("a")), file)
    found = load_object(file, "x")
    assert (found.kind, found.config, found.at) == (kind, config, Path("a"))
    np.testing.assert_equal(found.rng, numbers)
    for evil in (
        np.array([{}]),
        np.zeros(1, [("a", "i4")]),
        np.arange(2, dtype=">i4"),
        _RunsCode(),
    ):
        torch.save(evil, file)
        with pytest.raises(CheckpointError, match="cannot be loaded as plain data"):
            load_object(file, "x")


@pytest.mark.functional
def test_export_separates_optimizers_of_experts_as_in_the_loading_run(
    megatron: RankPools, saved: Curve, tmp_path: Path
) -> None:
    folder, uninterrupted = saved("sharded", 2, SHARDED, f"{f.ALLTOALL} {f.EP2}")
    assert _export(folder, tmp_path / "exported", expert_parallel=1) == 0
    resumed = _resume(megatron, 2, tmp_path / "exported", MEGATRON, f.ALLTOALL)
    assert distance(resumed.losses, uninterrupted.losses[SAVED_AT:]) < 1e-6


@pytest.mark.slow
def test_resume_from_an_export_is_bitwise_identical(
    megatron: RankPools, saved: Curve, tmp_path: Path
) -> None:
    folder, uninterrupted = saved("sharded", 2, SHARDED, ROUNDED)
    assert _export(folder, tmp_path / "exported") == 0
    resumed = _resume(megatron, 2, tmp_path / "exported", SHARDED, ROUNDED)
    assert resumed.losses == uninterrupted.losses[SAVED_AT:]


@pytest.mark.slow
def test_an_export_has_whole_main_weights_with_any_optimizer(
    megatron_te: RankPools, tmp_path: Path
) -> None:
    """Its arguments are those of a run that saves remainders."""
    flags = f.words(f.TRANSFORMER_ENGINE, STEPS, SHARDED, "--bf16", AWARE)
    saved = trained(megatron_te, 2, flags, f.saving(tmp_path / "run", SAVED_AT))
    assert _export(tmp_path / "run", tmp_path / "exported") == 0
    resumed = trained(megatron_te, 2, flags, f.loading(tmp_path / "exported", SAVED_AT))
    assert_equal(resumed, saved, after=SAVED_AT)


def _export(
    source: Path, target: Path, iteration: int | None = SAVED_AT, expert_parallel: int | None = None
) -> int:
    words = ["ckpt", "convert", "--to", "torch_dist", str(source), str(target)]
    if iteration is not None:
        words += ["--iteration", str(iteration)]
    if expert_parallel is not None:
        words += ["--expert-model-parallel-size", str(expert_parallel)]
    return main(words)


def test_export_prints_its_result_or_an_error_in_one_line(
    saved: Curve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved("sharded", 2, SHARDED, ROUNDED)
    target = tmp_path / "exported"
    assert _export(folder, target, iteration=None) == 0
    assert "iter_0000006: " in capsys.readouterr().out
    for source, problem in (
        (folder, "already exists"),
        (target, "is already a torch_dist checkpoint"),
        (tmp_path / "nothing", "does not exist"),
    ):
        assert _export(source, target, iteration=None) == 2
        written = capsys.readouterr().err
        assert problem in written
        assert written.count("\n") == 1


def load_into_plain_chunks(flags: str) -> None:
    """Train, and load into chunks without shards as a script for inference might."""
    from megatron.training import checkpointing, get_args

    def load(chunks: Any, optimizer: Any) -> None:
        del optimizer
        plain = {"model": {"weight": torch.zeros(1)}}
        checkpointing._load_base_checkpoint(get_args().save, get_args(), False, plain)

    train(f.words(f.MODEL_FLAGS, f.fsdp(), flags), probe=load)


def test_chunks_without_shards_are_rejected(megatron: RankPools, tmp_path: Path) -> None:
    flags = f"--train-iters 1 --save {tmp_path} --save-interval 1"
    with pytest.raises(RankFailure, match=r"build them with get_model\(\.\.\., wrap_with_ddp=True"):
        megatron(2).run(load_into_plain_chunks, flags)
