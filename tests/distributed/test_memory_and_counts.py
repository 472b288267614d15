"""What is communicated, what lives when, and what is a view of what."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import named_units, unit_of
from tests.distributed.allocations import changes, left_of, steady_nbytes
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import listen, on_mesh, wrap
from tests.reference.models import Stack

NUM_BLOCKS = 5


def _trained(steps: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model after some steps, and its optimizer."""
    model = wrap(Stack(NUM_BLOCKS), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("strategy", "gathers", "reduction"),
    [
        # The root is gathered once, since its backward follows its forward.
        ("optim_grads_params", 2 * NUM_BLOCKS + 1, "reduce_scatter"),
        ("optim_grads", NUM_BLOCKS + 1, "reduce_scatter"),
        ("optim", NUM_BLOCKS + 1, "reduce_scatter"),
        ("no_shard", 0, "all_reduce"),
    ],
)
@on_ranks("world_size", world_size=[2, 3])
def test_collectives_and_bytes_of_a_step_are_the_theoretical_ones(
    world_size: int, strategy: str, gathers: int, reduction: str
) -> None:
    model, _ = _trained(1, sharding_strategy=strategy)
    wire = listen(model)
    model(torch.randn(4, 5)).square().mean().backward()
    numels = [group.layout.numel for _, unit in named_units(model) for group in unit.groups]
    total = 4 * sum(numels)
    root = sum(group.layout.numel * 4 for group in unit_of(model).groups)
    gathered = 2 * total - root if strategy == "optim_grads_params" else total
    assert wire.count("all_gather") == gathers
    assert wire.count(reduction) == NUM_BLOCKS + 1
    assert wire.nbytes(reduction) == total
    assert wire.nbytes("all_gather") == (gathered if gathers else 0)


@on_ranks("world_size", world_size=[2, 3])
def test_between_steps_only_shards_are_alive(world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=torch.float32)
    model, optimizer = _trained(2, mp_policy=policy)
    alive, expected, temporary = 0, 0, 0
    groups = [group for unit in [*model.blocks, model] for group in unit_of(unit).groups]
    for group in groups:
        buffers = [group.main_weight]
        # Cast into the buffer that is gathered: there is no bf16 shard besides.
        assert group.model_weight is group.main_weight
        # Without rows of any parameter there is no gradient here that would need memory.
        has_rows = any(param.to_local().numel() for param in group.sharded_params)
        assert (group.main_grad is not None) is has_rows
        buffers += [group.main_grad] * has_rows
        alive += sum(b.tensor.untyped_storage().nbytes() for b in buffers)
        expected += group.layout.shard_numel * (4 + 4 * has_rows)
        temporary += group.weights.gathered.tensor.untyped_storage().nbytes()
        temporary += group.grads.buffers.full.tensor.untyped_storage().nbytes()
    assert alive == expected
    assert temporary == 0
    optimizer.zero_grad()
    assert all(group.main_grad is None for group in groups)


@on_ranks("mesh_name", mesh_name=["2", "HSDP 2x2", "HFSDP 2x2"], trace_pool=[False, True])
def test_sharding_a_model_allocates_nothing_but_its_shards(
    mesh_name: str, trace_pool: bool
) -> None:
    made = []

    def build() -> None:
        layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128))
        made.append(wrap(layers, layers, enable_trace_pool=trace_pool, **on_mesh(mesh_name)))

    found = changes(build)
    units = [unit_of(layer) for layer in made[0]]
    originals = 4 * sum(unit.groups[0].layout.numel for unit in units)
    shards = [steady_nbytes(unit.groups[0].weights) for unit in units]
    in_all = sum(nbytes for nbytes in found if nbytes > 0)
    assert in_all == pytest.approx(originals + sum(shards), rel=0.03)
    # The second layer's shard comes when the first layer's original is gone.
    peak = max(itertools.accumulate(found))
    assert peak == pytest.approx(originals + shards[0], rel=0.03)


@on_ranks("world_size", world_size=[2, 4])
def test_parameters_and_gradients_are_views_of_the_flat_buffers(world_size: int) -> None:
    model = wrap(Stack(NUM_BLOCKS))
    group = unit_of(model.blocks[0]).groups[0]
    seen = []

    def look(module: Any, *_: Any) -> None:
        flat = group.weights.gathered.tensor
        for index, param in enumerate(group.unsharded_params):
            offset = group.layout.slots[index].offset * 4
            seen.append(param.data_ptr() == flat.data_ptr() + offset)
        seen.append(module.up.weight is group.unsharded_params[group.names.index("up.weight")])

    model.blocks[0].register_forward_pre_hook(look)
    model(torch.randn(4, 5)).square().mean().backward()
    main, grad = group.main_weight.tensor, group.main_grad.tensor
    assert all(seen) and len(seen) > 5
    for param in group.sharded_params:
        local = param.to_local()
        if local.numel():
            offset = local.data_ptr() - main.data_ptr()
            assert 0 <= offset < main.numel() * 4
            assert param.grad.to_local().data_ptr() - grad.data_ptr() == offset
        else:
            assert param.grad is None


@on_ranks(2)
def test_original_parameters_are_freed_unit_by_unit() -> None:
    model = Stack(NUM_BLOCKS)
    originals = [weakref.ref(p) for p in model.parameters()]
    alive = [sum(ref() is not None for ref in originals)]
    for unit in [*model.blocks, model]:
        fully_shard(unit)
        alive.append(sum(ref() is not None for ref in originals))
    # Six parameters a block, four of the root.
    assert alive == [34, 28, 22, 16, 10, 4, 0]


@on_ranks(2)
def test_deleting_the_model_frees_its_storages_at_once() -> None:
    def train() -> list[Any]:
        model, optimizer = _trained(1)
        return [model, None, optimizer]

    assert left_of(train) == (0, None)
