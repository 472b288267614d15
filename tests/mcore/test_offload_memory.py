"""What is offloaded is told from what is on the device, before a run and in it."""

from __future__ import annotations

import gc
from typing import Any

from megatron_fsdp_v2.diagnostics import memory_tracker
from megatron_fsdp_v2.diagnostics.memory_ledger import Role
from tests.mcore.offload_memory import train_moving_activations
from tests.mcore.offloading import adam, backward, sharded_model
from tests.mcore.session import MODEL_FLAGS, curves, fsdp
from tests.mcore.trained import on_megatron
from tests.ranks import RankPools

MOMENTS, COUNTER = 8, 4
"""Bytes of an element's two moments, and of a parameter's step counter."""


@on_megatron(2, tracks_from_the_start=[True, False], fraction=[None, 0.0, 0.5, 1.0])
def test_the_tracker_tells_offloaded_state_from_that_on_the_device(
    tracks_from_the_start: bool, fraction: float | None
) -> None:
    model = sharded_model()
    optimizer: Any = adam(model)
    # What others offloaded is counted for as long as it lives.
    gc.collect()
    if fraction is not None:
        from megatron_fsdp_v2_mcore.optim.offload import ShardedHybridOptimizer

        optimizer = ShardedHybridOptimizer(optimizer, fraction=fraction)
    if not tracks_from_the_start:
        backward(model, 0)
        optimizer.step()
    with memory_tracker(model, optimizer) as memory:
        for step in range(1, 3):
            backward(model, step)
            optimizer.step()
    on_host = [] if fraction is None else list(optimizer.gpu_params_map_cpu_copy)
    numels = [param.to_local().numel() for param in model.parameters()]
    elements = sum(param.to_local().numel() for param in on_host)
    rest = sum(numels) - elements, sum(numel > 0 for numel in numels) - len(on_host)
    device, offloaded = memory.live[Role.OPTIMIZER], dict(memory.offloaded)
    assert elements >= (fraction or 0) * sum(numels)
    assert device == memory.bound.optimizer == MOMENTS * rest[0] + COUNTER * rest[1]
    # Moments, a copy of the main weight and one of its gradient.
    of_optimizer = (MOMENTS + 8) * elements + COUNTER * len(on_host)
    assert offloaded.pop(Role.OPTIMIZER, 0) == of_optimizer
    assert sum(offloaded.values()) == 0
    assert ("Offloaded to host memory: optimizer" in memory.report()) == bool(fraction)
    if fraction == 1.0:
        assert device == 0
    if fraction == 0.5:
        assert 0 < device <= MOMENTS * sum(numels) / 2 + COUNTER * rest[1]
    if fraction == 1.0 and not tracks_from_the_start:
        # Not for a moment either.
        assert memory.role_peaks[Role.OPTIMIZER] == 0


def test_activations_that_megatron_moves_to_the_host_compose_with_sharded_parameters(
    megatron: RankPools,
) -> None:
    flags = [*MODEL_FLAGS, *fsdp(), "--train-iters", "3"]
    plain = curves(megatron(2).run(train_moving_activations, flags, (), timeout_s=180))
    modules = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")
    moved = curves(megatron(2).run(train_moving_activations, flags, modules, timeout_s=180))
    assert moved.losses == plain.losses
    assert moved.grad_norms == plain.grad_norms
    for num_moved, num_weights in moved.extras:
        assert num_moved > 20
        assert num_weights == 0
