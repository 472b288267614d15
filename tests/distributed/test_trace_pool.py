"""The trace pool: size close to the bound, no allocations, stable addresses, registration."""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from examples.pool_picture import pool_picture
from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.comm.backends import NcclRegistrar, registrar_for
from megatron_fsdp_v2.memory.observer import BufferAcquired, BufferReleasing, Event
from megatron_fsdp_v2.memory.registered_memory import deregister_all
from megatron_fsdp_v2.runtime.module import unit_of
from megatron_fsdp_v2.runtime.registered_pool import register_pool
from tests.cases import longer
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    error_message,
    mesh_of,
    on_mesh,
    own_loss,
    shards_of,
    step_all,
    train_own,
    wrap,
)
from tests.reference.models import Block, Stack

WIDTH = 48


class Deep(nn.Module):
    """The shape of a transformer: an input layer and many equal blocks."""

    def __init__(self, num_blocks: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(num_blocks))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def _sharded(model: Any, mesh_name: str = "2", **options: Any) -> Any:
    return wrap(model, **{"enable_trace_pool": True, **on_mesh(mesh_name), **options})


def _step(model: Any, *, num_micro: int = 1, evaluates: bool = False, rows: int = 2) -> None:
    for micro in range(num_micro):
        is_last = micro == num_micro - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            model(torch.randn(rows, model.input.in_features)).square().mean().backward()
        if evaluates:
            with torch.no_grad():
                model(torch.randn(1, model.input.in_features))


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "training": (lambda: Deep(16), {}, {}),
    "training with evaluations between": (lambda: Deep(16), {}, {"evaluates": True}),
    "recomputation": (lambda: Deep(16, recomputes=True), {}, {}),
    "4 micro-batches": (lambda: Deep(16), {}, {"num_micro": 4}),
    "HSDP 2x2": (lambda: Deep(12), {"mesh_name": "HSDP 2x2"}, {"num_micro": 2}),
    "bf16 with fp32 gradients": (
        lambda: Deep(12),
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {},
    ),
    "ZeRO-1": (lambda: Deep(12), {"sharding_strategy": "optim"}, {"num_micro": 2}),
}


BOUNDED = ("training", "training with evaluations between", "recomputation", "4 micro-batches")


def _places(model: Any, steps: dict[str, Any]) -> dict[str, set[int]]:
    """Addresses of each buffer in a step."""
    seen: dict[str, set[int]] = {}

    def look(*_: Any) -> None:
        for module in [*model.blocks, model]:
            for group in unit_of(module).groups:
                temporaries = group.temporaries()
                for buffer in temporaries.values():
                    if buffer.is_live:
                        seen.setdefault(buffer.name, set()).add(buffer.tensor.data_ptr())

    handles = [module.register_forward_hook(look) for module in model.blocks]
    handles += [module.register_full_backward_hook(look) for module in model.blocks]
    _step(model, **steps)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.slow
@on_ranks(lambda name: 4 if "mesh_name" in CASES[name][1] else 2, name=CASES)
def test_plans_are_within_5_percent_of_the_bound_without_allocations_after_warm_up(
    name: str,
) -> None:
    """Buffers keep their addresses from step to step."""
    build, options, steps = CASES[name]
    model = _sharded(build(), **options)
    for _ in range(4):
        _step(model, **steps)
    pool = model.trace_pool()
    before = pool.num_allocations
    levels = [0]

    def receive(event: Event) -> None:
        match event:
            case BufferAcquired(buffer):
                levels.append(levels[-1] + buffer.tensor.nbytes)
            case BufferReleasing(buffer):
                levels.append(levels[-1] - buffer.tensor.nbytes)

    unit_of(model).context.observer.subscribe(receive)
    first, second = (_places(model, steps) for _ in range(2))
    reports = pool.reports()
    planned = sum(report.plan.nbytes for report in reports)
    assert max(report.plan.excess for report in reports) <= 0.05, pool.report()
    # Weights and gradients together: a single block for both could not be smaller.
    assert max(levels) <= planned <= 1.05 * max(levels)
    if name in BOUNDED:
        root, block = (unit_of(m).groups[0].layout.numel for m in (model, model.blocks[0]))
        two_units = 4 * 2 * (root + 2 * block)
        # The root's gradients come last, when no block is gathered any more.
        assert 0.9 * two_units < max(levels) <= two_units
    assert pool.num_allocations == before
    assert not any(report.outside_pool for report in reports)
    assert len(first) > 12
    assert first == second
    assert {name: len(at) for name, at in first.items() if len(at) > 1} == {}


# -- released memory ------------------------------------------------------------------------------


