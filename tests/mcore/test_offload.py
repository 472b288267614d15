"""`--optimizer-cpu-offload`: trainings and checkpoints are those without it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from megatron_fsdp_v2_mcore.flags.checkpoint_check import read_metadata
from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.flags import STRATEGIES, ZERO3, fsdp
from tests.mcore.session import Training, distance
from tests.mcore.trained import assert_equal, trained
from tests.ranks import RankFailure, RankPools

OFFLOAD = "--optimizer-cpu-offload"
WAYS = (
    f"{OFFLOAD} --optimizer-offload-fraction 0",
    f"{OFFLOAD} --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d",
    f"{OFFLOAD} --use-precision-aware-optimizer --no-pin-cpu-grads --no-pin-cpu-params",
    f"{OFFLOAD} --optimizer-offload-fraction 0.25 --use-torch-optimizer-for-cpu-offload",
)


def _parts(optimizer: Any) -> list[Any]:
    """Torch's optimizers inside of Megatron's."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


def numel_on_host(model: Any, optimizer: Any) -> tuple[int, int]:
    """Elements of moments that were offloaded, and of all moments."""
    from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
    from megatron_fsdp_v2.memory.host_memory import is_in_host_memory

    del model
    moments = [
        local_of(state["exp_avg"])
        for part in _parts(optimizer)
        for state in part.state.values()
        if "exp_avg" in state
    ]
    on_host = [moment.numel() for moment in moments if is_in_host_memory(moment)]
    return sum(on_host), sum(moment.numel() for moment in moments)


def _is(fraction: float, counts: Sequence[tuple[int, int]], slack: float = 0.1) -> bool:
    """Whether every rank has offloaded a fraction, or a little more."""
    return all(fraction <= host / total < fraction + slack for host, total in counts)


def _train(pools: RankPools, *flags: f.Flags, world_size: int = 2) -> Training:
    return trained(pools, world_size, *flags, probe=numel_on_host)


def _assert_as_without(offloaded: Training, plain: Training) -> None:
    assert_equal(offloaded, plain)
    assert offloaded.params_norms == plain.params_norms


def test_losses_and_norms_are_bit_for_bit_those_without_offload(megatron: RankPools) -> None:
    flags = fsdp(ZERO3, "--train-iters 4 --log-params-norm")
    plain = _train(megatron, flags)
    assert plain.extras[0][0] == 0
    for way, fraction in zip(WAYS[1:3], (0.5, 1.0), strict=True):
        offloaded = _train(megatron, flags, way)
        _assert_as_without(offloaded, plain)
        assert _is(fraction, offloaded.extras), way


@pytest.mark.functional
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_fraction_and_size_trains_as_without_offload(
    megatron: RankPools, strategy: str, world_size: int
) -> None:
    flags = fsdp(strategy, "--train-iters 6 --clip-grad 0.5 --log-params-norm")
    plain = _train(megatron, flags, world_size=world_size)
    for way in WAYS:
        _assert_as_without(_train(megatron, flags, way, world_size=world_size), plain)


@pytest.mark.functional
@pytest.mark.parametrize(
    "feature",
    [
        "--optimizer muon",
        "--fp16 --initial-loss-scale 1024",
        "--num-experts 4 --expert-model-parallel-size 2",
        f.TP2,
        f.PP2,
        f.HFSDP,
        "--init-model-with-meta-device",
        f"--global-batch-size 24 {f.OVERLAP} --fsdp-trace-pool",
    ],
)
def test_features_train_as_without_offload(megatron: RankPools, feature: str) -> None:
    flags = fsdp(ZERO3, "--train-iters 5", feature)
    plain = _train(megatron, flags)
    for way in WAYS[1:3]:
        _assert_as_without(_train(megatron, flags, way), plain)


