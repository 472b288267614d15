"""Two steps on one rank of several, with no-op collectives; run by `test_sanitizer.py`.

    TORCH_CUDA_SANITIZER=1 python -m tests.gpu.sanitized_step optim_grads_params 2x2 optim

Torch's fake process group replaces the other ranks; its collectives return at once. Communication
streams, events, work handles and the lifetime of memory are the same as on a cluster. The computed
values are meaningless. Without a GPU, `tests/distributed/test_fake_cuda.py` runs the same
steps on fake tensors.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.wrapping import BF16, wrap
from tests.reference.models import Checkpointed


def train(mesh: DeviceMesh, strategy: str, outer: str, **more: Any) -> Any:
    """Train two steps of two micro-batches with evaluations between; return the model."""
    device = mesh.device_type
    with torch.device(device):
        model = Checkpointed(use_reentrant=False)
    options: dict[str, Any] = {"sharding_strategy": strategy, "outer_dp_sharding_strategy": outer}
    wrap(model, mesh=mesh, mp_policy=BF16, **options, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(4, 5, device=device)).float().square().mean().backward()
            with torch.no_grad():
                model(torch.randn(4, 5, device=device))
        optimizer.step()
    return model


def race() -> None:
    """Race on purpose: a side stream writes a tensor without waiting for the current stream."""
    tensor = torch.zeros(1 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.fill_(1.0)
    torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """Run `race`, or: strategy, mesh such as `2x2`, outer strategy, and optionally device."""
    if arguments == ["race"]:
        race()
    else:
        strategy, sizes, outer, *device = arguments
        shape = tuple(int(size) for size in sizes.split("x"))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
        names = ("outer", "inner")[-len(shape) :]
        mesh = init_device_mesh(device[0] if device else "cuda", shape, mesh_dim_names=names)
        train(mesh, strategy, outer)
    print("finished")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
