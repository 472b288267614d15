"""Muon for plain and sharded parameters, with AdamW for parameters that are not matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, override

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from megatron_fsdp_v2.comm.backends import is_capturing
from megatron_fsdp_v2.dtensor.sharded_rows import add_to_rows, plain_attributes, rows_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim.engine import MatrixFunction
from megatron_fsdp_v2.optim.matrix_step import MatrixStep, gradient_rows, parameter_name
from megatron_fsdp_v2.optim.newton_schulz import (
    COEFFICIENTS,
    EPS,
    METHODS,
    STEPS,
    newton_schulz,
    newton_schulz_flops,
)

_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MOST_STEPS = 99


class Muon(MatrixStep):
    """Momentum orthogonalized by Newton-Schulz: the update of `torch.optim.Muon`.

    Parameters may be plain tensors or sharded by `fully_shard`, with any strategy, mesh and
    tensor-parallel split, in any mix. Momentum is sharded like the parameter. Every matrix is
    gathered and orthogonalized on one rank, and its rows are sent back, so that every rank does
    about `1 / ranks` of the work, also for replicated parameters. A parameter of more dimensions is
    a stack of matrices `(..., m, n)`, such as those of experts: `(experts, m, n)`, or `(experts, 2,
    m, n)` for fused gates and up projections. A parameter without a gradient is skipped.

    AdamW steps groups with `use_muon=False`, so that one optimizer serves a whole model. Use such
    groups for embeddings, output layers, norms, biases and convolutions, whose weights are no
    stacks of matrices.

    Args:
        params: Parameters, named parameters or groups, as for any optimizer.
        lr: Learning rate of Muon and AdamW.
        momentum: Factor of the running mean of gradients.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Decoupled weight decay of Muon and AdamW.
        ns_steps: Newton-Schulz iterations, 1 to 99.
        ns_coefficients: Coefficients `(a, b, c)` of each iteration.
        eps: Smallest norm that a matrix is divided by.
        adjust_lr_fn: `"original"` (the default) scales the learning rate by `sqrt(max(1, m / n))`,
            `"match_rms_adamw"` by `0.2 * sqrt(max(m, n))`.
        ns_dtype: Dtype of the iteration and of the matrices that ranks exchange; bf16 as in
            `torch.optim.Muon`.
        ns_method: `"standard"`, or `"gram"`: iterations on the Gram matrix, which take about half
            the operations for long matrices; see `newton_schulz`.
        block_rows: Rows of each block of a 2-D parameter that is orthogonalized on its own: the
            size of a head for the projections of queries, keys and values. Blocks that no shard
            boundary splits (`shard_granularity`) are not sent. None for whole matrices.
        use_muon: Default of the groups' option: True for Muon, False for AdamW.
        betas: Betas of AdamW.
        adamw_eps: Epsilon of AdamW.

    Raises:
        ValueError: An option is out of range, or a parameter of a Muon group has less than two
            dimensions, is a DTensor that `fully_shard` did not make, or has rows that are no
            multiple of `block_rows`; names it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = STEPS,
        *,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        adjust_lr_fn: str | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_method: str = "standard",
        block_rows: int | None = None,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        if not ns_dtype.is_floating_point:
            raise ValueError(f"ns_dtype must be a floating-point dtype, got {ns_dtype}")
        self._ns_dtype = ns_dtype
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_method": ns_method,
            "block_rows": block_rows,
            "use_muon": use_muon,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see the class for its options.

        Raises:
            ValueError: See the class.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            for index, param in enumerate(group["params"]):
                _check_parameter(group, index, param)
        except ValueError:
            self.param_groups.pop()
            raise

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ns_dtype": self._ns_dtype}

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. Collective over the meshes of sharded parameters.

        Args:
            closure: Reevaluates the model and returns the loss.

        Raises:
            RuntimeError: AdamW steps parameters in the capture of a CUDA graph.
        """
        _check_capture(self.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_matrices([group for group in self.param_groups if group["use_muon"]])
        for group in self.param_groups:
            if not group["use_muon"]:
                self._step_adamw(group)
        return loss

    # -- Muon ----------------------------------------------------------------------------------

    @override
    def matrix_function(self, group: dict[str, Any], param: nn.Parameter) -> MatrixFunction:
        """Return Newton-Schulz with the options of a group."""
        del param
        return _function(
            group["block_rows"],
            group["ns_steps"],
            group["ns_method"],
            coefficients=tuple(group["ns_coefficients"]),
            eps=group["eps"],
            dtype=self._ns_dtype,
        )

    @override
    def momentum_updates(
        self, group: dict[str, Any], params: Sequence[nn.Parameter]
    ) -> list[torch.Tensor]:
        """See `MatrixStep`."""
        # Cast before the exchange: Newton-Schulz rounds its input to this dtype anyway.
        return [update.to(self._ns_dtype) for update in super().momentum_updates(group, params)]

    @override
    def decay(
        self, group: dict[str, Any], params: Sequence[nn.Parameter], grads: Sequence[torch.Tensor]
    ) -> None:
        """Decay weights by the learning rate times `weight_decay`."""
        del grads
        # A product with a tensor on the device does not wait for its value.
        factor = 1 - group["lr"] * group["weight_decay"]
        torch._foreach_mul_([rows_of(param) for param in params], factor)

    @override
    def apply_results(
        self, group: dict[str, Any], params: Sequence[nn.Parameter], results: Sequence[torch.Tensor]
    ) -> None:
        """Subtract orthogonalized updates, in one operation per learning rate."""
        # Read once: a value on the device makes the host wait.
        lr = float(group["lr"])
        by_rate: dict[float, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for param, result in zip(params, results, strict=True):
            rows, columns = param.shape[-2:]
            size = group["block_rows"] or rows, columns
            rate = lr * _adjustment(group["adjust_lr_fn"], *size)
            by_rate.setdefault(rate, []).append((param, result))
        for rate, pairs in by_rate.items():
            add_to_rows([p for p, _ in pairs], [change for _, change in pairs], alpha=-rate)

    # -- AdamW ---------------------------------------------------------------------------------

    def _step_adamw(self, group: dict[str, Any]) -> None:
        with plain_attributes():
            used = [p for p in group["params"] if p.requires_grad and p.grad is not None]
        for param in used:
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        states = [self.state[param] for param in used]
        means = [rows_of(state["exp_avg"]) for state in states]
        adamw(
            [rows_of(param) for param in used],
            [gradient_rows(param, mean.dtype) for param, mean in zip(used, means, strict=True)],
            means,
            [rows_of(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


@functools.cache
def _function(block_rows: int | None, steps: int, method: str, **options: Any) -> MatrixFunction:
    apply = functools.partial(newton_schulz, steps=steps, method=method, **options)
    flops = functools.partial(newton_schulz_flops, steps=steps, method=method)
    return MatrixFunction(apply, flops, block_rows)


def _adjustment(name: str | None, m: int, n: int) -> float:
    """Factor of the learning rate for an `m x n` matrix."""
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / n)) if n else 1.0


def _check_capture(groups: Sequence[dict[str, Any]]) -> None:
    """Check that no steps are counted on the host while a CUDA graph is captured."""
    params = [param for group in groups if not group["use_muon"] for param in group["params"]]
    if params and is_capturing(params[0].device):
        raise RuntimeError(
            "Muon with use_muon=False counts the steps of AdamW on the host, and replays of a CUDA "
            "graph would not count; give these parameters to AdamW(capturable=True)"
        )


def _check_options(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element, got a tensor of shape {tuple(lr.shape)}")
    for name in ("lr", "momentum", "weight_decay", "eps", "adamw_eps"):
        if not float(group[name]) >= 0:
            raise ValueError(f"{name} must be at least 0, got {group[name]}")
    if not 1 <= group["ns_steps"] <= _MOST_STEPS:
        raise ValueError(f"ns_steps must be from 1 to {_MOST_STEPS}, got {group['ns_steps']}")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients must be (a, b, c), got {group['ns_coefficients']}")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ValueError(
            f"adjust_lr_fn must be 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}"
        )
    if group["ns_method"] not in METHODS:
        raise ValueError(f"ns_method must be 'standard' or 'gram', got {group['ns_method']!r}")
    if group["block_rows"] is not None and group["block_rows"] < 1:
        raise ValueError(f"block_rows must be at least 1, got {group['block_rows']}")
    for number, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{number}] must be in [0, 1), got {beta}")


def _check_parameter(group: dict[str, Any], index: int, param: nn.Parameter) -> None:
    if not group["use_muon"]:
        return
    if param.ndim < 2 or param.is_complex():
        kind = "complex" if param.is_complex() else f"{param.ndim}-D"
        raise ValueError(
            f"{parameter_name(group, index)} is {kind}, and Muon steps real matrices and "
            "stacks of them; put it into a group with use_muon=False, which AdamW steps"
        )
    if isinstance(param, DTensor) and not isinstance(param, UnevenDTensor):
        raise ValueError(
            f"{parameter_name(group, index)} is a DTensor that was not sharded by fully_shard of "
            "megatron_fsdp_v2; Muon steps those and plain tensors"
        )
    block_rows = group["block_rows"]
    if block_rows is not None and (param.ndim > 2 or param.shape[0] % block_rows):
        raise ValueError(
            f"{parameter_name(group, index)} has shape {tuple(param.shape)}, and "
            f"block_rows={block_rows} divides the rows of 2-D parameters, without a remainder; put "
            "this parameter into a group without block_rows"
        )
