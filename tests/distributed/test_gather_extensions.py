"""Tensors with FSDP2's all-gather extension train as with FSDP2, or are rejected by name."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_fsdp_v2 import fully_shard
from tests.cases import longer, quick_only
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    error_message,
    mesh_of,
    on_mesh,
    record_collectives,
    wrap,
)
from tests.reference.gather_extensions import Extended, Halves, Scaled, extend_linears
from tests.reference.models import INPUT, Checkpointed, Stack
from tests.reference.scaled_float8 import ScaledFloat8

type Trained = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


class Even(nn.Module):
    """A model whose shards are even, which extensions that do not pad need in FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(INPUT, 8), nn.Linear(8, 4)])
        self.output = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.output(x)  # type: ignore[no-any-return]


def _built(kind: type[Extended], of: Any = Stack) -> Any:
    torch.manual_seed(0)
    model = of()
    extend_linears(model, kind)
    return model


def _plain(value: Any) -> torch.Tensor:
    """Return the whole plain tensor of a parameter, a gradient or what FSDP2 has instead."""
    local = value.full_tensor() if hasattr(value, "full_tensor") else value
    return local.numbers if isinstance(local, Extended) else local


def _train(model: Any) -> Trained:
    """Return losses, the gradients of every step, and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], []
    for step in range(3):
        loss = model(batch(dist.get_rank(), step)).square().mean()
        loss.backward()
        grads += [_plain(param.grad).clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, grads, [_plain(param).detach() for param in model.parameters()]


def _equal(one: Trained, other: Trained) -> bool:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


KINDS = (Halves, Scaled)


@on_ranks(2, kind=KINDS, strategy=quick_only(STRATEGIES, "optim_grads_params"))
def test_extension_trains_as_with_fsdp2(kind: type[Extended], strategy: str) -> None:
    model, other = wrap(_built(kind, Even), sharding_strategy=strategy), _built(kind, Even)
    for module in (*other.blocks, other):
        fsdp2(module, mesh=mesh_of(2), reshard_after_forward=kind is not Halves)
    found, expected = _train(model), _train(other)
    assert _equal(found, expected)


@on_ranks(
    lambda kind, mesh, **options: {"1": 1, "3": 3, "HSDP 2x2": 4}.get(mesh, 2),
    kind=KINDS,
    mesh=("3", longer("1"), longer("HSDP 2x2")),
    strategy=quick_only(STRATEGIES, "optim_grads_params"),
)
def test_extension_on_uneven_and_empty_shards_trains_alike_at_all_levels(
    kind: type[Extended], mesh: str, strategy: str
) -> None:
    first = _train(wrap(_built(kind), sharding_strategy="no_shard", **on_mesh(mesh)))
    found = _train(wrap(_built(kind), sharding_strategy=strategy, **on_mesh(mesh)))
    torch.testing.assert_close(found, first)


@on_ranks(
    2,
    kind=KINDS,
    options=(
        {"enable_trace_pool": True},
        longer({"reshard_after_forward": False}),
        longer({"enable_unshard_prefetch": False}),
    ),
    of=(Stack, longer(functools.partial(Checkpointed, use_reentrant=False))),
)
def test_options_change_no_bit_of_a_training_with_an_extension(
    kind: type[Extended], options: dict[str, Any], of: Any
) -> None:
    expected = _train(wrap(_built(kind, of)))
    found = _train(wrap(_built(kind, of), **options))
    assert _equal(expected[:1] + expected[2:], found[:1] + found[2:])  # type: ignore[arg-type]


@on_ranks(2)
def test_extension_gathers_what_it_returns_and_has_no_memory_between_uses() -> None:
    model = wrap(_built(Scaled))
    # Losses that are read later need the weights of now.
    _train(model)
    recorder = record_collectives(model)
    model(batch(0)).sum().backward()
    gathered = [each for each in recorder.sent if each.kind == "all_gather"]
    of_8_bits = [each.numel for each in gathered if each.dtype == torch.float8_e4m3fn]
    inside = [param for block in model.blocks for param in block.parameters() if param.dim() == 2]
    # Units inside are gathered for the forward and for the backward, the root once.
    assert sum(of_8_bits) >= 2 * sum(param.numel() for param in inside)
    assert recorder.dtypes(gathers=True) == {torch.float8_e4m3fn, torch.float32}
    assert all(each.numel < min(of_8_bits) for each in gathered if each.dtype == torch.float32)

    sums = wrap(_built(Halves))
    _train(sums)
    groups = [group for unit in (sums.blocks[0], sums) for group in unit._fsdp_unit.groups]
    own = [e for g in groups for e in getattr(g.format, "_extensions", ())]
    sizes = {storage.nbytes() for extension in own for storage, _ in extension.memory}
    assert own and sizes == {0}


@on_ranks(2)
def test_changed_weights_are_written_before_the_next_forward() -> None:
    model, other = wrap(_built(Scaled)), _built(Scaled)
    with torch.no_grad():
        model(batch(0))
        for param in model.parameters():
            param.mul_(0.5)
        found = model(batch(0))
        for param in other.parameters():
            numbers = param.numbers if isinstance(param, Extended) else param
            numbers.mul_(0.5)
        for module in other.modules():
            if isinstance(module, nn.Linear):
                payload, scale = Scaled(module.weight.numbers).fsdp_pre_all_gather(mesh_of(2))
                module.weight = nn.Parameter(ScaledFloat8(payload[0], scale))
        expected = other(batch(0))
    assert torch.equal(found, expected)


class Pair(Extended):
    """Consists of two tensors."""

    def __tensor_flatten__(self) -> Any:
        return ["numbers", "more"], None

    fsdp_pre_all_gather, fsdp_post_all_gather = Scaled.fsdp_pre_all_gather, None
    more = torch.zeros(1)


class OnlyBefore(Extended):
    fsdp_pre_all_gather = Scaled.fsdp_pre_all_gather


class OfThree(Scaled):
    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any) -> Any:  # type: ignore[override]
        return (self.numbers,), None


class Plainly(Scaled):
    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return inner["numbers"]


class Failing(Scaled):
    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        raise ArithmeticError("not here")


class Padded(Scaled):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (torch.cat([self.numbers, self.numbers]),), None


class TwoDtypes(Scaled):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.numbers, self.numbers.half()), None


class Twice(Scaled):
    """Returns a tensor with two views of what was gathered."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.numbers,), None

    def fsdp_post_all_gather(self, gathered: Any, *args: Any, out: Any = None) -> Any:
        (whole,) = gathered
        return ScaledFloat8(whole, whole.view(-1)[:1]), (whole,)


