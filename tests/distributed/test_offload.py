"""Main weights, gradients, optimizer states and saved activations in host memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.comm.streams import StreamCommunicator
from megatron_fsdp_v2.diagnostics import memory_tracker
from megatron_fsdp_v2.diagnostics.memory_ledger import Role
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.params.autograd import save_activations_on_cpu
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, batch, on_mesh, wrap
from tests.reference.models import INPUT, Block, Stack
from tests.stream_safety import Recording, record_streams

POLICY = fsdp.CPUOffloadPolicy(pin_memory=True)


def _made(offloads: bool = True, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(Stack(), offload_policy=POLICY if offloads else None, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    """Train with two micro-batches a step; return losses, norms, evaluations and final weights."""
    found = []
    for step in steps:
        # Both modes of zero_grad, and one step that accumulates.
        if step != 1:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = model(batch(dist.get_rank(), 2 * step + micro)).square().mean()
                loss.backward()
                found.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        with torch.no_grad():
            found.append(model(batch(0, step)).sum())
    return [*found, *(local_of(param).clone() for param in model.parameters())]


@on_ranks(4, name=["bf16", "optim", "hfsdp"])
def test_offloaded_tensors_take_no_device_memory(name: str) -> None:
    options = {"bf16": {"mp_policy": BF16}, "optim": {"sharding_strategy": "optim"}}
    model, optimizer = _made(**options.get(name) or on_mesh("HFSDP 2x2"))
    _train(model, optimizer, range(1))
    with memory_tracker(model, optimizer) as memory:
        optimizer.zero_grad()
        model(batch(dist.get_rank())).square().mean().backward()
        optimizer.step()
    main = sum(4 * local_of(param).numel() for param in model.parameters())
    here, there = memory.live, memory.offloaded
    for role in (Role.MAIN_WEIGHT, Role.MAIN_GRAD):
        assert here[role] == 0
        assert there[role] >= main
    # The state existed before tracking, as in a run in progress.
    assert here[Role.OPTIMIZER] == 0
    assert there[Role.OPTIMIZER] >= 2 * main
    assert (here[Role.MODEL_WEIGHT] == 0) == (name == "bf16")


def _recorded_steps() -> Recording:
    model, optimizer = _made()
    with record_streams(model) as recording:
        for step in range(2):
            # Gradients accumulate, so that they are copied to the device and back.
            optimizer.zero_grad(set_to_none=False)
            for _ in range(2):
                model(batch(dist.get_rank(), step)).square().mean().backward()
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


@on_ranks(2)
def test_checkpoint_resumes_with_and_without_offload(tmp_path: Path) -> None:
    model, optimizer = _made()
    _train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "k", model, optimizer)
    expected = _train(model, optimizer, range(2, 4))
    for how in ({"offloads": False}, {}, {"offloads": False, "sharding_strategy": "optim_grads"}):
        again, later = _made(**how)  # type: ignore[arg-type]
        checkpoint.load(tmp_path / "k", again, later)
        found = _train(again, later, range(2, 4))
        count = 2 * 4
        assert all(map(torch.equal, expected[:count], found[:count])), how


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
