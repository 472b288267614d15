"""What stands in for Mamba's kernels in a rehearsal computes what they do."""

from __future__ import annotations

import torch
from torch.nn import functional

from megatron_fsdp_v2_mcore.rehearsal.mamba_kernels import GroupedRMSNorm, split_conv1d_scan


def test_the_mamba_stub_is_the_recurrence() -> None:
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


def test_a_norm_of_groups_is_a_norm_of_each() -> None:
    norm = GroupedRMSNorm(
        6, eps=1e-5, group_size=3, norm_before_gate=False, device="cpu", dtype=torch.float32
    )
    x = torch.randn(4, 6)
    parts = [functional.rms_norm(part, (3,), eps=1e-5) for part in x.split(3, dim=1)]
    torch.testing.assert_close(norm(x), torch.cat(parts, dim=1))
