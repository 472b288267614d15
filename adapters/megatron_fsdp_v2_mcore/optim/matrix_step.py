"""The step of an optimizer of whole matrices over sharded parameters.

It is elementwise except for one function of whole matrices in its middle. `ShardedMatrixStep`
does the elementwise part on the rows that are here and hands that function to `MatrixEngine`, which
puts every matrix together on one rank of those that hold it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, override

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_fsdp_v2.dtensor.foreach import add_to_rows
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, plain_attributes, rows_of
from megatron_fsdp_v2.optim import MatrixEngine, MatrixFunction, newton_schulz_flops
from megatron_fsdp_v2.optim.muon import check_gradients, gradient_rows, parameter_name

__all__ = ["HOOKS", "ShardedMatrixStep", "overrides"]

HOOKS = ("pre_weight_update_fn_inplace", "post_weight_update_fn_inplace")
"""What `OrthogonalizedOptimizer` calls around a weight's update."""


class ShardedMatrixStep(OrthogonalizedOptimizer):
    """The step of `OrthogonalizedOptimizer` over parameters that `fully_shard` made.

    To be mixed in before an optimizer of that kind. Order and arithmetic of the operations are
    those of the original; what differs is that all momenta are computed first, then all matrices
    at once. Rows travel to the rank that works on their matrix, and results back, so that ranks
    share the work. Only where every data-parallel rank holds whole parameters (`no_shard`) does
    each work on all of them, as without sharding, and nothing travels between them.

    State exists for every parameter on every rank, also where a rank holds no row of it.
    `pre_weight_update_fn_inplace` and `post_weight_update_fn_inplace` are given sharded tensors.
    """

    skips_empty_shards = True

    _engines: list[tuple[list[int], MatrixEngine]]
    _built_for: tuple[int, ...] | None

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices.

        Raises:
            ValueError: A parameter is no matrix.
        """
        super().add_param_group(param_group)
        self._built_for = None
        group = self.param_groups[-1]
        for index, param in enumerate(group["params"]):
            if param.ndim != 2:
                self.param_groups.pop()
                raise ValueError(
                    f"{parameter_name(group, index)} is {param.ndim}-D, and "
                    f"{type(self).__name__} steps 2-D matrices; give it to another optimizer"
                )

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Make one step. Collective over the meshes of the parameters.

        Args:
            closure: Not supported.

        Raises:
            ValueError: A closure was given.
            RuntimeError: A parameter has rows here and no gradient; names it.
        """
        if closure is not None:
            raise ValueError(f"{type(self).__name__}.step takes no closure")
        with plain_attributes():
            groups = [
                [p for p in group["params"] if p.requires_grad] for group in self.param_groups
            ]
            check_gradients(self.param_groups)
        self._prepare_engines(groups)
        updates: list[torch.Tensor] = []
        for group, params in zip(self.param_groups, groups, strict=True):
            self._init_group(group, skip_non_grad_params=False)
            updates += self._momentum_updates(group, params)
        with fp32_matmul_precision(self.fp32_matmul_prec):
            results = self._run_engines(updates)
        start = 0
        for group, params in zip(self.param_groups, groups, strict=True):
            self._apply(group, params, results[start : start + len(params)])
            start += len(params)

    # -- matrices ------------------------------------------------------------------------------

    @property
    def joins_tensor_parallel(self) -> bool:
        """Whether a matrix is the whole weight, or a tensor-parallel rank's part of it."""
        return True

    def matrix_function(self, group: int, param: torch.nn.Parameter) -> MatrixFunction:
        """What is done to the matrix of a parameter: the optimizer's `orthogonalize`.

        Equal objects mean equal work, which is batched. An `orthogonalize` that is not known may
        do something else for every parameter, and takes one matrix at a time.

        Args:
            group: Number of the parameter group.
            param: The parameter.
        """

        def orthogonalize(stack: torch.Tensor) -> torch.Tensor:
            # Looked up every time: learning rates change, and loading replaces the groups.
            options = {k: v for k, v in self.param_groups[group].items() if k != "params"}
            done = [self.orthogonalize(param, matrix, **options) for matrix in stack.float()]
            return torch.stack(done)

        return MatrixFunction(orthogonalize, functools.partial(newton_schulz_flops, steps=1))

    def _prepare_engines(self, groups: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        params = [param for group in groups for param in group]
        key = tuple(id(param) for param in params)
        if key == self._built_for:
            return
        functions = [
            self.matrix_function(number, param)
            for number, group in enumerate(groups)
            for param in group
        ]
        self._engines = []
        for shares in (True, False):
            chosen = [i for i, param in enumerate(params) if is_cut_by_data(param) is shares]
            engine = MatrixEngine(
                [params[i] for i in chosen],
                [functions[i] for i in chosen],
                joins_tensor_parallel=self.joins_tensor_parallel,
                shares_replicas=shares,
            )
            self._engines.append((chosen, engine))
        self._built_for = key

    def _run_engines(self, updates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = list(updates)
        for chosen, engine in self._engines:
            done = engine.run([updates[i] for i in chosen])
            for index, result in zip(chosen, done, strict=True):
                results[index] = result
        return results

    # -- rows ----------------------------------------------------------------------------------

    def _momentum_updates(
        self, group: dict[str, Any], params: Sequence[torch.nn.Parameter]
    ) -> list[torch.Tensor]:
        """Decay weights and move momenta on; this rank's rows of what is to be orthogonalized."""
        updates = [rows_of(self.state[param]["momentum_buffer"]) for param in params]
        here = [index for index, update in enumerate(updates) if update.numel()]
        if not here:
            return updates
        momenta = [updates[index] for index in here]
        chosen = [params[index] for index in here]
        grads = [gradient_rows(p, m.dtype) for p, m in zip(chosen, momenta, strict=True)]
        self._decay(group, chosen, grads)
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        if self.nesterov:
            ahead = torch._foreach_lerp(grads, momenta, group["momentum"])
            for index, update in zip(here, ahead, strict=True):
                updates[index] = update
        return updates

    def _decay(
        self,
        group: dict[str, Any],
        params: Sequence[torch.nn.Parameter],
        grads: Sequence[torch.Tensor],
    ) -> None:
        rate, lr = group["weight_decay"], group["lr"]
        if rate == 0.0:
            return
        method = self.weight_decay_method
        rows = [rows_of(param) for param in params]
        if method == "l2":
            torch._foreach_add_(list(grads), rows, alpha=rate)
            return
        factors = {"decoupled": -rate * lr, "independent": -rate, "palm": -(rate * lr * lr)}
        if method not in factors:
            raise ValueError(f"weight_decay_method {method!r} is none of l2, {', '.join(factors)}")
        add_to_rows(params, rows, alpha=factors[method])

    def _apply(
        self,
        group: dict[str, Any],
        params: Sequence[torch.nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Subtract orthogonalized updates from the weights."""
        changes = self._scaled(group, params, results)
        has_pre, has_post = (overrides(type(self), name) for name in HOOKS)
        if has_pre:
            for param, change in zip(params, changes, strict=True):
                self.pre_weight_update_fn_inplace(param, _like(param, change))
        here = [(p, change) for p, change in zip(params, changes, strict=True) if change.numel()]
        if here:
            add_to_rows(
                [param for param, _ in here], [change for _, change in here], alpha=-group["lr"]
            )
        if has_post:
            for param in params:
                self.post_weight_update_fn_inplace(param)

    def _scaled(
        self,
        group: dict[str, Any],
        params: Sequence[torch.nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        """What is subtracted, times the learning rate, for these results."""
        del group, params
        return results


def overrides(cls: type, name: str) -> bool:
    """Whether a class has a method of its own where `OrthogonalizedOptimizer` has one."""
    # Torch wraps the step of every class an object is made of.
    original = inspect.unwrap(getattr(OrthogonalizedOptimizer, name))
    return inspect.unwrap(getattr(cls, name)) is not original


def is_cut_by_data(param: torch.nn.Parameter) -> bool:
    """Whether data-parallel ranks hold different rows."""
    return not isinstance(param, UnevenDTensor) or any(param.row_shards.strides)


def _like(param: torch.nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, UnevenDTensor):
        return rows
    return UnevenDTensor.from_rows(rows, param.device_mesh, param.row_shards, param.shape)
