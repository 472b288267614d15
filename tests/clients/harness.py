"""A model of another library trained twice: as it is, with the data of all ranks, and sharded.

Every rank does both. What it compares is what it holds: its losses, and its rows of gradients and
parameters. Dropout draws the same numbers in both, since every forward starts from a seed of its
own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.reference.training import distances
from tests.sharding import arguments

type Batch = dict[str, torch.Tensor]

STRATEGIES = {
    "ZeRO-0": "no_shard",
    "ZeRO-1": "optim",
    "ZeRO-2": "optim_grads",
    "ZeRO-3": "optim_grads_params",
}


@dataclass(frozen=True)
class Part:
    """What a process holds of a tensor: rows from `start` to before `end`, if any."""

    start: int
    end: int
    tensor: torch.Tensor | None


def part_of(param: torch.Tensor, tensor: torch.Tensor | None) -> Part:
    """What this process holds of a parameter or, with the same rows, of its gradient, copied."""
    start, end = param.local_rows if isinstance(param, UnevenDTensor) else (0, param.shape[0])
    if isinstance(tensor, UnevenDTensor):
        tensor = tensor.to_local()
    return Part(start, end, None if tensor is None else tensor.detach().clone())


def parameters_held(model: nn.Module) -> dict[str, Part]:
    """This process's part of every parameter, by name."""
    return {name: part_of(param, param) for name, param in model.named_parameters()}


