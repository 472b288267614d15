"""The simulated cluster against real gloo: `python -m benchmarks.sim.gloo`.

Units of a model hold weights and sleep, forwards and twice as long backwards: so that ranks that
share the cores of one machine do not compute in each other's time. Everything else is real, in both
engines: copies, sums, collectives. The simulation is given what collectives of a few sizes took by
themselves, and sleeps where it waits for one. Its steps run in turn with the real ones, on all
ranks at a time. All are means, as steps are sums.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.common import options, ours, run_ranks, wrap_with_fsdp2
from megatron_fsdp_v2._text import table
from megatron_fsdp_v2.diagnostics.simulation import (
    AlphaBeta,
    HostDevice,
    MeasuredNetwork,
    RunningTimeline,
    simulated_groups,
)
from megatron_fsdp_v2.diagnostics.simulation.process_group import BACKEND

ENGINES = {"ours": ours(), "fsdp2": wrap_with_fsdp2}
Pause = Callable[[float], None]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, pause: Pause, s: float) -> Any:
        ctx.pause, ctx.seconds, ctx.shape = pause, s, weight.shape
        pause(s)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.pause(2 * ctx.seconds)
        return grad, grad.new_zeros(ctx.shape), None, None


class Sleeper(nn.Module):
    """A unit that takes its time."""

    def __init__(self, rows: int, seconds: float, pause: Pause) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 1024))
        self.seconds = seconds
        self.pause = pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep."""
        y: torch.Tensor = _Sleep.apply(x, self.weight, self.pause, self.seconds)
        return y


def build(args: argparse.Namespace, seconds: float, pause: Pause) -> nn.Sequential:
    """A model of sleepers."""
    return nn.Sequential(*(Sleeper(args.rows, seconds, pause) for _ in range(args.layers)))


def step(model: nn.Module) -> None:
    """Forward and backward; there is no optimizer, which would compute."""
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    model.zero_grad()


def compare(mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """On every rank: steps on gloo and on the simulation in turn; the first rank writes times."""
    lines: dict[str, AlphaBeta] = {}
    device = HostDevice(RunningTimeline(sleeps=True))
    with simulated_groups(device, MeasuredNetwork(lines)):
        group = dist.new_group(backend=BACKEND)
        meshes = {"gloo": mesh, "simulated": DeviceMesh.from_group(group, "cpu")}
        models = {
            (engine, seconds, where): wrap(build(args, seconds * 1e-3, time.sleep), on)
            for seconds in args.pauses
            for engine, wrap in ENGINES.items()
            for where, on in meshes.items()
        }
        measured: dict[str, dict[int, list[float]]] = {kind: {} for kind in _CALLS}
        steps: dict[str, list[float]] = {}
        for repeat in range(args.repeats + 1):
            _measure(measured, args.rows * 1024, lines)
            for (engine, seconds, where), model in models.items():
                # What disturbs one disturbs all.
                dist.barrier()
                began = time.perf_counter()
                step(model)
                if repeat:
                    took = time.perf_counter() - began
                    steps.setdefault(f"{engine} {seconds} {where}", []).append(took)
    if dist.get_rank() == 0:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        path = Path(args.out) / f"gloo-{mesh.size()}.json"
        path.write_text(json.dumps({key: statistics.fmean(took) for key, took in steps.items()}))


def _measure(
    measured: dict[str, dict[int, list[float]]], full: int, lines: dict[str, AlphaBeta]
) -> None:
    """Time collectives of a few sizes once more, and fit lines to the means so far."""
    for kind, call in _CALLS.items():
        for numel in (full // 4, full // 2, full, 2 * full):
            nbytes, seconds = _timed(call, numel)
            measured[kind].setdefault(nbytes, []).append(seconds)
        means = {nbytes: statistics.fmean(times) for nbytes, times in measured[kind].items()}
        lines[kind] = AlphaBeta.fitted(means)


def _all_gather(numel: int) -> tuple[int, Callable[[], Any]]:
    full = torch.zeros(numel)
    shard = torch.zeros(numel // dist.get_world_size())
    return full.nbytes, functools.partial(dist.all_gather_into_tensor, full, shard)


def _reduce_scatter(numel: int) -> tuple[int, Callable[[], Any]]:
    full = torch.zeros(numel)
    shard = torch.zeros(numel // dist.get_world_size())
    return full.nbytes, functools.partial(dist.reduce_scatter_tensor, shard, full)


def _all_to_all(numel: int) -> tuple[int, Callable[[], Any]]:
    """As ours does for a reduce-scatter: one's own piece does not travel."""
    size, rank = dist.get_world_size(), dist.get_rank()
    numels = [numel // size if other != rank else 0 for other in range(size)]
    sent, received = torch.zeros(sum(numels)), torch.zeros(sum(numels))
    call = functools.partial(dist.all_to_all_single, received, sent, numels, numels)
    return sent.nbytes, call


_CALLS = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all}


def _timed(call: Callable[[int], tuple[int, Callable[[], Any]]], numel: int) -> tuple[int, float]:
    nbytes, run = call(numel)
    run()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(3):
        run()
    return nbytes, (time.perf_counter() - began) / 3


def main(words: Sequence[str] | None = None) -> list[float]:
    """Compare, and write a table; return simulated over real times."""
    parser = options("benchmarks.sim.gloo", __doc__, layers=4, rows=1024, repeats=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pauses", type=float, nargs="+", default=[5.0, 20.0], metavar="MS")
    args = parser.parse_args(words)
    rows = [["ranks", "engine", "pause", "gloo", "simulated", "ratio"]]
    ratios = []
    counts = args.ranks
    for num_ranks in counts:
        args.ranks = num_ranks
        run_ranks(compare, args)
        found = json.loads((Path(args.out) / f"gloo-{num_ranks}.json").read_text())
        for seconds in args.pauses:
            for engine in ENGINES:
                took = found[f"{engine} {seconds} gloo"]
                virtual = found[f"{engine} {seconds} simulated"]
                ratios.append(virtual / took)
                times = (f"{seconds:g} ms", f"{took * 1e3:.1f} ms", f"{virtual * 1e3:.1f} ms")
                rows.append([str(num_ranks), engine, *times, f"{virtual / took:.2f}"])
    sys.stdout.writelines(f"{line}\n" for line in table(rows))
    return ratios


if __name__ == "__main__":
    main()
