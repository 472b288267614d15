"""Megatron's Muon, and other optimizers of whole matrices, on sharded parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args, override

import torch
from emerging_optimizers.orthogonalized_optimizers import (
    OrthogonalizedOptimizer,
    get_muon_scale_factor,
)
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from emerging_optimizers.utils import FP32MatmulPrecT
from megatron.core.optimizer.emerging_optimizers import (
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, rows_of
from megatron_fsdp_v2.optim import MatrixFunction, newton_schulz_flops
from megatron_fsdp_v2_mcore.optim.matrix_step import HOOKS, ShardedMatrixStep, overrides

__all__ = [
    "FSDPZeROTensorParallelAdaptiveMuon",
    "FSDPZeROTensorParallelMuon",
    "sharded_class",
]

TP_MODES = ("blockwise", "duplicated", "distributed")


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

    The update is that of `AdaptiveMuon` in emerging_optimizers: the orthogonalized momentum is
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
        moments = [rows_of(self.state[params[index]]["moment2_buffer"]) for index in here]
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
        own = [n for n in ("step", "_apply_weight_decay_inplace", *HOOKS) if overrides(cls, n)]
        if own:
            problem = f"it has a {' and a '.join(own)} of its own, which may need whole matrices"
    if problem:
        raise ValueError(f"{cls.__name__} cannot step sharded parameters: {problem}")
    return type(f"FSDPZeRO{cls.__name__}", (ShardedMatrixStep, cls), {})
