"""`make bench`: a training step of ours beside PyTorch's DDP and FSDP2, on this machine.

All contenders run in one process group, step by step in turn, so that whatever else the machine
does falls on all of them. What counts is the ratio of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp_v2 import fully_shard

BASELINE = "FSDP2"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Block(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to `(batch, width)`."""
        return x + self.down(torch.relu(self.up(x)))


def _ours(strategy: str) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for block in model.children():
            fully_shard(block, mesh=mesh, sharding_strategy=strategy)
        return fully_shard(model, mesh=mesh, sharding_strategy=strategy)

    return wrap


def wrap_with_fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard every child and the model with PyTorch's own `fully_shard`."""
    for block in model.children():
        fsdp2(block, mesh=mesh)
    return fsdp2(model, mesh=mesh)


def _ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    del mesh
    return DistributedDataParallel(model)


CONTENDERS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "DDP": _ddp,
    BASELINE: wrap_with_fsdp2,
    **{f"ours, {strategy}": _ours(strategy) for strategy in STRATEGIES},
}


def _work(rank: int, args: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    on_cuda = args.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        rank=rank,
        world_size=args.ranks,
        device_id=torch.device("cuda", rank) if on_cuda else None,
    )
    mesh = init_device_mesh(args.device, (args.ranks,))
    steps = {}
    for name, wrap in CONTENDERS.items():
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
        model = wrap(blocks.to(args.device), mesh)
        steps[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    inputs = torch.randn(args.batch, args.width, device=args.device)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for round_number in range(args.rounds + 2):
        for name, (model, optimizer) in steps.items():
            dist.barrier()
            _settle(on_cuda)
            start = time.perf_counter()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            _settle(on_cuda)
            if round_number >= 2:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        _report({name: statistics.median(values) for name, values in times.items()}, args)
    dist.barrier()
    dist.destroy_process_group()


def _settle(on_cuda: bool) -> None:
    """Wait for what is queued: a step on a GPU has returned long before it is done."""
    if on_cuda:
        torch.cuda.synchronize()


def _report(medians: dict[str, float], args: argparse.Namespace) -> None:
    ratios = {name: value / medians[BASELINE] for name, value in medians.items()}
    lines = [
        f"{args.layers} blocks of width {args.width}, fp32, {args.ranks} ranks "
        f"({'NCCL' if args.device == 'cuda' else 'gloo'}), "
        f"AdamW, median of {args.rounds} steps",
        f"{'':28}{'step ms':>10}{'over ' + BASELINE:>14}",
    ]
    lines += [f"{n:28}{medians[n] * 1e3:10.1f}{ratios[n]:14.2f}" for n in medians]
    sys.stdout.write("\n".join(lines) + "\n")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"settings": vars(args), "step_s": medians, "ratio": ratios}
    (out / "bench.json").write_text(json.dumps(record, indent=2) + "\n")
    _plot(ratios, out / "bench.png")
    sys.stdout.write(f"written: {out / 'bench.json'}, {out / 'bench.png'}\n")


def _plot(ratios: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.barh(list(ratios), list(ratios.values()))
    axes.axvline(1.0, color="gray", linestyle=":")
    axes.invert_yaxis()
    axes.set_xlabel(f"step time over {BASELINE}'s")
    figure.savefig(path, dpi=120)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="out/bench")
    args = parser.parse_args()
    mp.spawn(_work, (args, free_port()), args.ranks)