@on_ranks(2)
def test_extensions_that_cannot_be_called_are_rejected_by_name() -> None:
    def message(kind: type[Extended], **options: Any) -> str:
        module = nn.Linear(4, 6)
        module.weight = nn.Parameter(kind(torch.ones(6, 4)))
        return error_message(ValueError, lambda: wrap(module, [], **options))

    prefix = "weight format supports, and its fsdp_pre_all_gather cannot be called: "
    wanted = {
        Pair: prefix + "it consists of other tensors than one of its own shape and dtype: numbers",
        OnlyBefore: prefix + "its class does not define both",
        OfThree: prefix + "fsdp_pre_all_gather has 3 arguments",
        Plainly: prefix + "its __tensor_unflatten__ returns a Tensor",
        Failing: prefix + "its __tensor_unflatten__ fails: not here",
        Padded: "fsdp_pre_all_gather of weight returns tensors of shapes (12, 4) of torch.float32 "
        "for rows of shape (6, 4)",
        TwoDtypes: "they must have this shape, without padding, and one dtype",
        Twice: "returns a tensor that consists of 2 views of one gathered tensor",
    }
    found = {kind: message(kind) for kind in wanted}
    offload = message(Scaled, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with torch.device("meta"):
        unset = _built(Scaled)
    on_meta = error_message(ValueError, lambda: wrap(unset))
    split = nn.Linear(4, 6, bias=False)
    numbers = distribute_tensor(torch.ones(6, 4), mesh_of(2), [Shard(0)])
    split.weight = nn.Parameter(copy.copy(numbers))
    split.weight._local_tensor = Scaled(torch.ones(3, 4))
    of_dtensor = error_message(ValueError, lambda: fully_shard(split, mesh=mesh_of(2)))
    for kind, text in wanted.items():
        assert text in found[kind], found[kind]
    assert "parameter weight is a Pair, which no registered" in found[Pair]
    assert "leave offload_policy out" in offload
    assert "it is on the meta device" in on_meta
    assert "Scaled" in of_dtensor


@on_ranks(4)
def test_extension_of_main_weights_sharded_along_two_axes_is_rejected() -> None:
    message = error_message(ValueError, lambda: wrap(_built(Scaled), **on_mesh("HFSDP 2x2")))
    assert "fsdp_pre_all_gather communicates along one axis of the mesh" in message
