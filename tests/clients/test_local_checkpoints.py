"""Local checkpoints of Megatron's loop, which NVIDIA's resiliency extension keeps."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.session import Training, failed_saves_reported_to, rank, train
from tests.mcore.trained import TIMEOUT_S, trained
from tests.ranks import RankFailure, RankPools

MODEL = "--swiglu --hidden-dropout 0.1 --train-iters 6"
REPLICATION = "--replication --replication-jump 1"


def _flags(
    folder: Path, *more: f.Flags, strategy: str = f.ZERO3, save_interval: int = 1000
) -> list[str]:
    """Return the flags of a run that saves locally every 2 iterations, and resumes."""
    kept = [*f.saving(folder / "kept", save_interval), *f.loading(folder / "kept")]
    local = ["--non-persistent-local-ckpt-dir", str(folder / "local")]
    every = "--non-persistent-ckpt-type local --non-persistent-save-interval 2"
    return f.words(f.fsdp(strategy, kept, local, every, MODEL), *more)


def _stopped(flags: list[str]) -> Training:
    """Train on this rank until Megatron ends the process after iteration 4."""
    with pytest.raises(SystemExit):
        train([*flags, "--exit-interval", "4"])
    return Training()


def _whole(megatron: RankPools, world_size: int, strategy: str, *more: f.Flags) -> Training:
    return trained(megatron, world_size, f.fsdp(strategy, MODEL), *more, once=True)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt"))


@pytest.mark.parametrize(
    ("world_size", "strategy", "model", "how"),
    [
        (2, f.ZERO3, "--bf16", REPLICATION),
        longer(2, f.ZERO3, "--bf16", ""),
        longer(2, f.ZERO1, "--fp16 --initial-loss-scale 1024", f"--async-save {REPLICATION}"),
        # No step before the restart: the loss scale is too large.
        longer(2, f.ZERO3, "--fp16", ""),
        longer(2, f.ZERO2, "--optimizer muon --bf16", "--async-save"),
        longer(2, f.NO_SHARD, "", REPLICATION),
        longer(2, f.ZERO3, "--num-experts 4 --expert-model-parallel-size 2", REPLICATION),
        longer(
            2,
            f.ZERO3,
            "--num-layers 4 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 1",
            "",
        ),
        longer(
            4,
            f.ZERO3,
            "--tensor-model-parallel-size 2 --sequence-parallel",
            "--replication --replication-jump 2",
        ),
    ],
)
def test_resumed_training_is_bitwise_that_of_one_run(
    megatron: RankPools, tmp_path: Path, world_size: int, strategy: str, model: str, how: str
) -> None:
    """With replication, the folder of the last rank is lost, and it reads its neighbor's copy."""
    flags = _flags(tmp_path, model, how, strategy=strategy)
    trained(megatron, world_size, flags, by=_stopped)
    local, last, copies = tmp_path / "local", world_size - 1, "replication" in how
    assert not list((tmp_path / "kept").rglob("iter_*"))
    for number in range(world_size):
        # Local files of earlier iterations are removed.
        holder = number ^ (world_size // 2)
        held = sorted([number, holder]) if copies else [number]
        assert _files(local / str(number)) == [f"iter_0000004_{n}_local.pt" for n in held]
    if copies:
        shutil.rmtree(local / str(last))
    # Left by a process that ended while it saved iteration 6.
    (local / "0" / "iter_0000006_0_local.dirty.pt").write_bytes(b"")
    resumed = trained(megatron, world_size, flags)
    whole = _whole(megatron, world_size, strategy, model)
    assert resumed.losses == whole.losses[4:]
    assert resumed.grad_norms == whole.grad_norms[4:]
    assert (local / str(last) / f"iter_0000006_{last}_local.pt").exists()


@pytest.mark.functional
def test_scales_of_delayed_scaling_resume_bitwise(megatron_te: RankPools, tmp_path: Path) -> None:
    recipe = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4"
    model = f.words(f.TRANSFORMER_ENGINE, recipe, "--fp8-amax-compute-algo max --bf16")
    flags = _flags(tmp_path, model)
    trained(megatron_te, 2, flags, by=_stopped)
    whole = _whole(megatron_te, 2, f.ZERO3, model)
    assert trained(megatron_te, 2, flags).losses == whole.losses[4:]


def _sizes(folder: str) -> tuple[int, int, int]:
    """Return bytes of the tensors in this rank's file, of their storages, and of weights."""
    path = Path(folder, str(rank()), f"iter_0000004_{rank()}_local.pt")
    state = torch.load(path, weights_only=False)
    weights = [t for n, t in state.values_by_name().items() if n.startswith("model.")]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in state.tensors}
    return (
        sum(tensor.nbytes for tensor in state.tensors),
        sum(storage.nbytes() for storage in storages.values()),
        sum(tensor.nbytes for tensor in weights),
    )


