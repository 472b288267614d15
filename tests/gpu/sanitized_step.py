"""A step as one rank of several, with collectives that do nothing; run by `test_sanitizer.py`.

    TORCH_CUDA_SANITIZER=1 python -m tests.gpu.sanitized_step optim_grads_params 2x2 optim

Torch's fake process group stands for the other ranks: its collectives return at once. Everything
else is what runs on a cluster: communication streams, events, work handles, and when memory is
freed. Numbers mean nothing.
"""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.wrapping import BF16, wrap
from tests.reference.models import Checkpointed


def train(strategy: str, shape: tuple[int, ...], outer: str, device: str) -> None:
    """Two steps of two micro-batches with an evaluation between."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
    mesh = init_device_mesh(device, shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    model = Checkpointed(use_reentrant=False).to(device)
    options = {"sharding_strategy": strategy, "outer_dp_sharding_strategy": outer}
    wrap(model, mesh=mesh, mp_policy=BF16, **options)
    # Made in the first backward otherwise; the sanitizer takes the making of a view for a write.
    units = [unit_of(module) for module in [*model.blocks, model]]
    views = [group.grads.param_grads.views for unit in units for group in unit.groups]
    assert len(views) == 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(4, 5, device=device)).float().square().mean().backward()
            with torch.no_grad():
                model(torch.randn(4, 5, device=device))
        optimizer.step()


def race() -> None:
    """A race on purpose: a side stream writes what the current stream has just written."""
    tensor = torch.zeros(1 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.fill_(1.0)
    torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """`race`, or strategy, mesh such as `2x2`, outer strategy, and optionally the device."""
    if arguments == ["race"]:
        race()
    else:
        strategy, sizes, outer, *device = arguments
        shape = tuple(int(size) for size in sizes.split("x"))
        train(strategy, shape, outer, *(device or ["cuda"]))
    print("finished")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
