"""Megatron's Muon and other matrix optimizers on sharded parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast, get_args, override

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

from megatron_fsdp_v2.dtensor.sharded_rows import add_to_rows, rows_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim import MatrixFunction, MatrixStep, newton_schulz_flops
from megatron_fsdp_v2.optim.matrix_step import parameter_name

HOOKS = ("pre_weight_update_fn_inplace", "post_weight_update_fn_inplace")
"""Methods that `OrthogonalizedOptimizer` calls before and after a weight's update."""

TP_MODES = ("blockwise", "duplicated", "distributed")


class ShardedMatrixStep(MatrixStep, OrthogonalizedOptimizer):
    """Mixin that runs the step of `OrthogonalizedOptimizer` on parameters sharded by `fully_shard`.

    List the mixin before the optimizer class among the bases. The operations and their order match
    the original step, except that the step updates all momenta before it orthogonalizes any matrix.
    Every matrix has an owner rank, which receives the rows from the other ranks and sends them the
    results, so that the work is distributed over ranks. If every data-parallel rank holds whole
    parameters (`no_shard`), each rank computes all matrices, as without sharding, and no rows are
    exchanged.

    `pre_weight_update_fn_inplace` and `post_weight_update_fn_inplace` receive sharded tensors.
    """

    skips_missing_gradients = False
    spreads_replicated = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._functions: dict[Any, MatrixFunction] = {}
        self._options: dict[torch.Tensor, dict[str, Any]] = {}
        super().__init__(*args, **kwargs)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices.

        Raises:
            ValueError: A parameter is not a matrix.
        """
        super().add_param_group(param_group)
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step. Collective over the meshes of the parameters.

        Args:
            closure: Not supported.

        Raises:
            ValueError: A closure was given.
            RuntimeError: A parameter with rows on this rank has no gradient. The message names the
                parameter.
        """
        if closure is not None:
            raise ValueError(f"{type(self).__name__}.step takes no closure")
        for group in self.param_groups:
            self._init_group(group, skip_non_grad_params=False)
        with fp32_matmul_precision(self.fp32_matmul_prec):
            self.step_matrices(self.param_groups)

    @override
    def matrix_function(self, group: dict[str, Any], param: torch.nn.Parameter) -> MatrixFunction:
        """Return the function of a parameter's matrix: the optimizer's `orthogonalize`.

        An arbitrary `orthogonalize` may depend on the parameter and takes one matrix at a time.
        """
        self._options[param] = {k: v for k, v in group.items() if k != "params"}
        if param not in self._functions:

            def orthogonalize(stack: torch.Tensor) -> torch.Tensor:
                options = self._options[param]
                done = [self.orthogonalize(param, matrix, **options) for matrix in stack.float()]
                return torch.stack(done)

            flops = functools.partial(newton_schulz_flops, steps=1)
            self._functions[param] = MatrixFunction(orthogonalize, flops)
        return self._functions[param]

    @override
    def uses_nesterov(self, group: dict[str, Any]) -> bool:
        """Whether the step uses Nesterov momentum, which is the same for all groups."""
        del group
        return bool(self.nesterov)

    @override
    def decay(
        self, group: dict[str, Any], params: Sequence[torch.nn.Parameter], grads: Sequence[Any]
    ) -> None:
        """Decay weights by the method `weight_decay_method`.

        Raises:
            ValueError: The method is unknown.
        """
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

    @override
    def apply_results(
        self,
        group: dict[str, Any],
        params: Sequence[torch.nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Subtract the results, multiplied by the learning rate, from the weights."""
        has_pre, has_post = (_overrides(type(self), name) for name in HOOKS)
        if has_pre:
            for param, change in zip(params, results, strict=True):
                self.pre_weight_update_fn_inplace(param, _as_sharded(param, change))
        nonempty = [(p, rows) for p, rows in zip(params, results, strict=True) if rows.numel()]
        if nonempty:
            changed, changes = zip(*nonempty, strict=True)
            add_to_rows(changed, changes, alpha=-group["lr"])
        if has_post:
            for param in params:
                self.post_weight_update_fn_inplace(param)


def _overrides(cls: type, name: str) -> bool:
    """Whether a class overrides a method of `OrthogonalizedOptimizer`."""
    # torch wraps the `step` of every optimizer class that is instantiated.
    original = inspect.unwrap(getattr(OrthogonalizedOptimizer, name))
    return inspect.unwrap(getattr(cls, name)) is not original


def _as_sharded(param: torch.nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, UnevenDTensor):
        return rows
    return UnevenDTensor.from_rows(rows, param.device_mesh, param.row_shards, param.shape)


@dataclass(frozen=True, slots=True, eq=False)
class _NewtonSchulz:
    """Newton-Schulz on a stack of matrices, or on the row blocks of fused matrices.

    Attributes:
        steps: Number of iterations.
        coefficient_type: Name of the polynomial's coefficients in `emerging_optimizers`.
        scale: Function of a matrix's rows and columns that returns factors of the result, or None.
        split: Row counts of the blocks in a group of a fused projection: queries, keys, values.
            A projection has many groups; the blocks of one kind in all groups form one matrix.
            Empty if the matrix is not fused.
    """

    steps: int
    coefficient_type: str
    scale: Callable[[int, int], tuple[float, ...]] | None
    split: tuple[int, ...] = ()

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        # The kernel of emerging_optimizers requires fp32; main weights may have another dtype.
        stack = stack.float()
        if not self.split:
            return self._orthogonalize(stack)
        count, rows, columns = stack.shape
        shape = (count, rows // sum(self.split), -1, columns)
        blocks = torch.split(stack.view(shape), list(self.split), dim=2)
        done = [self._orthogonalize(block.flatten(1, 2)).view(shape) for block in blocks]
        return torch.cat(done, dim=2).view(stack.shape)

    def _orthogonalize(self, stack: torch.Tensor) -> torch.Tensor:
        done = newton_schulz(stack, self.steps, self.coefficient_type)
        for factor in self.scale(*stack.shape[1:]) if self.scale else ():
            done = done * factor
        return cast("torch.Tensor", done)

    def flops(self, m: int, n: int) -> int:
        """Number of floating-point operations for one `m x n` matrix."""
        groups = m // sum(self.split) if self.split else 1
        rows = [groups * length for length in self.split] or [m]
        return sum(newton_schulz_flops(length, n, self.steps) for length in rows)


class _ShardedMuon(ShardedMatrixStep):
    """Common base of Megatron's two Muon optimizers on sharded parameters."""

    scales_functions: ClassVar[bool] = True

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
        # Both calls raise ValueError for an unknown name.
        get_muon_scale_factor(1, 1, mode=scale_mode)
        newton_schulz(torch.zeros(1, 1, device="cpu"), 1, coefficient_type)
        self._steps, self._coefficients = num_ns_steps, coefficient_type
        # In all other modes, a matrix is the whole weight and not a tensor-parallel shard.
        self.joins_tensor_parallel = tp_mode != "blockwise"
        self.scale_mode, self.extra_scale_factor = scale_mode, extra_scale_factor
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

    @override
    def matrix_function(self, group: dict[str, Any], param: torch.nn.Parameter) -> MatrixFunction:
        """Return Newton-Schulz, as one object for all parameters with the same split.

        Raises:
            ValueError: A fused projection is split and its split does not fit its rows.
        """
        del group
        split = self._split(param)
        if split not in self._functions:
            scale = None
            if self.scales_functions:
                scale = functools.partial(_scale, self.scale_mode, self.extra_scale_factor)
            newton_schulz_step = _NewtonSchulz(self._steps, self._coefficients, scale, split)
            self._functions[split] = MatrixFunction(newton_schulz_step, newton_schulz_step.flops)
        return self._functions[split]

    def matrix_shape(self, param: torch.Tensor) -> tuple[int, int]:
        """Return the rows and columns of the matrix to which Newton-Schulz is applied."""
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
    """`TensorParallelMuon` on parameters sharded by any strategy; one rank computes each matrix.

    Up to rounding, the update equals the update that Megatron computes from the whole gradient. The
    tensor-parallel modes `duplicated` and `distributed` both use the whole weight, which one rank
    assembles from all tensor-parallel shards; in Megatron, every tensor-parallel rank repeats the
    work or takes part in a reduction in every iteration. `blockwise` uses the shard of each
    tensor-parallel rank. The matrices of experts are distributed over expert-data-parallel ranks,
    all others over data- and context-parallel ranks; if matrices are whole weights, also over
    tensor-parallel ranks. With `no_shard` every data-parallel rank computes all matrices instead.

    Args:
        params: Sharded 2-D parameters, or groups of them.
        num_ns_steps: Number of Newton-Schulz iterations, at least 1.
        coefficient_type: Newton-Schulz coefficients, by a name of `emerging_optimizers`.
        scale_mode: `spectral`, `unit_rms_norm` or `shape_scaling`.
        extra_scale_factor: Factor of every update.
        tp_mode: `duplicated`, `distributed` or `blockwise`.
        fp32_matmul_prec: `highest`, `high`, or `medium`, which is bf16.
        **options: All other options of `TensorParallelMuon`.

    Raises:
        ValueError: An option is out of range, or a parameter is not a matrix.
    """


class FSDPZeROTensorParallelAdaptiveMuon(_ShardedMuon, TensorParallelAdaptiveMuon):
    """`TensorParallelAdaptiveMuon` on sharded parameters; see `FSDPZeROTensorParallelMuon`.

    The update is that of `AdaptiveMuon` in emerging_optimizers: the orthogonalized momentum is
    divided by the root of its second moment and then scaled by a factor of its shape. (With
    emerging_optimizers 0.3, the class of Megatron 0.19 scales twice and fails at the second
    scaling.) Only the elementwise moment, `adamuon`, is supported: `normuon` and `namo` need sums
    over whole matrices.

    Args:
        params: Sharded 2-D parameters, or groups of them.
        moment2_method: `adamuon`.
        **options: The options of `FSDPZeROTensorParallelMuon`, `beta2` and `eps`.

    Raises:
        ValueError: An option is out of range or not supported, or a parameter is not a matrix.
    """

    scales_functions = False

    def __init__(self, params: Any, *, moment2_method: str = "adamuon", **options: Any) -> None:
        if moment2_method != "adamuon":
            raise ValueError(
                f"moment2_method {moment2_method!r} cannot be used with sharded parameters: its "
                "moment is of whole rows, columns or matrices; use 'adamuon'"
            )
        super().__init__(params, moment2_method=moment2_method, **options)

    @override
    def apply_results(
        self,
        group: dict[str, Any],
        params: Sequence[torch.nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Divide results by the root of their second moment, scale them, and apply them."""
        nonempty = [index for index, result in enumerate(results) if result.numel()]
        changes = list(results)
        if nonempty:
            rows = [results[index] for index in nonempty]
            moments = [rows_of(self.state[params[index]]["moment2_buffer"]) for index in nonempty]
            torch._foreach_lerp_(moments, torch._foreach_mul(rows, rows), 1 - group["beta2"])
            roots = torch._foreach_sqrt(moments)
            torch._foreach_add_(roots, group["eps"])
            scaled = torch._foreach_div(rows, roots)
            shapes = [self.matrix_shape(params[index]) for index in nonempty]
            factors = [_scale(self.scale_mode, self.extra_scale_factor, *s) for s in shapes]
            for factor in zip(*factors, strict=True):
                torch._foreach_mul_(scaled, list(factor))
            for index, change in zip(nonempty, scaled, strict=True):
                changes[index] = change
        super().apply_results(group, params, changes)


def _scale(mode: str, extra: float, m: int, n: int) -> tuple[float, ...]:
    return get_muon_scale_factor(m, n, mode=mode), extra


_SHARDED_CLASSES: dict[type, type[ShardedMatrixStep]] = {
    TensorParallelMuon: FSDPZeROTensorParallelMuon,
    TensorParallelAdaptiveMuon: FSDPZeROTensorParallelAdaptiveMuon,
}


@functools.cache
def sharded_class(cls: type) -> type[ShardedMatrixStep]:
    """Return the subclass of a matrix optimizer that steps sharded parameters.

    Args:
        cls: An optimizer class: Megatron's Muon, or any `OrthogonalizedOptimizer` that overrides
            only `orthogonalize` or passes its own `scaled_orthogonalize_fn`.

    Raises:
        ValueError: The class is not an `OrthogonalizedOptimizer`, or overrides another part of the
            step, which may need whole matrices.
    """
    if cls in _SHARDED_CLASSES:
        return _SHARDED_CLASSES[cls]
    if issubclass(cls, ShardedMatrixStep):
        return cls
    problem = ""
    if not issubclass(cls, OrthogonalizedOptimizer):
        problem = "it is not an OrthogonalizedOptimizer"
    elif issubclass(cls, TensorParallelMuon):
        problem = "derive it from FSDPZeROTensorParallelMuon or FSDPZeROTensorParallelAdaptiveMuon"
    elif own := [n for n in ("step", "_apply_weight_decay_inplace", *HOOKS) if _overrides(cls, n)]:
        problem = f"it has a {' and a '.join(own)} of its own, which may need whole matrices"
    if problem:
        raise ValueError(f"{cls.__name__} cannot step sharded parameters: {problem}")
    return type(f"FSDPZeRO{cls.__name__}", (ShardedMatrixStep, cls), {})
