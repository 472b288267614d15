"""Copies to and from host memory, and checkpoints of offloaded models.

`test_plan.py` measures the memory on the device and on the host, and the parity matrix compares
results with those without offload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.comm.streams import StreamCommunicator
from megatron_fsdp_v2.params.autograd import save_activations_on_cpu
from tests.distributed.checkpoint_trainings import digests, net, train
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import batch, fill, own_loss, wrap
from tests.reference.models import INPUT, Block, Stack
from tests.stream_safety import Recording, record_streams

POLICY = fsdp.CPUOffloadPolicy(pin_memory=True)


def _recorded_steps() -> Recording:
    model = wrap(Stack(), offload_policy=POLICY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with record_streams(model) as recording:
        for step in range(2):
            # Gradients accumulate, so that they are copied to the device and back.
            optimizer.zero_grad(set_to_none=False)
            for _ in range(2):
                own_loss(model, step).backward()
            optimizer.step()
    return recording


@on_ranks(2)
def test_host_step_that_does_not_wait_for_gradients_is_detected() -> None:
    with mock.patch.object(StreamCommunicator, "synchronize", lambda self: None):
        found = _recorded_steps().violations()
    assert any("main" in v.buffer.name and "on 'host'" in str(v) for v in found)


@on_ranks(2)
def test_host_memory_copies_run_on_communication_streams_without_races() -> None:
    recording = _recorded_steps()
    assert recording.violations() == []
    copies = {
        (stream, region.buffer.name.rpartition(" ")[2])
        for stream in ("gather", "reduce")
        for op in recording.schedule.operations(stream)
        if "copy_" in op.name
        for region in op.writes
    }
    assert {("gather", "gathered"), ("reduce", "main"), ("reduce", "offloading")} <= copies


@on_ranks(2, strategy=["optim", "optim_grads_params"], steps=[True, False])
def test_host_writes_main_weights_after_the_copies_of_a_forward(strategy: str, steps: bool) -> None:
    """By an optimizer after a forward without a backward, or by any code after an evaluation."""
    model = wrap(Stack(), offload_policy=POLICY, sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with record_streams(model) as recording:
        own_loss(model).backward()
        optimizer.step()
        with torch.set_grad_enabled(steps):
            own_loss(model, 1)
        if steps:
            optimizer.step()
        else:
            fill(model, 0.5)
    assert [str(violation) for violation in recording.violations()] == []


@on_ranks(2)
def test_checkpoint_resumes_with_and_without_offload(tmp_path: Path) -> None:
    def made(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = net(**options)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    model, optimizer = made(offload_policy=POLICY)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path / "k", model, optimizer)
    expected = train(model, optimizer, 2, first=2)
    options: list[dict[str, Any]] = [
        {},
        {"offload_policy": POLICY},
        {"sharding_strategy": "optim_grads"},
    ]
    for each in options:
        again, later = made(**each)
        checkpoint.load(tmp_path / "k", again, later)
        assert train(again, later, 2, first=2) == expected, each
        assert digests(again, later) == digests(model, optimizer), each


@on_ranks(2)
def test_activations_go_to_the_host_and_weights_do_not() -> None:
    original = torch.Tensor.copy_
    shapes: set[tuple[int, ...]] = set()

    def noted(tensor: Any, source: Any, *rest: Any) -> Any:
        shapes.add(tuple(source.shape))
        return original(tensor, source, *rest)

    layer = Block(INPUT)
    model = wrap(nn.Sequential(layer), units=[layer])
    with pytest.MonkeyPatch.context() as patch, save_activations_on_cpu():
        patch.setattr(torch.Tensor, "copy_", noted)
        model(batch(0))
    inner = layer.up.out_features
    assert (4, inner) in shapes
    assert not shapes & {(inner, INPUT), (INPUT, inner), (INPUT,)}
