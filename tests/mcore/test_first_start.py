"""The first start of a command that also resumes: `--load X --save X`, with nothing in X yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from tests.cases import longer, quick_only
from tests.mcore import flags as f
from tests.mcore.command_line import PRETRAIN, PRINTED, torchrun
from tests.mcore.flags import ZERO3, fsdp
from tests.mcore.session import Training, distance
from tests.mcore.trained import assert_close, assert_equal, trained
from tests.ranks import RankPools

OPTIMIZERS = [pytest.param("", id="adam"), pytest.param(f.MUON, id="muon")]


def _train(pools: RankPools, *flags: f.Flags, once: bool = False) -> Training:
    return trained(pools, 2, "--train-iters 5", *flags, iterations=5, once=once)


def _folder(path: Path) -> list[str]:
    return [*f.loading(path), *f.saving(path, 100)]


@pytest.mark.parametrize(
    "flags",
    [
        *OPTIMIZERS,
        longer("--bf16", id="adam-bf16"),
        longer("--fp16 --initial-loss-scale 256", id="adam-fp16"),
        longer(f"{f.MUON} --muon-scalar-optimizer lion", id="muon-lion"),
        longer("--optimizer lion", id="lion"),
    ],
)
def test_a_first_start_trains_as_without_load(
    megatron: RankPools, tmp_path: Path, flags: str
) -> None:
    first = _train(megatron, fsdp(), flags, _folder(tmp_path))
    assert_equal(first, _train(megatron, fsdp(), flags, once=True))


@pytest.mark.functional
@pytest.mark.parametrize("flags", OPTIMIZERS)
def test_a_first_start_trains_as_megatrons_ddp(
    megatron: RankPools, tmp_path: Path, flags: str
) -> None:
    theirs = _train(megatron, flags, _folder(tmp_path / "theirs"))
    ours = _train(megatron, fsdp(f.ZERO2), flags, _folder(tmp_path / "ours"))
    assert_close(ours, theirs, norms=1e-5)


@pytest.mark.parametrize("strategy", quick_only([ZERO3, f.NO_SHARD, f.ZERO1], ZERO3))
@pytest.mark.parametrize("flags", [OPTIMIZERS[0], longer(f.MUON, id="muon")])
def test_one_command_starts_stops_and_resumes_like_an_uninterrupted_run(
    megatron: RankPools, tmp_path: Path, flags: str, strategy: str
) -> None:
    uninterrupted = _train(megatron, fsdp(strategy), flags, once=True)
    command = [fsdp(strategy), flags, _folder(tmp_path), "--override-opt-param-scheduler"]
    first = trained(megatron, 2, *command, "--train-iters 3", iterations=3)
    rest = trained(megatron, 2, *command, "--train-iters 5", iterations=2)
    assert [*first.losses, *rest.losses] == uninterrupted.losses


@pytest.mark.functional
@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune"])
def test_weights_without_optimizer_state_go_on_as_under_megatrons_ddp(
    megatron: RankPools, tmp_path: Path, flag: str
) -> None:
    losses = []
    for name, flags in (("theirs", "--ckpt-format torch_dist"), ("ours", fsdp(f.ZERO1))):
        common = [flags, f.saving(tmp_path / name, 9)]
        trained(megatron, 2, *common, "--train-iters 2")
        go_on = [*common, "--train-iters 6", f.loading(tmp_path / name), flag]
        losses.append(trained(megatron, 2, *go_on).losses)
    assert len(losses[0]) == (6 if flag == "--finetune" else 4)
    assert distance(losses[1], losses[0]) < 1e-6


def test_making_a_state_dict_to_load_into_leaves_the_optimizer_alone(megatron: RankPools) -> None:
    # Of these two optimizers one is Adam.
    found = trained(megatron, 2, fsdp(), f.MUON, "--train-iters 2", probe=_what_changes)
    assert found.extras == [[], []]


def _what_changes(model: Any, optimizer: Any) -> list[str]:
    """What of an optimizer and its weights is another after the state dict was asked for."""
    before = _remember(model, optimizer)
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    optimizer.sharded_state_dict({}, is_loading=True, metadata=metadata)
    after = _remember(model, optimizer)
    assert before.keys() == after.keys()
    return [name for name, value in before.items() if value != after[name]]


def _remember(model: Any, optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for chunk in model:
        for name, param in chunk.named_parameters():
            found[name] = local_of(param).detach().flatten().tolist()
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, part in enumerate(parts):
        for index, state in enumerate(part.optimizer.state.values()):
            for key, value in state.items():
                local = local_of(value) if isinstance(value, UnevenDTensor) else value
                found[f"{number}.{index}.{key}"] = torch.as_tensor(local).flatten().tolist()
        for index, group in enumerate(part.optimizer.param_groups):
            found[f"{number}.group{index}"] = {k: v for k, v in group.items() if k != "params"}
    return found


@pytest.mark.functional
@pytest.mark.parametrize("flags", OPTIMIZERS)
def test_the_command_of_the_readme_trains_its_first_time_as_megatrons_ddp(
    megatron: RankPools, tmp_path: Path, flags: str
) -> None:
    common = f.words(f.MODEL_FLAGS, "--train-iters 5 --cpu-rehearsal", flags)
    ours = torchrun(2, PRETRAIN, [*common, *fsdp(ZERO3, _folder(tmp_path / "ours"))])
    theirs = torchrun(2, PRETRAIN, common)
    assert ours.code == theirs.code == 0, ours.output[-3000:] + theirs.output[-3000:]
    assert len(ours.losses) == 5
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6 + PRINTED)
