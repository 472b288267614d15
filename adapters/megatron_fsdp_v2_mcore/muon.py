"""Megatron's Muon, and other optimizers of whole matrices, on sharded parameters.

A step is elementwise except for one function of whole matrices in its middle. `ShardedMatrixStep`
does the elementwise part on the rows that are here and hands that function to `MatrixEngine`, which
puts every matrix together on one rank of those that hold it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args, override

import torch
from emerging_optimizers.orthogonalized_optimizers import (
    OrthogonalizedOptimizer,
    get_muon_scale_factor,
)
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from emerging_optimizers.utils import FP32MatmulPrecT, fp32_matmul_precision
from megatron.core.optimizer.emerging_optimizers import (
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)

from megatron_fsdp_v2.optim import MatrixEngine, MatrixFunction, newton_schulz_flops
from megatron_fsdp_v2.optim.muon import parameter_name
from megatron_fsdp_v2.uneven_dtensor import UnevenDTensor, local_of, plain_attributes

__all__ = [
    "FSDPZeROTensorParallelAdaptiveMuon",
    "FSDPZeROTensorParallelMuon",
    "ShardedMatrixStep",
    "sharded_class",
]

TP_MODES = ("blockwise", "duplicated", "distributed")

_HOOKS = ("pre_weight_update_fn_inplace", "post_weight_update_fn_inplace")
_SHOWN = 3


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
            self._check_gradients()
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
            chosen = [i for i, param in enumerate(params) if _is_sharded(param) is shares]
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

    def _check_gradients(self) -> None:
        missing = [
            parameter_name(group, index)
            for group in self.param_groups
            for index, param in enumerate(group["params"])
            if param.requires_grad and param.grad is None and _rows(param).numel()
        ]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise RuntimeError(
                f"no gradient for {', '.join(missing[:_SHOWN])}{more}: the update of a matrix "
                "needs all of its gradient; run a backward that reaches it before step(), or "
                "freeze it with requires_grad_(False) before the optimizer is made"
            )

    def _momentum_updates(
        self, group: dict[str, Any], params: Sequence[torch.nn.Parameter]
    ) -> list[torch.Tensor]:
        """Decay weights and move momenta on; this rank's rows of what is to be orthogonalised."""
        updates = [_rows(self.state[param]["momentum_buffer"]) for param in params]
        here = [index for index, update in enumerate(updates) if update.numel()]
        if not here:
            return updates
        momenta = [updates[index] for index in here]
        chosen = [params[index] for index in here]
        grads = [_grad(p, m.dtype) for p, m in zip(chosen, momenta, strict=True)]
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
        rows = [_rows(param) for param in params]
        if method == "l2":
            torch._foreach_add_(list(grads), rows, alpha=rate)
            return
        factors = {"decoupled": -rate * lr, "independent": -rate, "palm": -(rate * lr * lr)}
        if method not in factors:
            raise ValueError(f"weight_decay_method {method!r} is none of l2, {', '.join(factors)}")
        torch._foreach_add_(list(params), rows, alpha=factors[method])

    def _apply(
        self,
        group: dict[str, Any],
        params: Sequence[torch.nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Subtract orthogonalised updates from the weights."""
        changes = self._scaled(group, params, results)
        has_pre, has_post = (_overrides(type(self), name) for name in _HOOKS)
        if has_pre:
            for param, change in zip(params, changes, strict=True):
                self.pre_weight_update_fn_inplace(param, _like(param, change))
        here = [(p, change) for p, change in zip(params, changes, strict=True) if change.numel()]
        if here:
            torch._foreach_add_(
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


@dataclass(frozen=True, slots=True, eq=False)
class _NewtonSchulz:
    """Newton-Schulz on a stack of matrices, or on the blocks of rows they were fused of.

    Attributes:
        steps: Iterations.
        coefficient_type: Of the polynomial, by the names of `emerging_optimizers`.
        scale: What to multiply the result by, from the rows and columns of a matrix.
        split: Rows of the blocks of a group: of queries, keys, ... in a fused projection, which
            has many such groups. Blocks of one kind are one matrix. Empty where nothing is fused.
    """

    steps: int
    coefficient_type: str
    scale: Callable[[int, int], tuple[float, ...]]
    split: tuple[int, ...] = ()

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        # A kernel of emerging_optimizers takes fp32; main weights may be of another dtype.
        stack = stack.float()
        if not self.split:
            return self._orthogonalize(stack)
        count, rows, columns = stack.shape
        groups = rows // sum(self.split)
        blocks = torch.split(stack.view(count, groups, -1, columns), list(self.split), dim=2)
        done = [
            self._orthogonalize(block.flatten(1, 2)).view(count, groups, -1, columns)
            for block in blocks
        ]
        return torch.cat(done, dim=2).view(stack.shape)

    def _orthogonalize(self, stack: torch.Tensor) -> torch.Tensor:
        done = newton_schulz(stack, self.steps, self.coefficient_type)
        for factor in self.scale(stack.shape[1], stack.shape[2]):
            done = done * factor
        return cast("torch.Tensor", done)

    def flops(self, m: int, n: int) -> int:
        """Operations for one `m x n` matrix."""
        groups = m // sum(self.split) if self.split else 1
        rows = [groups * length for length in self.split] or [m]
        return sum(newton_schulz_flops(length, n, self.steps) for length in rows)


class _ShardedMuon(ShardedMatrixStep):
    """What the two kinds of Megatron's Muon have in common."""

    def __init__(
        self,
        params: Any,
        *,
        num_ns_steps: int = 5,
        coefficient_type: str = "quintic",
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        tp_mode: str = "duplicated",
        fp32_matmul_prec: str = "medium",
        **options: Any,
    ) -> None:
        if tp_mode not in TP_MODES:
            raise ValueError(f"tp_mode must be one of {', '.join(TP_MODES)}, got {tp_mode!r}")
        if fp32_matmul_prec not in get_args(FP32MatmulPrecT):
            known = ", ".join(get_args(FP32MatmulPrecT))
            raise ValueError(f"fp32_matmul_prec must be one of {known}, got {fp32_matmul_prec!r}")
        if num_ns_steps < 1:
            raise ValueError(f"num_ns_steps must be at least 1, got {num_ns_steps}")
        # Both raise ValueError for a name they do not know, the second one only when it runs.
        get_muon_scale_factor(1, 1, mode=scale_mode)
        newton_schulz(torch.zeros(1, 1, device="cpu"), 1, coefficient_type)
        self._steps, self._coefficients = num_ns_steps, coefficient_type
        self.scale_mode, self.extra_scale_factor = scale_mode, extra_scale_factor
        self._functions: dict[tuple[int, ...], MatrixFunction] = {}
        super().__init__(
            params,
            num_ns_steps=num_ns_steps,
            coefficient_type=coefficient_type,
            scale_mode=scale_mode,
            extra_scale_factor=extra_scale_factor,
            tp_mode=tp_mode,
            fp32_matmul_prec=fp32_matmul_prec,
            **options,
        )

    @property
    @override
    def joins_tensor_parallel(self) -> bool:
        """Whether a matrix is the whole weight: in every `tp_mode` but `blockwise`."""
        return bool(self.tp_mode != "blockwise")

    @override
    def matrix_function(self, group: int, param: torch.nn.Parameter) -> MatrixFunction:
        """Newton-Schulz, one object for all parameters that are split in the same way.

        Raises:
            ValueError: Queries, keys and values are to be split, and it is not known how.
        """
        del group
        split = self._split(param)
        if split not in self._functions:
            scale = self._function_scale()
            rule = _NewtonSchulz(self._steps, self._coefficients, scale, split)
            self._functions[split] = MatrixFunction(rule, rule.flops)
        return self._functions[split]

    def _function_scale(self) -> Callable[[int, int], tuple[float, ...]]:
        return functools.partial(_scale, self.scale_mode, self.extra_scale_factor)

    def matrix_shape(self, param: torch.Tensor) -> tuple[int, int]:
        """Rows and columns of the matrix a parameter is to Newton-Schulz."""
        is_part = isinstance(param, UnevenDTensor) and not self.joins_tensor_parallel
        rows, columns = cast("UnevenDTensor", param).part_shape if is_part else param.shape
        return rows, columns

    def _split(self, param: torch.nn.Parameter) -> tuple[int, ...]:
        if not (self.split_qkv and self.is_qkv_fn(param)):
            return ()
        split = tuple(getattr(param, "qkv_split_shapes", None) or self.qkv_split_shapes or ())
        rows = self.matrix_shape(param)[0]
        if not split or rows % sum(split):
            raise ValueError(
                f"a fused projection of {rows} rows cannot be split into groups of "
                f"{' + '.join(map(str, split)) or 'unknown length'}: give qkv_split_shapes whose "
                "sum divides the rows, or split_qkv=False"
            )
        return split


class FSDPZeROTensorParallelMuon(_ShardedMuon, TensorParallelMuon):
    """`TensorParallelMuon` on parameters sharded by any strategy, each matrix computed once.

    The update equals Megatron's on the whole gradient, to rounding. Of the tensor-parallel modes
    `duplicated` and `distributed` mean the whole weight and are computed alike: put together from
    all parts on one rank, where Megatron has every tensor-parallel rank repeat the work or reduce
    in every iteration. `blockwise` means a rank's own part. Gradients of experts are
    spread over expert-data-parallel ranks, all others over data- and context-parallel ranks, and
    both over tensor-parallel ranks as well where matrices are whole weights. With `no_shard` every
    data-parallel rank computes what `TensorParallelMuon` does.

    Args:
        params: Sharded 2-D parameters, or groups of them.
        num_ns_steps: Newton-Schulz iterations, at least 1.
        coefficient_type: Of Newton-Schulz, as in `emerging_optimizers`.
        scale_mode: `spectral`, `unit_rms_norm` or `shape_scaling`.
        extra_scale_factor: Multiplies every update.
        tp_mode: `duplicated`, `distributed` or `blockwise`.
        fp32_matmul_prec: `highest`, `high` or `medium`, which is bf16.
        **options: All others of `TensorParallelMuon`.

    Raises:
        ValueError: An option is out of range, or a parameter is no matrix.
    """


class FSDPZeROTensorParallelAdaptiveMuon(_ShardedMuon, TensorParallelAdaptiveMuon):
    """`TensorParallelAdaptiveMuon` on sharded parameters; see `FSDPZeROTensorParallelMuon`.

    The update is that of `AdaptiveMuon` in emerging_optimizers: the orthogonalised momentum is
    divided by the root of its second moment and scaled by its shape after that. (With
    emerging_optimizers 0.3, Megatron 0.19's own class scales twice and lacks what the second scale
    needs.) Only the elementwise moment, `adamuon`, is offered: `normuon` and `namo` need sums over
    whole matrices.

    Args:
        params: Sharded 2-D parameters, or groups of them.
        moment2_method: `adamuon`.
        **options: Those of `FSDPZeROTensorParallelMuon`, `beta2` and `eps`.

    Raises:
        ValueError: An option is out of range or not offered, or a parameter is no matrix.
    """

    def __init__(self, params: Any, *, moment2_method: str = "adamuon", **options: Any) -> None:
        if moment2_method != "adamuon":
            raise ValueError(
                f"moment2_method {moment2_method!r} cannot be used with sharded parameters: its "
                "moment is of whole rows, columns or matrices; use 'adamuon'"
            )
        super().__init__(params, moment2_method=moment2_method, **options)

    @override
    def _function_scale(self) -> Callable[[int, int], tuple[float, ...]]:
        return _unscaled

    @override
    def _scaled(
        self,
        group: dict[str, Any],
        params: Sequence[torch.nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        here = [index for index, result in enumerate(results) if result.numel()]
        if not here:
            return results
        rows = [results[index] for index in here]
        moments = [_rows(self.state[params[index]]["moment2_buffer"]) for index in here]
        torch._foreach_lerp_(moments, torch._foreach_mul(rows, rows), 1 - group["beta2"])
        roots = torch._foreach_sqrt(moments)
        torch._foreach_add_(roots, group["eps"])
        scaled = torch._foreach_div(rows, roots)
        shapes = [self.matrix_shape(params[index]) for index in here]
        factors = [_scale(self.scale_mode, self.extra_scale_factor, *shape) for shape in shapes]
        for factor in zip(*factors, strict=True):
            torch._foreach_mul_(scaled, list(factor))
        changes = list(results)
        for index, change in zip(here, scaled, strict=True):
            changes[index] = change
        return changes


def _scale(mode: str, extra: float, m: int, n: int) -> tuple[float, ...]:
    return get_muon_scale_factor(m, n, mode=mode), extra


def _unscaled(m: int, n: int) -> tuple[float, ...]:
    del m, n
    return ()


_KNOWN: dict[type, type[ShardedMatrixStep]] = {
    TensorParallelMuon: FSDPZeROTensorParallelMuon,
    TensorParallelAdaptiveMuon: FSDPZeROTensorParallelAdaptiveMuon,
}


@functools.cache
def sharded_class(cls: type) -> type[ShardedMatrixStep]:
    """The class that steps sharded parameters as an optimizer of whole matrices does.

    Args:
        cls: An optimizer class. Beside Megatron's Muon, any `OrthogonalizedOptimizer` that
            changes nothing but its `orthogonalize` or the function it is made of.

    Raises:
        ValueError: It needs whole matrices at another point of its step.
    """
    if cls in _KNOWN:
        return _KNOWN[cls]
    if issubclass(cls, ShardedMatrixStep):
        return cls
    problem = ""
    if not issubclass(cls, OrthogonalizedOptimizer):
        problem = "it is no OrthogonalizedOptimizer"
    elif issubclass(cls, TensorParallelMuon):
        problem = "derive it from FSDPZeROTensorParallelMuon, or the adaptive one, instead"
    else:
        own = [n for n in ("step", "_apply_weight_decay_inplace", *_HOOKS) if _overrides(cls, n)]
        if own:
            problem = f"it has a {' and a '.join(own)} of its own, which may need whole matrices"
    if problem:
        raise ValueError(f"{cls.__name__} cannot step sharded parameters: {problem}")
    return type(f"FSDPZeRO{cls.__name__}", (ShardedMatrixStep, cls), {})


def _overrides(cls: type, name: str) -> bool:
    # Torch wraps the step of every class an object is made of.
    original = inspect.unwrap(getattr(OrthogonalizedOptimizer, name))
    return inspect.unwrap(getattr(cls, name)) is not original


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, UnevenDTensor) else tensor.detach()


def _grad(param: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    with plain_attributes():
        grad = param.grad
    assert grad is not None
    return _rows(grad).to(dtype)


def _is_sharded(param: torch.nn.Parameter) -> bool:
    """Whether data-parallel ranks hold different rows."""
    return not isinstance(param, UnevenDTensor) or any(param.row_shards.strides)


def _like(param: torch.nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, UnevenDTensor):
        return rows
    return UnevenDTensor.from_rows(rows, param.device_mesh, param.row_shards, param.shape)
