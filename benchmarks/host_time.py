"""Host time of sharding per unit and micro-batch, compared with FSDP2, without communication.

One process in a group whose collectives do nothing (torch's `fake` backend) measures the Python and
dispatch work of a forward and a backward, without network and arithmetic. `--streams` includes the
work on streams, as on CUDA: FSDP2 and this package use the same streams, which only note times.
"""

from __future__ import annotations

import contextlib
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.common import STRATEGIES, Block, Wrap, fake_ranks, options, ours, wrap_with_fsdp2
from benchmarks.sim.engines import cpu_streams
from megatron_fsdp_v2 import FSDPModule, RuntimeOptions
from megatron_fsdp_v2.plan.simulation import VirtualStreams, run_on_streams

# A consistency check across ranks would read the undefined results of a fake all-gather.
ALONE = {"options": RuntimeOptions(check_ranks="never")}
CONTENDERS: dict[str, Wrap] = {
    "unsharded": lambda model, mesh: model,
    "FSDP2": wrap_with_fsdp2,
    **{f"ours, {strategy}": ours(strategy, **ALONE) for strategy in STRATEGIES},
    "the last, on the trace pool": ours(enable_trace_pool=True, **ALONE),
}


def measure(
    num_units: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    on_streams: bool = False,
) -> dict[str, float]:
    """Return the minimum milliseconds per unit that sharding adds to a forward and a backward.

    Args:
        num_units: Units of the model.
        rounds: Number of measurements of each contender, in turns with the others.
        clock: Returns seconds. Processor time depends less on other load of the machine.
        on_streams: Whether to queue operations and collectives on streams, as on CUDA.
    """
    x, models, streams = torch.randn(4, 16), {}, VirtualStreams()
    with fake_ranks() as mesh, cpu_streams(streams) if on_streams else contextlib.nullcontext():
        for name, wrap in CONTENDERS.items():
            models[name] = wrap(_blocks(num_units), mesh)
            if on_streams and isinstance(models[name], FSDPModule):
                run_on_streams(models[name], streams)
        least = dict.fromkeys(models, float("inf"))
        for _ in range(rounds):
            for name, model in models.items():
                start = clock()
                model(x).square().mean().backward()
                least[name] = min(least[name], clock() - start)
                model.zero_grad()
    base = least.pop("unsharded")
    return {name: (value - base) / num_units * 1e3 for name, value in least.items()}


def _blocks(number: int) -> nn.Module:
    return nn.Sequential(*(Block(16) for _ in range(number)))


def profile(num_units: int, strategy: str, steps: int = 20) -> None:
    """Print the host time of one strategy by function."""
    with fake_ranks() as mesh:
        model, x = ours(strategy, **ALONE)(_blocks(num_units), mesh), torch.randn(4, 16)
        with cProfile.Profile() as profiler:
            for _ in range(steps):
                model(x).square().mean().backward()
                model.zero_grad()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = options("benchmarks.host_time", __doc__, writes=False, units=64, rounds=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--streams", action="store_true", help="with streams, as on CUDA")
    parser.add_argument("--profile", metavar="STRATEGY")
    args = parser.parse_args()
    if args.profile:
        profile(args.units, args.profile)
        return
    found = measure(args.units, args.rounds, on_streams=args.streams)
    if args.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    sys.stdout.write(f"{args.units} units, ms of host time per unit above the unsharded model\n")
    for name, value in found.items():
        sys.stdout.write(f"{name:28}{value:8.3f}{value / found['FSDP2']:8.2f} of FSDP2's\n")


if __name__ == "__main__":
    main()
