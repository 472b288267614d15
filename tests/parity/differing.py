"""Training patterns whose ranks run different modules. They have no golden record."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.patterns import Pattern, mean_square, two_forwards
from tests.reference.models import WIDTH, Skipping, Stack


class _Uneven(Stack):
    """A stack that runs each block the number of times in `times`, which differs by rank."""

    times: tuple[int, ...] = (1, 1, 1)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block, times in zip(self.blocks, self.times, strict=True):
            for _ in range(times):
                x = block(x)
        return x


def _run_unevenly(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    model.times = ((0, 2, 1), (1, 1, 3), (2, 0, 0))[rank % 3]
    return two_forwards(model, step, micro, rank)


def _skip_all_in_the_first_forward(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Run two forwards; rank 1 runs no unit below the root in the first one."""
    model.times = (1, 1, 1) if rank != 1 else (0, 0, 0)
    first = mean_square(model, step, micro, rank)
    model.times = (1, 1, 1)
    return first + mean_square(model, step + 1, micro, rank)


def _frozen_at_first() -> Skipping:
    model = Skipping()
    model.blocks[1].requires_grad_(False)
    return model


def _trained_later(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Train a block that was frozen when it was sharded; rank 1 skips the block in step 0."""
    model.blocks[1].requires_grad_(True)
    model.skip = 1 if rank == 1 and step == 0 else None
    return mean_square(model, step, micro, rank)


class _TiedOnSomeRanks(Stack):
    """A stack whose root also uses a block's weight if `uses` is set."""

    uses = True

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.tied.weight = self.blocks[1].up.weight

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses:
            x = x + self.tied(x)[:, :WIDTH]
        return super().run_blocks(x)


def _tied_on_rank_0(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    model.uses = rank == 0
    return mean_square(model, step, micro, rank)


class _RegionWithBranch(nn.Module):
    """A unit with one recomputed region; its last module is `inner` or, if it branches, `own`."""

    branches = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(torch.tanh(x))
        return self.own(torch.tanh(x)) if self.branches else x

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._region, x, use_reentrant=False)


def _branch_on_rank_1(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    model.blocks[0].branches = rank == 1
    return mean_square(model, step, micro, rank)


DIFFERING: dict[str, Pattern] = {
    "units used different numbers of times on ranks": Pattern(
        _Uneven, loss=_run_unevenly, skips=True, num_micro=2
    ),
    "units used different numbers of times on ranks, compared": Pattern(
        _Uneven, loss=_run_unevenly, skips=True, options={"check_ranks": "always"}
    ),
    "a forward without units on one rank, before another": Pattern(
        _Uneven, loss=_skip_all_in_the_first_forward, skips=True
    ),
    "block trained after sharding, left out by a rank": Pattern(
        _frozen_at_first, loss=_trained_later, skips=True
    ),
    "weight tied on some ranks": Pattern(_TiedOnSomeRanks, loss=_tied_on_rank_0),
    "region that ends differently on ranks": Pattern(
        lambda: Stack(1, block=lambda _: _RegionWithBranch()),
        lambda m: [m.blocks[0].inner, m.blocks[0]],
        loss=_branch_on_rank_1,
    ),
}
