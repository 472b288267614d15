"""The trace pool in memory that is registered: what, when, once, and taken back at the end."""

from __future__ import annotations

import contextlib
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.backends import NcclRegistrar, registrar_for
from megatron_fsdp_v2.memory.registered_memory import Registrar, deregister_all
from megatron_fsdp_v2.runtime.registered_pool import register_pool
from tests.distributed.wrapping import batch, mesh_of, said, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack


class Recorder:
    """Stands where NCCL stands, and notes what it is told."""

    def __init__(self, rejects: bool = False) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.blocks: dict[int, torch.Tensor] = {}
        self.rejects = rejects

    def new_pool(self, group: Any, device: torch.device) -> int:
        self.calls.append(("pool", len(self.blocks), group.group_name))
        return len(self.blocks)

    def allocate(self, pool: int, nbytes: int, device: torch.device) -> torch.Tensor:
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # Only its address is kept: the block is to be freed when nobody uses it.
        self.blocks[pool] = torch.tensor([block.data_ptr(), nbytes])
        return block

    def register(self, pool: int, group: Any, device: torch.device) -> None:
        if self.rejects:
            raise RuntimeError("no such driver")
        self.calls.append(("register", pool, group.group_name))

    def deregister(self, pool: int, group: Any, device: torch.device) -> None:
        self.calls.append(("deregister", pool, group.group_name))

    def told(self, what: str) -> list[tuple[int, str]]:
        return [(pool, group) for kind, pool, group in self.calls if kind == what]


def _train(model: Any, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.to_local().clone() for param in model.parameters()]


def _life(shape: tuple[int, ...]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    torch.manual_seed(0)
    plain = _train(wrap(Stack(), mesh=mesh_of(*shape), enable_trace_pool=True), 6)
    torch.manual_seed(0)
    model = wrap(Stack(), mesh=mesh_of(*shape), enable_trace_pool=True)
    recorder = Recorder()
    facts["is on"] = register_pool(model, recorder)
    facts["before a plan"] = list(recorder.calls)
    weights = _train(model, 6)
    facts["same weights"] = all(map(torch.equal, weights, plain))
    first = recorder.told("register")
    blocks = {b.data_ptr() for b in model.trace_pool().blocks()}
    facts["in use"] = blocks <= {int(block[0]) for block in recorder.blocks.values()}
    facts["groups"] = sorted({group for _, group in first})
    _train(model, 3)
    facts["once"] = recorder.told("register") == first and len(set(first)) == len(first)
    facts["kept"] = recorder.told("deregister")
    # Another plan is another block; what was there is given up.
    model.trace_pool().reset()
    gc.collect()
    facts["given up"] = sorted(recorder.told("deregister")) == sorted(first)
    _train(model, 6)
    deregister_all()
    facts["at the end"] = sorted(recorder.told("deregister")) == sorted(recorder.told("register"))
    deregister_all()
    del model
    gc.collect()
    facts["no more"] = len(recorder.told("deregister")) == len(recorder.told("register")) > 2
    return facts


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.functional)])
def test_blocks_are_registered_once_with_every_group_and_taken_back(
    pools: RankPools, shape: tuple[int, ...]
) -> None:
    size = 2 if len(shape) == 1 else 4
    for facts in pools(size).run(_life, shape):
        assert len(facts.pop("groups")) == len(shape)
        assert facts.pop("before a plan") == facts.pop("kept") == []
        assert set(facts.values()) == {True}, facts


def _rejected() -> tuple[int, list[str]]:
    model = wrap(Stack(), mesh=mesh_of(2), enable_trace_pool=True)
    register_pool(model, Recorder(rejects=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = _train(model, 5)
    return len(weights), [str(warning.message) for warning in caught]


def test_memory_that_cannot_be_registered_is_used_all_the_same(pools: RankPools) -> None:
    for num_weights, messages in pools(2).run(_rejected):
        assert num_weights
        assert messages
        assert all("could not be registered with process group" in text for text in messages)
        assert all(text.endswith("no such driver") for text in messages)


def _without() -> tuple[bool, str, str]:
    on_a_cpu = register_pool(wrap(Stack(), mesh=mesh_of(2), enable_trace_pool=True))
    plain = wrap(Stack(), mesh=mesh_of(2))
    return (
        on_a_cpu,
        said(RuntimeError, lambda: register_pool(plain)),
        said(ValueError, lambda: register_pool(Stack())),
    )


def test_there_is_nothing_to_register_on_a_cpu_or_without_a_pool(pools: RankPools) -> None:
    for on_a_cpu, plain, unsharded in pools(2).run(_without):
        assert on_a_cpu is False
        assert "has no trace pool" in plain
        assert "Stack is not sharded" in unsharded


class _Backend:
    """Stands where a process group's NCCL stands."""

    mem_allocator = "NCCL's allocator"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def _get_backend(self, device: torch.device) -> _Backend:
        assert device.type == "cuda"
        return self

    def register_mem_pool(self, pool: Any) -> None:
        self.calls.append(("register", pool))

    def deregister_mem_pool(self, pool: Any) -> None:
        self.calls.append(("deregister", pool))


def test_nccl_is_given_pools_of_its_own_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = _Backend()
    used: list[Any] = []

    def use_mem_pool(pool: Any, device: torch.device) -> Any:
        used.append((pool, device.index))
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: ("pool", allocator))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch, "empty", lambda nbytes, **options: (nbytes, options["dtype"]))
    device = torch.device("cuda", 3)
    registrar: Registrar | None = registrar_for(device)
    assert isinstance(registrar, NcclRegistrar)
    pool = registrar.new_pool(group, device)
    assert pool == ("pool", "NCCL's allocator")
    assert registrar.allocate(pool, 64, device) == (64, torch.uint8)
    assert used == [(pool, 3)]
    registrar.register(pool, group, device)
    registrar.deregister(pool, group, device)
    assert group.calls == [("register", pool), ("deregister", pool)]
    assert registrar_for(torch.device("cpu")) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
def test_torch_has_what_nccl_is_called_by() -> None:
    from torch.distributed import ProcessGroupNCCL

    for name in ("register_mem_pool", "deregister_mem_pool", "mem_allocator"):
        assert hasattr(ProcessGroupNCCL, name), name
    assert hasattr(torch.cuda, "MemPool")
    assert hasattr(torch.cuda, "use_mem_pool")
