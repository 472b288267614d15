"""CPU reference kernels of a rehearsal match the definitions of GPU kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatron_cpu_rehearsal.experimental_attention import causal_conv1d, hadamard_rotation, l2norm
from megatron_cpu_rehearsal.mamba_kernels import GroupedRMSNorm, split_conv1d_scan
from megatron_cpu_rehearsal.norms import ZeroCenteredLayerNorm, ZeroCenteredRMSNorm
from tests.mcore.test_te_kernels import hadamard, layer_norm, rms_norm


class _Options:
    """Fields of Megatron's configuration that a norm reads."""

    layernorm_zero_centered_gamma = True

    def __init__(self, normalization: str) -> None:
        self.normalization = normalization


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_zero_centered_norms_multiply_by_their_weight_plus_one(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(8) / 8, torch.randn(8)
    centered = ZeroCenteredLayerNorm(_Options("LayerNorm"), 8, 1e-5).to(dtype)
    rms = ZeroCenteredRMSNorm(_Options("RMSNorm"), 8, 1e-5).to(dtype)
    for norm in (centered, rms):
        assert not any(param.any() for param in norm.parameters())
    x, weight, bias = (tensor.to(dtype) for tensor in (x, weight, bias))
    with torch.no_grad():
        centered.weight.copy_(weight)
        centered.bias.copy_(bias)
        rms.weight.copy_(weight)
    wide = [tensor.double() for tensor in (x, weight, bias)]
    exact = layer_norm(1, *wide), rms_norm(1, *wide[:2])
    # Only the result is rounded to bf16.
    rounding = 4e-3 if dtype == torch.bfloat16 else 1e-5
    for norm, wanted in zip((centered, rms), exact, strict=True):
        result = norm(x)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), wanted, rtol=rounding, atol=rounding / 8)


def test_kernels_of_experimental_attention_match_their_definition() -> None:
    x, weight, bias = torch.randn(2, 7, 4), torch.randn(4, 3), torch.randn(4)
    result, state = causal_conv1d(x, weight, bias, "silu")
    assert state is None
    for t in range(7):
        past = sum(x[:, t - lag] * weight[:, 2 - lag] for lag in range(min(3, t + 1)))
        torch.testing.assert_close(result[:, t], functional.silu(past + bias))
    with pytest.raises(NotImplementedError, match="does not support cu_seqlens"):
        causal_conv1d(x, weight, initial_state=None, cu_seqlens=torch.tensor([0, 7]))
    torch.testing.assert_close(l2norm(x), functional.normalize(x, dim=-1), rtol=1e-4, atol=1e-5)
    rows = torch.randn(5, 8)
    exact = rows.double() @ hadamard(8) / 8**0.5
    torch.testing.assert_close(hadamard_rotation(rows).double(), exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="--dsa-indexer-head-dim 6 is not a power of two"):
        hadamard_rotation(torch.randn(2, 6))


def test_mamba_kernel_matches_the_recurrence() -> None:
    batch, length, heads, width, groups, state, taps = 2, 9, 4, 3, 2, 5, 4
    inner, shared = heads * width, groups * state
    packed = torch.randn(batch, length, 2 * inner + 2 * shared + heads)
    weight, bias = torch.randn(inner + 2 * shared, taps), torch.randn(inner + 2 * shared)
    dt_bias, decay, skip = torch.randn(heads), -torch.rand(heads) - 0.1, torch.randn(heads)
    result = split_conv1d_scan(
        packed,
        weight,
        bias,
        dt_bias,
        decay,
        skip,
        chunk_size=128,
        activation="silu",
        headdim=width,
        ngroups=groups,
        norm_before_gate=False,
    )
    z, mixed, dt = torch.split(packed, [inner, inner + 2 * shared, heads], dim=-1)
    memory = torch.zeros(batch, heads, width, state)
    for t in range(length):
        past = [mixed[:, t - lag] * weight[:, -1 - lag] for lag in range(min(taps, t + 1))]
        x, b, c = torch.split(functional.silu(sum(past) + bias), [inner, shared, shared], dim=-1)
        x = x.view(batch, heads, width)
        b, c = (
            part.view(batch, groups, state).repeat_interleave(heads // groups, dim=1)
            for part in (b, c)
        )
        step = functional.softplus(dt[:, t] + dt_bias)
        memory *= (step * decay).exp()[..., None, None]
        memory += step[..., None, None] * x[..., None] * b[:, :, None]
        y = (memory * c[:, :, None]).sum(-1) + skip[:, None] * x
        torch.testing.assert_close(result[:, t], y.flatten(1) * functional.silu(z[:, t]))


def test_grouped_norm_equals_the_norm_of_each_group() -> None:
    norm = GroupedRMSNorm(
        6, eps=1e-5, group_size=3, norm_before_gate=False, device="cpu", dtype=torch.float32
    )
    x = torch.randn(4, 6)
    parts = [functional.rms_norm(part, (3,), eps=1e-5) for part in x.split(3, dim=1)]
    torch.testing.assert_close(norm(x), torch.cat(parts, dim=1))
