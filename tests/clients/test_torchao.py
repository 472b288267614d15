"""torchao's low-bit optimizers and float8 weights train as with FSDP2, or with whole tensors."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchao.optim
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from megatron_fsdp_v2 import checkpoint, fully_shard
from tests.cases import quick_if
from tests.distributed.wrapping import STRATEGIES, error_message, mesh_of
from tests.ranks import RankPools, rank_pools

WIDTH = 256
"""Blocks of 256 elements are rows, which shards do not split."""
LOW_BIT = [f"Adam{decay}{bits}" for decay in ("", "W") for bits in ("8bit", "4bit", "Fp8")]


@pytest.fixture(scope="module")
def clients() -> Iterator[RankPools]:
    """Yield rank pools by world size, forked from a process that has imported torchao."""
    with rank_pools(["tests.clients.preloaded_torchao"]) as pools:
        yield pools


class Net(nn.Module):
    """A model with weights whose state is quantized, and biases whose state is not."""

    def __init__(self, *, bias: bool, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, each, bias=bias) for each in rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(layer(x)).mean() for layer in self.layers]).sum()


def _uneven() -> Net:
    torch.manual_seed(0)
    return Net(bias=True, rows=(80, 16, 48))


def _even() -> Net:
    torch.manual_seed(0)
    return Net(bias=False, rows=(32, 64))


def _shard(model: Net, strategy: str, **options: Any) -> Net:
    mesh = mesh_of(dist.get_world_size())
    made = functools.partial(fully_shard, mesh=mesh, sharding_strategy=strategy, **options)
    for layer in model.layers:
        made(layer)
    return made(model)


def _optimizer(name: str, model: nn.Module, **options: Any) -> Any:
    return getattr(torchao.optim, name)(model.parameters(), lr=1e-2, **options)


def _backward(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss: torch.Tensor = model(torch.randn(8, WIDTH, generator=generator).to(dtype)).square()
    loss.backward()
    return loss.detach()


def _train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(_backward(model, step)))
        optimizer.step()
    return losses


def _kinds(optimizer: Any) -> set[str]:
    states = [state["exp_avg"] for state in optimizer.state.values()]
    return {type(getattr(state, "_local_tensor", state)).__name__ for state in states}


def _eagerly() -> Any:
    """Trace graphs whole, as torchao does, without generating code."""
    torch._dynamo.reset()
    return mock.patch.object(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )


def steps_of_equal_gradients(name: str, strategy: str) -> float:
    """Return the largest difference of parameters and moments from those of whole tensors.

    The shards of weights have 0 to 80 rows in blocks of 16, the smallest tensor that is quantized.
    """
    model, whole = _shard(_uneven(), strategy, shard_granularity="block:16"), _uneven()
    optimizer, expected = _optimizer(name, model), _optimizer(name, whole)
    with _eagerly():
        for step in range(3):
            optimizer.zero_grad()
            _backward(model, step)
            for param, plain in zip(model.parameters(), whole.parameters(), strict=True):
                assert param.grad is not None
                plain.grad = param.grad.full_tensor()
            optimizer.step()
            expected.step()
    assert _kinds(expected) == {"Tensor", f"OptimState{name.lstrip('AdamW').capitalize()}"}
    found = [param.full_tensor() for param in model.parameters()]
    states = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    wanted = [expected.state[p]["exp_avg"].dequantize() for p in list(whole.parameters())[::2]]
    pairs = [*zip(found, whole.parameters(), strict=True), *zip(states[::2], wanted, strict=True)]
    return max(float((one - other).abs().max()) for one, other in pairs)


def difference_from_fsdp2(name: str) -> float:
    """Return the largest difference of losses and parameters from those of FSDP2."""
    model, other = _shard(_even(), "optim_grads_params"), _even()
    for module in (*other.layers, other):
        fsdp2(module, mesh=mesh_of(dist.get_world_size()))
    optimizer, expected = _optimizer(name, model), _optimizer(name, other)
    with _eagerly():
        losses = _train(model, optimizer, range(4)), _train(other, expected, range(4))
    assert _kinds(optimizer) == _kinds(expected) != {"Tensor"}
    rows = zip(model.parameters(), other.parameters(), strict=True)
    steps = [float((a.to_local() - b.to_local()).abs().max()) for a, b in rows]
    return max(*steps, *(abs(a - b) for a, b in zip(*losses, strict=True)))


def resumed(folder: Path, name: str, strategy: str) -> str:
    """Resume by torch's checkpoints and by `torch.save`; return the error of our own."""

    def built() -> tuple[Net, Any]:
        model = _shard(_uneven(), strategy)
        return model, _optimizer(name, model)

    with torch.compiler.set_stance("force_eager"):
        model, optimizer = built()
        _train(model, optimizer, range(2))
        model_state, state = get_state_dict(model, optimizer)
        save({"model": model_state, "optimizer": state}, checkpoint_id=folder / "torch")
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        own = error_message(ValueError, lambda: checkpoint.save(folder / "own", model, optimizer))
        expected = _train(model, optimizer, range(2, 4))
        assert len(_kinds(optimizer)) == 2

        model, optimizer = built()
        model_state, state = get_state_dict(model, optimizer)
        load({"model": model_state, "optimizer": state}, checkpoint_id=folder / "torch")
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state)
        assert _train(model, optimizer, range(2, 4)) == expected

        model, optimizer = built()
        file.seek(0)
        of_model, of_optimizer = torch.load(file, weights_only=True)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        assert _train(model, optimizer, range(2, 4)) == expected
    return own


