"""Parameters without elements, (3, 0) as well as (0, 5), train and are saved as others are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint.exporting import convert, export
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2.optim import flat_optimizer
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, weight_error, wrap

OPTIMIZERS = {
    "for-loop": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "flat": lambda params: flat_optimizer(torch.optim.AdamW)(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """Parameters without elements beside others, in a unit and alone in one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(3, 0))
        self.columns = nn.Parameter(torch.empty(0, 5))
        self.stacked = nn.Parameter(torch.empty(3, 0, 2))
        self.frozen = nn.Parameter(torch.empty(2, 0), requires_grad=False)
        self.alone = nn.Linear(0, 3, bias=False)
        self.biased = nn.Linear(0, 2)
        self.linear = nn.Linear(4, 2)

    def reset_parameters(self) -> None:
        """There is nothing to set here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        empty = (self.rows, self.columns, self.stacked, self.frozen)
        total = sum(param.sum() for param in empty) + self.alone(x[:, :0]).sum()
        return self.linear(x) + self.biased(x[:, :0]) + total


def _steps(*trainings: tuple[Any, Any]) -> None:
    for step in range(2):
        for model, optimizer in trainings:
            optimizer.zero_grad()
            model(torch.ones(4, 4) + step).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def _shapes(state: Any) -> dict[str, Any]:
    return {name: tuple(value.shape) for name, value in state.items()}


@on_ranks("num_ranks", num_ranks=[1, 3], strategy=STRATEGIES)
def test_parameters_without_elements_train_are_saved_and_loaded(
    tmp_path: Path, num_ranks: int, strategy: str
) -> None:
    torch.manual_seed(0)
    original = Net()

    def sharded(strategy: str) -> Any:
        model = copy.deepcopy(original)
        return wrap(model, [model.alone], sharding_strategy=strategy)

    others = dict(zip(STRATEGIES, reversed(STRATEGIES), strict=True))
    errors, shapes = {}, []
    for name, optimizer_of in OPTIMIZERS.items():
        plain, model, other = copy.deepcopy(original), sharded(strategy), sharded(others[strategy])
        optimizers = [
            optimizer_of([param for param in each.parameters() if param.requires_grad])
            for each in (plain, model, other)
        ]
        _steps((plain, optimizers[0]), (model, optimizers[1]))
        errors[name] = weight_error(model, plain)
        path = tmp_path / name
        checkpoint.save(path, model, optimizers[1])
        checkpoint.load(path, other, optimizers[2])
        _steps((plain, optimizers[0]), (other, optimizers[2]))
        errors[f"{name}, loaded"] = weight_error(other, plain)
    whole = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    shapes += [_shapes(whole)] if dist.get_rank() == 0 else []
    # Torch's own checkpoint, and one of an unsharded model.
    states = dict(zip(("model", "optimizer"), get_state_dict(other, optimizers[2]), strict=True))
    dcp.save(states, checkpoint_id=tmp_path / "torch")
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers[1]), strict=True))
    dcp.load(states, checkpoint_id=tmp_path / "torch")
    set_state_dict(
        model,
        optimizers[1],
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    errors["torch's own"] = weight_error(model, plain)
    with torch.device("meta"):
        built: Any = Net()
        wrap(built, [built.alone], sharding_strategy=strategy)
    checkpoint.load(path, built)
    built(torch.ones(1, 4))
    built.load_state_dict(plain.state_dict())
    errors["meta"] = weight_error(built, plain)
    problems = []
    if dist.get_rank() == 0:
        for source, target in ((path, "m.pt"), (tmp_path / "m.pt", "m.safetensors")):
            (export if source == path else convert)(source, tmp_path / target)
        convert(tmp_path / "m.safetensors", tmp_path / "folder")
        shapes.append(_shapes(torch.load(tmp_path / "m.pt")))
        for kind in (path.name, "m.pt", "m.safetensors", "folder"):
            problems += verify(tmp_path / kind).problems
    assert all(found == _shapes(original.state_dict()) for found in shapes)
    assert problems == []
    assert max(errors.values()) < 1e-5, errors
