"""Memory of a training beside PyTorch's FSDP2, on a CPU: at rest, at the peak of a step, building.

Bytes of live storages on rank 0, counted alike for all contenders, one after the other. At rest is
after `optimizer.step()` and `optimizer.zero_grad()`. Building goes from nothing to a sharded model.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from benchmarks import common
from benchmarks.live_bytes import LiveBytes
from megatron_fsdp_v2 import fully_shard

BASELINE = "FSDP2"
COLUMNS = ("building", "at rest", "peak")
_MB = 1e6


class Language(nn.Module):
    """Transformer layers between an embedding and an output layer, which belong to the root."""

    def __init__(self, layers: int, width: int, vocabulary: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of `(batch, length)` tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.output(x))


Shard = Callable[[Language, DeviceMesh], None]


def _policy(in_bf16: bool) -> TheirPolicy:
    """That of FSDP2, which means the same here: gradients travel in the compute dtype."""
    return TheirPolicy(param_dtype=torch.bfloat16) if in_bf16 else TheirPolicy()


def _ours(in_bf16: bool, strategy: str, **options: Any) -> Shard:
    def shard(model: Language, mesh: DeviceMesh) -> None:
        given = {"mesh": mesh, "mp_policy": _policy(in_bf16), "sharding_strategy": strategy}
        for unit in [*model.layers, model]:
            fully_shard(unit, **given, **options)

    return shard


def _theirs(in_bf16: bool, *, reshards: bool) -> Shard:
    def shard(model: Language, mesh: DeviceMesh) -> None:
        given: dict[str, Any] = {"mesh": mesh, "mp_policy": _policy(in_bf16)}
        for unit in [*model.layers, model]:
            fsdp2(unit, reshard_after_forward=reshards, **given)

    return shard


def contenders(in_bf16: bool) -> dict[str, Shard]:
    """By name, what is compared; the baseline first, which is FSDP2 at ZeRO-3."""
    return {
        BASELINE: _theirs(in_bf16, reshards=True),
        "FSDP2, ZeRO-2": _theirs(in_bf16, reshards=False),
        "ours, ZeRO-3": _ours(in_bf16, "optim_grads_params"),
        "ours, ZeRO-3, one gradient buffer": _ours(
            in_bf16, "optim_grads_params", max_live_grad_buffers=1
        ),
        "ours, ZeRO-3, and no prefetch": _ours(
            in_bf16,
            "optim_grads_params",
            max_live_grad_buffers=1,
            enable_unshard_prefetch=False,
        ),
        "ours, ZeRO-2": _ours(in_bf16, "optim_grads"),
    }


def measure(shard: Shard, mesh: DeviceMesh, args: argparse.Namespace) -> dict[str, int]:
    """Bytes of building a model, at rest, and at the peak of a step."""
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as meter:
            torch.manual_seed(0)
            with meter.peak_of():
                model = Language(args.layers, args.width)
                shard(model, mesh)
            found = {"building": meter.peak}
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            tokens = torch.randint(512, (args.batch, args.length))
            for _ in range(args.steps):
                with meter.peak_of():
                    model(tokens).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return found | {"at rest": meter.now, "peak": meter.peak}
    finally:
        gc.enable()


def _work(mesh: DeviceMesh, args: argparse.Namespace) -> None:
    found = {}
    for dtype in ("fp32", "bf16"):
        found[dtype] = {
            name: measure(shard, mesh, args) for name, shard in contenders(dtype == "bf16").items()
        }
    if dist.get_rank() == 0:
        _report(found, args)


def _report(found: dict[str, dict[str, dict[str, int]]], args: argparse.Namespace) -> None:
    lines = []
    for dtype, rows in found.items():
        lines += [
            f"{args.layers} layers of width {args.width}, {dtype}, AdamW, {args.ranks} ranks "
            f"(gloo), {args.batch} x {args.length} tokens: MB, and over {BASELINE}'s",
            f"{'':36}" + "".join(f"{column:>18}" for column in COLUMNS),
        ]
        base = rows[BASELINE]
        for name, row in rows.items():
            cells = (f"{row[c] / _MB:10.1f} ({row[c] / base[c]:.2f})" for c in COLUMNS)
            lines.append(f"{name:36}" + "".join(f"{cell:>18}" for cell in cells))
    sys.stdout.write("\n".join(lines) + "\n")
    common.write(args, "memory.json", nbytes=found)


def main() -> None:
    """Measure and print a table."""
    sizes = {"ranks": 2, "layers": 8, "width": 512, "batch": 2, "length": 32, "steps": 3}
    common.run_ranks(_work, common.options("benchmarks.memory", __doc__, **sizes).parse_args())


if __name__ == "__main__":
    main()
