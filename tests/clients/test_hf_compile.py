"""Layers of transformers' models that are compiled, and sharded before or after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.clients.conftest import Measure
from tests.clients.harness import Trace, Training, build, change_of_parts, run, shard
from tests.clients.test_hf_training import COMPARED, training_of

BEFORE, AFTER, NEVER = "compiled and then sharded", "sharded and then compiled", "not compiled"


@dataclass
class Compiled:
    """What a training with compiled layers showed.

    Attributes:
        trace: What was computed.
        graphs: Graphs compiled so far, after the first micro-batch and after each step.
        breaks: Why graphs were broken, where they were.
    """

    trace: Trace
    graphs: list[int]
    breaks: list[str]


def compile_layers(model: Any) -> None:
    """Compile each layer by itself."""
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def train(training: Training, order: str, *, is_sharded: bool = True) -> Compiled:
    """Train with layers that are compiled at some time, or never."""
    graphs: list[int] = []

    def count(model: Any, step: int, rank: int) -> Mapping[str, torch.Tensor]:
        del model, step, rank
        graphs.append(counters["stats"]["unique_graphs"])
        return {}

    torch._dynamo.reset()
    counters.clear()
    training = replace(training, observe=count)
    model = build(training)
    if order == BEFORE:
        compile_layers(model)
    if is_sharded:
        shard(training, model)
    if order == AFTER:
        compile_layers(model)
    optimizer = training.optimizer(model.parameters())
    trace = run(training, model, optimizer, [dist.get_rank()], range(training.num_steps))
    return Compiled(trace, graphs, list(counters["graph_break"]))


def difference_with_compiled_layers(order: str) -> float:
    # Without a cache of keys and values, which only generation has a use for.
    training = training_of("Llama", prepare=lambda m: setattr(m.config, "use_cache", False))
    plain = train(training, NEVER)
    unsharded = train(training, BEFORE, is_sharded=False)
    compiled = train(training, order)
    assert not plain.trace.losses.keys() ^ compiled.trace.losses.keys()
    assert unsharded.graphs[0] > 0
    # What the library's code makes of it, and nothing more for being sharded; all in the first use.
    assert compiled.graphs == [unsharded.graphs[0]] * (2 * training.num_steps)
    assert compiled.breaks == unsharded.breaks
    found = [abs(compiled.trace.losses[key] - loss) for key, loss in plain.trace.losses.items()]
    pairs = zip(compiled.trace.grads, plain.trace.grads, strict=True)
    found += [change_of_parts(mine, theirs) for mine, theirs in pairs]
    found.append(change_of_parts(compiled.trace.params, plain.trace.params))
    return max(found)


@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_a_llama_whose_layers_are_compiled_trains_as_it_does_uncompiled(
    measure: Measure, order: str
) -> None:
    measure("transformers", COMPARED, 2, difference_with_compiled_layers, order, at_most=0.0)
