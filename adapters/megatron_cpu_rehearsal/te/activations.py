"""Activation functions, gated and not, forward and backward.

`x` is `(..., N)`. A gated function takes `(..., 2 N)`, applies the activation to the first half and
multiplies by the second half. All functions compute in fp32 and round once; with a quantizer the
result is quantized.

* gelu: `x / 2 * (1 + tanh(0.79788456 * (x + 0.044715 * x ** 3)))`, the approximation by tanh;
* qgelu: `x * sigmoid(1.702 * x)`;
* silu: `x * sigmoid(x)`;
* relu: `max(x, 0)`; srelu: its square;
* glu (gated only): `sigmoid(x)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_cpu_rehearsal.te import quant

__all__ = ["KERNELS", "clamped_dswiglu", "clamped_swiglu", "gelu_slope", "gelu_value"]

_Function = Callable[[torch.Tensor], torch.Tensor]

_SQRT_2_OVER_PI = 0.79788456
_CUBIC = 0.044715
_QUICK = 1.702


def gelu_value(x: torch.Tensor) -> torch.Tensor:
    """Compute gelu, approximated by tanh."""
    return 0.5 * x * (1 + torch.tanh(_SQRT_2_OVER_PI * x * (1 + _CUBIC * x * x)))


def gelu_slope(x: torch.Tensor) -> torch.Tensor:
    """Compute the derivative of gelu."""
    t = torch.tanh(_SQRT_2_OVER_PI * x * (1 + _CUBIC * x * x))
    inner = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


def _swish(x: torch.Tensor, steepness: float) -> torch.Tensor:
    return x * torch.sigmoid(steepness * x)


def _swish_slope(x: torch.Tensor, steepness: float) -> torch.Tensor:
    s = torch.sigmoid(steepness * x)
    return s + steepness * x * s * (1 - s)


def _sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


_FUNCTIONS: dict[str, tuple[_Function, _Function]] = {
    "gelu": (gelu_value, gelu_slope),
    "qgelu": (lambda x: _swish(x, _QUICK), lambda x: _swish_slope(x, _QUICK)),
    "silu": (lambda x: _swish(x, 1.0), lambda x: _swish_slope(x, 1.0)),
    "relu": (torch.relu, lambda x: (x > 0).float()),
    "srelu": (lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x)),
}
_GATES: dict[str, tuple[_Function, _Function]] = {
    "geglu": _FUNCTIONS["gelu"],
    "qgeglu": _FUNCTIONS["qgelu"],
    "swiglu": _FUNCTIONS["silu"],
    "reglu": _FUNCTIONS["relu"],
    "sreglu": _FUNCTIONS["srelu"],
    "glu": (torch.sigmoid, _sigmoid_slope),
}


def _forward(value: _Function) -> Callable[..., Any]:
    """Make a function's forward."""

    def kernel(input: torch.Tensor, quantizer: Any) -> Any:
        return quant.finished(value(input.float()), input.dtype, quantizer)

    return kernel


def _backward(slope: _Function) -> Callable[..., Any]:
    """Make a function's backward: the gradient times the derivative."""

    def kernel(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        values = grad.float() * slope(fwd_input.float())
        return quant.finished(values, fwd_input.dtype, quantizer)

    return kernel


def _backward_with_bias(slope: _Function) -> Callable[..., Any]:
    """Make a function's backward that also returns the bias gradient, the sum over rows."""

    def kernel(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
        values = grad.float() * slope(fwd_input.float())
        bias_grad = values.reshape(-1, values.shape[-1]).sum(0).to(fwd_input.dtype)
        return [bias_grad, quant.finished(values, fwd_input.dtype, quantizer)]

    return kernel


def _gated_forward(value: _Function) -> Callable[..., Any]:
    """Make a gated function's forward: `(..., 2 N)` to `(..., N)`."""

    def kernel(input: torch.Tensor, quantizer: Any) -> Any:
        x, gate = input.float().chunk(2, -1)
        return quant.finished(value(x) * gate, input.dtype, quantizer)

    return kernel


def _gated_backward(value: _Function, slope: _Function) -> Callable[..., Any]:
    """Make a gated function's backward: `(..., N)` to `(..., 2 N)`."""

    def kernel(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        x, gate = fwd_input.float().chunk(2, -1)
        grad = grad.float()
        both = torch.cat([grad * gate * slope(x), grad * value(x)], -1)
        return quant.finished(both, fwd_input.dtype, quantizer)

    return kernel


def clamped_swiglu(
    input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """`x * sigmoid(alpha * x) * (gate + offset)` of clamped halves.

    Args:
        input: `(..., 2 N)`: `x`, which is clamped from above, and the gate, clamped on both sides.
        quantizer: A quantizer of Transformer Engine, or None.
        limit: Bound of the clamped halves.
        alpha: Steepness of the sigmoid.
        glu_linear_offset: Added to the clamped gate.
    """
    x, gate = input.float().chunk(2, -1)
    gate = gate.clamp(-limit, limit) + glu_linear_offset
    return quant.finished(_swish(x.clamp(max=limit), alpha) * gate, input.dtype, quantizer)


def clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Backward of `clamped_swiglu`; clamped elements have a zero gradient."""
    x, gate = fwd_input.float().chunk(2, -1)
    clamped, factor = x.clamp(max=limit), gate.clamp(-limit, limit) + glu_linear_offset
    grad = grad.float()
    grad_x = grad * factor * _swish_slope(clamped, alpha) * (x <= limit)
    grad_gate = grad * _swish(clamped, alpha) * (gate.abs() <= limit)
    both = torch.cat([grad_x, grad_gate], -1)
    return quant.finished(both, fwd_input.dtype, quantizer)


def _kernels() -> dict[str, Callable[..., Any]]:
    kernels: dict[str, Callable[..., Any]] = {
        "clamped_swiglu": clamped_swiglu,
        "clamped_dswiglu": clamped_dswiglu,
    }
    for name, (value, slope) in _FUNCTIONS.items():
        kernels[name] = _forward(value)
        kernels[f"d{name}"] = _backward(slope)
        kernels[f"dbias_d{name}"] = _backward_with_bias(slope)
    for name, (value, slope) in _GATES.items():
        kernels[name] = _gated_forward(value)
        kernels[f"d{name}"] = _gated_backward(value, slope)
    return kernels


KERNELS = _kernels()
"""Activations by Transformer Engine's names."""
