"""Training as a pattern describes it: unsharded with all ranks' data, and sharded."""

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
    """Numbers of a training.

    Attributes:
        losses: Mean loss over ranks and micro-batches, per step.
        evaluations: Mean outputs of evaluations, per evaluation, of the rank asked for.
        grads: Gradients by name, per step; None where there is none.
        params: Parameters by name, at the end.
        rows: Of a sharded training: which rows of a parameter `grads` and `params` hold.
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
        held: What this process holds of a parameter or gradient, copied.
        syncs: Context of a backward, given whether it is the last one of a step.
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
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
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
    """Load other weights, given in full, as a plain checkpoint holds them."""
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
        pattern: What is trained.
        world_size: Ranks whose data it sees.
        evaluates_rank: Rank whose evaluations it makes.
        copy: What the trace has of a gradient or a parameter.
    """
    torch.manual_seed(0)
    hands = Hands(
        ranks=list(range(world_size)),
        weight=1.0 / world_size,
        held=lambda tensor: copy(tensor.detach()),
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
        pattern: What is trained.
        shard: Makes a module a unit.
        copy: What the trace has of the rows of a gradient or a parameter.
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

    A gradient that is almost zero by cancellation is measured against a third of the norm of
    all of them: its rounding errors come from terms of that size.

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
