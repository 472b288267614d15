"""Cost of a save relative to a step, and bytes written."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import common
from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor

MEASURED = "measured.json"


def _state_nbytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all parameters and their states, each counted once. Collective."""
    tensors: list[Any] = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, UnevenDTensor)]
    # A rank has no state for parameters without local rows, so each rank counts its own state.
    nbytes = torch.tensor(sum(tensor.to_local().nbytes for tensor in tensors))
    dist.all_reduce(nbytes)
    return int(nbytes)


def _timed(function: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - start


def _work(mesh: DeviceMesh, args: argparse.Namespace, folder: str) -> None:
    rank = dist.get_rank()
    model = common.ours()(common.blocks(args), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(args.batch, args.width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    step()
    times: dict[str, list[float]] = {name: [] for name in ("step", "save", "stall", "in_all")}
    for number in range(args.rounds):
        path = f"{folder}/{number}"
        times["step"].append(_timed(step))
        times["save"].append(_timed(lambda at=path: checkpoint.save(f"{at}/a", model, optimizer)))
        start = time.perf_counter()
        future = checkpoint.save(f"{path}/b", model, optimizer, async_save=True)
        times["stall"].append(time.perf_counter() - start)
        assert future is not None
        future.result()
        times["in_all"].append(time.perf_counter() - start)
        dist.barrier()
        if rank == 0 and number:
            shutil.rmtree(path)
    nbytes = _state_nbytes(model, optimizer)
    if rank == 0:
        written = sum(file.stat().st_size for file in Path(folder, "0", "a").iterdir())
        medians = {k: statistics.median(v) for k, v in times.items()}
        Path(folder, MEASURED).write_text(json.dumps([medians, nbytes, written]))


def _report(folder: Path, args: argparse.Namespace) -> None:
    times, nbytes, written = json.loads((folder / MEASURED).read_text())
    over = {name: value / times["step"] for name, value in times.items()}
    sys.stdout.write(
        f"{args.layers} blocks of width {args.width}, batch {args.batch}, {args.ranks} ranks; "
        f"state of {nbytes / 2**20:.1f} MiB, written {written / nbytes:.4f} of it\n"
        f"over a step of {times['step'] * 1e3:.0f} ms: a blocking save {over['save']:.2f}, the "
        f"stall of an asynchronous one {over['stall']:.2f} (done after {over['in_all']:.2f})\n"
    )
    common.write(
        args,
        "checkpoint.json",
        times_s=times,
        over_step=over,
        state_bytes=nbytes,
        written_over_state=written / nbytes,
    )


def main() -> None:
    """Run the benchmark and print its results."""
    sizes = {"ranks": 2, "layers": 8, "width": 512, "batch": 256, "rounds": 5}
    args = common.options("benchmarks.checkpoint", __doc__, **sizes).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        common.run_ranks(_work, args, folder)
        _report(Path(folder), args)


if __name__ == "__main__":
    main()
