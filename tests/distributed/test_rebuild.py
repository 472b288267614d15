"""A model that was aborted goes on in other process groups, with its values or after a load."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_fsdp_v2 import ShardPlacementResult, UnitOptions, checkpoint
from megatron_fsdp_v2.checkpoint import restore, snapshot
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim import flat_optimizer
from megatron_fsdp_v2.params.formats import register_format
from megatron_fsdp_v2.runtime.context import PROCESS
from megatron_fsdp_v2.runtime.module import unit_of
from tests.cases import quick_if, quick_strategies
from tests.distributed.checkpoint_trainings import block_muon
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    batch,
    check_error_messages,
    dying_collectives,
    train_losses,
    wrap,
)
from tests.pages import section
from tests.ranks import RankFailure, RankPool, free_port
from tests.reference.models import INPUT, Stack
from tests.reference.scaled_float8 import ScaledFloat8Format, quantize_linears
from tests.reference.two_way import TwoWayFormat, TwoWayLinear
from tests.sharding import shard


class Tied(Stack):
    """A block has a parameter that the next one owns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm.bias = self.blocks[0].norm.bias


KINDS: dict[str, Any] = {
    "plain": {},
    "bf16, trace pool": {"mp_policy": BF16, "enable_trace_pool": True},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "tied": {"model": Tied},
    "Muon": {"optimizer": block_muon},
    "flat AdamW": {
        "optimizer": lambda m: flat_optimizer(torch.optim.AdamW)(m.parameters(), lr=0.05)
    },
}


def _mesh_of_ranks(ranks: list[int]) -> Any:
    """A mesh of some ranks on a process group of its own; None on other ranks."""
    group = dist.new_group(ranks)
    is_member = dist.get_rank() in ranks
    return DeviceMesh.from_group(group, "cpu") if is_member else None


def _mesh(*shape: int) -> Any:
    """A mesh of the first ranks, on process groups of its own; None on other ranks."""
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    if len(shape) == 1:
        return _mesh_of_ranks(ranks.tolist())
    groups = []
    for axis in range(2):
        for row in ranks.movedim(axis, -1).tolist():
            group = dist.new_group(row)
            if dist.get_rank() in row:
                groups.append(group)
    if not groups:
        return None
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("outer", "inner"))


def _made(mesh: DeviceMesh, strategy: str, kind: str = "plain", **options: Any) -> tuple[Any, Any]:
    given = {**KINDS[kind], **options}
    torch.manual_seed(0)
    module = given.pop("model", Stack)()
    optimizer = given.pop("optimizer", lambda m: torch.optim.AdamW(m.parameters(), lr=0.05))
    model = wrap(module, mesh=mesh, sharding_strategy=strategy, **given)
    return model, optimizer(model)


def _state(model: Any, optimizer: Any) -> dict[str, list[Any]]:
    taken = snapshot(model, optimizer)
    return {name: taken.tensor(name).tolist() for name in taken.places}


_DIED = [
    *((strategy, "plain") for strategy in STRATEGIES[:3]),
    *((STRATEGIES[3], kind) for kind in KINDS),
    *((STRATEGIES[number % 3], kind) for number, kind in enumerate(KINDS) if number),
]


