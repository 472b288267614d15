"""A small model for checkpoint tests: training, saving, loading and bitwise comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim import Muon
from tests.distributed.wrapping import on_mesh, wrap


class Net(nn.Module):
    """Two linear layers and a buffer; the second layer has too few rows for every rank."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(5, width)
        self.down = nn.Linear(width, 3)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale.mean()


def net(mesh_name: str = "", width: int = 8, **options: Any) -> Any:
    """A sharded `Net`; the default is ZeRO-3 over all ranks."""
    torch.manual_seed(0)
    model = Net(width)
    given = on_mesh(mesh_name) if mesh_name else {}
    return wrap(model, [model.up], **given, **options)


def muon(model: nn.Module, lr: float = 0.1, **options: Any) -> Muon:
    """A `Muon` that steps matrices with Muon and other parameters with AdamW."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices}, {"params": others, "use_muon": False}]
    return Muon(groups, lr=lr, **options)


def block_muon(model: Any, **options: Any) -> Muon:
    """A `Muon` that steps matrices of `model.blocks` with Muon and other parameters with AdamW."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    known = set(map(id, matrices))
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    return Muon([{"params": matrices}, {"params": others, "use_muon": False}], **options)


def train(model: Any, optimizer: Any, steps: int, first: int = 0) -> list[float]:
    """Train on data that is the same on all ranks; return the losses."""
    losses = []
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 5, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of every parameter and its optimizer state, by name. Collective."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = _digest(param)
        states = optimizer.state.get(param, {})
        has_rows = not isinstance(param, UnevenDTensor) or param.to_local().numel() > 0
        # A rank without rows may have no state, and still takes part in the collectives.
        mine = {
            key: "" if isinstance(value, UnevenDTensor) else _digest(value)
            for key, value in states.items()
            if has_rows
        }
        everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        for key in sorted({key for of_rank in everyone for key in of_rank}):
            said = {of_rank[key] for of_rank in everyone if key in of_rank}
            assert len(said) == 1, f"ranks differ in {name}.{key}"
            plain = said.pop()
            found[f"{name}.{key}"] = plain or _digest(states.get(key, torch.zeros_like(param)))
    return found


def _digest(tensor: Any) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, UnevenDTensor) else torch.as_tensor(tensor)
    assert type(whole.detach()) is torch.Tensor, type(tensor)
    return hashlib.sha1(whole.detach().contiguous().numpy().tobytes()).hexdigest()


def flip_bit(file: Path, at: Callable[[int], int]) -> None:
    """Flip one bit of a file on rank 0, in the byte at `at(length of the file)`. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[at(len(content))] ^= 1
        file.write_bytes(content)
    dist.barrier()


def torch_save(path: str, model: Any, optimizer: Any) -> None:
    """Save with `torch.distributed.checkpoint`."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def torch_load(path: str, model: Any, optimizer: Any) -> None:
    """Load with `torch.distributed.checkpoint`."""
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )


WAYS = {"torch": (torch_save, torch_load), "ours": (checkpoint.save, checkpoint.load)}
"""Functions that save and load, by name."""
