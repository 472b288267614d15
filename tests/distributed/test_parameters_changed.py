"""Parameters that were replaced, tied, converted or removed after they were sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2 import fully_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import check_said, wrap
from tests.reference.models import Stack


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


@on_ranks(2, strategy=("optim_grads_params", "optim_grads", "no_shard"), change=CHANGES)
def test_replaced_parameters_keep_their_values_and_train_on(change: str, strategy: str) -> None:
    torch.manual_seed(0)
    expected = _losses(wrap(Stack(), sharding_strategy=strategy))
    torch.manual_seed(0)
    model = wrap(Stack(), sharding_strategy=strategy)
    CHANGES[change](model)
    assert _losses(model) == expected


def _stale_optimizer() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    fully_shard(model)
    optimizer.step()


def _optimizer_before_rebuilding() -> None:
    model = wrap(Stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    _rebuild(model)
    _step(model, optimizer)


def _changed(path: str, value: Callable[[Any], Any]) -> Callable[[], None]:
    """A use of a model in which something was set to a value."""
    owner, _, name = path.rpartition(".")

    def call() -> None:
        model = wrap(Stack())
        target = model.get_parameter(owner) if name == "data" else model.get_submodule(owner)
        setattr(target, name, value(model))
        model(torch.ones(2, 5))

    return call


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


OPTIMIZERS = {
    "holds input.weight of Stack/0 as it was before fully_shard": _stale_optimizer,
    "holds input.weight of Stack/0 as it was before the parameter was replaced": (
        _optimizer_before_rebuilding
    ),
}
MEANINGLESS: dict[str, Callable[[], Any]] = {
    "the root (Stack) are torch.float32 and cannot become torch.bfloat16 once they are": (
        lambda: wrap(Stack()).bfloat16()
    ),
    "set the dtype to compute with by mp_policy=MixedPrecisionPolicy(param_dtype=...)": (
        lambda: nn.Sequential(wrap(Stack())).half()
    ),
    "stay on cpu, where their mesh is, and cannot move to meta": lambda: wrap(Stack()).to("meta"),
    "parameter up.weight of blocks.1/0 (registered as weight of Linear) was tied to": _changed(
        "blocks.1.up.weight", lambda model: model.blocks[0].up.weight
    ),
    "shape (3, 7) before, (4, 7) now": _changed("output.weight", lambda _: _new(4, 7)),
    "was removed after fully_shard": _changed("blocks.0.up.bias", lambda _: None),
    "changed from torch.float32 to torch.bfloat16; keep its dtype": _changed(
        "output.weight", lambda _: _new(3, 7, dtype=torch.bfloat16)
    ),
    "cannot take the data of a tensor of shape (4, 7)": _changed(
        "output.weight.data", lambda _: torch.ones(4, 7)
    ),
}


@on_ranks(2)
def test_changes_without_meaning_are_named() -> None:
    check_said(RuntimeError, OPTIMIZERS)
    check_said(ValueError, MEANINGLESS)
