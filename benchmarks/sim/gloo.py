"""Compares the simulated cluster with real gloo: `python -m benchmarks.sim.gloo --write-docs`.

Units of a model hold weights and sleep in the forward, and twice as long in the backward, so that
ranks on shared cores do not compute at the same time. Copies, sums and collectives are real in both
engines. The simulation receives measured times of collectives of a few sizes and the fraction of
each time during which a core is busy. It runs a thread for the busy time, and sleeps while it waits
for a collective. Collectives, real steps and simulated steps alternate on all ranks; disturbed
repeats are run again, and medians count.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import report
from benchmarks.common import options, ours, run_ranks, wrap_with_fsdp2
from benchmarks.noise import Rounds
from benchmarks.repeats import Patience, Repeats, Run
from benchmarks.sim.measured import AlphaBeta, MeasuredNetwork, RunningTimeline
from megatron_fsdp_v2._text import table
from megatron_fsdp_v2.comm.calls import broadcast_shards
from megatron_fsdp_v2.comm.interface import Work
from megatron_fsdp_v2.plan.simulation import HostDevice, simulated_groups
from megatron_fsdp_v2.plan.simulation.process_group import BACKEND

PAGE = "docs/tested.md"
COMMAND = "python -m benchmarks.sim.gloo --write-docs"
ENGINES = {"ours": ours(), "fsdp2": wrap_with_fsdp2}
NAMES = {"ours": "ours", "fsdp2": "FSDP2"}
REAL, SIMULATED = "gloo", "simulated"
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
    """A unit that sleeps."""

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
    """Build a model of sleepers."""
    return nn.Sequential(*(Sleeper(args.rows, seconds, pause) for _ in range(args.layers)))


def step(model: nn.Module) -> float:
    """Run a forward and a backward, without an optimizer, which would use the CPU."""
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    model.zero_grad()
    return 0.0


def compare(mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Run collectives, steps on gloo and simulated steps in turns, on every rank.

    The first rank writes the results.
    """
    patience = Patience(args.rounds, args.most, 0.2, args.foreign, args.minutes, steps=100)
    collectives = _Collectives(args.rows * 1024)
    device = _WorkingHost(collectives.share)
    with simulated_groups(device, MeasuredNetwork(collectives.lines)):
        group = dist.new_group(backend=BACKEND)
        meshes = {REAL: mesh, SIMULATED: DeviceMesh.from_group(group, "cpu")}
        models = {
            f"{engine} {seconds} {where}": wrap(build(args, seconds * 1e-3, time.sleep), on)
            for seconds in args.pauses
            for engine, wrap in ENGINES.items()
            for where, on in meshes.items()
        }
        runs = {name: functools.partial(step, model) for name, model in models.items()}

        def before(name: str, rounds: Rounds) -> None:
            if name.endswith(SIMULATED):
                collectives.fit(rounds, name.split()[0])

        rounds = Repeats().measure(collectives.runs() | runs, patience, before)
    if dist.get_rank() == 0:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        found = {
            name: {
                "seconds": rounds.median(name),
                "disturbed": rounds.is_disturbed(name),
                "samples": [(sample.seconds, sample.foreign) for sample in samples],
            }
            for name, samples in rounds.samples.items()
        }
        (Path(args.out) / f"gloo-{mesh.size()}.json").write_text(json.dumps(found))


