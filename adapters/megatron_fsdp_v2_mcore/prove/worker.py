"""What a rank does in a proof: one training, recorded, and compared with an earlier one."""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_v2.checkpoint.errors import everyones
from megatron_fsdp_v2.dtensor.sharded_rows import local_of, rows_like
from megatron_fsdp_v2_mcore.flags.arguments import API_FLAG
from megatron_fsdp_v2_mcore.optim.optimizer_state import scaled_names
from megatron_fsdp_v2_mcore.prove import memory
from megatron_fsdp_v2_mcore.prove.compare import (
    Bounds,
    Difference,
    Options,
    Record,
    Tensors,
    records,
    replicas,
)


@dataclass(frozen=True)
class Job:
    """A training on all ranks of a pool.

    Attributes:
        flags: All flags except those of the rehearsal.
        keep: Name under which ranks keep their values for later comparisons.
        against: Name of kept values to compare with.
        num_before: Iterations of those values before the first of this training.
        bounds: Allowed differences.
        has_its_gradients: Whether steps use the gradients of `against` instead of their own.
        exact_norms: Whether gradient norms are summed in fp64, where the order does not matter.
        whole: After this many iterations of this training, whole weights and optimizer state are
            returned.
        rehearses: Whether ranks rehearse on a CPU.
    """

    flags: tuple[str, ...]
    keep: str | None = None
    against: str | None = None
    num_before: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    has_its_gradients: bool = False
    exact_norms: bool = False
    whole: int | None = None
    rehearses: bool = True


@dataclass
class Outcome:
    """What a rank measured.

    Attributes:
        losses: Loss of every iteration, on the last pipeline stage.
        grad_norms: Gradient norm of every iteration before clipping; infinite if its update was
            skipped.
        differences: Differences from the kept values that exceed the bounds.
        num_compared: Number of compared elements of gradients and weights.
        whole: Whole weights of this rank's stage.
        state: Whole optimizer state of this rank's stage.
        replicas: Differences between tensor-parallel ranks in weights that are not split.
        memory: Kept bytes before the last step, if the model is sharded.
        options: Options of the optimizer in every iteration, without copies of parameters.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    num_compared: int = 0
    whole: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    replicas: list[Difference] = field(default_factory=list)
    memory: Counter[str] = field(default_factory=Counter)
    options: list[Options] = field(default_factory=list)


_COPY = " (copy)"
"""Suffix of the names of a tied embedding on later pipeline stages."""

_kept: dict[str, Record] = {}
"""Values of earlier trainings of this rank."""


def forget() -> None:
    """Drop the values of earlier trainings."""
    _kept.clear()


def train(job: Job) -> Outcome:
    """Run one training on this rank. Collective over the pool."""
    from megatron_fsdp_v2_mcore.prove import session

    outcome, record = Outcome(), Record()
    with session.training(job.flags, rehearses=job.rehearses) as (patches, run):
        _watch(patches, outcome, record, job)
        if job.exact_norms:
            session.sum_norms_in_fp64(patches)
        with redirect_stdout(io.StringIO()):
            run()
    outcome.options = [
        {name: numbers for name, numbers in of_names.items() if not name.endswith(_COPY)}
        for of_names in record.options
    ]
    if job.keep is not None:
        _kept[job.keep] = record
    if job.against is not None:
        outcome.differences = records(record, _kept[job.against], job.bounds, job.num_before)
        compared = record.weights if job.has_its_gradients else [*record.grads, *record.weights]
        tensors = [tensor for values in compared for tensor in values.values()]
        outcome.num_compared = sum(tensor.numel() for tensor in tensors)
    return outcome


def _watch(patches: Any, outcome: Outcome, record: Record, job: Job) -> None:
    """Record what Megatron's loop logs, and the values around every step of the optimizer."""
    from megatron.training import training

    log, loop = training.training_log, training.train

    def log_and_record(losses: Any, *args: Any, **kwargs: Any) -> Any:
        if (loss := losses.get("lm loss")) is not None:
            outcome.losses.append(float(loss))
        # (total, learning rate, iteration, loss scale, report, skipped, gradient norm, ...)
        norm = args[6]
        outcome.grad_norms.append(math.inf if norm is None else float(norm))
        return log(losses, *args, **kwargs)

    def train_and_record(*args: Any, **kwargs: Any) -> Any:
        chunks, optimizer = kwargs.get("model", args[1]), kwargs.get("optimizer", args[2])
        step = optimizer.step
        if API_FLAG not in job.flags:
            # With fused weight gradients, Transformer Engine's gradients of biases are in fp32.
            # This package reduces them as they are; autograd would round the reference's.
            for param in itertools.chain.from_iterable(chunk.parameters() for chunk in chunks):
                param.grad_dtype = None

        def record_weights() -> None:
            record.weights.append(_weights(chunks, record))
            if len(record.weights) - 1 == job.whole:
                outcome.whole = _whole(chunks)
                outcome.state = _whole_state(chunks, optimizer)

        def step_and_record(*args: Any, **kwargs: Any) -> Any:
            if job.has_its_gradients:
                assert job.against is not None
                _replace_grads(chunks, record, _kept[job.against])
            record.options.append(_options(chunks, optimizer))
            record.grads.append(_grads(chunks))
            if API_FLAG in job.flags:
                outcome.memory = memory.measured(chunks, optimizer)
            result = step(*args, **kwargs)
            record_weights()
            return result

        record_weights()
        optimizer.step = step_and_record
        result = loop(*args, **kwargs)
        outcome.replicas = _replicas(chunks, record)
        return result

    patches.set(training, "training_log", log_and_record)
    patches.set(training, "train", train_and_record)