def rounded_stochastically(strategy: str) -> str:
    model = _shard(_even().bfloat16(), strategy)
    optimizer = _optimizer("AdamW8bit", model, bf16_stochastic_round=True)
    _backward(model, 0, torch.bfloat16)
    with torch.compiler.set_stance("force_eager"):
        return error_message(RuntimeError, optimizer.step)


def _in_float8(dtype: torch.dtype, rows: tuple[int, ...]) -> Any:
    """Return a model whose linear layers compute in float8, and gather float8 weights.

    With biases: gloo cannot gather float8 for FSDP2, which gathers a unit of several dtypes as
    bytes.
    """
    torch.manual_seed(0)
    model = Net(bias=True, rows=rows).to(dtype)
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(model, config=config)


def _trained_in_float8(model: Any, dtype: torch.dtype, *, precomputes: bool) -> list[torch.Tensor]:
    """Return losses, the gradients of every step, and parameters."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        found.append(_backward(model, step, dtype))
        found += [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if precomputes:
            precompute_float8_dynamic_scale_for_fsdp(model)
    wholes = [param.full_tensor().detach() for param in model.parameters()]
    # FSDP2 shards torchao's tensors, and a DTensor here has the plain numbers of one.
    return [*found, *(getattr(whole, "_tensor", whole) for whole in wholes)]


def float8_equals_fsdp2(strategy: str, dtype: torch.dtype, precomputes: bool) -> bool:
    model, other = _shard(_in_float8(dtype, (32, 64)), strategy), _in_float8(dtype, (32, 64))
    assert all(type(param.to_local()) is torch.Tensor for param in model.parameters())
    for module in (*other.layers, other):
        fsdp2(module, mesh=mesh_of(dist.get_world_size()))
    trainings = [
        _trained_in_float8(each, dtype, precomputes=precomputes) for each in (model, other)
    ]
    return all(map(torch.equal, *trainings))


def float8_on_uneven_shards(strategy: str) -> float:
    """Return the difference from `no_shard`, where each rank has the whole of every weight."""
    rows = (80, 1, 48)
    models = [_shard(_in_float8(torch.float32, rows), each) for each in (strategy, "no_shard")]
    trainings = [_trained_in_float8(each, torch.float32, precomputes=False) for each in models]
    return max(float((a - b).abs().max()) for a, b in zip(*trainings, strict=True))


def rejected_nf4() -> str:
    layer = nn.Linear(64, 256, bias=False)
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach()), requires_grad=False)
    return error_message(ValueError, lambda: fully_shard(layer, mesh=mesh_of(2)))


@pytest.mark.parametrize(
    ("name", "number", "strategy"),
    [
        quick_if(name == "AdamW8bit" and number == 3, name, number, strategy)
        for name in LOW_BIT
        for number in (1, 2, 3)
        for strategy in STRATEGIES
    ],
)
def test_steps_equal_those_of_whole_parameters(
    clients: RankPools, name: str, number: int, strategy: str
) -> None:
    assert max(clients(number).run(steps_of_equal_gradients, name, strategy)) <= 1e-7


@pytest.mark.parametrize("name", LOW_BIT)
def test_training_equals_that_of_fsdp2(clients: RankPools, name: str) -> None:
    assert clients(2).run(difference_from_fsdp2, name) == [0.0, 0.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOW_BIT[3:])
def test_training_resumes_on_as_many_ranks_by_torchs_checkpoints(
    clients: RankPools, tmp_path: Path, name: str, strategy: str
) -> None:
    for message in clients(2).run(resumed, tmp_path, name, strategy):
        assert "optimizer.state.layers.0.weight.exp_avg is a OptimState" in message
        assert "save optimizer.state_dict() with torch.distributed.checkpoint" in message


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stochastic_rounding_needs_rows_that_one_rank_holds(
    clients: RankPools, strategy: str
) -> None:
    draws = "AdamW8bit cannot step sharded parameters: its step draws random numbers"
    for message in clients(2).run(rounded_stochastically, strategy):
        assert draws in message if strategy == "no_shard" else message == "no error"


@pytest.mark.parametrize(
    ("strategy", "dtype", "precomputes"),
    [
        quick_if(strategy == "optim_grads_params", strategy, dtype, precomputes)
        for strategy in STRATEGIES
        for dtype in (torch.float32, torch.bfloat16)
        for precomputes in (False, True)
    ],
)
def test_float8_training_equals_that_of_fsdp2(
    clients: RankPools, strategy: str, dtype: torch.dtype, precomputes: bool
) -> None:
    assert all(clients(2).run(float8_equals_fsdp2, strategy, dtype, precomputes))


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_float8_training_on_uneven_shards(clients: RankPools, strategy: str) -> None:
    assert max(clients(3).run(float8_on_uneven_shards, strategy)) <= 1e-6


def test_nf4_is_rejected_by_name(clients: RankPools) -> None:
    for message in clients(2).run(rejected_nf4):
        assert "parameter weight is a NF4Tensor, which no registered weight format" in message
        assert "it consists of other tensors than one of its own shape and dtype" in message