@pytest.mark.functional
def test_a_file_has_the_rows_of_one_rank_and_nothing_else(
    megatron: RankPools, tmp_path: Path
) -> None:
    for strategy in (f.ZERO3, f.NO_SHARD):
        flags = _flags(tmp_path / strategy, strategy=strategy)
        trained(megatron, 2, flags, by=_stopped)
    sharded, whole = (
        megatron(2).run(_sizes, str(tmp_path / strategy / "local"))
        for strategy in (f.ZERO3, f.NO_SHARD)
    )
    assert all(storages == tensors for tensors, storages, _ in sharded)
    assert sum(weights for *_, weights in sharded) == whole[0][2] == whole[1][2]
    # Beside weights and two moments: states of random number generators, and counters.
    assert all(0 < tensors - 3 * weights < 2**15 for tensors, _, weights in sharded)


@pytest.mark.functional
def test_newer_persistent_checkpoint_is_loaded(megatron: RankPools, tmp_path: Path) -> None:
    flags = _flags(tmp_path, save_interval=4)
    trained(megatron, 2, flags, by=_stopped)
    assert _files(tmp_path / "local") == [f"{n}/iter_0000002_{n}_local.pt" for n in range(2)]
    assert trained(megatron, 2, flags).losses == _whole(megatron, 2, f.ZERO3).losses[4:]


@pytest.mark.functional
def test_persistent_checkpoint_is_loaded_if_a_local_one_is_lost(
    megatron: RankPools, tmp_path: Path
) -> None:
    flags = _flags(tmp_path, save_interval=3)
    trained(megatron, 2, flags, by=_stopped)
    shutil.rmtree(tmp_path / "local" / "1")
    assert trained(megatron, 2, flags).losses == _whole(megatron, 2, f.ZERO3).losses[3:]


@pytest.mark.functional
def test_local_checkpoint_of_another_run_is_rejected(megatron: RankPools, tmp_path: Path) -> None:
    trained(megatron, 2, _flags(tmp_path), by=_stopped)
    local = str(tmp_path / "local")
    for world_size, flags, said in (
        (
            2,
            _flags(tmp_path, strategy=f.ZERO1),
            f"--data-parallel-sharding-strategy is optim, and the local checkpoint in {local} was "
            "saved with optim_grads_params",
        ),
        (1, _flags(tmp_path), "the number of ranks is 1, and .* was saved with 2"),
        (2, _flags(tmp_path, "--ffn-hidden-size 96"), "has other rows, or none, of optimizer"),
    ):
        with pytest.raises(RankFailure, match=f"FlagError: .*{said}"):
            trained(megatron, world_size, flags)
    shutil.rmtree(tmp_path / "local" / "1")
    said = f"{local} has local checkpoints of rank 0, and none that is complete for the 2 ranks"
    with pytest.raises(RankFailure, match=f"FlagError: {said} of this run; use the number"):
        trained(megatron, 2, _flags(tmp_path))


def _reported(flags: list[str]) -> tuple[Training, str]:
    """Train on this rank; return its measurements and its reports."""
    said = io.StringIO()
    with failed_saves_reported_to(said):
        done = train([*f.MODEL_FLAGS, *flags])
    return done, said.getvalue()