@dataclass
class Trace:
    """What a training showed.

    Attributes:
        losses: By step, micro-batch and rank.
        observed: What `Training.observe` returned, of one rank.
        grads: Gradients by name, per step, as they were before the optimizer stepped.
        params: Parameters by name, at the end.
    """

    losses: dict[tuple[int, int, int], float] = field(default_factory=dict)
    observed: list[Mapping[str, torch.Tensor]] = field(default_factory=list)
    grads: list[dict[str, Part]] = field(default_factory=list)
    params: dict[str, Part] = field(default_factory=dict)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of most trainings here; Adam would hide a wrong scale of the gradients.

    Large steps would amplify rounding.
    """
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Training:
    """What is trained, and how.

    Attributes:
        build: Makes the model.
        units: Modules to shard, children first; the root comes after.
        batch: Arguments of the loss: `(step, micro, rank)`.
        loss: Loss of a batch: `(model, batch)`; usually one that the model's output has.
        prepare: What is done to the model before it is sharded.
        observe: Evaluation after each optimizer step and between the first two micro-batches of
            each step: `(model, step, rank)`; what it returns is compared.
        optimizer: Makes the optimizer.
        num_steps: Optimizer steps.
        num_micro: Backwards in a step.
        defers: Whether gradients are synchronized in the last backward of a step alone.
        options: Arguments of `fully_shard`.
    """

    build: Callable[[], nn.Module]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[Any, Batch], Any] = lambda model, batch: model(**batch).loss
    prepare: Callable[[Any], None] = lambda model: None
    observe: Callable[[Any, int, int], Mapping[str, torch.Tensor]] = lambda model, step, rank: {}
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    num_steps: int = 3
    num_micro: int = 2
    defers: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of all ranks, made once in a process."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "dp")[-len(shape) :])


def build(training: Training) -> nn.Module:
    """The model with its initial values, which are the same in every process."""
    torch.manual_seed(1)
    model = training.build()
    training.prepare(model)
    return model


def shard(training: Training, model: nn.Module) -> nn.Module:
    """Shard a model as its training says; without a mesh in its options, over all ranks."""
    options = arguments(**{"mesh": mesh_of(dist.get_world_size()), **training.options})
    for unit in training.units(model):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def run(
    training: Training,
    model: Any,
    optimizer: torch.optim.Optimizer,
    ranks: Sequence[int],
    steps: Sequence[int],
) -> Trace:
    """Make some steps of a training.

    Args:
        training: What to do.
        model: The model, sharded or not.
        optimizer: Steps its parameters.
        ranks: Whose data to train on; the mean over them is what counts.
        steps: Which steps.
    """
    trace = Trace()
    (rank,) = ranks if len(ranks) == 1 else (dist.get_rank(),)
    is_sharded = hasattr(model, "set_requires_gradient_sync")
    for step in steps:
        for micro in range(training.num_micro):
            if is_sharded and training.defers:
                model.set_requires_gradient_sync(micro == training.num_micro - 1)
            for of in ranks:
                torch.manual_seed(1000 * step + 100 * micro + of)
                loss = training.loss(model, training.batch(step, micro, of))
                (loss / len(ranks)).backward()
                trace.losses[step, micro, of] = float(loss.detach())
            if micro == 0:
                trace.observed.append(training.observe(model, step, rank))
        params = model.named_parameters()
        trace.grads.append({name: part_of(param, param.grad) for name, param in params})
        optimizer.step()
        optimizer.zero_grad()
        trace.observed.append(training.observe(model, step, rank))
    trace.params = parameters_held(model)
    return trace


def train_plain(training: Training) -> Trace:
    """Train the model as it is, with the data of all ranks."""
    model = build(training)
    optimizer = training.optimizer(model.parameters())
    ranks = range(dist.get_world_size())
    return run(training, model, optimizer, ranks, range(training.num_steps))


def train_sharded(training: Training) -> Trace:
    """Train the model sharded, every rank with its own data. Collective."""
    model = shard(training, build(training))
    optimizer = training.optimizer(model.parameters())
    return run(training, model, optimizer, [dist.get_rank()], range(training.num_steps))


def difference(sharded: Trace, plain: Trace) -> float:
    """The largest relative difference of what this rank holds from an unsharded training."""
    found = [0.0]
    for key, loss in sharded.losses.items():
        found.append(abs(loss - plain.losses[key]) / abs(plain.losses[key]))
    for mine, theirs in zip(sharded.observed, plain.observed, strict=True):
        found.append(difference_of_outputs(mine, theirs))
    for grads, whole in zip(sharded.grads, plain.grads, strict=True):
        found.append(difference_of_parts(grads, whole))
    found.append(difference_of_parts(sharded.params, plain.params))
    return max(found)


def difference_of_parts(mine: Mapping[str, Part], plain: Mapping[str, Part]) -> float:
    """The same for parameters or gradients by name, of which the plain ones are whole.

    Names have to be the same. No gradient is zero: where others of a unit have one, there is one.
    """
    assert mine.keys() == plain.keys()
    whole = {name: part.tensor for name, part in plain.items()}
    held = {}
    for name, part in mine.items():
        tensor = part.tensor
        if whole[name] is None:
            assert tensor is None or not tensor.any(), f"{name} has a gradient from nowhere"
        elif tensor is None:
            # A rank without rows of a parameter has no gradient either.
            is_zero = not whole[name].any()  # type: ignore[union-attr]
            assert part.start == part.end or is_zero, f"{name} has no gradient"
        else:
            held[name] = ((part.start, part.end), tensor)
    compared = {name: tensor for name in held if (tensor := whole[name]) is not None}
    return max(distances(held, compared), default=0.0)


def change_of_parts(mine: Mapping[str, Part], theirs: Mapping[str, Part]) -> float:
    """The largest difference of any element between two sharded trainings; zero: the same bits."""
    assert mine.keys() == theirs.keys()
    found = [0.0]
    for name, part in mine.items():
        other = theirs[name]
        assert (part.start, part.end) == (other.start, other.end), name
        assert (part.tensor is None) == (other.tensor is None), name
        if part.tensor is not None and other.tensor is not None and part.tensor.numel():
            found.append(float((part.tensor - other.tensor).abs().max()))
    return max(found)


def difference_of_outputs(
    mine: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]
) -> float:
    """The same for outputs by name; those of whole numbers have to be equal."""
    assert mine.keys() == plain.keys(), sorted(mine.keys() ^ plain.keys())
    found = [0.0]
    for name, tensor in plain.items():
        assert mine[name].shape == tensor.shape, name
        assert mine[name].dtype == tensor.dtype, name
        if tensor.is_floating_point():
            difference = (mine[name].double() - tensor.double()).norm()
            found.append(float(difference / tensor.double().norm()))
        else:
            assert torch.equal(mine[name], tensor), f"{name}: {mine[name]} and {tensor}"
    return max(found)


def compare(training: Training) -> float:
    """Train both ways on every rank; return this rank's largest difference. Collective."""
    return difference(train_sharded(training), train_plain(training))
