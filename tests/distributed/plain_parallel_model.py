"""A model whose tensor-parallel modules hold plain TP-local shards and communicate themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from megatron_fsdp_v2.tensor_parallel import (
    COLUMN,
    NORM_RULES,
    ROW,
    VOCABULARY,
    FusedShard,
    TensorParallelRule,
)

WORDS, HIDDEN, FFN, EXPERTS = 8, 6, 8, 2
# Dimension along which each full parameter is sharded; the other parameters are replicated.
CUT = {
    "embedding.weight": 0,
    "up.weight": 0,
    "up.bias": 0,
    "gated.weight": 0,
    "down.weight": 1,
    "gated_down.weight": 1,
    "experts_up.weight": 1,
    "experts_down.weight": 2,
}


def _total(x: torch.Tensor, group: Any) -> torch.Tensor:
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def copied(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Identity whose gradient is summed over the ranks of a group."""
    if x.requires_grad:
        x = x.clone()
        x.register_hook(lambda grad: _total(grad, group))
    return x


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over the ranks of a group, whose gradient is the identity."""
    return x + (_total(x, group) - x).detach()


class Part(nn.Module):
    """A layer that holds the TP-local shard of a weight."""

    group: Any = None

    def __init__(self, *shape: int, bias: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * 0.5)
        self.register_parameter("bias", None if bias is None else nn.Parameter(torch.randn(bias)))

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else copied(x, self.group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else summed(x, self.group)


class Column(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.copy(x), self.weight, self.bias)


class Gated(Column):
    """Gate and up projection in one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = super().forward(x).chunk(2, -1)
        return torch.tanh(gate) * up


class Row(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.sum(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class GroupedColumn(Part):
    """Stacked experts; Transformer Engine keeps an empty plain tensor for an absent bias."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        del self.bias
        self.bias = torch.Tensor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("ti,eoi->teo", self.copy(x), self.weight))

    def get_extra_state(self) -> torch.Tensor:
        """Bytes whose length differs between ranks, as in quantized modules."""
        return torch.zeros(3 + dist.get_rank(), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Accept the bytes of any rank."""


class GroupedRow(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(torch.einsum("teo,eio->ti", x, self.weight))


class Vocabulary(Part):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        first = 0 if self.group is None else dist.get_rank(self.group) * len(self.weight)
        here = (words >= first) & (words < first + len(self.weight))
        found = self.weight[torch.where(here, words - first, 0)] * here[:, None]
        return self.sum(found)


class PlainParts(nn.Module):
    """A model of all these layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Vocabulary(WORDS, HIDDEN)
        self.norm = nn.RMSNorm(HIDDEN)
        self.up = Column(FFN, HIDDEN, bias=FFN)
        self.down = Row(HIDDEN, FFN, bias=HIDDEN)
        self.gated = Gated(2 * FFN, HIDDEN)
        self.gated_down = Row(HIDDEN, FFN)
        self.experts_up = GroupedColumn(EXPERTS, FFN, HIDDEN)
        self.experts_down = GroupedRow(EXPERTS, HIDDEN, FFN)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        x = x + self.gated_down(self.gated(x))
        return x + self.experts_down(self.experts_up(x))


RULES = (
    TensorParallelRule(Gated, {"weight": FusedShard(-2, 2)}),
    TensorParallelRule(Column, COLUMN),
    # By import path, as for a class that may not be installed.
    TensorParallelRule(f"{__name__}.GroupedColumn", COLUMN),
    TensorParallelRule(Row, ROW),
    TensorParallelRule(GroupedRow, ROW),
    TensorParallelRule(Vocabulary, VOCABULARY),
    *NORM_RULES,
)


def whole(seed: int = 0) -> PlainParts:
    """The unsharded model."""
    torch.manual_seed(seed)
    return PlainParts()


def parts(mesh: DeviceMesh, seed: int = 0) -> PlainParts:
    """The model with this rank's TP-local shards, over the last axis of a mesh."""
    model = whole(seed)
    rank, size = mesh.get_local_rank("tp"), mesh.size(mesh.ndim - 1)
    for layer in model.children():
        if isinstance(layer, Part):
            layer.group = mesh.get_group("tp")
    for name, dim in CUT.items():
        layer, _, attribute = name.rpartition(".")
        full = model.get_parameter(name).detach()
        # The two halves of the gated layer are sharded separately.
        halves = full.chunk(2, dim) if layer == "gated" else [full]
        cut = torch.cat([half.chunk(size, dim)[rank] for half in halves], dim)
        setattr(model.get_submodule(layer), attribute, nn.Parameter(cut.clone()))
    return model
