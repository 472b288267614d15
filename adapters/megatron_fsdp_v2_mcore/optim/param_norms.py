"""`--log-per-param-norm`: the norm of every weight and gradient of the whole model.

Megatron has no place where a model, its final gradients and the writers come together, so two of
its functions are wrapped: gradients are looked at when they are final and not clipped yet, weights
when Megatron logs. Together they add up to what `grad norm` and `params norm` say.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import nn

from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2_mcore.checkpoint.names import canonical_parameter_names
from megatron_fsdp_v2_mcore.flags.options import active_options
from megatron_fsdp_v2_mcore.optim.optimizer import counted_here
from megatron_fsdp_v2_mcore.training_log import around_training_log, training_globals

__all__ = ["log_grads", "log_norms", "norms_of_all"]


@dataclass
class _Pending:
    """Norms of gradients that wait for the iteration to be logged, and their model."""

    chunks: Sequence[nn.Module]
    grads: dict[str, float]


_pending: list[_Pending] = []


def log_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's last step of a backward, after which gradients are final.

    Args:
        original: `finalize_model_grads`.
    """
    if not active_options().logs_parameter_norms:
        return original

    def finalize_model_grads(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        settings = training_globals().get_args()
        _pending.clear()
        if (settings.curr_iteration + 1) % settings.log_interval == 0:
            scale = _loss_scale(model)
            grads = norms_of_all(model, lambda param: param.grad)
            _pending.append(_Pending(model, {name: norm / scale for name, norm in grads.items()}))
        return result

    return finalize_model_grads


def log_norms(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's logging of an iteration.

    Args:
        original: `training_log`.
    """
    if not active_options().logs_parameter_norms:
        return original

    def write(iteration: int, nothing: None) -> None:
        del nothing
        if _pending:
            pending = _pending.pop()
            weights = norms_of_all(pending.chunks, lambda param: param)
            _write(iteration, weights, pending.grads)

    return around_training_log(original, lambda: None, write)


def norms_of_all(
    chunks: Sequence[nn.Module], tensor_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> dict[str, float]:
    """Norms of one tensor for each parameter of a model that all ranks hold together. Collective.

    Args:
        chunks: This rank's model chunks, wrapped.
        tensor_of: The tensor of a parameter, such as its gradient; None where there is none.

    Returns:
        2-norms over whole tensors, by the names parameters have in the whole model (layers and
        experts counted over all ranks); the same on every rank. Without those that have none.
    """
    mine = {param: name.fqn for param, name in canonical_parameter_names(chunks).items()}
    names = _names_of_all_ranks(list(mine.values()))
    index = {name: row for row, name in enumerate(names)}
    first = next(iter(mine))
    # Squares, and how many ranks hold something.
    table = torch.zeros(len(names), 2, dtype=torch.float64, device=local_of(first).device)
    tp_group = parallel_state.get_tensor_model_parallel_group()
    expert_tp_group = parallel_state.get_expert_tensor_parallel_group()
    for param in counted_here(mine, tp_group, expert_tp_group):
        tensor = tensor_of(param)
        if tensor is None:
            continue
        local = local_of(tensor).detach()
        row = table[index[mine[param]]]
        row[0] += torch.linalg.vector_norm(local, dtype=torch.float64) ** 2
        row[1] += 1
    dist.all_reduce(table)
    return {
        name: math.sqrt(square)
        for name, (square, holders) in zip(names, table.tolist(), strict=True)
        if holders
    }


def _names_of_all_ranks(names: list[str]) -> list[str]:
    """The names some rank has, in one order on all ranks."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, names)
    return list(dict.fromkeys(name for names_of_rank in gathered for name in names_of_rank))


def _loss_scale(model: Sequence[nn.Module]) -> float:
    scale = getattr(get_model_config(model[0]), "grad_scale_func", None)
    return 1.0 if scale is None else float(scale(torch.ones(())))


def _write(iteration: int, weights: dict[str, float], grads: dict[str, float]) -> None:
    scalars = {f"param-norm/{name}": norm for name, norm in weights.items()}
    scalars |= {f"param-grad-norm/{name}": norm for name, norm in grads.items()}
    variables = training_globals()
    writer, wandb_writer = variables.get_tensorboard_writer(), variables.get_wandb_writer()
    if writer:
        for name, norm in scalars.items():
            writer.add_scalar(name, norm, iteration)
    if wandb_writer:
        wandb_writer.log(scalars, iteration)
    if dist.get_rank() == 0:
        lines = [f" norms of every parameter at iteration {iteration}:"]
        for name, norm in weights.items():
            grad = f"{grads[name]:.6E}" if name in grads else "none"
            lines.append(f"   {name} | weight: {norm:.6E} | gradient: {grad}")
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
