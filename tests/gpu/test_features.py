"""Features beside plain training: offload, fp16, streams, groups, registered memory, hooks, TP."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.memory.registered_memory import deregister_all
from megatron_fsdp_v2.runtime.registered_pool import register_pool
from tests.distributed.wrapping import STRATEGIES, shards_of, step_all, wrap
from tests.gpu.machine import Machine, deterministic, mesh_of
from tests.gpu.test_pauses import pause
from tests.gpu.test_training import LOW_PRECISION, TOLERANCE, parity
from tests.reference.models import Stack

STEPS = 3
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, grad_comm_dtype=torch.float16)


def _stack(device: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return wrap(Stack(), mesh=mesh_of(device), **options)


def _inputs(step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(*shape, generator=generator)


def _train(model: Any) -> list[torch.Tensor]:
    """Train with AdamW on this rank's data; return its rows of the weights on the host."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        model(_inputs(step, 4, 5)).float().square().mean().backward()
        step_all(optimizer)
    return [rows.cpu() for rows in shards_of(model)]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


# -- offload, precision -------------------------------------------------------------------------


def offloaded(device: str, strategy: str) -> float:
    """Return the largest difference of weights that are stepped in host memory from others."""
    policy = CPUOffloadPolicy(pin_memory=device == "cuda")
    plain = _train(_stack(device, sharding_strategy=strategy))
    moved = _train(_stack(device, sharding_strategy=strategy, offload_policy=policy))
    pairs = zip(plain, moved, strict=True)
    return max([float((a - b).abs().max()) for a, b in pairs if a.numel()], default=0.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offloaded_weights_train_like_weights_on_the_device(
    machine: Machine, strategy: str
) -> None:
    assert max(machine.run(offloaded, strategy)) < 10 * TOLERANCE[machine.device]


def scaled(device: str, strategy: str) -> dict[str, bool]:
    """Train in fp16 with a GradScaler; one rank overflows in the second of three steps."""
    model = _stack(device, sharding_strategy=strategy, mp_policy=FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)  # type: ignore[attr-defined]
    losses, unchanged = [], False
    for step in range(STEPS):
        before = shards_of(model)
        loss = model(_inputs(0, 4, 5)).float().square().mean()
        losses.append(float(loss.detach()))
        overflows = step == 1 and dist.get_rank() == 0
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 1:
            unchanged = _same(before, shards_of(model))
    return {
        "skipped": unchanged and losses[2] == losses[1],
        "scale halved": scaler.get_scale() == 2.0**9,
        "learned": losses[1] < losses[0],
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradscaler_skips_a_step_in_fp16_on_all_ranks(machine: Machine, strategy: str) -> None:
    for found in machine.run(scaled, strategy):
        assert all(found.values()), found


def test_sums_in_fp32_train_like_an_unsharded_loop(
    machine: Machine,
) -> None:
    machine.require(2)
    shape, strategies = (machine.ranks,), STRATEGIES[1:]
    for found in machine.run(fp32_sums, shape, strategies):
        assert max(found.values()) < LOW_PRECISION, found


def fp32_sums(device: str, shape: tuple[int, ...], strategies: tuple[str, ...]) -> dict[str, float]:
    """Return errors of trainings whose reduce-scatters send bf16 and add in fp32."""
    return parity(device, shape, "no_shard", "bf16, fp32 sums", ["plain"], strategies)


# -- streams ------------------------------------------------------------------------------------


class _Side:
    """A side stream with random pauses, or no stream."""

    def __init__(self, device: str, *, is_used: bool) -> None:
        self._chance = random.Random(dist.get_rank())
        self._device = device
        self.stream: Any = torch.cuda.Stream() if is_used and device == "cuda" else None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Run on the stream, after the current stream's work."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            pause(self._device, self._chance)
            yield
            pause(self._device, self._chance)

    def join(self) -> None:
        """Make the current stream wait."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


def distilled(device: str, strategy: str, *, on_side: bool) -> list[torch.Tensor]:
    """Train a student; its teacher runs between forward and backward, perhaps on a side stream."""
    student = _stack(device, sharding_strategy=strategy)
    teacher = _stack(device, seed=1, sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    side = _Side(device, is_used=on_side)
    for step in range(STEPS):
        batch = _inputs(step, 4, 5).to(device)
        output = student(batch)
        with side.use(), torch.no_grad():
            target = teacher(batch)
        output.square().mean().backward()
        side.join()
        student(batch).sub(target).square().mean().backward()
        step_all(optimizer)
    return [rows.cpu() for rows in shards_of(student)]


def stepped_aside(device: str, strategy: str, *, on_side: bool) -> list[torch.Tensor]:
    """Train a model whose optimizer steps on a side stream, which gathers wait for by an event."""
    torch.manual_seed(0)
    model: Any = Stack()
    units = [model.input, *model.blocks, model.output]
    wrap(model, units, mesh=mesh_of(device), sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    side = _Side(device, is_used=on_side)
    for step in range(STEPS):
        model(_inputs(step, 4, 5)).square().mean().backward()
        with side.use():
            optimizer.step()
        model.set_post_optim_event(side.stream.record_event() if side.stream else None)
        optimizer.zero_grad()
    side.join()
    return [rows.cpu() for rows in shards_of(model)]


def hooked(device: str, strategy: str, *, on_side: bool) -> list[torch.Tensor]:
    """Train a model whose reduced gradients a hook doubles, perhaps in a stream of its own."""
    model = _stack(device, sharding_strategy=strategy)
    side = _Side(device, is_used=on_side)
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(lambda flat: flat.mul_(2.0), stream=side.stream)
    return _train(model)


ON_SIDE: dict[str, Callable[..., list[torch.Tensor]]] = {
    "two models": distilled,
    "optimizer and event": stepped_aside,
    "hooks": hooked,
}


def differing_on_side(device: str, what: str) -> list[str]:
    """Return the strategies for which a side stream changes a bit."""
    with deterministic():
        return [
            strategy
            for strategy in STRATEGIES
            if not _same(
                ON_SIDE[what](device, strategy, on_side=True),
                ON_SIDE[what](device, strategy, on_side=False),
            )
        ]


@pytest.mark.parametrize("what", ON_SIDE)
def test_side_stream_keeps_results_bitwise_identical(machine: Machine, what: str) -> None:
    assert machine.run(differing_on_side, what) == [[]] * machine.ranks


# -- groups, memory, tensor parallelism ---------------------------------------------------------


def differing_with_gather_group(device: str) -> list[str]:
    """Return the strategies for which gathers in a process group of their own change a bit."""
    wrong = []
    for strategy in STRATEGIES:
        model = _stack(device, sharding_strategy=strategy)
        model.set_separate_reduce_scatter_group(True)
        if not _same(_train(model), _train(_stack(device, sharding_strategy=strategy))):
            wrong.append(strategy)
    return wrong


def test_separate_gather_group_keeps_results_bitwise_identical(machine: Machine) -> None:
    assert machine.run(differing_with_gather_group) == [[]] * machine.ranks


def registered(device: str) -> dict[str, bool]:
    """Train with a traced pool in memory that is registered with the library of collectives."""
    plain = _train(_stack(device))
    model = _stack(device, enable_trace_pool=True)
    is_registered = register_pool(model)
    found = _train(model)
    if device == "cuda":
        torch.cuda.synchronize()
    deregister_all()
    return {"registered": is_registered, "same": _same(plain, found)}


def test_registered_memory_keeps_results_bitwise_identical(machine: Machine) -> None:
    expected = {"registered": machine.on_cuda and machine.ranks > 1, "same": True}
    assert machine.run(registered) == [expected] * machine.ranks


def tensor_parallel(device: str) -> float:
    """Return the relative error of a loss after steps with `parallelize_module`."""
    num = dist.get_world_size()
    mesh = init_device_mesh(device, (num // 2, 2), mesh_dim_names=("dp", "tp"))
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    losses = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(device)
        if is_sharded:
            fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.zeros(())
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            # Equal on all ranks, so that the mean over ranks is the loss of one.
            loss = model(torch.randn(4, 8, generator=generator).to(device)).square().mean()
            loss.backward()
            step_all(optimizer)
        losses.append(float(loss.detach()))
    return abs(losses[1] - losses[0]) / abs(losses[0])


def test_parallelized_model_trains_like_a_plain_one(machine: Machine) -> None:
    machine.require(2)
    ranks = machine.ranks // 2 * 2
    assert max(machine.run(tensor_parallel, ranks=ranks)) < 10 * TOLERANCE[machine.device]
