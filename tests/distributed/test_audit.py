"""Audits: 200 flipped bits are found and named; values that are as they should be are not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.comm.backends import CpuCommunicator
from megatron_fsdp_v2.comm.interface import Collective, CollectiveKind
from megatron_fsdp_v2.diagnostics import Auditor, audit, compare_gradients
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.params.group import ParameterGroup, WeightSource
from megatron_fsdp_v2.runtime.module import unit_of
from tests.cases import QUICK_STRATEGIES, longer, quick_if
from tests.distributed.checkpoint_trainings import block_muon
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    batch,
    mesh_of,
    on_mesh,
    own_loss,
    strategies_on,
    train_losses,
    wrap,
)
from tests.reference.models import Stack


def _flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element, behind the counters; twice: nothing changed."""
    data = tensor.data.view(-1).view(torch.uint8)
    data[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def _trained(optimizer_of: Callable[[Any], Any] | None = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = wrap(Stack(), **options)
    adam = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = adam if optimizer_of is None else optimizer_of(model)
    train_losses(model, optimizer, range(2))
    return model, optimizer


def _next_backward(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    own_loss(model, 2).backward()


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        quick_if(name == "2" and strategy in QUICK_STRATEGIES, name, strategy)
        for name in ("1", "2", "3", "HSDP 2x2", "HFSDP 2x2")
        for strategy in strategies_on(name)
    ],
)
@on_ranks("name")
def test_nothing_is_found_where_nothing_is_wrong(name: str, strategy: str) -> None:
    for options in ({}, {"mp_policy": BF16}):
        for optimizer_of in (None, block_muon) if name in ("3", "HFSDP 2x2") else (None,):
            model, optimizer = _trained(
                optimizer_of, **on_mesh(name), sharding_strategy=strategy, **options
            )
            assert audit(model, optimizer) == []
            auditor = Auditor(model, optimizer, every=1)
            for step in range(3):
                _next_backward(model, optimizer)
                if step == 1:
                    with torch.no_grad():
                        # A write that counters see is no corruption.
                        next(model.parameters()).mul_(2.0)
                    model.unshard()
                    model.reshard()
                optimizer.step()
                assert audit(model, optimizer) == []
            auditor.close()
            _flip(unit_of(model).groups[0].main_weight.tensor, 0, 0)
            optimizer.step()


def _of_kind(kind: str, group: ParameterGroup, index: int, optimizer: Any) -> torch.Tensor | None:
    """Return this rank's rows of a kind of value; None if it has none."""
    param = group.sharded_params[index]
    if kind == "main weight":
        return group.main_weight.view(index)
    if kind == "model weight":
        return group.model_weight.view(index) if group.source is WeightSource.MODEL else None
    if kind == "gradient":
        has_copies = group.has_replicas and param.grad is not None
        return local_of(param.grad) if has_copies else None
    return local_of(optimizer.state[param]["exp_avg"]) if param in optimizer.state else None


def _flips() -> Iterator[Any]:
    for size, strategy in itertools.product((2, 3), STRATEGIES):
        yield quick_if(size == 2, size, strategy, 5)
        yield longer(size, strategy, 22)


@on_ranks("size", **{"size, strategy, flips": _flips()})
def test_flipped_bits_are_found_and_named(size: int, strategy: str, flips: int) -> None:
    model, optimizer = _trained(sharding_strategy=strategy, mp_policy=BF16)
    chance = random.Random(size * flips)
    auditor = Auditor(model, optimizer, every=1)
    num_found = num_tried = 0
    while num_found < flips:
        num_tried += 1
        assert num_tried < 500
        auditor.after_step()
        _next_backward(model, optimizer)
        unit = chance.choice(unit_of(model).context.units())
        group = chance.choice(unit.groups)
        index, rank = chance.randrange(len(group.names)), chance.randrange(size)
        kind = chance.choice(["main weight", "model weight", "gradient", "optimizer state exp_avg"])
        place, bit = chance.random(), chance.random()
        tensor, where = _of_kind(kind, group, index, optimizer), (0, 0)
        can_flip = [None] * size
        dist.all_gather_object(can_flip, tensor is not None and tensor.numel() > 0)
        if not can_flip[rank]:
            continue
        if dist.get_rank() == rank:
            assert tensor is not None
            where = int(place * tensor.numel()), int(bit * 8 * tensor.element_size())
            _flip(tensor, *where)
        with pytest.raises(RuntimeError, match="corrupted memory") as raised:
            auditor.before_step()
        text = str(raised.value)
        assert group.names[index] in text, text
        assert kind in text, text
        assert str(rank) in text.split(":")[1].split(";")[0] + text, text
        found = audit(model, optimizer, before_step=True)
        named = {each.ranks for each in found if each.kind == kind}
        if named and size == 3:
            assert named == {(rank,)}, found
        if dist.get_rank() == rank:
            assert tensor is not None
            _flip(tensor, *where)
        assert audit(model, optimizer, before_step=True) == []
        num_found += 1


@on_ranks(3)
def test_gathers_that_deliver_other_bytes_than_were_sent_are_found() -> None:
    model, optimizer = _trained(mp_policy=BF16)
    _next_backward(model, optimizer)
    issue = CpuCommunicator.issue
    target = unit_of(model.blocks[1]).groups[0]

    def corrupting(self: Any, collective: Collective, *, async_op: bool) -> Any:
        work = issue(self, collective, async_op=False)
        is_target = collective.name == target.name
        if is_target and collective.kind is CollectiveKind.ALL_GATHER and dist.get_rank() == 1:
            _flip(collective.output, 3, 5)
        return work

    with mock.patch.object(CpuCommunicator, "issue", corrupting):
        found = audit(model, optimizer)
    (only,) = found
    assert (only.ranks, only.kind) == ((1,), "gathered weight")
    assert only.name == f"blocks.1.{target.names[target.layout.index_at(3)]}"
    assert only.evidence == "is not what rank 0 sent"
    assert audit(model, optimizer) == []


@on_ranks(2, strategy=["optim", "optim_grads"])
def test_weights_written_behind_the_counters_are_found(strategy: str) -> None:
    model, optimizer = _trained(sharding_strategy=strategy, mp_policy=BF16)
    with torch.no_grad():
        own_loss(model)
    name, param = list(model.named_parameters())[-1]
    for write in (
        lambda rows: rows.data.add_(1.0),
        lambda rows: np.add(rows.numpy(), 1.0, out=rows.numpy()),
        lambda rows: rows.untyped_storage().fill_(1),
    ):
        assert audit(model, optimizer) == []
        rows = param.to_local().detach()
        before = rows.clone()
        version = param._version
        write(rows)
        assert param._version == version
        found = audit(model, optimizer)
        if rows.numel():
            assert any(each.name == name and each.kind == "model weight" for each in found), found
        rows.data.copy_(before)


@on_ranks(3, strategy=STRATEGIES)
def test_gradients_of_one_input_are_compared(strategy: str) -> None:
    mesh_of(3)
    model, optimizer = _trained(sharding_strategy=strategy)
    _next_backward(model, optimizer)
    before = [local_of(p.grad).clone() for p in model.parameters()]

    def closure() -> None:
        model(batch(0)).square().mean().backward()

    assert compare_gradients(model, closure) == []

    def scaled(grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + 1e-6) if dist.get_rank() == 2 else grad

    hook = model.blocks[0].register_full_backward_hook(lambda _m, grads, _o: (scaled(grads[0]),))
    found = compare_gradients(model, closure)
    hook.remove()
    assert found and {each.ranks for each in found} == {(2,)}, found
    assert {each.name.split(".")[0] for each in found} == {"input"}
    assert all(each.kind == "gradient (reduction 1)" for each in found)
    assert all(map(torch.equal, before, [local_of(p.grad) for p in model.parameters()]))


@on_ranks(1)
def test_bad_arguments_are_rejected() -> None:
    model, optimizer = _trained()
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        Auditor(model, optimizer, every=0)
    with pytest.raises(ValueError, match="an Auditor needs the optimizers"):
        Auditor(model, every=1)
    with pytest.raises(ValueError, match="contains no sharded module"):
        audit(torch.nn.Linear(2, 2))


@on_ranks(2)
def test_an_auditor_reads_memory_only_when_an_audit_is_due() -> None:
    model, optimizer = _trained()
    auditor = Auditor(model, optimizer, every=3)
    with mock.patch.object(auditor, "_at_rest", wraps=auditor._at_rest) as at_rest:
        calls = []
        for _ in range(6):
            _next_backward(model, optimizer)
            optimizer.step()
            calls.append(at_rest.call_count)
    assert calls == [0, 1, 2, 2, 3, 4]
    param = next(model.parameters())
    for _ in range(2):
        _next_backward(model, optimizer)
        optimizer.step()
    if param.to_local().numel():
        _flip(param.to_local(), 0, 3)
    _next_backward(model, optimizer)
    with pytest.raises(RuntimeError, match="changed since the last step, and nothing wrote it"):
        optimizer.step()


@on_ranks(2)
def test_a_load_between_two_steps_is_no_corruption(tmp_path: Path) -> None:
    model, optimizer = _trained()
    checkpoint.save(tmp_path / "k", model, optimizer)
    auditor = Auditor(model, optimizer, every=1)
    for step in range(3):
        _next_backward(model, optimizer)
        optimizer.step()
        if step:
            checkpoint.load(tmp_path / "k", model, optimizer)
    # Nor one that makes new tensors, whose counters are where those of the old ones were.
    for make, then in (
        (torch.ones_like, auditor.after_step),
        (torch.zeros_like, auditor.before_step),
    ):
        for state in optimizer.state.values():
            state["exp_avg"] = make(state["exp_avg"])
        then()
