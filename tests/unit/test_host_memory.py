"""Asynchronous saves copy to host memory that is made once, and shared by no two of them."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint import host_memory, saving
from megatron_fsdp_v2.checkpoint.host_memory import HostCopies, HostMemory
from tests.distributed.allocations import changes
from tests.distributed.wrapping import Dispatched

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:This process"),
]

SMALL = 1 << 15
"""Bytes that a save may allocate for what is not a copy of values."""


def _trained() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 100).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


@pytest.fixture
def let_write() -> Iterator[Callable[[], None]]:
    """To be called for saves to be written."""
    may_write = threading.Event()
    saving._BACKGROUND.submit(may_write.wait)
    yield may_write.set
    may_write.set()


def test_a_second_save_allocates_nothing_for_its_copies(tmp_path: Path) -> None:
    model, optimizer = _trained()
    nbytes = []
    for number in range(2):
        optimizer.step()
        # Written later, so that what writing allocates is not counted.
        may_write = threading.Event()
        saving._BACKGROUND.submit(may_write.wait)
        saves: list[Any] = []
        arguments = (tmp_path / str(number), model, optimizer)
        save = functools.partial(checkpoint.save, *arguments, async_save=True)
        found = changes(lambda save=save, saves=saves: saves.append(save()))
        nbytes.append(sum(size for size in found if size > SMALL))
        may_write.set()
        saves[0].result()
        expected = [param.clone() for param in model.parameters()]
        other, other_optimizer = _trained()
        checkpoint.load(tmp_path / str(number), other, other_optimizer)
        assert all(map(torch.equal, expected, other.parameters()))
    # Parameters and two moments of each.
    wanted = 3 * sum(param.nbytes for param in model.parameters())
    assert nbytes == [pytest.approx(wanted, rel=0.01), 0]


def test_saves_under_way_together_have_memory_of_their_own_and_one_set_is_kept(
    tmp_path: Path, let_write: Callable[[], None]
) -> None:
    model = nn.Linear(256, 256)
    saves = []
    for number in range(3):
        torch.nn.init.constant_(model.weight, number)
        saves.append(checkpoint.save(tmp_path / str(number), model, async_save=True))
    let_write()
    for number, save in enumerate(saves):
        assert save is not None
        save.result()
        checkpoint.load(tmp_path / str(number), model)
        assert model.weight.unique().tolist() == [number]
    assert saving._MEMORY[model].nbytes == pytest.approx(model.weight.nbytes, rel=0.01)


def test_the_memory_goes_with_the_model(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    save = checkpoint.save(tmp_path / "saved", model, async_save=True)
    assert save is not None
    save.result()
    memory = weakref.ref(saving._MEMORY[model])
    assert memory() is not None
    del model
    gc.collect()
    assert memory() is None


def test_copies_are_queued_and_waited_for_once_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _trained()
    events: list[str] = []

    def look(func: Any, args: Any, _: Any) -> None:
        if func is torch.ops.aten.copy_.default:
            events.append("queued" if (*args, False)[2] else "blocking")

    with Dispatched(look):
        monkeypatch.setattr(host_memory, "wait_for_device", lambda _: events.append("wait"))
        write = saving._Job.write
        monkeypatch.setattr(saving._Job, "write", lambda job: (events.append("write"), write(job)))
        save = checkpoint.save(tmp_path / "saved", model, optimizer, async_save=True)
    assert save is not None
    save.result()
    # Four parameters, each with two moments and a count of steps.
    assert events == ["queued"] * 16 + ["wait", "write"]


def test_what_a_save_does_not_use_is_not_kept_and_what_does_not_fit_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "_BLOCK", 1024)
    memory, cpu = HostMemory(), torch.device("cpu")
    kept = []
    for sizes in ((100, 1000, 3000, 0), (3000, 1000), (60,), ()):
        values = [torch.arange(size).byte() for size in sizes]
        copies = memory.lend(sum(map(HostCopies.nbytes_of, values)), cpu)
        made = [copies.copy(value) for value in values]
        for value, copy in zip(values, made, strict=True):
            assert torch.equal(value, copy)
            # What torch's writer writes as it is, and does not clone.
            assert copy.untyped_storage().nbytes() == value.nbytes
        copies.give_back()
        kept.append(memory.nbytes)
    # Sizes are rounded up to 64 bytes, and nothing lies in two blocks.
    assert kept == [1024 + 1024 + 3008, 3008 + 1024, 3008, 0]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5, dtype=torch.float64),
        torch.arange(12).view(3, 4).t(),
        torch.ones(1).expand(5, 2),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["number", "transposed", "expanded", "bool", "empty", "sparse", "conjugate"],
)
def test_every_kind_of_tensor_is_copied_as_it_is(value: torch.Tensor) -> None:
    memory = HostMemory()
    copies = memory.lend(0, value.device)
    copy = copies.copy(value)
    assert (copy.dtype, copy.shape, copy.layout) == (value.dtype, value.shape, value.layout)
    assert torch.equal(copy.to_dense(), value.to_dense())