def _named(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return this rank's trained parameters by their names in a checkpoint."""
    from megatron_fsdp_v2_mcore.checkpoint.names import canonical_parameter_names

    return {
        name.fqn + _COPY if name.is_copy else name.fqn: param
        for param, name in canonical_parameter_names(chunks).items()
        if param.requires_grad and not name.is_unused
    }


def _replicas(chunks: Sequence[Any], record: Record) -> list[Difference]:
    """Compare the weights that tensor parallelism does not split. Collective.

    Megatron counts such a weight in the norm, and saves it, on the first rank only.
    """
    from megatron.core import mpu

    names = [name for name, param in _named(chunks).items() if _is_replica(param)]
    mine = [{name: weights[name] for name in names} for weights in record.weights]
    return replicas(mine, everyones(mine, mpu.get_tensor_model_parallel_group())[0])


def _is_replica(param: Any) -> bool:
    # The command imports this module, and must not import Megatron before a rehearsal begins.
    from megatron_fsdp_v2_mcore.model.tensor_shards import is_expert

    # Experts have tensor-parallel groups of their own.
    if is_expert(param):
        return False
    if hasattr(param, "row_shards"):
        return param.row_shards.tensor is not None and param.row_shards.tensor.dim is None
    return not getattr(param, "tensor_model_parallel", False)


def _weights(chunks: Sequence[Any], record: Record) -> Tensors:
    """Return copies of this rank's main weights."""
    found: Tensors = {}
    for name, param in _named(chunks).items():
        main = getattr(param, "main_param", None)
        value = param if main is None else main
        found[name] = _copy(value).view(_part_shape(param))
        record.first_rows[name] = param.local_rows[0] if hasattr(param, "local_rows") else 0
    return found


def _grads(chunks: Sequence[Any]) -> Tensors:
    """Return copies of this rank's gradients; zeros if there is none."""
    found: Tensors = {}
    for name, param in _named(chunks).items():
        grad = getattr(param, "main_grad", None)
        if grad is None or hasattr(param, "local_rows"):
            grad = param.grad if param.grad is not None else torch.zeros_like(param)
        found[name] = _copy(grad).view(_part_shape(param))
    return found


def _replace_grads(chunks: Sequence[Any], record: Record, theirs: Record) -> None:
    """Replace this rank's gradients by those of the same iteration of another training."""
    grads = theirs.grads[len(record.grads)]
    for name, param in _named(chunks).items():
        if param.grad is None:
            continue
        own = local_of(param.grad)
        first = record.first_rows[name] - theirs.first_rows[name]
        rows = slice(first, first + own.shape[0]) if own.dim() else ...
        own.copy_(grads[name][rows].view_as(own))


def _options(chunks: Sequence[Any], optimizer: Any) -> Options:
    """Return the numbers in the parameter groups of an optimizer, by the parameter's name."""
    names = {getattr(param, "main_param", None): name for name, param in _named(chunks).items()}
    names |= {param: name for name, param in _named(chunks).items()}
    found: Options = {}
    for group in optimizer.param_groups:
        numbers = dict(_numbers(group))
        found |= {names[param]: numbers for param in group["params"] if param in names}
    return found


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for option, value in group.items():
        values = value if isinstance(value, tuple) else (value,)
        for index, number in enumerate(values):
            if isinstance(number, int | float | torch.Tensor) and not isinstance(number, bool):
                yield f"{option}[{index}]" if value is values else option, float(number)


def _part_shape(param: Any) -> Any:
    return param.to_local().shape if hasattr(param, "local_rows") else param.shape


def _copy(tensor: Any) -> torch.Tensor:
    return _local(tensor).detach().to("cpu", torch.float32, copy=True)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _whole(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return all weights of this rank's stage, unsplit. Collective."""
    found = {}
    for name, param in _named(chunks).items():
        if name.endswith(_COPY):
            continue
        whole = param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach()
        found[name] = whole.to("cpu", torch.float32).numpy().copy()
    return found


def _whole_state(chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """Return the optimizer state of this rank's stage, unsplit. Collective.

    State is left out that depends on the number of ranks: factors of a matrix, which have another
    shape than the weight, and state with one scale for all rows of a rank.
    """
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    own: dict[str, dict[str, Any]] = {}
    for name, param in _named(chunks).items():
        own[name] = {
            key: value
            for part in parts
            for key, value in part.state.get(param, {}).items()
            if key not in scaled_names(part)
        }
    found: dict[str, Any] = {}
    of_rows: dict[str, dict[str, torch.dtype]] = {}
    for name, param in _named(chunks).items():
        tensors = {key: _local(v) for key, v in own[name].items() if torch.is_tensor(v)}
        shape = local_of(param).shape
        of_rows[name] = {key: v.dtype for key, v in tensors.items() if v.shape == shape}
        steps = {f"{key} of {name}": v for key, v in tensors.items() if not v.dim()}
        found |= {key: v.to("cpu", torch.float32).numpy().copy() for key, v in steps.items()}
    # A rank without rows of a weight may have no state.
    of_ranks = everyones(of_rows, dist.group.WORLD)
    for name, param in _named(chunks).items():
        dtypes = {key: dtype for each in of_ranks for key, dtype in each.get(name, {}).items()}
        for key in sorted(dtypes):
            rows = _local(own[name].get(key, torch.zeros_like(local_of(param))))
            whole = rows_like(rows.detach().to(dtypes[key]), param).full_tensor()
            found[f"{key} of {name}"] = whole.to("cpu", torch.float32).numpy().copy()
    return {name: value for name, value in found.items() if not name.endswith(_COPY)}
