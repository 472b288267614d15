"""A small language model, plain and cut by torch's `parallelize_module`, for tests here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megatron_fsdp_v2 import fully_shard
from tests.distributed.checkpoint_trainings import WAYS, digests
from tests.distributed.wrapping import STRATEGIES
from tests.ranks import RankPools
from tests.reference.models import Block

VOCAB, HIDDEN, FFN, SEQUENCE, BATCH = 10, 6, 8, 4, 3


class Language(nn.Module):
    """Embedding, two blocks, column-parallel and row-parallel, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(HIDDEN, FFN) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.cache
def mesh_with_tp(*shape: int) -> DeviceMesh:
    """`(dp, tp)` or `(dp_outer, dp, tp)`; once in a process, since its groups are never ended."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_outer", "dp", "tp")[-len(shape) :])


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """All axes of such a mesh but the last."""
    return mesh[("dp_outer", "dp")[-(mesh.ndim - 1) :]]


def plain(seed: int = 0) -> Any:
    """The model on one rank."""
    torch.manual_seed(seed)
    return Language()


def parallelized(mesh: DeviceMesh, model: Any = None) -> Any:
    """The model with its sequence, vocabulary, columns and rows over the last axis."""
    model = plain() if model is None else model
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, mesh["tp"], plan)


def sharded(*shape: int, model: Any = None, **options: Any) -> Any:
    """The same, sharded over the other axes, block by block."""
    mesh = mesh_with_tp(*shape)
    model = parallelized(mesh, model)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=data_axes(mesh), **options)
    return model


def tokens_of(data_rank: int, step: int) -> torch.Tensor:
    """What one data-parallel rank sees in a step: `(BATCH, SEQUENCE)`."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)


def loss_of(model: nn.Module, data_rank: int, step: int) -> torch.Tensor:
    """Cross entropy of predicting the next token of a ring."""
    tokens = tokens_of(data_rank, step)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def data_rank_of(mesh: DeviceMesh) -> int:
    """Number of a rank among those that see different data."""
    return dist.get_rank() // mesh.size(mesh.ndim - 1)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_ranks: list[int],
    steps: range,
    clips: float = math.inf,
    loss: Callable[[Any, int, int], torch.Tensor] = loss_of,
) -> list[float]:
    """Train on the mean loss of some data-parallel ranks; norms of gradients before clipping."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        torch.stack([loss(model, rank, step) for rank in data_ranks]).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clips).item())
        optimizer.step()
    return norms


def assert_loads_everywhere(
    pools: RankPools, loaded: Callable[..., Any], folder: Path, saved: dict[str, str]
) -> None:
    """See that what was saved at (2, 2) loads as it was at other sizes, by every way of loading.

    Args:
        pools: To run in.
        loaded: Digests by way of loading, of a folder, sizes and a strategy.
        folder: Where it was saved.
        saved: Digests of what was saved.
    """
    for number, shape in enumerate([(2, 1), (1, 2), (4, 1), (1, 1), (2, 2)]):
        strategy = STRATEGIES[number % len(STRATEGIES)]
        for of_rank in pools(shape[0] * shape[1]).run(loaded, str(folder), shape, strategy):
            assert len(of_rank) == 2
            for found in of_rank:
                assert found == saved, shape


def full_error(model: nn.Module, reference: nn.Module) -> float:
    """Largest difference of weights to those of a model on one rank. Collective."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p.full_tensor() - q).abs().max()) for p, q in pairs)  # type: ignore[attr-defined]


def loaded_in_both_ways(folder: str, make: Callable[[], tuple[Any, Any]]) -> list[dict[str, str]]:
    """Digests of models and optimizers into which this package and torch load from a folder."""
    found = []
    for way, (_, load) in WAYS.items():
        model, optimizer = make()
        load(f"{folder}/{way}", model, optimizer)
        found.append(digests(model, optimizer))
    return found
