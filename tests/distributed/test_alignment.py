"""Views of real buffers start where layouts promise, and checkpoints do not care where that is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import FSDPModule, checkpoint
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.layout import flat_buffers
from megatron_fsdp_v2.layout.alignment import UNALIGNED, Alignment
from megatron_fsdp_v2.memory.address_plan import ALIGNMENT
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.checkpoint_trainings import Net, digests, net, train
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, batch, wrap
from tests.reference.models import Stack

WIDTH = 300
"""Of rows and biases that are multiples of nothing, and long enough for lines."""
FROM_MALLOC = 64
"""Bytes that memory of a CPU starts at multiples of; those of CUDA do at 512."""


@pytest.mark.parametrize("pooled", [False, True], ids=["plain", "pool"])
@on_ranks(3)
def test_weights_gradients_and_shards_start_where_their_layout_promises(pooled: bool) -> None:
    model = wrap(Stack(3, WIDTH), mp_policy=BF16, enable_trace_pool=pooled)
    wrong: list[tuple[str, int, int]] = []
    num_checked = 0

    def check(what: str, flat: torch.Tensor, view: torch.Tensor, line: int) -> None:
        nonlocal num_checked
        num_checked += 1
        offset = view.data_ptr() - flat.data_ptr()
        if view.numel() and (offset % line or flat.data_ptr() % FROM_MALLOC):
            wrong.append((what, offset, line))

    def look(module: FSDPModule, *_: Any) -> None:
        for group in unit_of(module).groups:
            line = group.layout.alignment.line * 2
            assert line >= 16
            for index, param in enumerate(group.unsharded_params):
                check(group.names[index], group.weights.gathered.tensor, param.data, line)

    for module in [*model.blocks, model]:
        module.register_forward_pre_hook(look)
    for _ in range(4):
        model(batch(dist.get_rank())).sum().backward()
    for module in [*model.blocks, model]:
        for group in unit_of(module).groups:
            alignment = group.layout.alignment
            assert group.grads is not None and group.main_grad is not None
            flat = group.grads.buffers.full.tensor
            for index, param in enumerate(group.sharded_params):
                nbytes = alignment.start(group.layout.slots[index].numel) * 2
                start = group.grads.buffers.views[index].storage_offset() - flat.storage_offset()
                if start * flat.element_size() % nbytes:
                    wrong.append((f"gradient of {group.names[index]}", start, nbytes))
                # Main weights and gradients are fp32: twice as far.
                check("main", group.main_weight.tensor, local_of(param), 2 * nbytes)
                if param.grad is not None:
                    check("grad", group.main_grad.tensor, local_of(param.grad), 2 * nbytes)
    assert num_checked > 40
    assert wrong == []


@on_ranks(2)
def test_buffers_in_the_pool_lie_at_multiples_of_512_bytes() -> None:
    model = wrap(Stack(3, WIDTH), enable_trace_pool=True)
    found = []

    def look(module: Any, *_: Any) -> None:
        for group in unit_of(module).groups:
            for buffer in (group.weights.temporaries() | group.grads.temporaries()).values():
                if buffer.is_live and buffer.pool_memory is not None:
                    found.append(buffer.tensor.data_ptr() - buffer.pool_memory.data_ptr())

    for block in model.blocks:
        block.register_forward_pre_hook(look)
        block.register_full_backward_hook(look)
    for _ in range(6):
        model(batch(0)).sum().backward()
    assert len(set(found)) > 1
    assert {offset % ALIGNMENT for offset in found} == {0}


@contextlib.contextmanager
def unaligned_layouts() -> Iterator[None]:
    """Layouts as they were before anything was aligned."""
    aligned = Alignment.of
    flat_buffers._buffers.cache_clear()
    Alignment.of = lambda itemsize: UNALIGNED  # type: ignore[method-assign]
    try:
        yield
    finally:
        Alignment.of = aligned  # type: ignore[method-assign]
        flat_buffers._buffers.cache_clear()


def _rows(model: nn.Module) -> list[list[tuple[int, int]]]:
    return [list(param.row_shards.row_ranges) for param in model.parameters()]


@pytest.mark.parametrize("saves_aligned", [False, True], ids=["to aligned", "to unaligned"])
@on_ranks(3)
def test_a_checkpoint_of_an_unaligned_layout_loads_into_an_aligned_one_and_back(
    tmp_path: Path, saves_aligned: bool
) -> None:
    """Save under one layout, load under the other, and go on in both."""
    folder = str(tmp_path / "saved")

    def made(is_aligned: bool) -> tuple[Any, torch.optim.Optimizer]:
        with contextlib.nullcontext() if is_aligned else unaligned_layouts():
            model = net(width=10)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    model, optimizer = made(saves_aligned)
    train(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer)
    other, other_optimizer = made(not saves_aligned)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    checkpoint.load(folder, other, other_optimizer)
    plain = Net(10)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    checkpoint.load(folder, plain, plain_optimizer)
    all_three = [(model, optimizer), (other, other_optimizer), (plain, plain_optimizer)]
    first, second, third = (digests(*both) for both in all_three)
    losses = train(model, optimizer, 2), train(other, other_optimizer, 2)
    assert _rows(model) != _rows(other)
    assert first == second == third
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