@pytest.mark.parametrize(
    ("strategy", "kind"), [quick_if(place % 6 == 1, *case) for place, case in enumerate(_DIED)]
)
@on_ranks(2)
def test_training_goes_on_bit_by_bit_after_it_died_in_any_collective(
    strategy: str, kind: str
) -> None:
    with dying_collectives() as dying:
        model, optimizer = _made(_mesh(2), strategy, kind)
        expected = train_losses(model, optimizer, range(4))
        state, last = _state(model, optimizer), dying.count
        for dying.dies_at in range(last // 4, last, max(last // 5, 1)):
            dying.count, losses = 0, []
            model, optimizer = _made(_mesh(2), strategy, kind)
            params = list(model.parameters())
            with pytest.raises(RuntimeError, match="a rank is gone"):
                for step in range(4):
                    taken = snapshot(model, optimizer)
                    losses += train_losses(model, optimizer, [step])
            dying.count = -(10**6)
            model.abort()
            model.abort()
            assert all(param.grad is None for param in params)
            check_error_messages(
                RuntimeError,
                {
                    "was aborted; call rebuild(mesh) on it first": lambda m=model: m(batch(0)),
                    "root (": model.unshard,
                },
            )
            old = weakref.ref(unit_of(model).context)
            assert model.rebuild(_mesh(2), optimizer)
            if kind == "Muon":
                # It may have died in the optimizer's step, after momenta were updated.
                restore(taken, model, optimizer)
            gc.collect()
            assert old() is None and not PROCESS.under_way
            losses += train_losses(model, optimizer, range(len(losses), 4))
            assert losses == expected, dying.dies_at
            assert _state(model, optimizer) == state, dying.dies_at
            assert all(a is b for a, b in zip(model.parameters(), params, strict=True))


CHANGES = {
    # Sizes before and after, and strategies that keep values. Ranks that join have none to keep.
    "4 -> 3": ((4,), (3,), ("no_shard",)),
    "3 -> 4": ((3,), (4,), ()),
    "4 -> 1": ((4,), (1,), ("no_shard",)),
    "1 -> 2": ((1,), (2,), ()),
    "HSDP 2x2 -> 1x2": ((2, 2), (1, 2), STRATEGIES),
    "HSDP 2x2 -> 2": ((2, 2), (2,), STRATEGIES),
    "HSDP 2x2 -> 4": ((2, 2), (4,), ("no_shard",)),
    "2 -> HSDP 2x2": ((2,), (2, 2), ()),
}
_TRIED = [
    (change, strategy, ["plain", "tied", "Muon", "flat AdamW"][(number + place) % 4])
    for number, change in enumerate(CHANGES)
    for place, strategy in enumerate((STRATEGIES[number % 3], STRATEGIES[3]))
]


@pytest.mark.parametrize(
    ("change", "strategy", "kind"),
    [quick_if(place % 5 == 0, *case) for place, case in enumerate(_TRIED)],
)
@on_ranks(4)
def test_a_rebuilt_model_trains_as_a_new_one_that_loaded_a_checkpoint(
    change: str, strategy: str, kind: str, tmp_path: Path
) -> None:
    before, after, kept = CHANGES[change]
    saved = tmp_path / "saved"
    alone = [_mesh_of_ranks([rank]) for rank in range(4)][dist.get_rank()]
    meshes = _mesh(*before), _mesh(*after), _mesh(*after)
    model: Any = None
    if meshes[0] is not None:
        model, optimizer = _made(meshes[0], strategy, kind)
        train_losses(model, optimizer, range(2))
        checkpoint.save(saved, model, optimizer)
        model.abort()
    dist.barrier()
    if meshes[1] is not None:
        if model is None:
            # A rank that joins: sharded over itself until then.
            model, optimizer = _made(alone, strategy, kind)
        is_kept = model.rebuild(meshes[1], optimizer)
        assert is_kept == (strategy in kept)
        if not is_kept:
            assert not optimizer.state
            with pytest.raises(
                RuntimeError, match=r"or after rebuild\(\), and got none since: load"
            ):
                train_losses(model, optimizer, range(2, 3))
            checkpoint.load(saved, model, optimizer)
        found = train_losses(model, optimizer, range(2, 4)), _state(model, optimizer)
        other, other_optimizer = _made(meshes[2], strategy, kind)
        checkpoint.load(saved, other, other_optimizer)
        expected = train_losses(other, other_optimizer, range(2, 4)), _state(other, other_optimizer)
        assert found == expected


@on_ranks(4, strategy=quick_strategies(STRATEGIES))
def test_parameters_on_several_meshes_are_put_on_several_meshes(strategy: str) -> None:
    """The middle block, as experts would, is sharded over other ranks than the other units."""

    def made(meshes: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = Stack()
        of_experts = {*module.blocks[1].parameters()}
        return _made(
            meshes[0],
            strategy,
            model=lambda: module,
            shard_placement_fn=lambda p: (
                ShardPlacementResult(None, meshes[1]) if p in of_experts else None
            ),
        )

    def meshes() -> Any:
        return _mesh(4), _mesh(2, 2)

    model, optimizer = made(meshes())
    expected = train_losses(model, optimizer, range(4))
    before, after = meshes(), meshes()
    model, optimizer = made(before)
    losses = train_losses(model, optimizer, range(2))
    taken = snapshot(model, optimizer)
    model.abort()
    assert model.rebuild(dict(zip(before, after, strict=True)), optimizer)
    losses += train_losses(model, optimizer, range(2, 3))
    model.abort()
    # One rank says that it keeps nothing, which those of its expert mesh alone would not hear.
    again = meshes()
    keep = dist.get_rank() != 3
    assert not model.rebuild(dict(zip(after, again, strict=True)), optimizer, keep=keep)
    restore(taken, model, optimizer)
    assert losses + train_losses(model, optimizer, range(2, 4))[1:] == expected


# -- settings and formats --------------------------------------------------------------------------


@on_ranks(2)
def test_settings_hooks_and_subscribers_are_kept() -> None:
    def half(flat: torch.Tensor) -> None:
        flat.mul_(0.5)

    gradients, calls, events = [], [], []
    for rebuilds in (False, True):
        torch.manual_seed(0)
        model = wrap(Stack(), mesh=_mesh(2), reshard_after_forward=True)
        unit_of(model).context.observer.subscribe(events.append)
        blocks: Any = list(model.blocks)
        blocks[0].set_gradient_divide_factor(4.0)
        blocks[1].set_all_reduce_hook(half)
        blocks[2].set_requires_gradient_reduction(False)
        model.set_separate_reduce_scatter_group()
        model.blocks[0].set_modules_to_forward_prefetch(blocks[1:])
        model.output.bias.register_post_accumulate_grad_hook(lambda param: calls.append(param))
        if rebuilds:
            model.abort()
            assert model.rebuild(_mesh(2))
            groups = [group for unit in unit_of(model).context.units() for group in unit.groups]
            gathers = {group.axes[-1].gather_group for group in groups}
            assert len(gathers) == 1 and None not in gathers
            events.clear()
        model(batch(dist.get_rank())).sum().backward()
        gradients.append([param.grad.to_local().tolist() for param in model.parameters()])
    assert gradients[0] == gradients[1]
    assert len(calls) == 2 and calls[1] is model.output.bias
    assert events
    assert list(blocks[0]._fsdp_unit.settings.forward_prefetch) == [
        block._fsdp_unit.state for block in blocks[1:]
    ]


@on_ranks(2, format_type=[ScaledFloat8Format, TwoWayFormat])
def test_weights_with_scales_and_with_several_payloads_are_bound_again(format_type: Any) -> None:
    register_format(format_type)

    def build() -> Any:
        torch.manual_seed(0)
        blocks: list[nn.Module] = [nn.Linear(INPUT, INPUT) for _ in range(3)]
        if format_type is TwoWayFormat:
            blocks = [TwoWayLinear(torch.randn(INPUT, INPUT)) for _ in range(3)]
        module = nn.Sequential(*blocks)
        if format_type is ScaledFloat8Format:
            quantize_linears(module)
        model = wrap(module, blocks, mesh=_mesh(2))
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    losses = []
    for rebuilds in (False, True):
        model, optimizer = build()
        found = train_losses(model, optimizer, range(2))
        if rebuilds:
            assert model.rebuild(_mesh(2), optimizer)
        losses.append(found + train_losses(model, optimizer, range(2, 4)))
    assert losses[0] == losses[1]


class Bare(nn.Module):
    """A parameter that only a state dict initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(INPUT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@on_ranks(2)
def test_parameters_without_values_are_loaded_after_a_rebuild() -> None:
    with torch.device("meta"):
        model = Bare()
    wrap(model, mesh=_mesh(2))
    sharded: Any = model
    assert sharded.rebuild(_mesh(2))
    with pytest.raises(RuntimeError, match="weight of unit the root"):
        model(batch(0))
    state = {"weight": torch.full((INPUT,), 2.0)}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(model(batch(0)), 2 * batch(0))


# -- memory and errors -----------------------------------------------------------------------------


@on_ranks(2, strategy=quick_strategies(STRATEGIES), enable_trace_pool=[False, True])
def test_an_aborted_model_holds_weights_alone(strategy: str, enable_trace_pool: bool) -> None:
    options = {"enable_trace_pool": enable_trace_pool, "mp_policy": BF16}
    model, optimizer = _made(_mesh(2), strategy, **options)
    train_losses(model, optimizer, range(2))
    unit = unit_of(model)
    temporary = [m for group in unit.context.groups() for m in group.temporaries().values()]
    output = model(batch(dist.get_rank()))
    model.abort()
    del output
    assert not any(memory.is_live for memory in temporary)
    assert all(memory.backing.storage.nbytes() == 0 for memory in temporary)
    assert all(group.main_grad is None for group in unit.context.groups())
    assert all(isinstance(param, UnevenDTensor) for param in model.parameters())


@on_ranks(2)
def test_what_cannot_be_rebuilt_is_rejected_and_unchanged(tmp_path: Path) -> None:
    mesh, other = _mesh(2), _mesh(2)
    model, optimizer = _made(mesh, STRATEGIES[3])
    linear = nn.Linear(4, 4)
    pieces = {linear.weight: TensorShard(None, None, pieces=(2, 2))}
    parallel: Any = shard(linear, mesh=mesh, options=UnitOptions(tensor_shards=pieces))
    outer, _ = _made(_mesh(1, 2), "optim_grads", outer_dp_sharding_strategy="optim")
    several: Any = nn.Linear(4, 4)
    alone = [_mesh_of_ranks([rank]) for rank in range(2)][dist.get_rank()]
    meshes = {several.weight: mesh, several.bias: alone}
    shard(several, mesh=mesh, shard_placement_fn=lambda p: ShardPlacementResult(None, meshes[p]))
    expected = train_losses(model, optimizer, range(2))
    check_error_messages(
        ValueError,
        {
            "have a tensor-parallel split, whose mesh rebuild() cannot replace": lambda: (
                parallel.rebuild(other)
            ),
            "are sharded over 2 meshes, and rebuild() was given one": lambda: several.rebuild(
                other
            ),
            "was given no mesh in the place of DeviceMesh": lambda: several.rebuild({mesh: other}),
            "needs a 2-D mesh": lambda: outer.rebuild(other),
            "mesh must be a DeviceMesh, got int": lambda: model.rebuild(3),
        },
    )
    check_error_messages(
        RuntimeError,
        {
            "is not the root; call rebuild on the root": lambda: model.blocks[0].rebuild(other),
            "is not the root; call abort on the root": model.blocks[0].abort,
        },
    )
    model.offload()
    check_error_messages(RuntimeError, {"call reload() on it first": lambda: model.rebuild(other)})
    model.reload()
    again, other_optimizer = _made(other, STRATEGIES[3])
    assert train_losses(again, other_optimizer, range(4))[:2] == expected
    train_losses(model, optimizer, range(2, 4))
    assert _state(model, optimizer) == _state(again, other_optimizer)


@pytest.mark.parametrize("steps", [True, False])
@on_ranks(2)
def test_ranks_in_different_steps_keep_no_values(steps: bool) -> None:
    """One rank had finished the step in which the other one failed, or says so."""
    model, optimizer = _made(_mesh(2), "optim_grads")
    train_losses(model, optimizer, range(2))
    is_other = dist.get_rank() == 0
    if steps and is_other:
        model.zero_grad()
        optimizer.step()
    model.abort()
    assert not model.rebuild(_mesh(2), optimizer, keep=steps or not is_other)
    assert not optimizer.state
    with pytest.raises(RuntimeError, match="had no values on the meta device, or after rebuild"):
        train_losses(model, optimizer, range(1))


@pytest.mark.parametrize(("shape", "strategy"), [((2,), "no_shard"), ((2, 1), STRATEGIES[3])])
@on_ranks(2)
def test_a_rank_that_joins_before_the_next_step_has_no_values(
    shape: tuple[int, ...], strategy: str
) -> None:
    """It holds whole parameters, in the first step since the other rank was rebuilt."""
    alone = [_mesh_of_ranks([rank]) for rank in range(2)][dist.get_rank()]
    meshes = _mesh(*shape), _mesh(*shape)
    model, optimizer = _made(meshes[0], strategy)
    train_losses(model, optimizer, range(2))
    model.abort()
    if dist.get_rank() == 0:
        assert model.rebuild(alone, optimizer)
    else:
        model, optimizer = _made(alone, strategy)
    assert not model.rebuild(meshes[1], optimizer)


@on_ranks(2, strategy=quick_strategies(STRATEGIES))
def test_a_graph_from_before_raises(strategy: str) -> None:
    model, optimizer = _made(_mesh(2), strategy)
    expected = train_losses(model, optimizer, range(2))
    model, optimizer = _made(_mesh(2), strategy)
    old = model(batch(0)).sum(), next(model.blocks[0].parameters()).sum()
    model.abort()
    assert model.rebuild(_mesh(2), optimizer)
    for loss in old:
        with pytest.raises(RuntimeError, match=r"from before abort\(\) or rebuild\(\)"):
            loss.backward()
    assert train_losses(model, optimizer, range(2)) == expected


# -- a rank that is killed -------------------------------------------------------------------------


def _train_and_lose_a_rank(folder: Path, port: int) -> None:
    """Three ranks train, the last one is killed in a backward, and the others go on."""
    rank = dist.get_rank()
    model, optimizer = _made(_mesh(3), STRATEGIES[3])
    train_losses(model, optimizer, range(2))
    checkpoint.save(folder / "saved", model, optimizer, extra={"step": 2})
    if rank == 2:
        model.blocks[1].up.register_full_backward_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
    code = section("docs/fault_tolerance.md", "Restart within the processes")
    address = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": 2}
    names = {
        "train_step": lambda m, o, step: train_losses(m, o, range(step, step + 1)),
        "ranks_that_are_left": lambda: address,
        **{"path": folder / "saved", "step": 2, "taken": None, "model": model},
        **{"optimizer": optimizer, "torch": torch, "checkpoint": checkpoint},
        **{"init_device_mesh": init_device_mesh, "restore": restore},
    }
    exec(code.partition("```python\n")[2].partition("```")[0], names)
    assert (dist.get_world_size(), names["step"]) == (2, 2)
    losses = train_losses(model, optimizer, range(2, 5))
    other, other_optimizer = _made(init_device_mesh("cpu", (2,)), STRATEGIES[3])
    checkpoint.load(folder / "saved", other, other_optimizer)
    assert losses == train_losses(other, other_optimizer, range(2, 5))
    (folder / f"{rank}.txt").write_text("went on")


def test_ranks_that_are_left_go_on_in_their_processes(tmp_path: Path) -> None:
    pool = RankPool(3)
    try:
        with pytest.raises(RankFailure):
            pool.run(_train_and_lose_a_rank, tmp_path, free_port())
    finally:
        pool.close()
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["went on"] * 2
