"""What is offloaded is told from what is on the device, before a run and in it."""

from __future__ import annotations

import pytest

from tests.mcore.offload_memory import tracked_steps, train_moving_activations
from tests.mcore.session import MODEL_FLAGS, curves, fsdp
from tests.ranks import RankPools

MOMENTS, COUNTER = 8, 4
"""Bytes of an element's two moments, and of a parameter's step counter."""


@pytest.mark.parametrize("tracks_from_the_start", [True, False])
def test_the_tracker_tells_offloaded_state_from_that_on_the_device(
    megatron: RankPools, tracks_from_the_start: bool
) -> None:
    for fraction in (None, 0.0, 0.5, 1.0):
        for found in megatron(2).run(
            tracked_steps, fraction, tracks_from_the_start=tracks_from_the_start, timeout_s=180
        ):
            elements, params = found["numel on host"], found["params on host"]
            assert elements >= (fraction or 0) * found["numel"]
            rest = found["numel"] - elements, found["params"] - params
            assert found["device"] == MOMENTS * rest[0] + COUNTER * rest[1]
            assert found["bound"] == found["device"]
            # Moments, a copy of the main weight and one of its gradient.
            assert found["host"] == (MOMENTS + 8) * elements + COUNTER * params
            assert found["others on host"] == 0
            assert ("Offloaded to host memory: optimizer" in found["report"]) == bool(fraction)
            if fraction == 1.0:
                assert found["device"] == 0
            if fraction == 0.5:
                assert 0 < found["device"] <= MOMENTS * found["numel"] / 2 + COUNTER * rest[1]
            if fraction == 1.0 and not tracks_from_the_start:
                # Not for a moment either.
                assert found["device peak"] == 0


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