@pytest.mark.parametrize("how", ["", longer("--async-save")])
def test_a_save_that_fails_on_one_rank_is_reported_on_all_and_tried_again(
    megatron: RankPools, tmp_path: Path, how: str
) -> None:
    place = tmp_path / "local" / "1"
    # A folder in the place of the file of iteration 2.
    (place / "iter_0000002_1_local.pt").mkdir(parents=True)
    results = megatron(2).run(_reported, _flags(tmp_path, how), timeout_s=TIMEOUT_S)
    for number, (_, said) in enumerate(results):
        assert (
            f"rank {number}: saving iteration 2 to {tmp_path / 'local'} failed, and earlier" in said
        )
        assert "local checkpoints remain: on rank 1, IsADirectoryError" in said
        assert "training continues without this checkpoint until the next save" in said
        assert "iteration 4" not in said
    assert results[0][0].losses == _whole(megatron, 2, f.ZERO3).losses
    assert _files(tmp_path / "local")[0] == "0/iter_0000006_0_local.pt"
    assert (place / "iter_0000006_1_local.pt").is_file()


@pytest.mark.functional
@pytest.mark.parametrize("how", ["", REPLICATION, f"--async-save {REPLICATION}"])
def test_a_folder_that_one_rank_cannot_write_ends_no_training(
    megatron: RankPools, tmp_path: Path, how: str
) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "1").write_text("a file, not a folder")
    results = megatron(2).run(_reported, _flags(tmp_path, how), timeout_s=TIMEOUT_S)
    assert results[0][0].losses == _whole(megatron, 2, f.ZERO3).losses
    said = [said for _, said in results]
    if how:
        # Rank 0 has copies of the rows of rank 1.
        assert "iteration 4 in" not in said[0]
        assert (
            f"a file of iteration 4 in {tmp_path / 'local' / '1'} could not be written" in said[1]
        )
        assert _files(tmp_path / "local" / "0") == [f"iter_0000006_{n}_local.pt" for n in range(2)]
    else:
        assert all(
            "saving iteration 4" in text and "on rank 1, FileExists" in text for text in said
        )
        assert not _files(tmp_path / "local")


@pytest.mark.functional
def test_a_failed_local_save_ends_the_training_if_asked_to(
    megatron: RankPools, tmp_path: Path
) -> None:
    (tmp_path / "local" / "1" / "iter_0000002_1_local.pt").mkdir(parents=True)
    with pytest.raises(RankFailure, match=r"saving iteration 2 to .* on rank 1, IsADirectoryError"):
        trained(megatron, 2, _flags(tmp_path, "--fsdp-exit-on-failed-save"))


# -- the state, without ranks ----------------------------------------------------------------------


def _state() -> Any:
    from megatron_fsdp_v2_mcore.checkpoint.local_state import LocalState

    row = torch.arange(8.0)
    return LocalState({"a": row[:3], "b": {"x": [1]}, "c": torch.ones(2, dtype=torch.int64)})


def test_state_is_the_same_after_its_tensors_are_popped_and_inserted() -> None:
    from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict

    state = _state()
    assert isinstance(state, TensorAwareStateDict)
    before = state.values_by_name()
    popped = state.pop_tensors()
    assert state.is_hollow
    assert [tuple(tensor.shape) for tensor in popped] == [(3,), (2,)]
    state.init_tensors()
    assert [tensor.dtype for tensor in state.tensors] == [torch.float32, torch.int64]
    state.pop_tensors()
    state.insert_tensors(popped)
    assert not state.is_hollow
    assert all(value is before[name] for name, value in state.values_by_name().items())


def test_copies_of_a_state_do_not_change_with_the_model() -> None:
    from megatron_fsdp_v2_mcore.checkpoint.local_state import LocalState

    weight, numbers = torch.arange(4.0), [1]
    state = LocalState({"weight": weight[:2], "numbers": numbers})
    state.copy_tensors_to_cpu(non_blocking=True)
    weight.zero_()
    numbers.append(2)
    values = state.values_by_name()
    assert values["weight"].tolist() == [0, 1]
    assert values["weight"].untyped_storage().nbytes() == 8
    assert values["numbers"] == [1]


def test_misuse_of_a_state_is_an_error() -> None:
    state = _state()
    with pytest.raises(RuntimeError, match="has its tensors already; pop them first"):
        state.insert_tensors([])
    first, second = state.pop_tensors()
    with pytest.raises(RuntimeError, match="were popped; insert them first"):
        state.pop_tensors()
    with pytest.raises(ValueError, match=r"expected 2 tensors .*, got 1$"):
        state.insert_tensors([first])
    with pytest.raises(ValueError, match=r"expected 2 tensors .*, got 2; c differs first"):
        state.insert_tensors([first, second.float()])
