"""What is communicated, what lives when, and what is a view of what."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.comm.interface import Collective
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.allocations import changes
from tests.distributed.wrapping import mesh_of, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack

NUM_BLOCKS = 5


class Recorder:
    """A communicator that counts, and looks at what lives, around the real one."""

    def __init__(self, inner: Any, units: list[Any]) -> None:
        self._inner = inner
        self._units = units
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.most_gathered = 0
        self.most_gradients = 0

    def look(self) -> None:
        gathered = sum(any(g.weights.is_gathered for g in unit.groups) for unit in self._units)
        gradients = sum(any(g.grads.is_live for g in unit.groups) for unit in self._units)
        self.most_gathered = max(self.most_gathered, gathered)
        self.most_gradients = max(self.most_gradients, gradients)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def issue(self, collective: Collective, *, async_op: bool) -> Any:
        name = collective.kind.value
        self.calls[name] += 1
        self.nbytes[name] += collective.full.numel() * collective.full.element_size()
        self.look()
        return self._inner.issue(collective, async_op=async_op)


def _sharded(strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Stack(NUM_BLOCKS)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, sharding_strategy=strategy, **options)
    return fully_shard(model, mesh=mesh, sharding_strategy=strategy, **options)


def _record(model: Any) -> Recorder:
    blocks = [unit_of(block) for block in model.blocks]
    recorder = Recorder(unit_of(model).context.communicator, blocks)
    for unit in [*blocks, unit_of(model)]:
        for group in unit.groups:
            group.weights.replace_communicator(recorder)
            group.grads.replace_communicator(recorder)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: recorder.look())
        block.register_full_backward_hook(lambda *_: recorder.look())
    return recorder


def _step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()


def counts_of_a_step(strategy: str) -> tuple[dict, dict, int, int, int]:
    model = _sharded(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _step(model, optimizer)
    recorder = _record(model)
    _step(model, optimizer)
    total = sum(
        group.layout.numel * 4
        for module in [*model.blocks, model]
        for group in unit_of(module).groups
    )
    root = sum(group.layout.numel * 4 for group in unit_of(model).groups)
    return (
        dict(recorder.calls),
        dict(recorder.nbytes),
        total,
        root,
        max(recorder.most_gathered * 100 + recorder.most_gradients, 0),
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_and_bytes_of_a_step_are_the_theoretical_ones(
    pools: RankPools, world_size: int
) -> None:
    groups = NUM_BLOCKS + 1
    for strategy, gathers, reduction in (
        # The root is gathered once, since its backward follows its forward.
        ("optim_grads_params", 2 * NUM_BLOCKS + 1, "reduce_scatter"),
        ("optim_grads", groups, "reduce_scatter"),
        ("optim", groups, "reduce_scatter"),
        ("no_shard", 0, "all_reduce"),
    ):
        for calls, nbytes, total, root, _ in pools(world_size).run(counts_of_a_step, strategy):
            assert calls.get("all_gather", 0) == gathers, strategy
            assert calls[reduction] == groups, strategy
            assert nbytes[reduction] == total, strategy
            gathered = 2 * total - root if strategy == "optim_grads_params" else total
            assert nbytes.get("all_gather", 0) == (gathered if gathers else 0), strategy


def test_at_most_two_units_are_gathered_and_two_have_gradient_buffers(pools: RankPools) -> None:
    for *_, most in pools(2).run(counts_of_a_step, "optim_grads_params"):
        assert most == 202


def resting_bytes() -> tuple[int, int, int]:
    """Bytes alive in flat buffers between steps, what the layout says, and temporary ones."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=torch.float32)
    model = _sharded("optim_grads_params", mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        _step(model, optimizer)
    alive, expected, temporary = 0, 0, 0
    for module in [*model.blocks, model]:
        for group in unit_of(module).groups:
            buffers = [group.main_weight.tensor, group.model_weight.tensor, group.main_grad.tensor]
            alive += sum(b.untyped_storage().nbytes() for b in buffers)
            # fp32 main weight and gradient, bf16 model weight.
            expected += group.layout.shard_numel * (4 + 4 + 2)
            temporary += group.weights.gathered.tensor.untyped_storage().nbytes()
            temporary += group.grads.buffers.full.tensor.untyped_storage().nbytes()
    return alive, expected, temporary


@pytest.mark.parametrize("world_size", [2, 3])
def test_between_steps_only_shards_are_alive(pools: RankPools, world_size: int) -> None:
    for alive, expected, temporary in pools(world_size).run(resting_bytes):
        assert alive == expected
        assert temporary == 0


def allocations_of_sharding(
    shape: tuple[int, ...], outer: str, trace_pool: bool
) -> dict[str, tuple[int, int]]:
    """Bytes in all, and at most at a time, while layers are made and sharded; those expected."""
    options: dict[str, Any] = {"mesh": mesh_of(*shape), "outer_dp_sharding_strategy": outer}
    options["enable_trace_pool"] = trace_pool
    made = []

    def build() -> None:
        layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128))
        wrap(layers, units=layers, **options)
        made.append(layers)

    found = changes(build)
    units = [unit_of(layer) for layer in made[0]]
    originals = 4 * sum(unit.groups[0].layout.numel for unit in units)
    shards = [unit.groups[0].weights.steady_nbytes for unit in units]
    return {
        "in all": (sum(nbytes for nbytes in found if nbytes > 0), originals + sum(shards)),
        # The second layer's shard comes when the first layer's original is gone.
        "peak": (max(itertools.accumulate(found)), originals + shards[0]),
    }


