"""`CPUOffloadPolicy`: main weights, gradients and optimizer states in host memory."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.comm.streams import StreamCommunicator
from megatron_fsdp_v2.diagnostics import memory_tracker
from megatron_fsdp_v2.diagnostics.memory_ledger import Role
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.memory.host_memory import is_in_host_memory
from megatron_fsdp_v2.params.formats import register_format
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.cases import quick_if
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, STRATEGIES, batch, mesh_of, said, step_all, wrap
from tests.reference.models import Checkpointed, Stack
from tests.reference.scaled_float8 import ScaledFloat8Format, quantize_linears
from tests.stream_safety import Recording, record_streams

POLICY = fsdp.CPUOffloadPolicy(pin_memory=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        mesh: Its sizes.
        options: Of `fully_shard`.
        recomputes: Whether blocks are recomputed.
        fused: Whether the optimizer is torch's fused one.
    """

    mesh: tuple[int, ...] = (2,)
    options: tuple[tuple[str, Any], ...] = ()
    recomputes: bool = False
    fused: bool = False


def _case(strategy: str, *mesh: int, recomputes: bool = False, fused: bool = False, **more: Any):
    options = (("sharding_strategy", strategy), *more.items())
    return Case(mesh or (2,), options, recomputes, fused)


FULL = "optim_grads_params"
CASES = {
    **{strategy: _case(strategy) for strategy in STRATEGIES},
    "three ranks": _case(FULL, 3),
    "one rank": _case(FULL, 1),
    "bf16": _case(FULL, mp_policy=BF16),
    "bf16, optim": _case("optim", mp_policy=BF16),
    "recomputed": _case(FULL, recomputes=True),
    "traced pool": _case(FULL, enable_trace_pool=True),
    "waiting": _case(FULL, enable_async_reduce_grad=False, enable_unshard_prefetch=False),
    "fused": _case(FULL, fused=True),
    "hsdp": _case(FULL, 2, 2),
    "hfsdp": _case(FULL, 2, 2, outer_dp_sharding_strategy="optim"),
}
QUICK = (*STRATEGIES, "bf16", "hfsdp")


def _sharded(case: Case, **more: Any) -> Any:
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant=False) if case.recomputes else Stack()
    return wrap(model, mesh=mesh_of(*case.mesh), **dict(case.options), **more)


def _optimizer(case: Case, model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=case.fused)


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    """Losses, norms and in the end weights: two micro-batches a step, clipped, evaluated once."""
    found = []
    for step in steps:
        # Both ways of forgetting, and one step that adds to what is there.
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


@pytest.mark.parametrize(
    "case",
    [quick_if(name in QUICK, case, id=name) for name, case in CASES.items()],
)
@on_ranks("case")
def test_training_is_bit_by_bit_that_without_it(case: Case) -> None:
    found = []
    for more in ({}, {"offload_policy": POLICY}):
        model = _sharded(case, **more)
        found.append(_train(model, _optimizer(case, model), range(4)))
    for plain, offloaded in zip(*found, strict=True):
        assert torch.equal(plain, offloaded)


@on_ranks(2)
def test_what_the_optimizer_steps_and_makes_is_in_host_memory_and_nothing_rests_elsewhere() -> None:
    case = CASES["bf16"]
    model = _sharded(case, offload_policy=POLICY)
    optimizer = _optimizer(case, model)
    _train(model, optimizer, range(2))
    for module in (*model.blocks, model):
        for group in unit_of(module).groups:
            weights = group.weights
            assert weights.model is weights.main
            assert is_in_host_memory(weights.main.tensor)
            assert is_in_host_memory(group.grads.main.tensor)
            live = [*weights.temporaries().values(), *group.grads.temporaries().values()]
            assert not any(buffer.is_live for buffer in live)
            assert not any(is_in_host_memory(buffer.tensor) for buffer in live)
    for param in model.parameters():
        assert is_in_host_memory(local_of(param))
        assert local_of(param).numel() == 0 or is_in_host_memory(local_of(param.grad))


@pytest.mark.parametrize("name", ["bf16", "optim", "hfsdp"])
@on_ranks(4)
def test_the_device_has_none_of_it_and_never_more_than_the_bound(name: str) -> None:
    case = dataclasses.replace(CASES[name], mesh=(2, 2) if name == "hfsdp" else (4,))
    model = _sharded(case, offload_policy=POLICY)
    optimizer = _optimizer(case, model)
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
    # That was made before, as the state of a run that is under way is.
    assert here[Role.OPTIMIZER] == 0
    assert there[Role.OPTIMIZER] >= 2 * main
    assert (here[Role.MODEL_WEIGHT] == 0) == (name == "bf16")
    # What blocks compute with is no part of it: these are small.
    assert memory.peak.total <= memory.bound.total + 8192


def _recorded_steps() -> Recording:
    case = _case(FULL)
    model = _sharded(case, offload_policy=POLICY)
    optimizer = _optimizer(case, model)
    with record_streams(model) as recording:
        for step in range(2):
            # Gradients are added to, so that they are copied to the device and back.
            optimizer.zero_grad(set_to_none=False)
            for _ in range(2):
                model(batch(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
    return recording


@on_ranks(2)
def test_a_step_on_the_host_that_does_not_wait_for_gradients_is_found() -> None:
    with mock.patch.object(StreamCommunicator, "synchronize", lambda self: None):
        found = _recorded_steps().violations()
    assert any("main" in v.buffer.name and "on 'host'" in str(v) for v in found)


@on_ranks(2)
def test_copies_from_and_to_host_memory_run_beside_the_computation_and_race_with_nothing() -> None:
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
def test_a_checkpoint_goes_on_with_and_without_it(tmp_path: Path) -> None:
    case = _case(FULL)
    model = _sharded(case, offload_policy=POLICY)
    optimizer = _optimizer(case, model)
    _train(model, optimizer, range(2))
    folder = [tmp_path / "k" if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoint.save(folder[0], model, optimizer)
    expected = _train(model, optimizer, range(2, 4))
    for strategy, more in ((FULL, {}), (FULL, {"offload_policy": POLICY}), ("optim_grads", {})):
        other = _case(strategy)
        again = _sharded(other, **more)
        later = _optimizer(other, again)
        checkpoint.load(folder[0], again, later)
        found = _train(again, later, range(2, 4))
        count = 2 * 4
        assert all(map(torch.equal, expected[:count], found[:count])), (strategy, more)


@on_ranks(2)
def test_fsdp2_with_its_policy_trains_alike() -> None:
    torch.manual_seed(0)
    plain = Stack()
    theirs, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    mesh, policy = mesh_of(2), fsdp.CPUOffloadPolicy(pin_memory=False)
    for model, shard in ((theirs, fsdp.fully_shard), (ours, fully_shard)):
        for module in (*model.blocks, model):
            shard(module, mesh=mesh, offload_policy=policy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (theirs, ours)]
    for step in range(3):
        losses = []
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            loss = model(batch(dist.get_rank(), step)).square().mean()
            loss.backward()
            step_all(optimizer)
            losses.append(float(loss))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@on_ranks(1)
def test_what_cannot_be_offloaded_is_rejected_by_name() -> None:
    register_format(ScaledFloat8Format)
    model = Stack()
    quantize_linears(model)
    text = said(ValueError, lambda: fully_shard(model.blocks[0], offload_policy=POLICY))
    assert "parameter up.weight is a ScaledFloat8" in text
    text = said(ValueError, lambda: fully_shard(Stack(), offload_policy="cpu"))
    assert "offload_policy='cpu' cannot be honored; give" in text
