"""Models built on the meta device are given memory and values one unit at a time."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_fsdp_v2 import fully_shard
from tests.distributed.wrapping import mesh_of, said, weight_error, wrap
from tests.ranks import RankPools

LIVE: list[weakref.ref[torch.Tensor]] = []
MOST: list[int] = [0]


class Layer(nn.Module):
    """A unit that notes how many bytes of full parameters are alive when it is initialized."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(11, 11))
        self.register_buffer("scale", torch.empty(11))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.scale.fill_(2.0)
        LIVE.append(weakref.ref(self.weight))
        alive = sum(ref() is not None for ref in LIVE)
        MOST[0] = max(MOST[0], alive)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.scale


class Model(nn.Module):
    """Layers with an embedding that is tied to the head, all on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 11)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(11, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _build(strategy: str, sizes: tuple[int, ...]) -> Any:
    # Every rank has a seed of its own: weights must be the same all the same.
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = Model()
    mesh = mesh_of(*sizes)
    for unit in [model.embedding, *model.layers, model.head]:
        fully_shard(unit, mesh=mesh, sharding_strategy=strategy)
    return fully_shard(model, mesh=mesh, sharding_strategy=strategy)


def built_on_meta(strategy: str, sizes: tuple[int, ...]) -> tuple[dict[str, Any], int, bool, bool]:
    """Full parameters, most layers alive in full, whether tied, whether a step trains."""
    LIVE.clear()
    MOST[0] = 0
    model = _build(strategy, sizes)
    full = {name: param.full_tensor() for name, param in model.named_parameters()}
    tied = model.head.weight is model.embedding.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.arange(6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    no_meta = not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    return full, MOST[0], tied, no_meta and losses[2] < losses[0]


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (2, 2)])
def test_a_meta_model_is_the_same_on_every_rank_and_peaks_at_one_unit(
    pools: RankPools, sizes: tuple[int, ...]
) -> None:
    world_size = sizes[0] * sizes[-1] if len(sizes) == 2 else sizes[0]
    for strategy in ("optim_grads_params", "no_shard"):
        results = pools(world_size).run(built_on_meta, strategy, sizes)
        first = results[0][0]
        for full, most, tied, trains in results:
            assert full.keys() == first.keys()
            assert all(torch.equal(full[name], first[name]) for name in first)
            assert len({float(value.sum()) for value in full.values()}) == len(full)
            assert most == 1
            assert tied
            assert trains


class Forgetful(Layer):
    """A module that leaves a buffer out."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def forgotten_buffer() -> tuple[str, list[float]]:
    """What a buffer without values leads to, and what the module gives once it has some."""
    with torch.device("meta"):
        module: Any = Forgetful()
    fully_shard(module, mesh=mesh_of(1))
    x = torch.ones(1, *module.weight.shape[1:])
    found = said(RuntimeError, lambda: module(x))
    module.scale.fill_(2.0)
    return found, module(x).flatten().tolist()


def test_a_buffer_that_gets_no_values_is_named(pools: RankPools) -> None:
    ((found, output),) = pools(1).run(forgotten_buffer)
    assert "scale of unit the root (Forgetful) had no values on the meta device" in found
    assert output and all(map(math.isfinite, output))


