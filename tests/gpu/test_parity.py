"""The patterns of the parity matrix on one GPU.

At world size 1 every axis has size 1 and the communicator takes its short cuts: no collective and
no comm_stream runs. Covered here are layouts, casts, hooks, gradient collection, optimizers and
checkpointing on CUDA; communication streams are in `test_streams.py` and `test_sanitizer.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2 import fully_shard
from tests.gpu.conftest import NEEDS_GPU
from tests.parity.patterns import PATTERNS, Pattern
from tests.parity.test_parity import STRATEGIES, compare
from tests.reference.training import train_reference, train_sharded

pytestmark = NEEDS_GPU

# Views of a flat buffer are aligned otherwise than parameters of their own, and a GPU's matrix
# product may add in another order for that.
TOLERANCE = 1e-5


def on_device(pattern: Pattern, device: str) -> Pattern:
    """The pattern with its model on a device, which moves its inputs there."""

    def move(module: nn.Module, args: Any) -> Any:
        del module
        return tuple(arg.to(device) for arg in args)

    def build() -> nn.Module:
        model = pattern.build().to(device)
        model.register_forward_pre_hook(move)
        return model

    return dataclasses.replace(pattern, build=build)


def error_of(pattern: Pattern, strategy: str, mesh: DeviceMesh) -> float:
    """The largest relative error of a training against the unsharded one on the same device."""
    here = on_device(pattern, mesh.device_type)
    reference = train_reference(here, world_size=1, evaluates_rank=0)

    def shard(module: nn.Module) -> None:
        fully_shard(module, mesh=mesh, sharding_strategy=strategy)

    return compare(train_sharded(here, shard), reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_trains_on_cuda_like_the_reference(
    mesh: DeviceMesh, pattern: str, strategy: str
) -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    assert error_of(PATTERNS[pattern], strategy, mesh) < TOLERANCE
