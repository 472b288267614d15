"""Parameters that some or all ranks have no gradient of, compared with FSDP2 and a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as their_fully_shard

from megatron_fsdp_v2 import checkpoint, fully_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, mesh_of, record_collectives, whole
from tests.parity.missing import adamw, routed
from tests.reference.models import MixtureOfExperts

NUM_STEPS = 4


def _built(shard: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = MixtureOfExperts()
    for unit in (*model.blocks, model):
        shard(unit, **options)
    return model, adamw(model.parameters())


def _sharded(strategy: str, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    mesh = mesh_of(dist.get_world_size())
    return _built(fully_shard, mesh=mesh, sharding_strategy=strategy, **options)


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: Any, ranks: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (routed(model, step, 0, rank) / len(ranks)).backward()
        optimizer.step()


def _plain(steps: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    """Weights of the plain loop with the data of all ranks."""
    model, optimizer = _built(lambda module: module)
    _train(model, optimizer, range(steps), range(dist.get_world_size()))
    return {name: param.detach() for name, param in model.named_parameters()}


def _error(model: Any, expected: dict[str, torch.Tensor]) -> float:
    found = {name: whole(param) for name, param in model.named_parameters()}
    return max(
        float((found[name] - value).norm() / value.norm()) for name, value in expected.items()
    )


@on_ranks(2)
def test_unused_parameters_are_left_alone_as_with_fsdp2() -> None:
    expected, rank = _plain(), [dist.get_rank()]
    made = [_sharded(strategy) for strategy in STRATEGIES]
    made.append(_built(their_fully_shard, mesh=mesh_of(2)))
    for model, optimizer in made:
        # FSDP2 waits for ever where ranks have gradients of different parameters.
        ranks = rank if model is not made[-1][0] else [0]
        _train(model, optimizer, range(NUM_STEPS), ranks)
    errors = [_error(model, expected) for model, _ in made[:-1]]
    assert max(errors) < 1e-6, errors
    unused = [name for name in expected if ".experts.2." in name]
    assert unused
    for model, _ in made:
        params = dict(model.named_parameters())
        assert all(torch.equal(whole(params[name]), expected[name]) for name in unused)


@on_ranks(2)
def test_unused_parameters_may_get_zeros() -> None:
    def unused(model: Any) -> list[Any]:
        return [expert.weight.grad for expert in (b.experts[2] for b in model.blocks)]

    def run(model: Any) -> list[Any]:
        model.zero_grad()
        routed(model, 0, 0, dist.get_rank()).backward()
        return unused(model)

    model, _ = _sharded("optim_grads_params", on_missing_grad="zero")
    assert all(grad is not None and not grad.to_local().any() for grad in run(model))
    model.set_reduce_scatter_unused_params(False)
    assert run(model) == [None, None]
    model.set_reduce_scatter_unused_params(True)
    assert all(grad is not None for grad in run(model))
    model.blocks[0].set_reduce_scatter_unused_params(False, recurse=False)
    assert [grad is None for grad in run(model)] == [True, False]


@pytest.mark.parametrize("strategy", [STRATEGIES[1], STRATEGIES[3]])
@on_ranks(2)
def test_training_resumes_without_state_of_unused_parameters(tmp_path: Path, strategy: str) -> None:
    expected, rank = _plain(), [dist.get_rank()]
    model, optimizer = _sharded(strategy)
    _train(model, optimizer, range(2), rank)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    other, resumed = _sharded("no_shard")
    checkpoint.load(tmp_path / "saved", other, resumed)
    _train(other, resumed, range(2, NUM_STEPS), rank)
    assert _error(other, expected) < 1e-6
    name = "blocks.0.experts.2.weight"
    assert not resumed.state.get(dict(other.named_parameters())[name])


@on_ranks(2)
def test_flags_of_all_parameters_are_one_all_reduce_per_backward() -> None:
    model, optimizer = _sharded("optim_grads_params")
    recorder = record_collectives(model)
    _train(model, optimizer, range(3), [dist.get_rank()])
    assert recorder.count("all_reduce") == 3
    # Flags are fp32.
    num_params = sum(1 for _ in model.parameters())
    assert recorder.nbytes("all_reduce") == 3 * 4 * num_params
