"""Training with random pauses is bitwise identical to training with synchronous launches.

A missing wait has an effect only if one stream is late. Therefore every collective and every layer
pauses for a random time on its stream, different on every rank. The reference is the same training
with CUDA_LAUNCH_BLOCKING=1, whose result does not depend on waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.comm.interface import Collective, Communicator, Work
from megatron_fsdp_v2.runtime.module import named_units
from tests.distributed.wrapping import BF16, STRATEGIES, step_all
from tests.gpu.machine import Machine, deterministic, mesh_of, sharded_blocks

MAX_CYCLES = 4_000_000
"""Longest pause on a GPU in clock cycles: about two milliseconds."""
SEEDS = (1, 2, 3)


def pause(device: str, chance: random.Random) -> None:
    """Pause the current stream, or the host on a CPU, for a random time."""
    if device == "cuda":
        torch.cuda._sleep(chance.randrange(MAX_CYCLES))
    else:
        time.sleep(chance.random() / 1000)


class _PausingCommunicator:
    """A communicator with pauses before and after each collective, on the collective's stream.

    All other attributes are those of the wrapped communicator.
    """

    def __init__(self, inner: Communicator, late: Callable[[], None]) -> None:
        self._inner = inner
        self._late = late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """See `Communicator.issue`."""
        before, after = self._with_pauses(collective.before), self._with_pauses(collective.after)
        late = collective._replace(before=before, after=after)
        return self._inner.issue(late, async_op=async_op)

    def _with_pauses(self, step: Callable[[], object] | None) -> Callable[[], None]:
        def both() -> None:
            self._late()
            if step is not None:
                step()
                self._late()

        return both


def trained(
    device: str, shape: tuple[int, ...], strategies: Sequence[str], width: int, seeds: Sequence[int]
) -> dict[str, list[str]]:
    """Return, by strategy, digests of this rank's weights after two steps of two micro-batches.

    Args:
        device: `cuda` or `cpu`.
        shape: Shape of the mesh; an outer axis also shards the optimizer state.
        strategies: Sharding strategies.
        width: Width of the model.
        seeds: Seeds of the pauses; 0 for no pauses.
    """
    with deterministic():
        return {
            strategy: [_digest(device, shape, strategy, width, seed) for seed in seeds]
            for strategy in strategies
        }


def _digest(device: str, shape: tuple[int, ...], strategy: str, width: int, seed: int) -> str:
    chance = random.Random(1000 * seed + dist.get_rank())
    torch.manual_seed(0)
    outer = "optim" if len(shape) > 1 and strategy != STRATEGIES[0] else "no_shard"
    options: dict[str, Any] = {"sharding_strategy": strategy, "outer_dp_sharding_strategy": outer}
    options |= {"mesh": mesh_of(device, *shape), "mp_policy": BF16}
    model = sharded_blocks(device, 4, width, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def late(*_: object) -> None:
        pause(device, chance)

    if seed:
        _add_pauses(model, late)
    for step in range(2):
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                generator = torch.Generator().manual_seed(10 * step + micro + dist.get_rank())
                data = torch.randn(8, width, generator=generator).to(device)
                model(data).float().square().mean().backward()
        step_all(optimizer)
        with torch.no_grad():
            model(torch.ones(8, width, device=device))
    held = hashlib.sha256()
    for param in model.parameters():
        held.update(param.to_local().detach().cpu().view(torch.uint8).numpy().tobytes())
    return held.hexdigest()


def _add_pauses(model: nn.Module, late: Callable[..., None]) -> None:
    for module in model.modules():
        module.register_forward_hook(late)
    for _, unit in named_units(model):
        for group in unit.groups:
            inner = group.replace_communicator(unit.context.communicator)
            pausing: Any = _PausingCommunicator(inner, late)
            group.replace_communicator(pausing)


@pytest.mark.parametrize("num_axes", [1, 2])
def test_training_with_pauses_is_bitwise_identical(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, num_axes: int
) -> None:
    shape: tuple[int, ...] = (machine.ranks,)
    if num_axes == 2:
        machine.require(4)
        shape = (2, machine.ranks // 2)
    width = 1024 if machine.on_cuda else 16
    strategies = STRATEGIES[-1:] if machine.is_small else STRATEGIES
    seeds = SEEDS[:1] if machine.is_small else SEEDS
    words, ranks = (shape, strategies, width), math.prod(shape)
    late = machine.run(trained, *words, seeds, ranks=ranks)
    # Ranks started from here on launch one kernel at a time.
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    blocking = machine.run(trained, *words, (0,), ranks=ranks)
    for found, expected in zip(late, blocking, strict=True):
        assert found == {s: expected[s] * len(seeds) for s in strategies}