class Bare(nn.Module):
    """A module that cannot initialize itself, as most of model libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("table", torch.arange(5))
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, self.table] @ self.weight)


def loaded_into_bare_modules(strategy: str) -> tuple[list[str], dict[str, float], bool]:
    """Errors before values; distances of trained weights by how they got some; a new init."""
    mesh = mesh_of(dist.get_world_size())
    torch.manual_seed(0)
    real = nn.Sequential(Bare(), nn.Linear(1, 2))
    errors, distances = [], {}
    for how in ("full", "assigned", "distributed", "sharded"):
        with torch.device("meta"):
            model: Any = nn.Sequential(Bare(), nn.Linear(1, 2))
            wrap(model, [model[0]], sharding_strategy=strategy)
        errors.append(said(RuntimeError, lambda model=model: model(torch.ones(2, 5))))
        model.to_empty(device="cpu")
        state: Any = real.state_dict()
        if how == "distributed":
            split = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in real.named_parameters()}
            state = {**state, **split}
        if how == "sharded":
            other: Any = copy.deepcopy(real)
            wrap(other, [other[0]], sharding_strategy=strategy)
            state = other.state_dict()
        model.load_state_dict(state, assign=how != "full")
        plain = copy.deepcopy(real)
        # With parameters that were assigned, the sharded ones are there after the first use.
        x = torch.randn(2, 4, 5)
        model(x[0])
        model.reshard()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        for part in x:
            (plain(part).square().mean() / 2).backward()
        model(x[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        distances[how] = weight_error(model, plain)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            nn.init.constant_(param, 0.5)
    full = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
    return errors, distances, bool((full == 0.5).all())


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_modules_that_cannot_initialize_themselves_take_a_state_dict(
    pools: RankPools, strategy: str
) -> None:
    for errors, distances, filled in pools(2).run(loaded_into_bare_modules, strategy):
        assert all("table, weight of unit 0 (Bare) had no values" in error for error in errors)
        assert max(distances.values()) < 1e-6, distances
        assert filled


def _drawn_alike() -> bool:
    """Whether one unit, seeded alike, starts as when it is built with memory."""

    def build() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(
            nn.Linear(5, 4),
            nn.Sequential(nn.Linear(4, 3), nn.Bilinear(3, 3, 2)),
            nn.Embedding(3, 2),
        )

    real = build()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(7)
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    return all(
        torch.equal(param.full_tensor(), expected)  # type: ignore[attr-defined]
        for param, expected in zip(model.parameters(), real.parameters(), strict=True)
    )


def test_modules_of_a_unit_draw_in_the_order_they_were_constructed_in(pools: RankPools) -> None:
    assert all(pools(2).run(_drawn_alike))


class Rewrapping(nn.Module):
    """Registers parameters of its own and marks those, as Transformer Engine's modules do."""

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self.copies = copies
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.weight.from_the_constructor = 1  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        values = torch.arange(24.0).view(6, 4)
        if not self.copies:
            values = self.weight.detach().copy_(values)
        self.weight = nn.Parameter(values)
        self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def rewrapped() -> list[tuple[bool, int, bool]]:
    """Marks and values of a parameter that its initialization replaced."""
    found = []
    for copies in (False, True):
        with torch.device("meta"):
            module: Any = Rewrapping(copies=copies)
        fully_shard(module, mesh=mesh_of(dist.get_world_size()))
        weight = module.weight
        is_right = torch.equal(weight.full_tensor(), torch.arange(24.0).view(6, 4))
        module.unshard()
        marks = (module.weight.sequence_parallel, module.weight.from_the_constructor)
        assert marks == (weight.sequence_parallel, weight.from_the_constructor)
        found.append((*marks, is_right))
    return found


def test_what_an_initialization_registered_anew_keeps_its_marks_and_values(
    pools: RankPools,
) -> None:
    for found in pools(2).run(rewrapped):
        assert found == [(True, 1, True)] * 2


class Reshaping(Layer):
    """Registers something of another shape."""

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.zeros(3, 11))


def reshaped() -> str:
    """What an initialization that changes a shape leads to."""
    with torch.device("meta"):
        module = Reshaping()
    try:
        fully_shard(module, mesh=mesh_of(1))
    except ValueError as error:
        return str(error)
    return "no error"


def test_an_initialization_that_changes_a_shape_is_named(pools: RankPools) -> None:
    (said,) = pools(1).run(reshaped)
    assert "initialization of Reshaping left weight of shape (3, 11)" in said


class LeftAsItIs(nn.Module):
    """A module that its initialization gives other memory, which is full of NaN on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))

    def reset_parameters(self) -> None:
        self.weight.data = torch.full((5, 3), float("nan") if dist.get_rank() else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def left_as_it_is() -> float:
    """Output once weights were loaded, where ranks disagree on whether there had been some."""
    with torch.device("meta"):
        module: Any = LeftAsItIs()
    fully_shard(module, mesh=mesh_of(dist.get_world_size()))
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(2.0)
    return float(module(torch.ones(1, 5)).sum())


def test_ranks_agree_on_whether_weights_have_values(pools: RankPools) -> None:
    assert pools(2).run(left_as_it_is) == [30.0, 30.0]
