"""Training patterns whose results must be equal with and without sharding.

A pattern defines the model, its units, and a training step. The same pattern runs in the unsharded
reference, on the data of all ranks, and in the sharded training, in which each rank has its own
data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.reference import models

ROWS = 4


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    """Return the inputs of one micro-batch of one rank: `(ROWS, INPUT)`."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(ROWS, models.INPUT, generator=generator)


def mean_square(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    """Return the loss of most patterns."""
    return model(batch(step, micro, rank)).square().mean()


def mean_output(model: Any, step: int, rank: int) -> float:
    """Return the result of the evaluation of most patterns."""
    return float(mean_square(model, step, 7, rank))


def two_forwards(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    first = model(batch(step, micro, rank))
    second = model(batch(step, micro + 50, rank))
    return first.square().mean() + second.square().mean() * 0.5


def _skipping(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    model.skip = 1 if step in (1, 3) else None
    return mean_square(model, step, micro, rank)


def _skipping_by_rank(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Skip a block by rank and step; in step 3, all ranks skip the same block."""
    model.skip = None if (rank + step) % 2 else 1
    if (rank + step + micro) % 3 == 2:
        model.skip = 0
    if step == 3:
        model.skip = 2
    return mean_square(model, step, micro, rank)


def _routing_by_rank(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    for block in model.blocks:
        block.active = ((0, 1), (0,), (0, 2), (), (1,))[(step + micro + 3 * rank) % 5]
        if step == 2:
            block.active = ()
    return mean_square(model, step, micro, rank)


def _freezing(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Freeze a block in steps 2 and 3."""
    model.blocks[1].requires_grad_(step not in (2, 3))
    return mean_square(model, step, micro, rank)


def _tied_units(model: Any) -> list[nn.Module]:
    return [model.embedding, *model.blocks, model.head]


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.blocks)


def _nested_units(model: Any) -> list[nn.Module]:
    return [unit for outer in model.outer for unit in (outer.first, outer.second, outer)]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    # Adam would hide a wrong scale of the gradients.
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _gentle_sgd(parameters: Any) -> torch.optim.Optimizer:
    # For a model with large gradients: larger steps would amplify rounding.
    return torch.optim.SGD(parameters, lr=0.002, momentum=0.9)


@dataclass(frozen=True)
class Pattern:
    """A training.

    Attributes:
        build: Builds the model.
        units: Modules to shard, children first; the root comes after.
        loss: Loss of one micro-batch: `(model, step, micro, rank)`.
        num_micro: Micro-batches in a step.
        sync: When gradients are synchronized: in `every` backward; in the last one, selected by
            `no_sync` or `last_backward`; along the outer axis only in the last one (`all_reduce`);
            or by a call after the last one (`finalized`).
        evaluate: An evaluation without gradients between micro-batches and steps, whose results
            are compared: `(model, step, rank)`.
        set_to_none: Argument of `zero_grad`; None alternates between both values.
        raises: `forward` or `backward`: in step 2, a first attempt raises an error there.
        reloads: Whether step 2 starts with a `load_state_dict` of other weights.
        clips: Whether gradients are clipped.
        optimizer: Builds the optimizer.
        skips: Whether some ranks skip whole units, so that their all-gathers would not match.
        options: Further arguments of `fully_shard`.
        steps: Numbers of the optimizer steps.
    """

    build: Callable[[], nn.Module]
    units: Callable[[Any], list[nn.Module]] = _blocks
    loss: Callable[[Any, int, int, int], torch.Tensor] = mean_square
    num_micro: int = 1
    sync: str = "every"
    evaluate: Callable[[Any, int, int], Any] | None = None
    set_to_none: bool | None = None
    raises: str = ""
    reloads: bool = False
    clips: bool = False
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd
    skips: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    steps: range = range(5)


def _adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    # A large eps: for a gradient near zero, Adam's quotient would amplify rounding.
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.003, eps=1e-3, **options)


PATTERNS: dict[str, Pattern] = {
    "plain": Pattern(models.Stack),
    "root only": Pattern(models.Stack, units=lambda model: []),
    "accumulation, every backward synchronized": Pattern(models.Stack, num_micro=3),
    "accumulation under no_sync": Pattern(models.Stack, num_micro=3, sync="no_sync"),
    "accumulation with set_is_last_backward": Pattern(
        models.Stack, num_micro=3, sync="last_backward"
    ),
    "two forwards before one backward": Pattern(models.Stack, loss=two_forwards),
    "module used twice in a forward": Pattern(models.UsedTwice),
    "unit skipped on some steps": Pattern(models.Skipping, loss=_skipping),
    "detached inputs": Pattern(models.Detached),
    "nested outputs, keyword inputs": Pattern(models.NestedOutputs),
    "frozen parameters": Pattern(models.PartlyFrozen),
    "tied parameters in one unit": Pattern(models.TiedInside),
    "tied parameters across units": Pattern(
        models.TiedInside,
        units=_tied_units,
        num_micro=2,
        evaluate=mean_output,
        optimizer=_gentle_sgd,
    ),
    "unit skipped on some ranks": Pattern(models.Skipping, loss=_skipping_by_rank, skips=True),
    "unit skipped on some ranks, accumulation": Pattern(
        models.Skipping, loss=_skipping_by_rank, num_micro=3, sync="no_sync", skips=True
    ),
    "experts without tokens on some ranks": Pattern(models.MixtureOfExperts, loss=_routing_by_rank),
    "parameter group unused on some ranks": Pattern(
        models.MixtureOfDoubleExperts,
        loss=_routing_by_rank,
        num_micro=2,
        sync="no_sync",
    ),
    "frozen and trained again": Pattern(models.Stack, loss=_freezing),
    "blocks of 4 rows": Pattern(models.Stack, options={"shard_granularity": "block:4"}),
    "whole tensors": Pattern(models.Stack, options={"shard_granularity": "tensor"}),
    "unused parameter in a unit": Pattern(
        models.UnusedParameter, optimizer=_adamw(weight_decay=0.1)
    ),
    "nested units": Pattern(models.Nested, units=_nested_units),
    "two dtypes in one unit": Pattern(models.MixedDtypes),
    "evaluation between": Pattern(models.Stack, num_micro=2, evaluate=mean_output),
    "zero_grad to zero": Pattern(models.Stack, num_micro=2, set_to_none=False),
    "zero_grad to None": Pattern(models.Stack, num_micro=2, set_to_none=True),
    "checkpointing, reentrant": Pattern(lambda: models.Checkpointed(use_reentrant=True)),
    "checkpointing, non-reentrant": Pattern(lambda: models.Checkpointed(use_reentrant=False)),
    "checkpointed region of units, reentrant": Pattern(
        lambda: models.CheckpointedRegion(use_reentrant=True)
    ),
    "checkpointed region of units, non-reentrant": Pattern(
        lambda: models.CheckpointedRegion(use_reentrant=False)
    ),
    "exception in a forward": Pattern(models.Stack, num_micro=2, raises="forward"),
    "exception in a backward": Pattern(models.Stack, num_micro=2, raises="backward"),
    "load_state_dict between steps": Pattern(models.Stack, reloads=True, evaluate=mean_output),
    "clip_grad_norm_": Pattern(models.Stack, clips=True),
    "AdamW, for-loop": Pattern(models.Stack, optimizer=_adamw(foreach=False)),
    "AdamW, foreach": Pattern(models.Stack, optimizer=_adamw(foreach=True)),
    "AdamW, fused": Pattern(models.Stack, optimizer=_adamw(fused=True)),
}
