"""Training of a pattern, unsharded with all ranks' data and sharded, and the comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

from tests.parity.patterns import Pattern
from tests.reference.failing import fail, failing


@dataclass
class Trace:
    """Results of a training.

    Attributes:
        losses: Mean loss over ranks and micro-batches, per step.
        evaluations: Results of evaluations of the requested rank, and norms before clipping.
        grads: Gradients by name, per step; None for parameters without a gradient.
        params: Parameters by name, at the end.
        rows: In a sharded training, the rows of each parameter in `grads` and `params`.
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[Any] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class ModelAccess:
    """Access to the model of a training, which differs between sharded and unsharded models.

    Attributes:
        ranks: Ranks whose data this process uses.
        weight: Factor of every loss before its backward.
        held: Copies this process's rows of a parameter or gradient.
        syncs: Returns the context of a backward, given whether it is the last of a step.
    """

    ranks: list[int]
    weight: float
    held: Callable[[torch.Tensor], torch.Tensor]
    syncs: Callable[[nn.Module, bool], contextlib.AbstractContextManager[Any]]


def sharded_access(
    pattern: Pattern, copy: Callable[[torch.Tensor], Any] = torch.clone
) -> ModelAccess:
    """Return the access to a sharded model for the training of a pattern."""

    @contextlib.contextmanager
    def syncs(model: Any, is_last: bool) -> Iterator[None]:
        if pattern.sync == "last_backward":
            model.set_is_last_backward(is_last)
        if pattern.sync == "all_reduce":
            model.set_requires_all_reduce(is_last)
        if pattern.sync == "finalized":
            model.set_manual_backward_finalization(True)
        waits = pattern.sync == "no_sync" and not is_last
        with model.no_sync() if waits else contextlib.nullcontext():
            yield
        if pattern.sync == "finalized" and is_last:
            model.finalize_backward()

    return ModelAccess(
        ranks=[dist.get_rank()],
        weight=1.0,
        held=lambda tensor: copy(tensor.to_local().detach()),  # type: ignore[attr-defined]
        syncs=syncs,
    )


def run(
    pattern: Pattern,
    model: nn.Module,
    hands: ModelAccess,
    evaluates_rank: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> Trace:
    """Train a model by a pattern, with the optimizer of the pattern if none is given."""
    trace = Trace()
    optimizer = optimizer or pattern.optimizer(model.parameters())

    def evaluate(step: int) -> None:
        if pattern.evaluate is not None:
            with torch.no_grad():
                trace.evaluations.append(pattern.evaluate(model, step, evaluates_rank))

    for step in pattern.steps:
        if pattern.reloads and step == 2:
            _reload(model)
            evaluate(step)
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
            evaluate(step)
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
        evaluate(step)
    for name, param in model.named_parameters():
        trace.params[name] = hands.held(param)
        trace.rows[name] = getattr(param, "local_rows", (0, len(param)))
    return trace


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


def built(pattern: Pattern) -> Any:
    """Build the model with its initial values, which are identical in every process."""
    torch.manual_seed(0)
    return pattern.build()


def shard_units(pattern: Pattern, model: nn.Module, shard: Callable[[Any], Any]) -> Any:
    """Call `shard` on the units of a pattern and then on the whole model."""
    for unit in pattern.units(model):
        shard(unit)
    shard(model)
    return model


def train_reference(
    pattern: Pattern,
    world_size: int,
    evaluates_rank: int,
    copy: Callable[[torch.Tensor], Any] = torch.clone,
) -> Trace:
    """Train the unsharded model in one process on the data of all ranks, with the mean over ranks.

    Args:
        pattern: The training.
        world_size: Number of ranks whose data it uses.
        evaluates_rank: Rank whose evaluations it runs.
        copy: Copies a gradient or parameter for the trace.
    """
    hands = ModelAccess(
        ranks=list(range(world_size)),
        weight=1.0 / world_size,
        held=lambda tensor: copy(tensor.detach().to_dense()),
        syncs=lambda model, is_last: contextlib.nullcontext(),
    )
    return run(pattern, built(pattern), hands, evaluates_rank)


def train_sharded(
    pattern: Pattern, shard: Callable[[Any], Any], copy: Callable[[torch.Tensor], Any] = torch.clone
) -> Trace:
    """Train the sharded model on this rank's data. Collective.

    Args:
        pattern: The training.
        shard: Shards a module as a unit.
        copy: Copies the rows of a gradient or parameter for the trace.
    """
    model = shard_units(pattern, built(pattern), shard)
    trace = run(pattern, model, sharded_access(pattern, copy), dist.get_rank())
    losses = torch.tensor(trace.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    trace.losses = (losses / dist.get_world_size()).tolist()
    return trace


# -- comparing ------------------------------------------------------------------------------------


def compare(trace: Trace, reference: Trace) -> float:
    """Return the largest relative error of losses, evaluations, gradients and parameters."""
    errors = list(_errors_of_results(trace, reference))
    for found, expected in zip(trace.grads, reference.grads, strict=True):
        assert found.keys() == expected.keys()
        trained = {}
        for name, grad in expected.items():
            other = found[name]
            assert (other is None) == (grad is None), f"{name} has no gradient in one of them"
            if other is not None and not grad.any():
                assert not other.any(), name
            elif grad is not None:
                trained[name] = grad
        errors += distances({n: (trace.rows[n], found[n]) for n in trained}, trained)
    return max(*errors, error_of_params(trace, reference))


def error_of_params(trace: Trace, reference: Trace) -> float:
    """Return the largest relative error of parameters."""
    held = {name: (trace.rows[name], param) for name, param in trace.params.items()}
    return max(distances(held, reference.params))


def _errors_of_results(trace: Trace, reference: Trace) -> Iterator[float]:
    """Yield the relative errors of losses and evaluations; assert that integers are equal."""
    (mine, spec), (theirs, other) = (
        tree_flatten((t.losses, t.evaluations)) for t in (trace, reference)
    )
    assert spec == other, (spec, other)
    for value, expected in zip(mine, theirs, strict=True):
        if isinstance(expected, float):
            yield abs(value - expected) / abs(expected)
            continue
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
        if expected.is_floating_point():
            yield float((value.double() - expected.double()).norm() / expected.double().norm())
        else:
            assert torch.equal(value, expected), f"{value} and {expected}"


def same_bits(first: Trace, second: Trace) -> bool:
    """Return whether two trainings are bitwise identical."""
    (mine, spec), (theirs, other) = (
        tree_flatten((t.losses, t.evaluations, t.grads, t.params)) for t in (first, second)
    )
    return spec == other and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and b is not None else a == b
        for a, b in zip(mine, theirs, strict=True)
    )


def distances(mine: dict[str, Any], theirs: dict[str, torch.Tensor]) -> list[float]:
    """Return the relative error of every tensor: norm of the difference over norm.

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
        found.append(float(difference) / max(norms[name], floor, 1e-12))
    return found