@pytest.mark.parametrize("trace_pool", [False, True])
@pytest.mark.parametrize(
    ("shape", "outer"), [((2,), "no_shard"), ((2, 2), "no_shard"), ((2, 2), "optim")]
)
def test_sharding_a_model_allocates_nothing_but_its_shards(
    pools: RankPools, shape: tuple[int, ...], outer: str, trace_pool: bool
) -> None:
    ranks = pools(math.prod(shape)).run(allocations_of_sharding, shape, outer, trace_pool)
    for found in ranks:
        for kind, (nbytes, expected) in found.items():
            assert nbytes == pytest.approx(expected, rel=0.03), kind


def views_of_flat_buffers() -> bool:
    """Whether parameters and gradients are views of what is communicated."""
    model = _sharded("optim_grads_params")
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
    for param in group.sharded_params:
        local = param.to_local()
        if local.numel():
            offset = local.data_ptr() - main.data_ptr()
            seen.append(0 <= offset < main.numel() * 4)
            seen.append(param.grad.to_local().data_ptr() - grad.data_ptr() == offset)
        else:
            seen.append(param.grad is None)
    return all(seen) and len(seen) > 10


def test_parameters_and_gradients_are_views_of_the_flat_buffers(pools: RankPools) -> None:
    assert all(pools(2).run(views_of_flat_buffers))
    assert all(pools(4).run(views_of_flat_buffers))


def originals_alive() -> list[int]:
    """How many original parameters are alive after each unit was sharded."""
    model = Stack(NUM_BLOCKS)
    originals = [weakref.ref(p) for p in model.parameters()]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    alive = [sum(ref() is not None for ref in originals)]
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh)
        alive.append(sum(ref() is not None for ref in originals))
    return alive


def test_original_parameters_are_freed_unit_by_unit(pools: RankPools) -> None:
    # Six parameters a block, four of the root.
    for alive in pools(2).run(originals_alive):
        assert alive == [34, 28, 22, 16, 10, 4, 0]


def storages_after_deletion() -> int:
    """How many buffers outlive a model that trained a step, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        model = _sharded("optim_grads_params")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        _step(model, optimizer)
        alive = []
        for module in [*model.blocks, model]:
            for group in unit_of(module).groups:
                for buffer in (group.main_weight, group.main_grad, group.weights.gathered):
                    alive.append(weakref.ref(buffer.tensor))
        del group, module, buffer, optimizer, model
        return sum(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_deleting_the_model_frees_its_storages_at_once(pools: RankPools) -> None:
    assert pools(2).run(storages_after_deletion) == [0, 0]
