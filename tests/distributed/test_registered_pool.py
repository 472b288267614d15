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
from tests.cases import longer
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import mesh_of, said, train_own, wrap
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

    def wait(self, device: torch.device) -> None:
        self.calls.append(("wait", len(self.blocks), ""))

    def deregister(self, pool: int, group: Any, device: torch.device) -> None:
        self.calls.append(("deregister", pool, group.group_name))

    def always_waited(self) -> bool:
        """Whether the device was waited for before each block was deregistered."""
        before = {"wait", "deregister"}
        calls = [kind for kind, _, _ in self.calls]
        pairs = zip(["", *calls], calls, strict=False)
        return all(first in before for first, second in pairs if second == "deregister")

    def told(self, what: str) -> list[tuple[int, str]]:
        return [(pool, group) for kind, pool, group in self.calls if kind == what]


@on_ranks("shape", shape=[(2,), longer((2, 2))])
def test_blocks_are_registered_once_with_every_group_and_taken_back(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = train_own(wrap(Stack(), mesh=mesh_of(*shape), enable_trace_pool=True), 6)
    torch.manual_seed(0)
    model = wrap(Stack(), mesh=mesh_of(*shape), enable_trace_pool=True)
    recorder = Recorder()
    assert register_pool(model, recorder)
    assert not recorder.calls
    assert all(map(torch.equal, train_own(model, 6), plain))
    first = recorder.told("register")
    used = {b.data_ptr() for b in model.trace_pool().blocks()}
    assert used <= {int(block[0]) for block in recorder.blocks.values()}
    assert len({group for _, group in first}) == len(shape)
    train_own(model, 3)
    assert recorder.told("register") == first and len(set(first)) == len(first)
    assert not recorder.told("deregister")
    # Another plan is another block; what was there is given up.
    model.trace_pool().reset()
    gc.collect()
    assert sorted(recorder.told("deregister")) == sorted(first)
    assert recorder.always_waited()
    train_own(model, 6)
    deregister_all()
    assert sorted(recorder.told("deregister")) == sorted(recorder.told("register"))
    deregister_all()
    del model
    gc.collect()
    assert len(recorder.told("deregister")) == len(recorder.told("register")) > 2
    assert recorder.always_waited()


@on_ranks(2)
def test_memory_that_cannot_be_registered_is_used_all_the_same() -> None:
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
    # What NCCL's allocator gave goes back to it, registered or not.
    model.trace_pool().reset()
    gc.collect()
    assert len(recorder.told("wait")) == len(recorder.told("pool")) > 0


@on_ranks(2)
def test_there_is_nothing_to_register_on_a_cpu_or_without_a_pool() -> None:
    on_a_cpu = register_pool(wrap(Stack(), mesh=mesh_of(2), enable_trace_pool=True))
    plain = wrap(Stack(), mesh=mesh_of(2))
    assert on_a_cpu is False
    assert "has no trace pool" in said(RuntimeError, lambda: register_pool(plain))
    assert "Stack is not sharded" in said(ValueError, lambda: register_pool(Stack()))


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
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch, "empty", lambda nbytes, **options: (nbytes, options["dtype"]))
    device = torch.device("cuda", 3)
    registrar: Registrar | None = registrar_for(device)
    assert isinstance(registrar, NcclRegistrar)
    pool = registrar.new_pool(group, device)
    assert pool == ("pool", "NCCL's allocator")
    assert registrar.allocate(pool, 64, device) == (64, torch.uint8)
    assert used == [(pool, 3)]
    registrar.register(pool, group, device)
    registrar.wait(device)
    registrar.deregister(pool, group, device)
    assert waited == [device]
    assert group.calls == [("register", pool), ("deregister", pool)]
    assert registrar_for(torch.device("cpu")) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
def test_torch_has_what_nccl_is_called_by() -> None:
    from torch.distributed import ProcessGroupNCCL

    for name in ("register_mem_pool", "deregister_mem_pool", "mem_allocator"):
        assert hasattr(ProcessGroupNCCL, name), name
    assert hasattr(torch.cuda, "MemPool")
    assert hasattr(torch.cuda, "use_mem_pool")
