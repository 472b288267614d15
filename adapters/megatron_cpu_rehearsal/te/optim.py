"""Optimizer steps, scaling and norms over lists of tensors.

A call has one list of tensors per role; entries at the same index belong together. Values are
computed in fp32 and rounded when stored. `chunk_size` divides the work of a GPU and is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_cpu_rehearsal.te import numbers
from megatron_cpu_rehearsal.te.enums import TORCH_DTYPES

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

Lists = Sequence[Sequence[torch.Tensor]]

_WITH_L2 = 0


def multi_tensor_scale(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Compute `out = in * scale`; `is_infinite` becomes 1 if an input is not finite.

    Args:
        chunk_size: Ignored.
        is_infinite: One integer.
        tensor_lists: Inputs, outputs.
        scale: Factor.
    """
    del chunk_size
    for source, target in zip(*tensor_lists, strict=True):
        if not bool(source.isfinite().all()):
            is_infinite.fill_(1)
        target.copy_(source.float() * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """As `multi_tensor_scale`, with the factor in a tensor."""
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, float(scale))


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the norm over a list, `(1,)`, and optionally the norm of each tensor, `(n,)`.

    Args:
        chunk_size: Ignored.
        noop_flag: One integer; becomes 1 if the norm is not finite.
        tensor_lists: One list.
        per_tensor_python: Whether to compute the norm of each tensor.
    """
    return _norms(noop_flag, tensor_lists[0], torch.ones(()), per_tensor_python)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `multi_tensor_l2norm`, for elements times `inv_scale`; tensors are not changed."""
    return _norms(noop_flag, tensor_lists[0], inv_scale, per_tensor_python)


def _norms(
    noop_flag: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    factor: torch.Tensor,
    per_tensor: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = factor.float().reshape(())
    squares = torch.stack([(tensor.float() * scale).square().sum() for tensor in tensors])
    total = squares.sum().sqrt().reshape(1)
    if not bool(total.isfinite()):
        noop_flag.fill_(1)
    return total, squares.sqrt() if per_tensor else torch.empty(0)


class _Adam:
    """Compute one step of Adam from a gradient, moments and a parameter.

    Args:
        lr: Step size.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added to the root of the second moment.
        step: Number of this step, from 1.
        mode: 0 adds weight decay to the gradient, 1 to the update.
        bias_correction: Whether moments are divided by `1 - beta ** step`.
        weight_decay: Factor of the parameter.
    """

    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        self.lr, self.beta1, self.beta2, self.epsilon = lr, beta1, beta2, epsilon
        self.mode, self.weight_decay = mode, weight_decay
        self.correction1 = 1 - beta1**step if bias_correction else 1.0
        self.correction2 = 1 - beta2**step if bias_correction else 1.0

    def __call__(
        self, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, p: torch.Tensor
    ) -> torch.Tensor:
        """Return the updated parameter in fp32, and store the moments rounded to their dtypes.

        Args:
            grad: Gradient.
            exp_avg: First moment.
            exp_avg_sq: Second moment.
            p: Parameter.
        """
        grad, p = grad.float(), p.float()
        if self.mode == _WITH_L2:
            grad = grad + self.weight_decay * p
        first = self.beta1 * exp_avg.float() + (1 - self.beta1) * grad
        second = self.beta2 * exp_avg_sq.float() + (1 - self.beta2) * grad * grad
        update = first / self.correction1 / ((second / self.correction2).sqrt() + self.epsilon)
        if self.mode != _WITH_L2:
            update = update + self.weight_decay * p
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
        return p - self.lr * update


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    *options: Any,
) -> None:
    """Step parameters, or fp32 masters from which parameters are rounded.

    Args:
        chunk_size: Ignored.
        noop_flag: Ignored, as in the GPU kernel.
        tensor_lists: Gradients, parameters, first and second moments, masters (optional).
        options: Arguments of `_Adam`.
    """
    del chunk_size, noop_flag
    adam = _Adam(*options)
    for grad, p, exp_avg, exp_avg_sq, *masters in zip(*tensor_lists, strict=True):
        stepped = adam(grad, exp_avg, exp_avg_sq, masters[0] if masters else p)
        for target in (p, *masters):
            target.copy_(stepped)


