"""The limit of a step: the model's own compute plus the minimum number of collectives.

The limit has no overlap: on a CPU, communication and compute use the same cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import Setting
from benchmarks.engines import RATE, Plain
from benchmarks.model import Model
from megatron_fsdp_v2.comm.calls import broadcast_shards

__all__ = ["gathers_per_micro_batch", "limit_seconds", "pieces"]

COMPUTE = "compute"
GATHER = "all-gather"
BROADCASTS = "broadcasts"
REDUCE = "reduce-scatter"
EXCHANGE = "all-to-all and sum"
ALL_REDUCE = "all-reduce"
WHOLE = "AdamW, whole"
SHARE = "AdamW, share"


def limit_seconds(
    took: Mapping[str, float], strategy: str, micro_batches: int, gathers: float
) -> float:
    """Return the seconds of a step with only the work that the strategy requires.

    Args:
        took: Seconds of each component of `pieces`: compute of all micro-batches, and one call of
            each other component.
        strategy: Sharding strategy.
        micro_batches: Micro-batches of a step.
        gathers: Number of gathers of the model per micro-batch at ZeRO-3.
    """
    if strategy == "no_shard":
        return took[COMPUTE] + took[ALL_REDUCE] + took[WHOLE]
    reduction = min(took[name] for name in (REDUCE, EXCHANGE) if name in took)
    gather = min(took[name] for name in (GATHER, BROADCASTS) if name in took)
    reductions = 1 if strategy == "optim" else micro_batches
    passes = gathers * micro_batches if strategy == "optim_grads_params" else 1
    return took[COMPUTE] + reductions * reduction + passes * gather + took[SHARE]


def gathers_per_micro_batch(model: Model) -> float:
    """Return the bytes gathered per micro-batch at ZeRO-3 over the model's bytes.

    Layers are gathered twice, the root once.
    """
    whole = sum(param.numel() for param in model.parameters())
    layers = sum(param.numel() for param in model.layers.parameters())
    return (whole + layers) / whole


def pieces(
    plain: Plain, setting: Setting, batches: list[torch.Tensor]
) -> dict[str, Callable[[], Any]]:
    """Return the components of a limit by name: functions to time on all ranks together.

    Each collective covers the whole model in the compute dtype. The optimizer has one flat fp32
    parameter: the whole model, or a rank's share.
    """
    sample = next(plain.model.parameters())
    ranks, device = setting.ranks, sample.device
    numel = sum(param.numel() for param in plain.model.parameters())
    share = -(-numel // ranks)
    whole = torch.zeros(share * ranks, dtype=sample.dtype, device=device)
    mine = torch.zeros(share, dtype=sample.dtype, device=device)

    def compute() -> None:
        plain.compute(batches)
        plain.model.zero_grad()

    found: dict[str, Callable[[], Any]] = {
        COMPUTE: compute,
        GATHER: lambda: dist.all_gather_into_tensor(whole, mine),
        REDUCE: lambda: dist.reduce_scatter_tensor(mine, whole),
        ALL_REDUCE: lambda: dist.all_reduce(whole),
        WHOLE: _stepper(numel, device),
        SHARE: _stepper(share, device),
    }
    if device.type == "cpu":
        received = torch.empty_like(whole)

        def exchange() -> None:
            dist.all_to_all_single(received, whole)
            torch.sum(received.view(ranks, share), 0, out=mine)

        found[EXCHANGE] = exchange
        found[BROADCASTS] = lambda: broadcast_shards(whole, mine, group=dist.group.WORLD).wait()
    return found


def _stepper(numel: int, device: torch.device) -> Callable[[], Any]:
    weight = torch.zeros(numel, device=device, requires_grad=True)
    weight.grad = torch.zeros(numel, device=device)
    return torch.optim.AdamW([weight], lr=RATE, fused=True).step
