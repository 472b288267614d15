"""Trainings of a pattern: unsharded with all ranks' data, and sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.patterns import Pattern, batch
from tests.reference.failing import fail, failing

STEPS = 5


@dataclass
class Trace:
    """Results of a training.

    Attributes:
        losses: Mean loss over ranks and micro-batches, per step.
        evaluations: Mean outputs of evaluations of the requested rank, and norms before clipping.
        grads: Gradients by name, per step; None for parameters without a gradient.
        params: Parameters by name, at the end.
        rows: In a sharded training, the rows of each parameter in `grads` and `params`.
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Hands:
    """How a training touches its model: the difference between sharded and unsharded.

    Attributes:
        ranks: Ranks whose data this process sees.
        weight: Factor of every loss before its backward.
        held: Copies the part of a parameter or gradient that this process holds.
        syncs: Returns the context of a backward, given whether it is the last of a step.
    """

    ranks: list[int]
    weight: float
    held: Callable[[torch.Tensor], torch.Tensor]
    syncs: Callable[[nn.Module, bool], contextlib.AbstractContextManager[Any]]


def run(pattern: Pattern, model: nn.Module, hands: Hands, evaluates_rank: int) -> Trace:
    """Train a model for `STEPS` steps as a pattern says."""
    trace = Trace()
    optimizer = pattern.optimizer(model.parameters())
    for step in range(STEPS):
        if pattern.reloads and step == 2:
            _reload(model)
            _evaluate(pattern, model, step, evaluates_rank, trace)
        optimizer.zero_grad(
            set_to_none=step % 2 == 0 if pattern.set_to_none is None else pattern.set_to_none
        )
        if pattern.raises and step == 2:
            _fail(pattern, model, hands.ranks[0])
            optimizer.zero_grad()
        loss_sum = 0.0
        for micro in range(pattern.num_micro):
            with hands.syncs(model, micro == pattern.num_micro - 1):
                for rank in hands.ranks:
                    loss = pattern.loss(model, step, micro, rank) * hands.weight
                    loss.backward()
                    loss_sum += float(loss.detach())
            if pattern.evaluates:
                _evaluate(pattern, model, step, evaluates_rank, trace)
        trace.losses.append(loss_sum)
        if pattern.clips:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            trace.evaluations.append(norm.item())
        trace.grads.append(
            {
                name: None if param.grad is None else hands.held(param.grad)
                for name, param in model.named_parameters()
            }
        )
        optimizer.step()
        if pattern.evaluates:
            _evaluate(pattern, model, step, evaluates_rank, trace)
    trace.params = {name: hands.held(param) for name, param in model.named_parameters()}
    return trace


def _evaluate(pattern: Pattern, model: nn.Module, step: int, rank: int, trace: Trace) -> None:
    del pattern
    with torch.no_grad():
        trace.evaluations.append(float(model(batch(step, 7, rank)).square().mean()))


def _reload(model: nn.Module) -> None:
    """Load other weights, given as full tensors, as in a plain checkpoint."""
    generator = torch.Generator().manual_seed(5)
    state = {
        name: torch.randn(tuple(value.shape), generator=generator, dtype=value.dtype) * 0.3
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state)


def _fail(pattern: Pattern, model: Any, rank: int) -> None:
    """Run a step that raises in the middle of a forward or of a backward."""
    layer = model.blocks[1].up
    at = "forward_hook" if pattern.raises == "forward" else "full_backward_hook"
    with failing(getattr(layer, f"register_{at}")(fail)):
        pattern.loss(model, 0, 0, rank).backward()


def train_reference(
    pattern: Pattern,
    world_size: int,
    evaluates_rank: int,
    copy: Callable[[torch.Tensor], Any] = torch.clone,
) -> Trace:
    """The plain loop: one process, every rank's data, mean over ranks.

    Args:
        pattern: The training.
        world_size: Number of ranks whose data it uses.
        evaluates_rank: Rank whose evaluations it runs.
        copy: Copies a gradient or parameter for the trace.
    """
    torch.manual_seed(0)
    hands = Hands(
        ranks=list(range(world_size)),
        weight=1.0 / world_size,
        held=lambda tensor: copy(tensor.detach().to_dense()),
        syncs=lambda model, is_last: contextlib.nullcontext(),
    )
    return run(pattern, pattern.build(), hands, evaluates_rank)


def train_sharded(
    pattern: Pattern,
    shard: Callable[[nn.Module], None],
    copy: Callable[[torch.Tensor], Any] = torch.clone,
) -> Trace:
    """The sharded model, on this rank's data. Collective.

    Args:
        pattern: The training.
        shard: Makes a module a unit.
        copy: Copies the rows of a gradient or parameter for the trace.
    """
    rank = dist.get_rank()

    def syncs(model: Any, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        if pattern.sync == "no_sync" and not is_last:
            context: contextlib.AbstractContextManager[Any] = model.no_sync()
            return context
        if pattern.sync == "last_backward":
            model.set_is_last_backward(is_last)
        return contextlib.nullcontext()

    torch.manual_seed(0)
    model = pattern.build()
    for unit in pattern.units(model):
        shard(unit)
    shard(model)
    hands = Hands(
        ranks=[rank],
        weight=1.0,
        held=lambda tensor: copy(tensor.to_local().detach()),  # type: ignore[attr-defined]
        syncs=syncs,
    )
    trace = run(pattern, model, hands, rank)
    trace.rows = {name: param.local_rows for name, param in model.named_parameters()}
    losses = torch.tensor(trace.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    trace.losses = (losses / dist.get_world_size()).tolist()
    return trace


def distances(mine: dict[str, Any], theirs: dict[str, torch.Tensor]) -> list[float]:
    """Relative error of every tensor: norm of the difference over norm.

    For a gradient that is almost zero by cancellation the reference is a third of the norm of all
    gradients, since its rounding errors come from terms of that size.

    Args:
        mine: `((first row, one past the last), those rows)` by name.
        theirs: Full tensors by name.
    """
    assert mine.keys() == theirs.keys()
    norms = {name: float(tensor.double().norm()) for name, tensor in theirs.items()}
    floor = 0.33 * sum(norm**2 for norm in norms.values()) ** 0.5
    found = []
    for name, tensor in theirs.items():
        (start, end), held = mine[name]
        difference = (held.double() - tensor[start:end].double()).norm()
        found.append(float(difference) / max(norms[name], floor, 1e-30))
    return found
