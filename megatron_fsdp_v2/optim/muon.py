"""Muon for plain and for sharded parameters, with AdamW for everything that is not a matrix."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, override

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.dtensor.foreach import add_to_rows
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, plain_attributes, rows_of
from megatron_fsdp_v2.optim.engine import MatrixEngine, MatrixFunction
from megatron_fsdp_v2.optim.newton_schulz import (
    COEFFICIENTS,
    EPS,
    STEPS,
    newton_schulz,
    newton_schulz_flops,
)

__all__ = ["Muon", "check_gradients", "gradient_rows", "parameter_name"]

_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MOST_STEPS = 99


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton-Schulz: the update of `torch.optim.Muon`.

    Parameters may be plain tensors or sharded by `fully_shard`, with any strategy, mesh or
    tensor-parallel part, in any mix. Momentum stays sharded like the parameter. Every matrix is put
    together on one rank, orthogonalized there once, and its rows are sent back; of equal work
    every rank does about `1 / ranks`, where tensors are replicated too. A 3-D parameter is a stack
    of matrices, such as those of experts.

    Groups with `use_muon=False` are stepped by AdamW, so that one optimizer serves a whole model:
    give it embeddings, output layers, norms and biases there.

    Args:
        params: Parameters, named parameters or groups, as for any optimizer.
        lr: Learning rate, of AdamW too.
        momentum: Of the running mean of gradients.
        nesterov: Whether the update looks one step of momentum ahead.
        weight_decay: Decoupled, of AdamW too.
        ns_steps: Newton-Schulz iterations, 1 to 99.
        ns_coefficients: `(a, b, c)` of each.
        eps: Smallest norm that a matrix is divided by.
        adjust_lr_fn: `"original"` (the default) scales by `sqrt(max(1, m / n))`,
            `"match_rms_adamw"` by `0.2 * sqrt(max(m, n))`.
        ns_dtype: Of the iteration and of what ranks exchange for it; bf16 as in `torch.optim.Muon`.
        use_muon: Whether a group that does not say is stepped by Muon or by AdamW.
        betas: Of AdamW.
        adamw_eps: Of AdamW.

    Raises:
        ValueError: An option is out of range, or a parameter of a Muon group is neither 2-D nor
            3-D, or a DTensor that `fully_shard` did not make; names it.
    """

    skips_empty_shards = True

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
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        if not ns_dtype.is_floating_point:
            raise ValueError(f"ns_dtype must be a floating-point dtype, got {ns_dtype}")
        self._ns_dtype = ns_dtype
        self._engine: tuple[_Matrices, MatrixEngine] | None = None
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the class for its options.

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
        # Process groups of the engine can be neither copied nor pickled; it is planned again.
        return {**super().__getstate__(), "_ns_dtype": self._ns_dtype, "_engine": None}

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. Collective over the meshes of sharded parameters.

        Args:
            closure: Computes the loss again and returns it.

        Raises:
            RuntimeError: A matrix that is trained has no gradient; names it. One whose rows are
                all on other ranks needs none here.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with plain_attributes():
            groups = [group for group in self.param_groups if group["use_muon"]]
            check_gradients(groups)
            matrices = [(g, param) for g in groups for param in g["params"] if param.requires_grad]
        self._step_matrices(matrices)
        for group in self.param_groups:
            if not group["use_muon"]:
                self._step_adamw(group)
        return loss

    # -- Muon ----------------------------------------------------------------------------------

    def _step_matrices(self, matrices: list[tuple[dict[str, Any], nn.Parameter]]) -> None:
        params = [param for _, param in matrices]
        updates: dict[int, torch.Tensor] = {}
        for group in self.param_groups:
            mine = [param for owner, param in matrices if owner is group]
            for param, update in zip(mine, self._momentum_updates(group, mine), strict=True):
                updates[id(param)] = update
        if not params:
            return
        results = self._engine_for(matrices).run([updates[id(param)] for param in params])
        changes = {id(param): result for param, result in zip(params, results, strict=True)}
        for group in self.param_groups:
            mine = [param for owner, param in matrices if owner is group]
            _apply(group, mine, [changes[id(param)] for param in mine])

    def _momentum_updates(
        self, group: dict[str, Any], params: list[nn.Parameter]
    ) -> list[torch.Tensor]:
        """Move the running means of gradients on; what is to be orthogonalized, of this rank."""
        for param in params:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        buffers = [rows_of(self.state[param]["momentum_buffer"]) for param in params]
        # An empty shard has a buffer, so that checkpoints are alike on all ranks, and no gradient.
        here = [index for index, buffer in enumerate(buffers) if buffer.numel()]
        updates = list(buffers)
        if here:
            moved = [buffers[index] for index in here]
            grads = [gradient_rows(params[index], buffers[index].dtype) for index in here]
            torch._foreach_lerp_(moved, grads, 1 - group["momentum"])
            if group["nesterov"]:
                ahead = torch._foreach_lerp(grads, moved, group["momentum"])
                for index, update in zip(here, ahead, strict=True):
                    updates[index] = update
        # Newton-Schulz rounds its input to this dtype anyway, so less can travel.
        return [update.to(self._ns_dtype) for update in updates]

    def _engine_for(self, matrices: list[tuple[dict[str, Any], nn.Parameter]]) -> MatrixEngine:
        params = [param for _, param in matrices]
        functions = [
            _function(
                group["ns_steps"], tuple(group["ns_coefficients"]), group["eps"], self._ns_dtype
            )
            for group, _ in matrices
        ]
        # Parameters may be frozen, and options of groups changed, between two steps.
        if self._engine is None or not self._engine[0].are(params, functions):
            engine = MatrixEngine(params, functions)
            self._engine = _Matrices(params, functions), engine
        return self._engine[1]

    # -- AdamW ---------------------------------------------------------------------------------

    def _step_adamw(self, group: dict[str, Any]) -> None:
        with plain_attributes():
            trained = [param for param in group["params"] if param.requires_grad]
            used = [p for p in trained if p.grad is not None or not rows_of(p).numel()]
        for param in used:
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        states = [self.state[param] for param in used if rows_of(param).numel()]
        for param in used:
            if not rows_of(param).numel():
                self.state[param]["step"] += 1
        here = [param for param in used if rows_of(param).numel()]
        means = [rows_of(state["exp_avg"]) for state in states]
        adamw(
            [rows_of(param) for param in here],
            [gradient_rows(param, mean.dtype) for param, mean in zip(here, means, strict=True)],
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


@dataclass(frozen=True, slots=True)
class _Matrices:
    """What an engine was made for."""

    params: list[nn.Parameter]
    functions: list[MatrixFunction]

    def are(self, params: list[nn.Parameter], functions: list[MatrixFunction]) -> bool:
        """Whether these are the same ones."""
        if len(params) != len(self.params) or functions != self.functions:
            return False
        return all(mine is theirs for mine, theirs in zip(self.params, params, strict=True))


@functools.cache
def _function(
    steps: int, coefficients: tuple[float, float, float], eps: float, dtype: torch.dtype
) -> MatrixFunction:
    return MatrixFunction(
        functools.partial(
            newton_schulz, steps=steps, coefficients=coefficients, eps=eps, dtype=dtype
        ),
        functools.partial(newton_schulz_flops, steps=steps),
    )


def _apply(group: dict[str, Any], params: list[nn.Parameter], changes: list[torch.Tensor]) -> None:
    """Decay weights and subtract orthogonalized updates, those of one learning rate at once."""
    lr = float(group["lr"])
    by_rate: dict[float, list[int]] = {}
    for index, param in enumerate(params):
        # An empty tensor in the list of a multi-tensor kernel can corrupt its neighbors.
        if not rows_of(param).numel():
            continue
        rate = lr * _adjustment(group["adjust_lr_fn"], *param.shape[-2:])
        by_rate.setdefault(rate, []).append(index)
    for rate, indices in by_rate.items():
        chosen: list[torch.Tensor] = [params[i] for i in indices]
        torch._foreach_mul_(chosen, 1 - lr * group["weight_decay"])
        add_to_rows(chosen, [changes[i] for i in indices], alpha=-rate)


def _adjustment(name: str | None, m: int, n: int) -> float:
    """Factor of the learning rate for an `m x n` matrix."""
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / n))


