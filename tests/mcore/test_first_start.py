"""The first start of a command that also resumes: `--load X --save X`, with nothing in X yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from tests.mcore.command_line import PRINTED, torchrun
from tests.mcore.session import MODEL_FLAGS, Training, curves, distance, fsdp, train
from tests.ranks import RankPools

PRETRAIN = "megatron_fsdp_v2_mcore.pretrain_gpt"
ITERATIONS = ["--train-iters", "5"]
MUON = ["--optimizer", "muon", "--muon-fp32-matmul-prec", "high"]


def _curves(pools: RankPools, flags: list[str], world_size: int = 2) -> Training:
    result: Training = curves(pools(world_size).run(train, [*MODEL_FLAGS, *ITERATIONS, *flags]))
    assert len(result.losses) == len(result.grad_norms) == 5
    return result


def _folder(path: Path) -> list[str]:
    return ["--load", str(path), "--save", str(path), "--save-interval", "100"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="adam"),
        pytest.param(["--bf16"], id="adam-bf16", marks=pytest.mark.functional),
        pytest.param(
            ["--fp16", "--initial-loss-scale", "256"], id="adam-fp16", marks=pytest.mark.functional
        ),
        pytest.param(MUON, id="muon"),
        pytest.param(
            [*MUON, "--muon-scalar-optimizer", "lion"], id="muon-lion", marks=pytest.mark.functional
        ),
        pytest.param(["--optimizer", "lion"], id="lion", marks=pytest.mark.functional),
    ],
)
def test_a_first_start_trains_as_without_load(
    megatron: RankPools, tmp_path: Path, flags: list[str]
) -> None:
    plain = _curves(megatron, fsdp("optim_grads_params", *flags))
    first = _curves(megatron, fsdp("optim_grads_params", *flags, *_folder(tmp_path)))
    assert first.losses == plain.losses
    assert first.grad_norms == plain.grad_norms


@pytest.mark.functional
@pytest.mark.parametrize("flags", [pytest.param([], id="adam"), pytest.param(MUON, id="muon")])
def test_a_first_start_trains_as_megatrons_ddp(
    megatron: RankPools, tmp_path: Path, flags: list[str]
) -> None:
    theirs = _curves(megatron, [*flags, *_folder(tmp_path / "theirs")])
    ours = _curves(megatron, fsdp("optim_grads", *flags, *_folder(tmp_path / "ours")))
    assert distance(ours.losses, theirs.losses) < 1e-6
    assert distance(ours.grad_norms, theirs.grad_norms) < 1e-5


@pytest.mark.parametrize(
    "strategy",
    [
        "optim_grads_params",
        *(pytest.param(name, marks=pytest.mark.functional) for name in ("no_shard", "optim")),
    ],
)
@pytest.mark.parametrize(
    "flags",
    [pytest.param([], id="adam"), pytest.param(MUON, id="muon", marks=pytest.mark.functional)],
)
def test_one_command_starts_stops_and_resumes_like_an_uninterrupted_run(
    megatron: RankPools, tmp_path: Path, flags: list[str], strategy: str
) -> None:
    uninterrupted = _curves(megatron, fsdp(strategy, *flags))
    command = [*MODEL_FLAGS, *fsdp(strategy, *flags, *_folder(tmp_path))]
    command += ["--override-opt-param-scheduler"]
    runs = [
        curves(megatron(2).run(train, [*command, "--train-iters", train_iters])).losses
        for train_iters in ("3", "5")
    ]
    assert [len(losses) for losses in runs] == [3, 2]
    assert [*runs[0], *runs[1]] == uninterrupted.losses


@pytest.mark.functional
@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune"])
def test_weights_without_optimizer_state_go_on_as_under_megatrons_ddp(
    megatron: RankPools, tmp_path: Path, flag: str
) -> None:
    losses = []
    for name, flags in (("theirs", ["--ckpt-format", "torch_dist"]), ("ours", fsdp("optim"))):
        common = [*MODEL_FLAGS, *flags, "--save", str(tmp_path / name), "--save-interval", "9"]
        megatron(2).run(train, [*common, "--train-iters", "2"])
        go_on = [*common, "--train-iters", "6", "--load", str(tmp_path / name), flag]
        losses.append(curves(megatron(2).run(train, go_on)).losses)
    assert len(losses[0]) == (6 if flag == "--finetune" else 4)
    assert distance(losses[1], losses[0]) < 1e-6


def test_making_a_state_dict_to_load_into_leaves_the_optimizer_alone(megatron: RankPools) -> None:
    # Of these two optimizers one is Adam.
    flags = [*MODEL_FLAGS, *fsdp("optim_grads_params", *MUON), "--train-iters", "2"]
    training = megatron(2).run(train, flags, _what_changes)
    assert [result.extras for result in training] == [[], []]


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
@pytest.mark.parametrize("flags", [pytest.param([], id="adam"), pytest.param(MUON, id="muon")])
def test_the_command_of_the_readme_trains_its_first_time_as_megatrons_ddp(
    megatron: RankPools, tmp_path: Path, flags: list[str]
) -> None:
    common = [*MODEL_FLAGS, *ITERATIONS, *flags, "--cpu-rehearsal"]
    ours = torchrun(2, PRETRAIN, [*common, *fsdp(), *_folder(tmp_path / "ours")])
    theirs = torchrun(2, PRETRAIN, common)
    assert ours.code == theirs.code == 0, ours.output[-3000:] + theirs.output[-3000:]
    assert len(ours.losses) == 5
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6 + PRINTED)
