"""Host time of sharding, per unit and micro-batch, beside FSDP2: many tiny units, no communication.

One process in a group whose collectives do nothing (torch's `fake` backend), so what is timed is
the Python and dispatch work of a forward and a backward, not the network and not the arithmetic.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.step import Block, wrap_with_fsdp2
from megatron_fsdp_v2 import fully_shard

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def _ours(strategy: str, *, pooled: bool = False) -> Wrap:
    def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for unit in [*model.children(), model]:
            fully_shard(
                unit,
                mesh=mesh,
                sharding_strategy=strategy,
                enable_trace_pool=pooled,
                # A comparison at the first use would see what a fake gather leaves behind.
                check_ranks="never",
            )
        return model

    return wrap


CONTENDERS: dict[str, Wrap] = {
    "unsharded": lambda model, mesh: model,
    "FSDP2": wrap_with_fsdp2,
    **{f"ours, {s}": _ours(s) for s in ("no_shard", "optim", "optim_grads", "optim_grads_params")},
    "the last, on the trace pool": _ours("optim_grads_params", pooled=True),
}


def measure(num_units: int, rounds: int) -> dict[str, float]:
    """Least milliseconds per unit of a forward and a backward, above the unsharded model's."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    models = {}
    for name, wrap in CONTENDERS.items():
        models[name] = wrap(nn.Sequential(*(Block(16) for _ in range(num_units))), mesh)
    x = torch.randn(4, 16)
    least = dict.fromkeys(models, float("inf"))
    for _ in range(rounds):
        for name, model in models.items():
            start = time.perf_counter()
            model(x).square().mean().backward()
            least[name] = min(least[name], time.perf_counter() - start)
            model.zero_grad()
    dist.destroy_process_group()
    base = least.pop("unsharded")
    return {name: (value - base) / num_units * 1e3 for name, value in least.items()}


def profile(num_units: int, strategy: str, steps: int = 20) -> None:
    """Print where the host time of one strategy goes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = _ours(strategy)(nn.Sequential(*(Block(16) for _ in range(num_units))), mesh)
    x = torch.randn(4, 16)
    with cProfile.Profile() as profiler:
        for _ in range(steps):
            model(x).square().mean().backward()
            model.zero_grad()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", metavar="STRATEGY")
    args = parser.parse_args()
    if args.profile:
        profile(args.units, args.profile)
        return
    found = measure(args.units, args.rounds)
    if args.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    sys.stdout.write(f"{args.units} units, ms of host time per unit above the unsharded model\n")
    for name, value in found.items():
        sys.stdout.write(f"{name:28}{value:8.3f}{value / found['FSDP2']:8.2f} of FSDP2's\n")


if __name__ == "__main__":
    main()
