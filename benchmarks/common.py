"""Shared code of the benchmarks: contenders, process groups, command lines, results."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp_v2 import fully_shard

TIMEOUT = datetime.timedelta(minutes=3)
"""Timeout after which ranks stop waiting for a failed rank."""
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


class Block(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to `(batch, width)`."""
        return x + self.down(torch.relu(self.up(x)))


def blocks(args: argparse.Namespace, *, bias: bool = True) -> nn.Sequential:
    """Build a model of `args.layers` blocks of `args.width`, identical across ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(args.width, bias=bias) for _ in range(args.layers)))


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the units: the layers, or the children without layers, and then the model."""
    return [*getattr(model, "layers", model).children(), model]


def ours(strategy: str = "optim_grads_params", **options: Any) -> Wrap:
    """Shard every unit with this package."""

    def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for unit in units_of(model):
            fully_shard(unit, mesh=mesh, sharding_strategy=strategy, **options)
        return model

    return wrap


def wrap_with_fsdp2(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard every unit with PyTorch's own `fully_shard`."""
    for unit in units_of(model):
        fsdp2(unit, mesh=mesh, **options)
    return model


def wrap_with_ddp(model: nn.Module, mesh: DeviceMesh) -> DistributedDataParallel:
    """Wrap the model with PyTorch's data parallelism."""
    del mesh
    return DistributedDataParallel(model)


def options(
    module: str, about: str | None, *, writes: bool = True, **numbers: int
) -> argparse.ArgumentParser:
    """Return a parser for integer options and for the path of the results."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    if writes:
        parser.add_argument("--out", default="out/bench")
    return parser


Work = Callable[..., None]


def run_ranks(work: Work, args: argparse.Namespace, *more: Any, device: str = "cpu") -> None:
    """Run `work(mesh, args, *more)` on `args.ranks` ranks of one process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    mp.spawn(_start, (work, args, more, device, port), args.ranks)


def _start(
    rank: int, work: Work, args: argparse.Namespace, more: tuple[Any, ...], device: str, port: int
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    on_cuda = device == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        rank=rank,
        world_size=args.ranks,
        timeout=TIMEOUT,
        device_id=torch.device("cuda", rank) if on_cuda else None,
    )
    work(init_device_mesh(device, (args.ranks,)), args, *more)
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def fake_ranks() -> Iterator[DeviceMesh]:
    """Create a process group of two ranks in one process, whose collectives do nothing."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def write(args: argparse.Namespace, name: str, **record: Any) -> Path:
    """Write results and their settings; return the file."""
    path = Path(args.out) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": vars(args), **record}, indent=2) + "\n")
    sys.stdout.write(f"written: {path}\n")
    return path
