"""Base class of matrix optimizers.

Their step is elementwise, except for one function of whole matrices. `MatrixStep` runs the
elementwise parts on this rank's rows and passes momenta to `MatrixEngine`, which gathers every
matrix on one rank, applies the function and sends rows of the result back.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.dtensor.sharded_rows import plain_attributes, rows_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim.engine import MatrixEngine, MatrixFunction

type _Facts = tuple[list[object], list[MatrixFunction]]


class MatrixStep(torch.optim.Optimizer):
    """An optimizer that applies a function of whole matrices to its momenta.

    A derived class defines the function (`matrix_function`) and the update from its results
    (`apply_results`). A momentum exists on every rank, also for an empty shard, so that state dicts
    have the same entries on all ranks.

    Attributes:
        skips_missing_gradients: Whether a trained parameter without a gradient is skipped, as in
            torch's optimizers; otherwise it is an error.
        joins_tensor_parallel: See `MatrixEngine`.
        spreads_replicated: See `MatrixEngine`.
    """

    skips_missing_gradients: bool = True
    joins_tensor_parallel: bool = True
    spreads_replicated: bool = True

    # The engine, with its parameters, their row ranges and functions. Process groups can be neither
    # copied nor pickled: a copy of the optimizer makes a new engine.
    _engine: tuple[_Facts, MatrixEngine] | None = None

    def step_matrices(self, groups: Sequence[dict[str, Any]]) -> None:
        """Step the parameters of these groups. Collective over the meshes of the parameters.

        Args:
            groups: Parameter groups of this optimizer, with `momentum`.

        Raises:
            RuntimeError: A parameter with rows on this rank has no gradient, and such parameters
                are not skipped; names it.
        """
        skips = self.skips_missing_gradients
        with plain_attributes():
            if not skips:
                _check_gradients(groups)
            trained = [
                [p for p in group["params"] if p.requires_grad and not (skips and p.grad is None)]
                for group in groups
            ]
        # First, since it rejects unsupported parameters before anything changes.
        engine = self._engine_for(groups, trained)
        updates: list[torch.Tensor] = []
        for group, params in zip(groups, trained, strict=True):
            updates += self.momentum_updates(group, params)
        results = engine.run(updates)
        for group, params in zip(groups, trained, strict=True):
            self.apply_results(group, params, results[: len(params)])
            del results[: len(params)]

    @abstractmethod
    def matrix_function(self, group: dict[str, Any], param: nn.Parameter) -> MatrixFunction:
        """Return the function of a parameter's matrix; called in every step.

        Equal functions are batched, and need no new plan in the next step.

        Args:
            group: The parameter group.
            param: A parameter of the group.
        """

    @abstractmethod
    def decay(
        self,
        group: dict[str, Any],
        params: Sequence[nn.Parameter],
        grads: Sequence[torch.Tensor],
    ) -> None:
        """Decay weights in place, before momenta are updated.

        Args:
            group: The parameter group.
            params: Parameters of the group with rows on this rank.
            grads: Rows of their gradients; an L2 penalty may be added in place.
        """

    @abstractmethod
    def apply_results(
        self,
        group: dict[str, Any],
        params: Sequence[nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Update weights from the results of the matrix function.

        Args:
            group: The parameter group.
            params: Parameters of the group, including those without rows on this rank.
            results: This rank's rows of each result.
        """

    def uses_nesterov(self, group: dict[str, Any]) -> bool:
        """Return whether a group uses Nesterov momentum."""
        return bool(group["nesterov"])

    def momentum_updates(
        self, group: dict[str, Any], params: Sequence[nn.Parameter]
    ) -> list[torch.Tensor]:
        """Decay weights, and update the running means of gradients.

        Args:
            group: The parameter group.
            params: Parameters of the group, including those without rows on this rank.

        Returns:
            This rank's rows of the function's input, per parameter.
        """
        for param in params:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        updates = [rows_of(self.state[param]["momentum_buffer"]) for param in params]
        # The gradients of empty shards may be hidden (`hide_empty_gradients`).
        here = [index for index, update in enumerate(updates) if update.numel()]
        if not here:
            return updates
        momenta, chosen = [updates[index] for index in here], [params[index] for index in here]
        grads = [gradient_rows(p, m.dtype) for p, m in zip(chosen, momenta, strict=True)]
        self.decay(group, chosen, grads)
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        if self.uses_nesterov(group):
            ahead = torch._foreach_lerp(grads, momenta, group["momentum"])
            for index, update in zip(here, ahead, strict=True):
                updates[index] = update
        return updates

    def _engine_for(
        self, groups: Sequence[dict[str, Any]], trained: Sequence[list[nn.Parameter]]
    ) -> MatrixEngine:
        pairs = [(g, param) for g, ps in zip(groups, trained, strict=True) for param in ps]
        params = [param for _, param in pairs]
        # New row ranges mean other process groups.
        facts = [*params, *(getattr(param, "row_shards", None) for param in params)]
        functions = [self.matrix_function(group, param) for group, param in pairs]
        # Between two steps, parameters may be frozen or unused and options changed.
        if self._engine is not None:
            (known, known_functions), engine = self._engine
            is_same = len(known) == len(facts) and all(map(operator.is_, known, facts))
            if is_same and known_functions == functions:
                return engine
        engine = MatrixEngine(
            params,
            functions,
            joins_tensor_parallel=self.joins_tensor_parallel,
            spreads_replicated=self.spreads_replicated,
        )
        self._engine = (facts, functions), engine
        return engine


def gradient_rows(param: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Return this rank's rows of an existing gradient, in a dtype."""
    with plain_attributes():
        grad = param.grad
    assert grad is not None
    return rows_of(grad).to(dtype)


def _check_gradients(groups: Iterable[dict[str, Any]]) -> None:
    """Check that every trained parameter with rows on this rank has a gradient."""
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
    """Return the name of a parameter of an optimizer's group for errors."""
    if "param_names" in group:
        return str(group["param_names"][index])
    param = group["params"][index]
    name = param.row_shards.label if isinstance(param, UnevenDTensor) else None
    return name or f"parameter {index} of shape {tuple(param.shape)}"
