"""Parameters that were replaced, tied, converted or removed after they were sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import fully_shard
from tests.distributed.wrapping import mesh_of, said, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack


def _sharded(strategy: str = "optim_grads_params") -> Any:
    torch.manual_seed(0)
    return wrap(Stack(), sharding_strategy=strategy)


def _step(model: Any, optimizer: Any) -> float:
    optimizer.zero_grad()
    loss = model(torch.linspace(-1, 1, 10).view(2, 5)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _losses(model: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return [_step(model, optimizer) for _ in range(steps)]


def _rebuild(model: Any) -> None:
    """Every parameter becomes another object, as code that rebuilds parameters does."""
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                setattr(module, name, nn.Parameter(param.detach().clone()))


def _assign_sharded(model: Any) -> None:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _assign_full(model: Any) -> None:
    state = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    # An optimizer needs the sharded ones; the next use of the model puts them back.
    with torch.no_grad():
        model(torch.ones(1, 5))


def _move(model: Any) -> None:
    model.to("cpu")
    model.float()


def _set_data(model: Any) -> None:
    for param in model.parameters():
        param.data = param.detach().clone()


CHANGES = {
    "rebuilt": _rebuild,
    "assigned, sharded": _assign_sharded,
    "assigned, full": _assign_full,
    "moved to where it is": _move,
    "data set": _set_data,
}


def losses_after(change: str, strategy: str) -> tuple[list[float], list[float]]:
    """Losses of an untouched model, and of one changed before the optimizer was built."""
    expected = _losses(_sharded(strategy))
    model = _sharded(strategy)
    CHANGES[change](model)
    return expected, _losses(model)


@pytest.mark.parametrize("change", CHANGES)
def test_replaced_parameters_keep_their_values_and_train_on(pools: RankPools, change: str) -> None:
    for strategy in ("optim_grads_params", "optim_grads", "no_shard"):
        for expected, found in pools(2).run(losses_after, change, strategy):
            assert found == expected, strategy


def _stale_optimizer() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    mesh = mesh_of(dist.get_world_size())
    fully_shard(model, mesh=mesh)
    optimizer.step()


def _optimizer_before_rebuilding() -> None:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    _rebuild(model)
    _step(model, optimizer)


def _changed(change: Any) -> Any:
    def call() -> None:
        model = _sharded()
        change(model)
        model(torch.ones(2, 5))

    return call


def _tie(model: Any) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def _resize(model: Any) -> None:
    model.output.weight = nn.Parameter(torch.ones(4, 7))


def _remove(model: Any) -> None:
    model.blocks[0].up.bias = None


def _plain_bf16(model: Any) -> None:
    model.output.weight = nn.Parameter(torch.ones(3, 7, dtype=torch.bfloat16))


def _resize_data(model: Any) -> None:
    model.output.weight.data = torch.ones(4, 7)


def messages() -> dict[str, str]:
    """What every change that has no meaning says."""
    value, runtime = ValueError, RuntimeError
    return {
        "optimizer": said(runtime, _stale_optimizer),
        "rebuilt": said(runtime, _optimizer_before_rebuilding),
        "dtype": said(value, lambda: _sharded().bfloat16()),
        "half": said(value, lambda: nn.Sequential(_sharded()).half()),
        "device": said(value, lambda: _sharded().to("meta")),
        "tied": said(value, _changed(_tie)),
        "size": said(value, _changed(_resize)),
        "removed": said(value, _changed(_remove)),
        "plain dtype": said(value, _changed(_plain_bf16)),
        "data": said(value, _changed(_resize_data)),
    }


EXPECTED = {
    "optimizer": "holds input.weight of Stack/0 as it was before fully_shard",
    "rebuilt": "holds input.weight of Stack/0 as it was before the parameter was replaced",
    "dtype": "the root (Stack) are torch.float32 and cannot become torch.bfloat16 once they are",
    "half": "set the dtype to compute with by mp_policy=MixedPrecisionPolicy(param_dtype=...)",
    "device": "stay on cpu, where their mesh is, and cannot move to meta",
    "tied": "parameter up.weight of blocks.1/0 (registered as weight of Linear) was tied to",
    "size": "shape (3, 7) before, (4, 7) now",
    "removed": "was removed after fully_shard",
    "plain dtype": "changed from torch.float32 to torch.bfloat16; keep its dtype",
    "data": "cannot take the data of a tensor of shape (4, 7)",
}


def test_changes_without_meaning_are_named(pools: RankPools) -> None:
    for found in pools(2).run(messages):
        for name, expected in EXPECTED.items():
            assert expected in found[name], name