class _WorkingHost(HostDevice):
    """A host whose CPU is busy during communication, as with a thread of gloo.

    Args:
        share: Fraction of a collective's time during which a core is busy for this rank.
    """

    def __init__(self, share: float) -> None:
        super().__init__(RunningTimeline(sleeps=True))
        self._share = share
        self._thread = ThreadPoolExecutor(1)
        self._memory = torch.zeros(2, 1 << 18)

    @override
    def communicate(self, communicator: str, link: str, seconds: float) -> Work:
        work = self._thread.submit(self._work, seconds * self._share)
        return _Both(super().communicate(communicator, link, seconds), work)

    def _work(self, seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            self._memory[0].copy_(self._memory[1])


class _Both:
    """A collective that is complete when its time and its CPU work are over."""

    def __init__(self, over: Work, work: Future[None]) -> None:
        self._over = over
        self._work = work

    def wait(self) -> None:
        self._over.wait()
        self._work.result()


class _Collectives:
    """Measured times of single collectives of a few sizes, and linear fits.

    Args:
        full: Elements of a unit.

    Attributes:
        lines: Linear fits by kind, updated with every result.
        share: Fraction of the collectives' time during which a core is busy for this rank.
    """

    def __init__(self, full: int) -> None:
        self.lines: dict[str, AlphaBeta] = {}
        self._calls: dict[str, tuple[str, int, Run]] = {}
        for kind, make in _CALLS.items():
            for numel in (full // 4, full // 2, full, 2 * full):
                nbytes, call = make(numel)
                self._calls[f"{kind}, {nbytes} bytes"] = kind, nbytes, call
        began, worked = time.perf_counter(), time.process_time()
        # Initial values for simulated steps that precede the measurements in turns.
        self._first = {name: self._try(call) for name, (_, _, call) in self._calls.items()}
        self.share = (time.process_time() - worked) / (time.perf_counter() - began)
        self._fit(self._first)

    def runs(self) -> dict[str, Run]:
        """Return the functions to measure by name."""
        return {name: call for name, (_, _, call) in self._calls.items()}

    @staticmethod
    def _try(call: Run) -> float:
        call()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(3):
            call()
        return (time.perf_counter() - began) / 3

    def fit(self, rounds: Rounds, engine: str) -> None:
        """Update the fits with the results so far for the collectives of an engine."""
        measured = {name: rounds.median(name) for name in self._calls if rounds.samples[name]}
        self._fit(self._first | measured)
        if engine == "ours":
            self.lines["all_gather"] = self.lines[_BROADCASTS]

    def _fit(self, seconds: Mapping[str, float]) -> None:
        by_kind: dict[str, dict[int, float]] = {}
        for name, (kind, nbytes, _) in self._calls.items():
            by_kind.setdefault(kind, {})[nbytes] = seconds[name]
        self.lines |= {kind: AlphaBeta.fitted(found) for kind, found in by_kind.items()}


# Outputs are newly allocated, as in the engines, so that times include page faults.


def _all_gather(numel: int) -> tuple[int, Run]:
    shard = torch.zeros(numel // dist.get_world_size())

    def run() -> float:
        dist.all_gather_into_tensor(torch.empty(numel), shard)
        return 0.0

    return 4 * numel, run


def _broadcasts(numel: int) -> tuple[int, Run]:
    """Make an all-gather by broadcasts, as in this package for this size."""
    shard = torch.zeros(numel // dist.get_world_size())

    def run() -> float:
        broadcast_shards(torch.empty(numel), shard, group=dist.group.WORLD).wait()
        return 0.0

    return 4 * numel, run


def _reduce_scatter(numel: int) -> tuple[int, Run]:
    full = torch.zeros(numel)

    def run() -> float:
        dist.reduce_scatter_tensor(torch.empty(numel // dist.get_world_size()), full)
        return 0.0

    return 4 * numel, run


def _all_to_all(numel: int) -> tuple[int, Run]:
    """Make the all-to-all of this package's reduce-scatter: a rank's own shard is not sent."""
    size, rank = dist.get_world_size(), dist.get_rank()
    numels = [numel // size if other != rank else 0 for other in range(size)]
    sent = torch.zeros(sum(numels))

    def run() -> float:
        dist.all_to_all_single(torch.empty(sum(numels)), sent, numels, numels)
        return 0.0

    return sent.nbytes, run


_BROADCASTS = "broadcasts"
_CALLS = {
    "all_gather": _all_gather,
    _BROADCASTS: _broadcasts,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def main(words: Sequence[str] | None = None) -> list[float]:
    """Compare and write a table; return the ratios of simulated to real times."""
    patience = Patience()
    counts = {"layers": 4, "rows": 1024, "rounds": patience.rounds, "most": 8}
    parser = options("benchmarks.sim.gloo", __doc__, **counts)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pauses", type=float, nargs="+", default=[5.0, 20.0], metavar="MS")
    parser.add_argument("--foreign", type=float, default=patience.foreign, help="that disturbs")
    parser.add_argument("--minutes", type=float, default=patience.minutes, help="for each of ranks")
    parser.add_argument("--write-docs", action="store_true", help=f"also into {PAGE}")
    args = parser.parse_args(words)
    began = time.perf_counter()
    rows, ratios, is_any_disturbed = [], [], False
    for num_ranks in args.ranks:
        run_ranks(compare, argparse.Namespace(**{**vars(args), "ranks": num_ranks}))
        found = json.loads((Path(args.out) / f"gloo-{num_ranks}.json").read_text())
        for seconds, engine in itertools.product(args.pauses, ENGINES):
            real, simulated = (found[f"{engine} {seconds} {where}"] for where in (REAL, SIMULATED))
            took, virtual = real["seconds"], simulated["seconds"]
            ratios.append(virtual / took)
            is_disturbed = real["disturbed"] or simulated["disturbed"]
            is_any_disturbed |= is_disturbed
            star = " (*)" if is_disturbed else ""
            times = (f"{seconds:g} ms", f"{took * 1e3:.1f} ms", f"{virtual * 1e3:.1f} ms")
            rows.append((str(num_ranks), NAMES[engine], *times, f"{virtual / took:.2f}{star}"))
    minutes = (time.perf_counter() - began) / 60
    remark = "(*) Too few undisturbed repeats: the least disturbed ones count."
    remarks = [remark] if is_any_disturbed else []
    worst = max(abs(ratio - 1) for ratio in ratios)
    title = f"At most {worst:.0%} apart"
    head = ("ranks", "engine", "a unit sleeps", "gloo", "simulated", "ratio")
    sys.stdout.writelines(f"{line}\n" for line in [*table([head, *rows]), *remarks, title])
    if args.write_docs:
        text = f"`{COMMAND}`, {minutes:.0f} minutes on {report.hardware('cpu')}.\n\n"
        shown = report.markdown(report.Table(title, head, rows, remarks))
        report.put_between_marks(PAGE, text + shown)
    return ratios


if __name__ == "__main__":
    main()
