"""Mixed-precision policies of cases, and the casts of the plain model that they amount to.

The plain model's parameters are the main weights. Each rank's forward casts them to the dtype in
which the policy computes, once, however often a module runs; its gradients are sums in that dtype.
They are converted to the dtype of the main weights and scaled before they are summed over ranks.
So losses do not carry the factor, and both models round the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2 import MixedPrecisionPolicy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDED_SUMS = 3e-2
"""Sums of up to four ranks in bf16 round three times, by 2**-9 of terms that may cancel partly."""


@dataclass(frozen=True)
class Precision:
    """A policy of a case.

    Attributes:
        options: Arguments of `MixedPrecisionPolicy` of every unit.
        given: Name of the dtype in which the model is built; empty for any.
        tolerance: Largest relative difference; None for that of the dtype of the main weights,
            since both models compute the same in 16 bits.
    """

    options: Mapping[str, Any]
    given: str = ""
    tolerance: float | None = None

    @property
    def computes(self) -> torch.dtype | None:
        """The policy's `param_dtype`."""
        dtype: torch.dtype | None = self.options.get("param_dtype")
        return dtype

    @property
    def output(self) -> torch.dtype | None:
        """The dtype of the outputs of a root."""
        dtype: torch.dtype | None = self.options.get("output_dtype")
        return dtype

    @property
    def sums_in_fp32(self) -> bool:
        """Whether reduce-scatters sum in fp32."""
        return bool(self.options.get("reduce_scatter_with_fp32_accumulation"))

    def main(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the main weights of parameters that are given in `dtype`."""
        main: torch.dtype = self.options.get("main_params_dtype") or dtype
        return main

    def of(self, *, is_root: bool, wide: bool) -> MixedPrecisionPolicy:
        """Return the policy of a unit; `wide`: gradients are communicated in fp64."""
        options = dict(self.options)
        if not is_root:
            # Layers of the root need the outputs of units in the dtype they compute in.
            options.pop("output_dtype", None)
        if wide:
            options["grad_comm_dtype"] = torch.float64
        return MixedPrecisionPolicy(**options)


SENT_IN_FP32_SUMS = {"grad_comm_dtype": FP16, "reduce_scatter_with_fp32_accumulation": True}
POLICIES: dict[str, Precision] = {
    "": Precision({}),
    "bf16": Precision({"param_dtype": BF16}),
    "fp16": Precision({"param_dtype": FP16, "output_dtype": FP32}),
    "bf16 sent": Precision({"param_dtype": BF16, "grad_comm_dtype": BF16}, tolerance=ROUNDED_SUMS),
    "fp16 sent": Precision({"param_dtype": FP16, **SENT_IN_FP32_SUMS}, tolerance=ROUNDED_SUMS),
    "fp32": Precision({"param_dtype": FP32}, given="float64"),
    "bf16 model": Precision({"main_params_dtype": FP32}, given="bfloat16", tolerance=1e-5),
    "fp16 model": Precision({"main_params_dtype": FP32}, given="float16", tolerance=1e-5),
}
"""By name; without one, a case has no policy."""


class _Cast(torch.autograd.Function):
    """A cast of a main weight, whose gradient is scaled in the main weight's dtype."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
        ctx.dtype, ctx.factor = weight.dtype, factor
        return weight.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].to(ctx.dtype) * ctx.factor, None, None


def scaled_gradient(weight: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a copy of a main weight whose gradient is scaled, for a loss without the factor."""
    found: torch.Tensor = _Cast.apply(weight, weight.dtype, factor)
    return found


class Casts:
    """The casts of one rank's forward of the plain model.

    Args:
        precision: The policy.
        dtypes: By identity of a main weight, the dtype it is cast to.
        factor: Factor of gradients.
    """

    def __init__(
        self, precision: Precision, dtypes: Mapping[int, torch.dtype], factor: float
    ) -> None:
        self._precision, self._dtypes, self._factor = precision, dtypes, factor
        self._made: dict[int, torch.Tensor] = {}

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """Cast a root's input."""
        return x.to(self._precision.computes or x.dtype)

    def _of(self, weight: torch.Tensor) -> torch.Tensor:
        # A weight of a functional call is given in the dtype of the forward.
        dtype = self._dtypes.get(id(weight))
        if dtype is None:
            return weight
        if id(weight) not in self._made:
            # A region that is recomputed by a reentrant backward first runs without gradients.
            with torch.enable_grad():
                self._made[id(weight)] = _Cast.apply(weight, dtype, self._factor)
        return self._made[id(weight)]

    @contextlib.contextmanager
    def inside(self, modules: list[nn.Module]) -> Iterator[None]:
        """Put casts in the place of the modules' main weights."""
        before = [(module._parameters, dict(module._parameters)) for module in modules]
        for module in modules:
            held: Any = module._parameters
            for name, param in list(held.items()):
                if param is not None:
                    held[name] = self._of(param)
        try:
            yield
        finally:
            for held, known in before:
                held.update(known)


def with_main_weights(model: nn.Module, precision: Precision) -> dict[int, torch.dtype]:
    """Convert the parameters of the plain model to main weights.

    Returns:
        By identity of a parameter, the dtype that forwards cast it to.
    """
    dtypes = {}
    for param in model.parameters():
        dtypes[id(param)] = precision.computes or param.dtype
        param.data = param.data.to(precision.main(param.dtype))
    return dtypes
