"""Activations that Transformer Engine moves to the host (`--cpu-offloading-num-layers`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_v2.params.autograd import is_gathered_weight
from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.flags import GATED, OVERLAP, TP2_SP, ZERO3, fsdp, words
from tests.mcore.session import Training, enter_rehearsal, train
from tests.mcore.trained import assert_equal, trained
from tests.ranks import RankPools

OFFLOAD = "--cpu-offloading-num-layers 2"
TE = words(f.TRANSFORMER_ENGINE, "--num-layers 4 --global-batch-size 8 --train-iters 3")
SMALLEST = 512


def _train_offloading(flags: Sequence[str]) -> Training:
    """Train with a patched selection of offloaded tensors, which accepts CPU and small tensors.

    The other conditions of the selection are those of Transformer Engine. Moved tensors are
    overwritten on the device. `extras` counts the selected and the overwritten bytes, the
    parameters that the selection kept, and the gathered weights that it selected.
    """
    enter_rehearsal("transformer_engine")
    from transformer_engine.pytorch import cpu_offload

    counts = {"bytes": 0, "spoiled": 0, "parameters": 0, "gathered": 0}

    def is_moved(state: Any, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, torch.nn.Parameter):
            counts["parameters"] += 1
            return False
        kept = getattr(tensor, "_TE_do_not_offload", False) or tensor.numel() < SMALLEST
        if kept or not tensor.is_contiguous():
            return False
        counts["gathered"] += is_gathered_weight(tensor)
        counts["bytes"] += tensor.nbytes
        return True

    layer_state = cpu_offload.OffloadableLayerState
    release = layer_state.release_activation_forward_gpu_memory

    def release_and_spoil(state: Any) -> None:
        moved = list(state.fwd_gpu_tensor_group.tensor_list)
        release(state)
        for tensor in moved:
            # This device memory is free: a later read does not find the activation.
            tensor.fill_(float("nan"))
            counts["spoiled"] += tensor.nbytes

    with (
        mock.patch.object(layer_state, "_check_if_offload", is_moved),
        mock.patch.object(layer_state, "release_activation_forward_gpu_memory", release_and_spoil),
    ):
        result = train(flags)
    result.extras = counts
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        (ZERO3, ""),
        longer("no_shard", ""),
        longer(ZERO3, f"--bf16 {GATED} {OVERLAP}"),
        longer(ZERO3, TP2_SP),
        longer("optim", "--bf16 --fsdp-trace-pool"),
    ],
)
def test_activations_are_moved_and_gathered_weights_are_not(
    megatron_te: RankPools, strategy: str, flags: str
) -> None:
    common = [TE, flags, fsdp(strategy)]
    moved = trained(megatron_te, 2, *common, OFFLOAD, by=_train_offloading)
    assert_equal(moved, trained(megatron_te, 2, *common))
    for counts in moved.extras:
        # A tensor with several uses is moved once.
        assert 0 < counts["spoiled"] <= counts["bytes"]
        assert counts["parameters"] > 0
        assert counts["gathered"] == 0
