"""`make bench`: a training step of ours beside PyTorch's DDP and FSDP2, on this machine.

All contenders run in one process group, step by step in turn, so that whatever else the machine
does falls on all of them. What counts is the ratio of medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import common
from benchmarks.common import STRATEGIES, Wrap

BASELINE = "FSDP2"
CONTENDERS: dict[str, Wrap] = {
    "DDP": common.wrap_with_ddp,
    BASELINE: common.wrap_with_fsdp2,
    **{f"ours, {strategy}": common.ours(strategy) for strategy in STRATEGIES},
}


def _work(mesh: DeviceMesh, args: argparse.Namespace) -> None:
    on_cuda = args.device == "cuda"
    steps = {}
    for name, wrap in CONTENDERS.items():
        model = wrap(common.blocks(args).to(args.device), mesh)
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
    if dist.get_rank() == 0:
        _report({name: statistics.median(values) for name, values in times.items()}, args)


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
    written = common.write(args, "bench.json", step_s=medians, ratio=ratios)
    _plot(ratios, written.with_suffix(".png"))


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
    sys.stdout.write(f"written: {path}\n")


def main() -> None:
    """Run the benchmark and print its table."""
    sizes = {"ranks": 2, "layers": 8, "width": 256, "batch": 32, "rounds": 15}
    parser = common.options("benchmarks", __doc__, **sizes)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    common.run_ranks(_work, args, device=args.device)