@pytest.mark.functional
@pytest.mark.parametrize("way", WAYS[1:3])
def test_with_fp16_the_iterations_that_overflow_are_those_of_ddp(
    megatron: RankPools, way: str
) -> None:
    # Megatron adds micro-batches up in fp16 otherwise, and overflows where ours do not yet.
    flags = "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 16777216"
    more = "--hysteresis 1 --loss-scale-window 3 --train-iters 14 --log-params-norm"
    ddp = trained(megatron, 2, flags, more, once=True)
    plain, offloaded = (_train(megatron, fsdp(), flags, more, way) for way in ("", way))
    _assert_as_without(offloaded, plain)
    assert 3 < sum(ddp.skipped) < 11
    for mine in (plain, offloaded):
        assert (mine.loss_scales, mine.skipped) == (ddp.loss_scales, ddp.skipped)
        assert distance(mine.losses, ddp.losses) < 2e-3
        assert distance(mine.grad_norms, ddp.grad_norms) < 1e-2


def test_of_muon_the_adam_part_is_offloaded(megatron: RankPools) -> None:
    flags = fsdp(ZERO3, "--train-iters 3 --optimizer muon")
    offloaded = _train(megatron, flags, OFFLOAD)
    assert offloaded.losses == _train(megatron, flags).losses
    assert all(host == total > 0 for host, total in offloaded.extras)


# -- checkpoints ----------------------------------------------------------------------------------

SIX = "--train-iters 6 --bf16"


def _entries(folder: Path) -> set[str]:
    return set(read_metadata(folder).state_dict_metadata)


@pytest.fixture(scope="module")
def saved(
    megatron: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """A checkpoint of iteration 3 of an offloaded run, and the losses of the run that went on."""
    folder = tmp_path_factory.mktemp("offloaded")
    return folder, _train(megatron, fsdp(), SIX, f.saving(folder, 3), WAYS[1]).losses


def _resumed(
    pools: RankPools, folder: Path, way: str, world_size: int = 2, strategy: str = ZERO3
) -> list[float]:
    load = f.loading(folder, 3)
    return _train(pools, fsdp(strategy), SIX, load, way, world_size=world_size).losses


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("", id="not offloaded"),
        pytest.param(OFFLOAD, id="everything offloaded"),
        longer(WAYS[1], id="as saved"),
        longer(WAYS[0], id="nothing offloaded"),
    ],
)
def test_an_offloaded_run_goes_on_bit_for_bit_with_any_fraction_or_none(
    megatron: RankPools, saved: tuple[Path, list[float]], way: str
) -> None:
    folder, uninterrupted = saved
    assert _resumed(megatron, folder, way) == uninterrupted[3:]


@pytest.mark.functional
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_offloaded_checkpoint_loads_at_any_size_and_strategy(
    megatron: RankPools, saved: tuple[Path, list[float]], world_size: int, strategy: str
) -> None:
    folder, uninterrupted = saved
    plain = _resumed(megatron, folder, "", world_size, strategy)
    # Other ranks add up in other orders, with and without offload alike.
    assert distance(plain, uninterrupted[3:]) < 1e-3
    for way in WAYS:
        assert _resumed(megatron, folder, way, world_size, strategy) == plain, way


def test_a_checkpoint_has_what_it_has_without_offload(
    megatron: RankPools, saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    uninterrupted = _train(megatron, fsdp(), SIX, f.saving(tmp_path, 3)).losses
    mine, theirs = (_entries(folder / "iter_0000003") for folder in (saved[0], tmp_path))
    assert mine == theirs
    assert any(name.endswith("exp_avg") for name in mine)
    # One that was saved without offload is loaded with it as well.
    assert _resumed(megatron, tmp_path, OFFLOAD) == uninterrupted[3:]


def test_a_checkpoint_that_lacks_a_state_is_rejected_by_name(
    megatron: RankPools, saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    path = saved[0] / "iter_0000003"
    missing = next(name for name in sorted(_entries(path)) if name.endswith("exp_avg_sq"))
    target = tmp_path / "iter_0000003"
    target.mkdir()
    for file in path.iterdir():
        (target / file.name).symlink_to(file)
    reader = dcp.FileSystemReader(str(path))
    metadata = reader.read_metadata()
    del metadata.state_dict_metadata[missing]
    (target / ".metadata").unlink()
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(RankFailure, match=f"FlagError.*does not hold {missing}"):
        _resumed(megatron, tmp_path, OFFLOAD)
