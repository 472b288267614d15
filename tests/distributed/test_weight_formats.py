"""Another format of weights than plain numbers, written as one file: `tests/reference`."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.params.formats import DenseFormat, format_of, register_format
from megatron_fsdp_v2.runtime import unit
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    held_error,
    listen,
    mesh_of,
    shards_of,
    wrap,
)
from tests.reference.models import Checkpointed, Stack
from tests.reference.scaled_float8 import (
    ScaledFloat8,
    ScaledFloat8Format,
    quantize_linears,
    quantized,
)

STEPS = 3


def _pair(shape: tuple[int, ...], **options: Any) -> tuple[Any, Any]:
    """The plain fp32 model, and the same with weights in 8 bits, sharded."""
    register_format(ScaledFloat8Format)
    torch.manual_seed(0)
    plain = Stack()
    eight = Checkpointed(use_reentrant=False) if options.pop("recompute", False) else Stack()
    eight.load_state_dict(plain.state_dict())
    quantize_linears(eight)
    with torch.no_grad():
        # Both begin with numbers that 8 bits can hold.
        for name, param in eight.named_parameters():
            if isinstance(param, ScaledFloat8):
                plain.get_parameter(name).copy_(param.numbers())
    return plain, wrap(eight, mesh=mesh_of(*shape), **options)


def _with_quantized(plain: nn.Module, step: int) -> torch.Tensor:
    """The mean loss of all ranks, computed with whole weights that were quantized and back."""
    weights = {
        name: param + (quantized(param).numbers() - param).detach()
        for name, param in plain.named_parameters()
        if param.dim() == 2
    }
    losses = [
        torch.func.functional_call(plain, weights, (batch(rank, step),)).square().mean()
        for rank in range(dist.get_world_size())
    ]
    return torch.stack(losses).mean()


def largest_errors(shape: tuple[int, ...], options: dict[str, Any]) -> list[float]:
    """Over some steps: of the losses summed over ranks, and of the main weights."""
    plain, model = _pair(shape, **options)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (plain, model)]
    worst = [0.0, 0.0]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = _with_quantized(plain, step)
        expected.backward()
        own = model(batch(dist.get_rank(), step)).square().mean()
        own.backward()
        for optimizer in optimizers:
            optimizer.step()
        total = own.detach().clone()
        dist.all_reduce(total)
        worst[0] = max(worst[0], float((total / dist.get_world_size() - expected).abs()))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        worst[1] = max(worst[1], *(held_error(mine, theirs) for mine, theirs in pairs))
        if step == 0:
            # Without gradients the same weights are written and gathered.
            with torch.no_grad():
                model(batch(0, step))
    return worst


CASES = [((2,), strategy, {}) for strategy in STRATEGIES]
CASES += [
    ((3,), "optim_grads_params", {}),
    ((3,), "optim", {}),
    ((2,), "optim_grads_params", {"recompute": True}),
    ((2,), "optim_grads_params", {"enable_trace_pool": True}),
    ((2,), "optim_grads_params", {"reshard_after_forward": False}),
    ((2, 2), "optim_grads_params", {}),
]


@pytest.mark.parametrize(("shape", "strategy", "more"), CASES, ids=str)
@on_ranks("shape")
def test_training_in_8_bits_is_that_of_whole_quantized_weights(
    shape: tuple[int, ...], strategy: str, more: dict[str, Any]
) -> None:
    errors = largest_errors(shape, {"sharding_strategy": strategy, **more})
    assert max(errors) < 2e-6, errors


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_all_that_a_step_changed_is_written_in_one_call(strategy: str) -> None:
    found = []
    for one_by_one in (False, True):
        _, model = _pair((2,), sharding_strategy=strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        instead = mock.patch.object(unit, "write_stale") if one_by_one else contextlib.nullcontext()
        calls = []
        write = mock.patch.object(ScaledFloat8Format, "write", wraps=ScaledFloat8Format.write)
        for step in range(STEPS):
            with instead, write as written:
                model(batch(dist.get_rank(), step)).square().mean().backward()
                with torch.no_grad():
                    model(batch(0, step))
            calls.append(written.call_count)
            optimizer.step()
            optimizer.zero_grad()
        found.append((calls, shards_of(model)))
    (together, weights), (apart, same) = found
    num_units = len(unit_of(model).context.units())
    # Once after a step, and once after a backward: an optimizer that nobody sees may have stepped.
    assert together == [2] * STEPS
    assert apart == [2 * num_units] * STEPS
    assert all(map(torch.equal, weights, same))


@on_ranks(2)
def test_what_travels_is_the_payload() -> None:
    weights = sum(p.numel() for p in Stack().parameters() if p.dim() == 2)
    _, model = _pair((2,))
    wire = listen(model)
    model(batch(dist.get_rank()))
    gathers = [sent for sent in wire.sent if sent.kind == "all_gather"]
    eight = sum(sent.nbytes for sent in gathers if sent.dtype.itemsize == 1)
    groups = unit_of(model.blocks[0]).groups
    formats = sorted(group.spec.format_type.__name__ for group in groups)
    assert weights <= eight < 1.5 * weights
    assert 0 < wire.nbytes("all_gather") - eight < weights
    assert formats == ["DenseFormat", "ScaledFloat8Format"]


def _bytes(weight: ScaledFloat8) -> torch.Tensor:
    return weight.payload.view(torch.uint8)


@on_ranks(2)
def test_a_gathered_payload_is_that_of_quantizing_the_whole_weight() -> None:
    plain, model = _pair((2,))
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(1.7)
        for param in model.parameters():
            param.mul_(1.7)
    same: list[bool] = []

    def look(module: Any, _args: Any) -> None:
        for name, param in module.named_parameters():
            if isinstance(param, ScaledFloat8):
                fqn = next(n for n, m in model.named_modules() if m is module)
                whole = quantized(plain.get_parameter(f"{fqn}.{name}"))
                same.append(torch.equal(_bytes(param), _bytes(whole)))
                same.append(bool(param.scale == whole.scale))

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    model(batch(dist.get_rank()))
    assert len(same) == 3 * 2 * 2
    assert all(same)


def test_a_format_is_found_by_what_the_parameter_is() -> None:
    register_format(ScaledFloat8Format)
    register_format(ScaledFloat8Format)
    assert format_of(nn.Parameter(torch.ones(2, 2))) is DenseFormat
    assert format_of(nn.Parameter(quantized(torch.ones(2, 2)))) is ScaledFloat8Format
