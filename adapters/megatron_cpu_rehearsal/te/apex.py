"""apex's extension for weight gradients, which Megatron's own layers use.

With `--gradient-accumulation-fusion`, Megatron's default, the output layer calls it.
"""

from __future__ import annotations

from types import ModuleType

import torch

__all__ = ["NAME", "make", "wgrad_gemm_accum"]

NAME = "fused_weight_gradient_mlp_cuda"
"""Module name under which Megatron imports the extension."""


def wgrad_gemm_accum(input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor) -> None:
    """Compute `d_weight += d_output.T @ input` in place; summed in fp32 and rounded once.

    Args:
        input: `(..., in)`.
        d_output: `(..., out)`.
        d_weight: `(out, in)`, in fp32, bf16 or fp16.
    """
    rows = d_output.reshape(-1, d_output.shape[-1]).float()
    product = rows.t() @ input.reshape(-1, input.shape[-1]).float()
    d_weight.copy_(d_weight.float() + product)


def make() -> ModuleType:
    """Make the module, with one function for 32-bit and one for 16-bit main gradients."""
    module = ModuleType(NAME, __doc__)
    vars(module).update(
        wgrad_gemm_accum_fp32=wgrad_gemm_accum, wgrad_gemm_accum_fp16=wgrad_gemm_accum
    )
    return module
