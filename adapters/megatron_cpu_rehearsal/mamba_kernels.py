"""CPU reference kernels for the functions of mamba_ssm that Megatron's Mamba layers call.

The kernels compute the published definitions in fp32 and return the dtype of the input.
"""

from __future__ import annotations

from typing import Any, override

import torch
from torch.nn import functional


def split_conv1d_scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    activation: str,
    headdim: int | None,
    ngroups: int,
    norm_before_gate: bool,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the short convolution, selective scan and gate of a Mamba-2 layer.

    Args:
        zxbcdt: Gate z, input x, B, C and step dt side by side:
            `(batch, sequence, 2 * heads * headdim + 2 * ngroups * state + heads)`.
        conv1d_weight: `(channels of x, B and C, taps)`.
        conv1d_bias: `(channels of x, B and C,)`.
        dt_bias: Added to the step, `(heads,)`.
        A: Decay, negative, `(heads,)`.
        D: Weight of the skip connection, `(heads,)` or `(heads, headdim)`.
        chunk_size: Chunk size of the kernel's algorithm; it does not change the result.
        activation: Always SiLU.
        headdim: Features of a head; derived from D if None.
        ngroups: Number of groups of heads that share B and C.
        norm_before_gate: Used only with a fused norm.
        seq_idx: Not supported; Megatron rejects packed sequences.

    Returns:
        `(batch, sequence, heads * headdim)`.
    """
    del chunk_size, norm_before_gate
    assert activation == "silu"
    assert seq_idx is None, "packed sequences"
    heads = A.shape[0]
    inner = heads * (headdim or D.shape[-1])
    z, mixed, dt = torch.split(zxbcdt, [inner, conv1d_weight.shape[0], heads], dim=-1)
    mixed = functional.silu(_causal_conv1d(mixed, conv1d_weight, conv1d_bias))
    state = (mixed.shape[-1] - inner) // 2
    x, b, c = torch.split(mixed, [inner, state, state], dim=-1)
    steps = functional.softplus(dt.float() + dt_bias)
    y = _scan(
        _split_last(x, heads).float(),
        steps,
        A,
        _split_last(b, ngroups).float(),
        _split_last(c, ngroups).float(),
        D.float().view(heads, -1),
    )
    return (y.flatten(-2) * functional.silu(z.float())).to(zxbcdt.dtype)


def _causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Apply a causal convolution to each channel of `(batch, sequence, channels)`."""
    taps = weight.shape[1]
    past = functional.pad(x.transpose(1, 2), (taps - 1, 0))
    return functional.conv1d(past, weight.unsqueeze(1), bias, groups=len(weight)).transpose(1, 2)


def _scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
) -> torch.Tensor:
    """Compute the state-space model as a sum over pairs of a token and an earlier token.

    With `state_t = exp(dt_t A) state_(t-1) + dt_t B_t x_t`, the output `C_t state_t + D x_t` is the
    sum over `s <= t` of `(C_t B_s) exp(A (dt_(s+1) + ... + dt_t)) dt_s x_s`, and `D x_t`.

    Args:
        x: `(batch, sequence, heads, headdim)`.
        steps: `(batch, sequence, heads)`.
        decay: `(heads,)`.
        b: `(batch, sequence, groups, state)`.
        c: `(batch, sequence, groups, state)`.
        skip: D, `(heads, headdim)` or `(heads, 1)`.

    Returns:
        A tensor of the shape of `x`.
    """
    length, heads = x.shape[1:3]
    repeats = heads // b.shape[2]
    decays = (steps * decay).cumsum(1).transpose(1, 2)
    since = decays.unsqueeze(-1) - decays.unsqueeze(-2)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    kept = since.masked_fill(future, -torch.inf).exp()
    pairs = torch.einsum("btgn,bsgn->bgts", c, b).repeat_interleave(repeats, dim=1)
    y = torch.einsum("bhts,bshp->bthp", pairs * kept, x * steps.unsqueeze(-1))
    return y + x * skip


class GroupedRMSNorm(torch.nn.Module):
    """RMS norm over groups of features.

    The norm of mamba_ssm can also apply a gate, which Megatron's scan applies in training.

    Args:
        hidden_size: Number of features.
        eps: Added to the mean square.
        group_size: Features of a group.
        norm_before_gate: Not used, since there is no gate.
        device: Device of the weight.
        dtype: Dtype of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: Any,
        dtype: torch.dtype,
    ) -> None:
        del norm_before_gate
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        torch.nn.init.ones_(self.weight)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `(..., hidden_size)`."""
        groups = _split_last(x.float(), x.shape[-1] // self.group_size)
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return ((groups * scale).flatten(-2) * self.weight.float()).to(x.dtype)


def _split_last(x: torch.Tensor, parts: int) -> torch.Tensor:
    """View `(..., features)` as `(..., parts, features / parts)`."""
    return x.reshape(*x.shape[:-1], parts, -1)