def gradient_rows(param: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """This rank's rows of a gradient that is there, in a dtype."""
    with plain_attributes():
        grad = param.grad
    assert grad is not None
    return rows_of(grad).to(dtype)


def check_gradients(groups: Iterable[dict[str, Any]]) -> None:
    """Find out whether every trained matrix has a gradient where it has rows.

    Args:
        groups: Parameter groups of an optimizer that needs whole matrices.

    Raises:
        RuntimeError: One has none; names it.
    """
    missing = [
        parameter_name(group, index)
        for group in groups
        for index, param in enumerate(group["params"])
        if param.requires_grad and param.grad is None and rows_of(param).numel()
    ]
    if missing:
        raise RuntimeError(
            f"no gradient for {listed(missing, 3)}: the update of a matrix needs all of its "
            "gradient; run a backward that reaches it before step(), or freeze it with "
            "requires_grad_(False)"
        )


def parameter_name(group: dict[str, Any], index: int) -> str:
    """What to call a parameter of an optimizer's group in an error."""
    if "param_names" in group:
        return str(group["param_names"][index])
    param = group["params"][index]
    name = param.row_shards.holders.name_of(param) if isinstance(param, UnevenDTensor) else None
    return name or f"parameter {index} of shape {tuple(param.shape)}"


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
    for number, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{number}] must be in [0, 1), got {beta}")


def _check_parameter(group: dict[str, Any], index: int, param: nn.Parameter) -> None:
    if not group["use_muon"]:
        return
    if param.ndim not in (2, 3) or param.is_complex():
        kind = "complex" if param.is_complex() else f"{param.ndim}-D"
        raise ValueError(
            f"{parameter_name(group, index)} is {kind}, and Muon steps real 2-D matrices and 3-D "
            "stacks of them; put it into a group with use_muon=False, which AdamW steps"
        )
    if isinstance(param, DTensor) and not isinstance(param, UnevenDTensor):
        raise ValueError(
            f"{parameter_name(group, index)} is a DTensor that was not sharded by fully_shard of "
            "megatron_fsdp_v2; Muon steps those and plain tensors"
        )
