"""Snapshots in host memory: training goes on from them, and from a neighbor's copy, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint import Snapshot, recover, replicate, restore, snapshot
from tests.cases import quick_only
from tests.distributed.checkpoint_trainings import block_muon, digests
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, on_mesh, strategies_on, train_losses, wrap
from tests.reference.models import Stack

OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "Muon": block_muon,
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
}


class WithBuffers(Stack):
    """A stack with a buffer that forwards change, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.note = "new"

    def forward(self, x: torch.Tensor) -> Any:
        self.num_calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def _made(kind: str = "AdamW", **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = wrap(WithBuffers(), **options)
    return model, OPTIMIZERS[kind](model)


@on_ranks(
    "name",
    name=quick_only(["1", "3", "HFSDP 2x2"], "HFSDP 2x2"),
    kind=quick_only(OPTIMIZERS, "AdamW", "Muon"),
)
def test_training_goes_on_from_a_snapshot_bit_by_bit(name: str, kind: str) -> None:
    for strategy in strategies_on(name):
        options = {**on_mesh(name), "sharding_strategy": strategy, "mp_policy": BF16}
        model, optimizer = _made(kind, **options)
        train_losses(model, optimizer, range(2))
        model.note = "later"
        taken = snapshot(model, optimizer, step=2, extra={"step": 2})
        expected = train_losses(model, optimizer, range(2, 4))
        digest = snapshot(model, optimizer).memory
        # In place, and into a new model and a new optimizer, which has no state yet.
        for target in ((model, optimizer), _made(kind, **options)):
            assert restore(taken, *target) == {"step": 2}
            assert all(param.grad is None for param in target[0].parameters())
            assert (int(target[0].num_calls), target[0].note) == (2, "later")
            assert train_losses(*target, range(2, 4)) == expected, strategy
            assert torch.equal(snapshot(*target).memory, digest), strategy


@on_ranks(2)
def test_memory_of_a_snapshot_is_used_again_and_is_that_of_the_rows() -> None:
    model, optimizer = _made()
    train_losses(model, optimizer, range(1))
    first = snapshot(model, optimizer, step=1)
    rows = sum(param.to_local().nbytes for param in model.parameters())
    assert 3 * rows <= first.nbytes <= 3 * rows + 64 * (len(first.places) + 1)
    address, before = first.memory.data_ptr(), first.memory.clone()
    train_losses(model, optimizer, range(1, 2))
    second = snapshot(model, optimizer, step=2, into=first)
    assert second.memory.data_ptr() == address
    assert not torch.equal(second.memory, before)
    assert second.step == 2


@on_ranks(4)
def test_lost_ranks_go_on_from_their_neighbors_copies() -> None:
    model, optimizer = _made()
    train_losses(model, optimizer, range(2))
    mine = snapshot(model, optimizer, step=2, extra=dist.get_rank())
    held = replicate(mine, distance=2)
    assert held.extra == (dist.get_rank() - 2) % 4
    expected = train_losses(model, optimizer, range(2, 4))
    digest = digests(model, optimizer)
    # A node of ranks 0 and 1 is lost, with everything in its memory.
    is_lost = dist.get_rank() < 2
    model, optimizer = _made()
    found = recover(None if is_lost else mine, None if is_lost else held, distance=2)
    assert found.extra == dist.get_rank()
    assert torch.equal(found.memory, mine.memory)
    restore(found, model, optimizer)
    assert train_losses(model, optimizer, range(2, 4)) == expected
    assert digests(model, optimizer) == digest


@on_ranks(3)
def test_what_cannot_be_recovered_is_named_on_all_ranks() -> None:
    model, optimizer = _made()
    mine = snapshot(model, optimizer, step=1)
    held = replicate(mine)
    is_lost = dist.get_rank() < 2
    with pytest.raises(RuntimeError, match="the snapshot of rank 0 and its copy were both lost"):
        recover(None if is_lost else mine, None if is_lost else held)
    other = snapshot(model, optimizer, step=2) if dist.get_rank() == 1 else mine
    with pytest.raises(RuntimeError, match=r"of different steps, by rank: \{0: 1, 1: 2, 2: 1\}"):
        recover(other, held)
    with pytest.raises(ValueError, match="with a distance of 3 in a group of 3 ranks"):
        replicate(mine, distance=3)
    with (
        mock.patch.object(dist, "get_backend_config", lambda group: "cuda:nccl"),
        pytest.raises(ValueError, match=r"pass group=torch\.distributed\.new_group"),
    ):
        replicate(mine)


@on_ranks(2)
def test_snapshots_of_something_else_are_rejected() -> None:
    model, optimizer = _made()
    train_losses(model, optimizer, range(1))
    taken = snapshot(model, optimizer)
    before = digests(model, optimizer)
    other, _ = _made(sharding_strategy="no_shard")
    plain = wrap(Stack())
    calls: list[tuple[str, Any, Any]] = [
        ("has the state of an optimizer, and none was given", model, None),
        ("for this rank's rows of model.input.", other, torch.optim.AdamW(other.parameters())),
        ("only one of them has", plain, torch.optim.AdamW(plain.parameters())),
        ("with other parameter groups", model, torch.optim.SGD([*model.parameters()][:2], lr=1.0)),
    ]
    for text, target, steps in calls:
        with pytest.raises(ValueError, match="the snapshot") as raised:
            restore(taken, target, steps)
        assert text in str(raised.value), raised.value
    with pytest.raises(ValueError, match="has not the state of an optimizer, and one was given"):
        restore(snapshot(model), model, optimizer)
    assert digests(model, optimizer) == before
    model.offload()
    with pytest.raises(RuntimeError, match="call reload"):
        snapshot(model, optimizer)


@on_ranks(2)
def test_a_snapshot_of_a_rank_is_what_its_checkpoint_has(tmp_path: Path) -> None:
    model, optimizer = _made()
    train_losses(model, optimizer, range(2))
    taken = snapshot(model, optimizer)
    checkpoint.save(tmp_path / "k", model, optimizer)
    again, later = _made()
    checkpoint.load(tmp_path / "k", again, later)
    loaded = snapshot(again, later)
    assert isinstance(taken, Snapshot)
    assert taken.places.keys() == loaded.places.keys()
    assert all(torch.equal(taken.tensor(name), loaded.tensor(name)) for name in taken.places)
    assert isinstance(again, nn.Module)
