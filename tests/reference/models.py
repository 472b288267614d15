"""Small models whose sizes make some shards uneven and some empty."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 7
INPUT = 5
OUTPUT = 3


class Formula(nn.Module):
    """A module with given submodules and a given forward function."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Block(nn.Module):
    """Norm, two linear layers, residual; the unit of most models here."""

    def __init__(self, width: int = WIDTH, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or 2 * width + 1
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Input layer, blocks, output layer.

    Args:
        num_blocks: Number of blocks.
        width: Width of the blocks.
        block: Creates a block of a width.
        ends: Width of the input and of the output.
    """

    def __init__(
        self,
        num_blocks: int = 3,
        width: int = WIDTH,
        *,
        block: Callable[[int], nn.Module] = Block,
        ends: tuple[int, int] = (INPUT, OUTPUT),
    ) -> None:
        super().__init__()
        self.input = nn.Linear(ends[0], width)
        self.blocks = nn.ModuleList(block(width) for _ in range(num_blocks))
        self.output = nn.Linear(width, ends[1])

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.run_blocks(self.input(x)))


class Checkpointed(Stack):
    """Every block is recomputed in the backward."""

    def __init__(self, *args: Any, use_reentrant: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.use_reentrant = use_reentrant

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class CheckpointedRegion(Checkpointed):
    """All blocks are recomputed as one region with units inside."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        run = functools.partial(Stack.run_blocks, self)
        return checkpoint(run, x, use_reentrant=self.use_reentrant)


class InnerCheckpoint(nn.Module):
    """A unit that recomputes a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


class UsedTwice(Stack):
    """The first block runs again at the end."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](super().run_blocks(x))


class Skipping(Stack):
    """The block given by `skip` is skipped."""

    skip: int | None = None

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != self.skip:
                x = block(x)
        return x


class Detached(Stack):
    """The second block gets a detached input."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return x + self.blocks[1](x.detach()) + self.blocks[2](x)


@dataclass
class Parts:
    """An output whose tensors are in dataclass fields."""

    first: torch.Tensor
    rest: dict[str, Any]


class PartsBlock(Block):
    """A unit with a nested output."""

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> Any:
        y = super().forward(x + shift)
        return Parts(y * 0.5, {"more": [y * 0.5]})


class NestedOutputs(Stack):
    """Units that take keyword arguments and return dataclasses of dicts of lists."""

    def __init__(self) -> None:
        super().__init__(block=PartsBlock)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            parts = block(x, shift=x * 0.1)
            x = parts.first + parts.rest["more"][0]
        return x


class TiedInside(nn.Module):
    """Embedding and head share one weight, which the root owns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding((x.abs() * 10).long()[..., 0] % 11)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


class Experts(nn.Module):
    """A unit of a shared layer and three experts; a forward uses the experts in `active`."""

    active: tuple[int, ...] = (0, 1, 2)

    def __init__(self, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(x)
        for index in self.active:
            expert = self.experts[index]
            y = y + torch.tanh(expert(x.to(expert.weight.dtype))).to(x.dtype)
        return y


MixtureOfExperts = functools.partial(Stack, 2, block=Experts)
"""Blocks with experts; ranks may use different experts."""
MixtureOfDoubleExperts = functools.partial(
    Stack, 2, block=functools.partial(Experts, dtype=torch.float64)
)
"""The same with experts in fp64, a parameter group that a rank may leave unused."""


class UnusedParameter(Stack):
    """A unit with an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].unused = nn.Parameter(torch.randn(4, 3))


class PartlyFrozen(Stack):
    """A frozen block, and a block with one frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)


class Nested(nn.Module):
    """Units inside units."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(InnerCheckpoint() for _ in range(2))
        self.input = nn.Linear(INPUT, WIDTH)
        self.output = nn.Linear(WIDTH, OUTPUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for module in self.outer:
            x = module(x)
        return self.output(x)


class Elementless(nn.Module):
    """Parameters without elements, next to others and alone in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(3, 0))
        self.columns = nn.Parameter(torch.empty(0, 5))
        self.stacked = nn.Parameter(torch.empty(3, 0, 2))
        self.frozen = nn.Parameter(torch.empty(2, 0), requires_grad=False)
        self.alone = nn.Linear(0, 3, bias=False)
        self.biased = nn.Linear(0, 2)
        self.linear = nn.Linear(INPUT, 2)

    def reset_parameters(self) -> None:
        """Do nothing: the parameters have no elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        empty = (self.rows, self.columns, self.stacked, self.frozen)
        total = sum(param.sum() for param in empty) + self.alone(x[:, :0]).sum()
        return self.linear(x) + self.biased(x[:, :0]) + total


class MixedBlock(Block):
    """fp32 norm and output, fp64 inside."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.up.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x).double())
        return x + self.down(torch.tanh(y).float())


MixedDtypes = functools.partial(Stack, 2, block=MixedBlock)
"""Units with parameters of two dtypes."""
