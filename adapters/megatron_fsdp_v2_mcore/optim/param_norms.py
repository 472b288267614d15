"""`--log-per-param-norm`: the norm of every weight and gradient of the whole model.

No single function of Megatron has access to the model, its final gradients and the writers. This
file therefore wraps two functions: `log_grads` computes the norms of gradients after their
reduction and before clipping, and `log_norms` computes the norms of weights when Megatron logs an
iteration. The sums of their squares are the squares of Megatron's `grad norm` and `params norm`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from torch import nn

from megatron_fsdp_v2.checkpoint.errors import everyones
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2_mcore.checkpoint.names import canonical_parameter_names
from megatron_fsdp_v2_mcore.flags.options import active_options, training_globals
from megatron_fsdp_v2_mcore.optim.optimizer import params_counted_on_rank

_pending: list[tuple[Sequence[nn.Module], dict[str, float]]] = []
"""Model chunks and the norms of their gradients, until an iteration is logged."""


def log_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's finalization of gradients to compute their norms.

    Args:
        original: Megatron's `finalize_model_grads`.
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
            _pending.append((model, {name: norm / scale for name, norm in grads.items()}))
        return result

    return finalize_model_grads


def log_norms(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's logging of an iteration to write the norms.

    Args:
        original: Megatron's `training_log`.
    """
    if not active_options().logs_parameter_norms:
        return original

    def training_log(
        losses: Any, total_losses: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(losses, total_losses, rate, iteration, *args, **kwargs)
        if _pending:
            chunks, grads = _pending.pop()
            _write(iteration, norms_of_all(chunks, lambda param: param), grads)
        return result

    return training_log


def norms_of_all(
    chunks: Sequence[nn.Module], tensor_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> dict[str, float]:
    """Return the norm of one tensor for each parameter of the whole model. Collective.

    Args:
        chunks: This rank's wrapped model chunks.
        tensor_of: Function that returns a tensor of a parameter, such as its gradient, or None.

    Returns:
        2-norms of the whole tensors by the parameters' global names (layers and experts numbered
        over all ranks), equal on all ranks. Parameters without the tensor are omitted.
    """
    fqns = {param: name.fqn for param, name in canonical_parameter_names(chunks).items()}
    norms = {
        fqns[param]: torch.linalg.vector_norm(local_of(tensor).detach(), dtype=torch.float64)
        for param in params_counted_on_rank(fqns)
        if (tensor := tensor_of(param)) is not None
    }
    squares = (torch.stack(list(norms.values())) ** 2).tolist() if norms else []
    parts = everyones((list(fqns.values()), dict(zip(norms, squares, strict=True))))
    # The order is the same on all ranks.
    names = dict.fromkeys(name for names_of_rank, _ in parts for name in names_of_rank)
    found = {name: [part[name] for _, part in parts if name in part] for name in names}
    return {name: math.sqrt(math.fsum(each)) for name, each in found.items() if each}


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