# The pool's method to call after a step, and between the next step's forward and backward.
GIVEN_BACK = [("", "")] * 4
GIVEN_BACK += [("release", ""), ("release", "release"), ("", "reset")]
GIVEN_BACK += [("", "")] * 4


@on_ranks(2)
def test_pool_releases_memory_unless_a_backward_needs_it_and_results_are_unchanged() -> None:
    bits, given_back = [], []
    for pooled in (False, True):
        torch.manual_seed(0)
        model: Any = _sharded(Stack(5), enable_trace_pool=pooled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        pool = model.trace_pool() if pooled else None
        for step, (after, between) in enumerate(GIVEN_BACK):
            if pool is not None and after:
                given_back.append((getattr(pool, after)(), pool.release()))
            loss = own_loss(model, step)
            if pool is not None and between:
                given_back.append(getattr(pool, between)())
            loss.backward()
            step_all(optimizer)
        bits.append(shards_of(model))
    planned = sum(report.plan.nbytes for report in pool.reports() if report.plan is not None)
    first, second, awaited, _ = given_back
    assert all(map(torch.equal, *bits))
    assert first == second == (planned, 0) and planned > 0
    assert awaited == 0


# -- misuse ---------------------------------------------------------------------------------------


PAIRS = list(itertools.combinations(range(5), 2))


@on_ranks(2)
def test_units_with_conflicting_addresses_are_both_named() -> None:
    model = _sharded(Stack(5))
    for _ in range(4):
        _step(model)
    report = next(r for r in model.trace_pool().reports() if r.kind.is_weight)
    weights = [report.names.index(f"blocks.{index}/0/model_weight") for index in range(5)]
    first, second = next(
        (i, j) for i, j in PAIRS if report.plan.overlaps[weights[i]] >> weights[j] & 1
    )
    loss = model(torch.randn(2, 5)).square().mean()
    model.blocks[second].unshard()
    text = error_message(RuntimeError, model.blocks[first].unshard)
    del loss
    model.blocks[second].reshard()
    for _ in range(3):
        _step(model)
    assert "must return to the memory that saved views of it refer to" in text
    assert all(f"blocks.{index}/0/model_weight" in text for index in (first, second))
    assert "reset()" in text


@on_ranks(2)
def test_a_plan_is_reported_as_text_and_as_a_picture(tmp_path: Path) -> None:
    path = tmp_path / f"{dist.get_rank()}.svg"
    plain, model = _sharded(Stack(2), enable_trace_pool=False), _sharded(Stack(5))
    early = model.trace_pool().report()
    assert "no plan yet" in error_message(RuntimeError, lambda: pool_picture(model, path))
    assert "Stack has no trace pool" in error_message(RuntimeError, plain.trace_pool)
    assert "Stack has no trace pool" in error_message(
        RuntimeError, lambda: pool_picture(plain, path)
    )
    for _ in range(4):
        _step(model)
    pool_picture(model, path)
    text = model.trace_pool().report()
    assert early == (
        "float32 weights on cpu: no plan yet; traced: nothing\n\n"
        "float32 gradients on cpu: no plan yet; traced: nothing"
    )
    assert "lower bound" in text
    assert "forward and synchronized backward (3x)" in text
    assert "blocks.0/0/model_weight, blocks.2/0/model_weight" in text
    root = ElementTree.parse(path).getroot()
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    # Each block is gathered twice in a pass, and two patterns were traced.
    assert sum(title.startswith("blocks.1/0/model_weight") for title in titles) == 4


class Recorder:
    """Replaces NCCL's registrar and records its calls."""

    def __init__(self, rejects: bool = False) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.blocks: dict[int, torch.Tensor] = {}
        self.rejects = rejects

    def allocate(self, nbytes: int, group: Any, device: torch.device) -> tuple[int, torch.Tensor]:
        pool, block = len(self.blocks), torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.calls.append(("pool", pool, group.group_name))
        # Keeps only the address, so that an unused block is freed.
        self.blocks[pool] = torch.tensor([block.data_ptr(), nbytes])
        return pool, block

    def register(self, pool: int, group: Any, device: torch.device) -> None:
        if self.rejects:
            raise RuntimeError("no such driver")
        self.calls.append(("register", pool, group.group_name))

    def wait(self, device: torch.device) -> None:
        self.calls.append(("wait", len(self.blocks), ""))

    def deregister(self, pool: int, group: Any, device: torch.device) -> None:
        self.calls.append(("deregister", pool, group.group_name))

    def always_waited(self) -> bool:
        """Whether the device was synchronized before each block was deregistered."""
        before = {"wait", "deregister"}
        calls = [kind for kind, _, _ in self.calls]
        pairs = zip(["", *calls], calls, strict=False)
        return all(first in before for first, second in pairs if second == "deregister")

    def calls_of(self, what: str) -> list[tuple[int, str]]:
        return [(pool, group) for kind, pool, group in self.calls if kind == what]


@on_ranks("shape", shape=[(2,), longer((2, 2))])
def test_blocks_are_registered_once_per_group_and_deregistered(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = train_own(wrap(Stack(), mesh=mesh_of(*shape), enable_trace_pool=True), 6)
    torch.manual_seed(0)
    model = wrap(Stack(), mesh=mesh_of(*shape), enable_trace_pool=True)
    recorder = Recorder()
    assert register_pool(model, recorder)
    assert not recorder.calls
    assert all(map(torch.equal, train_own(model, 6), plain))
    first = recorder.calls_of("register")
    used = {b.data_ptr() for b in model.trace_pool().blocks()}
    assert used <= {int(block[0]) for block in recorder.blocks.values()}
    assert len({group for _, group in first}) == len(shape)
    train_own(model, 3)
    assert recorder.calls_of("register") == first and len(set(first)) == len(first)
    assert not recorder.calls_of("deregister")
    # A new plan allocates a new block, and the old block is released.
    model.trace_pool().reset()
    gc.collect()
    assert sorted(recorder.calls_of("deregister")) == sorted(first)
    assert recorder.always_waited()
    train_own(model, 6)
    deregister_all()
    assert sorted(recorder.calls_of("deregister")) == sorted(recorder.calls_of("register"))
    deregister_all()
    del model
    gc.collect()
    assert len(recorder.calls_of("deregister")) == len(recorder.calls_of("register")) > 2
    assert recorder.always_waited()


@on_ranks(2)
def test_memory_is_used_even_if_its_registration_fails() -> None:
    model = wrap(Stack(), mesh=mesh_of(2), enable_trace_pool=True)
    recorder = Recorder(rejects=True)
    register_pool(model, recorder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = train_own(model, 5)
    messages = [str(warning.message) for warning in caught]
    assert len(weights)
    assert messages
    assert all("could not be registered with process group" in text for text in messages)
    assert all(text.endswith("no such driver") for text in messages)
    # Memory of NCCL's allocator is returned, registered or not.
    model.trace_pool().reset()
    gc.collect()
    assert len(recorder.calls_of("wait")) == len(recorder.calls_of("pool")) > 0


@on_ranks(2)
def test_register_pool_returns_false_on_a_cpu_and_raises_without_a_pool() -> None:
    on_a_cpu = register_pool(wrap(Stack(), mesh=mesh_of(2), enable_trace_pool=True))
    plain = wrap(Stack(), mesh=mesh_of(2))
    assert on_a_cpu is False
    assert "has no trace pool" in error_message(RuntimeError, lambda: register_pool(plain))
    assert "Stack is not sharded" in error_message(ValueError, lambda: register_pool(Stack()))


def test_nccl_registrar_uses_pools_of_nccls_allocator() -> None:
    device, group = torch.device("cuda", 3), mock.Mock()
    backend, default = group._get_backend.return_value, mock.DEFAULT
    cuda = mock.patch.multiple(
        torch.cuda, MemPool=default, use_mem_pool=default, synchronize=default
    )
    with cuda as called, mock.patch.object(torch, "empty") as empty:
        registrar = registrar_for(device)
        assert isinstance(registrar, NcclRegistrar)
        pool, block = registrar.allocate(64, group, device)
        registrar.register(pool, group, device)
        registrar.wait(device)
        registrar.deregister(pool, group, device)
    called["MemPool"].assert_called_once_with(backend.mem_allocator)
    called["use_mem_pool"].assert_called_once_with(pool, device)
    called["synchronize"].assert_called_once_with(device)
    empty.assert_called_once_with(64, dtype=torch.uint8, device=device)
    assert block is empty.return_value
    names = [name for name, _, _ in backend.mock_calls]
    assert names == ["register_mem_pool", "deregister_mem_pool"]
    backend.register_mem_pool.assert_called_once_with(pool)
    backend.deregister_mem_pool.assert_called_once_with(pool)
    assert registrar_for(torch.device("cpu")) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
def test_torch_has_the_apis_of_the_nccl_registrar() -> None:
    from torch.distributed import ProcessGroupNCCL

    for name in ("register_mem_pool", "deregister_mem_pool", "mem_allocator"):
        assert hasattr(ProcessGroupNCCL, name), name
    assert hasattr(torch.cuda, "MemPool")
    assert hasattr(torch.cuda, "use_mem_pool")
