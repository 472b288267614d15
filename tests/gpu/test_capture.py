"""A whole step in one CUDA graph: replays are bitwise identical to steps without a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.wrapping import STRATEGIES, shards_of
from tests.gpu.machine import Machine, deterministic, sharded_blocks

STEPS = 4


class _EagerGraph:
    """Substitute for a CUDA graph on a CPU: a replay calls the step."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def replay(self) -> None:
        self._step()


def _captured(device: str, step: Any, *, on_other_stream: bool) -> Any:
    """Return a graph of a step; capture does not execute the step."""
    if device == "cpu":
        return _EagerGraph(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=None if on_other_stream else torch.cuda.current_stream()):
        step()
    return graph


def trained(
    device: str, strategy: str, width: int, *, in_graph: bool, on_other_stream: bool
) -> list[torch.Tensor]:
    """Return this rank's weights, and the output of an evaluation, after some steps."""
    torch.manual_seed(0)
    model = sharded_blocks(device, 3, width, sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=device == "cuda")
    data = torch.zeros(8, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    graph: Any = None
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        data.copy_(torch.randn(8, width, generator=generator))
        if number < 2 or not in_graph:
            # The first steps create optimizer state and compare ranks.
            step()
            continue
        if graph is None:
            graph = _captured(device, step, on_other_stream=on_other_stream)
        graph.replay()
    with torch.no_grad():
        output = model(data)
    return [tensor.cpu() for tensor in (*shards_of(model), output)]


def differing_strategies(
    device: str, strategies: Sequence[str], width: int, on_other_stream: bool
) -> list[str]:
    """Return the strategies for which runs with and without a graph differ in a bit."""
    found = []
    # The default stream cannot capture.
    on_side = device == "cuda" and not on_other_stream
    side = torch.cuda.stream(torch.cuda.Stream()) if on_side else contextlib.nullcontext()
    with deterministic(), side:
        for strategy in strategies:
            plain, replayed = (
                trained(device, strategy, width, in_graph=is_on, on_other_stream=on_other_stream)
                for is_on in (False, True)
            )
            if not all(map(torch.equal, plain, replayed)):
                found.append(strategy)
    return found


@pytest.mark.parametrize("on_other_stream", [False, True], ids=["one stream", "another stream"])
def test_graph_replays_and_a_later_evaluation_are_bitwise_identical_to_steps(
    machine: Machine, on_other_stream: bool
) -> None:
    """The steps before the capture run on its stream, or as in the example of docs/gpu.md."""
    width = 256 if machine.on_cuda else 16
    strategies = STRATEGIES[:2] if machine.is_small else STRATEGIES
    found = machine.run(differing_strategies, strategies, width, on_other_stream)
    assert found == [[]] * machine.ranks
    machine.require_cuda()
