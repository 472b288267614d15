"""Step times of Muon compared with AdamW and with two other implementations of Muon.

Contenders run in turns in one process group, as in `benchmarks.step`. The naive implementation
gathers every momentum on every rank and repeats Newton-Schulz there, as published integrations did.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import common
from megatron_fsdp_v2.optim import Muon, newton_schulz

BASELINE = "AdamW, ZeRO-3"
OURS = "Muon, ZeRO-3"
GRAM = "Muon, ZeRO-3, Gram matrices"
NAIVE = "Muon, gathered and repeated"


class NaiveMuon(torch.optim.Optimizer):
    """Muon that orthogonalizes every matrix on every rank."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run one step. Collective."""
        del closure
        (group,) = self.param_groups
        for param in group["params"]:
            if not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
            momentum = self.state[param]["momentum_buffer"]
            if param.grad is not None:
                momentum.lerp_(param.grad, 0.05)
            whole = momentum.full_tensor().bfloat16()
            result = newton_schulz(whole.unsqueeze(0)).squeeze(0)
            first, last = param.local_rows
            param.to_local().mul_(1 - group["lr"] * 0.1)
            scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
            param.to_local().add_(result[first:last], alpha=-group["lr"] * scale)


CONTENDERS: dict[str, tuple[common.Wrap, Callable[[Any], torch.optim.Optimizer]]] = {
    BASELINE: (common.ours(), lambda params: torch.optim.AdamW(params, lr=1e-4)),
    OURS: (common.ours(), lambda params: Muon(params, lr=1e-4, nesterov=False)),
    GRAM: (
        common.ours(),
        lambda params: Muon(params, lr=1e-4, nesterov=False, ns_method="gram"),
    ),
    NAIVE: (common.ours(), lambda params: NaiveMuon(params, lr=1e-4)),
    "torch.optim.Muon, DDP": (
        common.wrap_with_ddp,
        lambda params: torch.optim.Muon(params, lr=1e-4, nesterov=False),
    ),
}


def _work(mesh: DeviceMesh, args: argparse.Namespace) -> None:
    running = {}
    for name, (wrap, make) in CONTENDERS.items():
        model = wrap(common.blocks(args, bias=False), mesh)
        running[name] = (model, make(model.parameters()))
    inputs = torch.randn(args.batch, args.width)
    steps: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    optimizers: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for round_number in range(args.rounds + 2):
        for name, (model, optimizer) in running.items():
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            dist.barrier()
            middle = time.perf_counter()
            optimizer.step()
            dist.barrier()
            end = time.perf_counter()
            if round_number >= 2:
                steps[name].append(end - start)
                optimizers[name].append(end - middle)
    if dist.get_rank() == 0:
        _report(steps, optimizers, args)


def _report(
    steps: dict[str, list[float]], optimizers: dict[str, list[float]], args: argparse.Namespace
) -> None:
    step = {name: statistics.median(times) for name, times in steps.items()}
    alone = {name: statistics.median(times) for name, times in optimizers.items()}
    ratios = {name: step[name] / step[BASELINE] for name in step}
    gain = {name: alone[name] / alone[OURS] for name in alone}
    heads = ("step ms", f"over {BASELINE}", "optimizer ms", f"over {OURS}", "of the step")
    lines = [
        f"{args.layers} blocks of width {args.width}, batch {args.batch}, {args.ranks} ranks "
        f"(gloo), median of {args.rounds} steps; a step includes the optimizer's",
        f"{'':30}" + "".join(f"{head:>20}" for head in heads),
    ]
    for name in step:
        lines.append(
            f"{name:30}{step[name] * 1e3:20.1f}{ratios[name]:20.2f}{alone[name] * 1e3:20.1f}"
            f"{gain[name]:20.2f}{alone[name] / step[name]:20.0%}"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    times = {"step_s": step, "optimizer_s": alone}
    name = f"muon_{args.ranks}.json"
    common.write(args, name, **times, step_ratio=ratios, optimizer_ratio=gain)


def main() -> None:
    """Run the benchmark and print its table."""
    sizes = {"ranks": 2, "layers": 8, "width": 256, "batch": 32, "rounds": 9}
    common.run_ranks(_work, common.options("benchmarks.muon", __doc__, **sizes).parse_args())


if __name__ == "__main__":
    main()