def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    *options: Any,
) -> None:
    """Step fp32 masters whose upper halves are the bf16 parameters.

    The lower half is stored as 16 bits. A parameter is its master rounded to nearest: if the lower
    half is negative as a signed integer, the parameter is the upper half plus one.

    Args:
        chunk_size: Ignored.
        noop_flag: Ignored, as in the GPU kernel.
        tensor_lists: Gradients, parameters (bf16), first and second moments, lower halves (int16).
        options: Arguments of `_Adam`.
    """
    del chunk_size, noop_flag
    adam = _Adam(*options)
    for grad, p, exp_avg, exp_avg_sq, lower in zip(*tensor_lists, strict=True):
        upper = p.detach().view(torch.int16).int() - (lower < 0).int()
        master = (upper << 16 | lower.int() & 0xFFFF).view(torch.float32)
        bits = adam(grad, exp_avg, exp_avg_sq, master).view(torch.int32)
        lower.copy_(bits.to(torch.int16))
        rounded = ((bits >> 16) + (lower < 0).int()).to(torch.int16)
        p.detach().view(torch.int16).copy_(rounded)


def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    *options: Any,
) -> None:
    """Step fp32 masters and quantize them with the scale of delayed scaling.

    Args:
        chunk_size: Ignored.
        noop_flag: Ignored, as in the GPU kernel.
        tensor_lists: Gradients, payloads (bytes), first and second moments, masters, scales,
            amaxes (which grow), inverses of scales.
        options: Arguments of `_Adam`, and the payload's `DType`.
    """
    del chunk_size, noop_flag
    *numbers_of_adam, fp8_dtype = options
    adam, dtype = _Adam(*numbers_of_adam), TORCH_DTYPES[int(fp8_dtype)]
    for lists in zip(*tensor_lists, strict=True):
        grad, data, exp_avg, exp_avg_sq, master, scale, amax, scale_inv = lists
        stepped = adam(grad, exp_avg, exp_avg_sq, master)
        master.copy_(stepped)
        factor = scale.reshape(())
        data.view(torch.uint8).copy_(numbers.to_fp8(stepped * factor, dtype).view(data.shape))
        amax.copy_(torch.maximum(amax, stepped.abs().amax().view_as(amax)))
        scale_inv.copy_(factor.reciprocal().view_as(scale_inv))


def multi_tensor_adam_capturable(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *options: Any
) -> None:
    """As `multi_tensor_adam`, with scalars in tensors, unscaling of gradients, and a skip flag.

    Args:
        chunk_size: Ignored.
        noop_flag: If 1, the step is skipped.
        tensor_lists: Gradients, which are multiplied by `inv_scale` in place, parameters, first
            and second moments, masters (optional).
        options: Arguments of `_Adam` and `inv_scale`; `lr`, `step` and `inv_scale` are tensors of
            one element.
    """
    if int(noop_flag) == 1:
        return
    lr, beta1, beta2, epsilon, step, *others, inv_scale = options
    for grad in tensor_lists[0]:
        grad.copy_(grad.float() * inv_scale.float().reshape(()))
    numbers_of_adam = (float(lr), beta1, beta2, epsilon, int(step), *others)
    multi_tensor_adam(chunk_size, noop_flag, tensor_lists, *numbers_of_adam)


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Perform a step of SGD with momentum, as defined by torch.

    Args:
        chunk_size: Ignored.
        noop_flag: If not 0, the step is skipped.
        tensor_lists: Gradients, parameters, momenta, and copies of the parameters (optional).
        wd: Weight decay.
        momentum: Decay of the momentum.
        dampening: Dampening of the momentum.
        lr: Step size.
        nesterov: Whether to use Nesterov momentum.
        first_run: Whether the momentum is initialized with the gradient.
        wd_after_momentum: Whether weight decay is applied after the momentum.
        scale: Factor of the gradients.
    """
    del chunk_size
    if int(noop_flag):
        return
    for grad, p, velocity, *copies in zip(*tensor_lists, strict=True):
        direction, old = grad.float() * scale, p.float()
        if wd and not wd_after_momentum:
            direction = direction + wd * old
        if momentum:
            moving = direction
            if not first_run:
                moving = velocity.float() * momentum + (1.0 - dampening) * direction
            velocity.copy_(moving)
            direction = direction + momentum * moving if nesterov else moving
        if wd and wd_after_momentum:
            direction = direction + wd * old
        stepped = old - lr * direction
        for target in (p, *copies):
            target.copy_(stepped)
