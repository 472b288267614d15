"""Models built on the meta device are given memory and values one unit at a time."""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_fsdp_v2 import fully_shard
from tests.distributed.nccl_double import as_on_cuda
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    backward_both,
    batch,
    mesh_of,
    of_all_ranks,
    said,
    step_all,
    weight_error,
    wrap,
)

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


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@on_ranks("sizes", sizes=[(1,), (2,), (3,), (2, 2)])
def test_a_meta_model_is_the_same_on_every_rank_and_peaks_at_one_unit(
    sizes: tuple[int, ...], strategy: str
) -> None:
    LIVE.clear()
    MOST[0] = 0
    # Every rank has a seed of its own: weights must be the same all the same.
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model: Any = Model()
    units = [model.embedding, *model.layers, model.head]
    wrap(model, units, mesh=mesh_of(*sizes), sharding_strategy=strategy)
    full = {name: param.full_tensor().tolist() for name, param in model.named_parameters()}
    same = of_all_ranks(full)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.arange(6)).square().mean()
        loss.backward()
        step_all(optimizer)
        losses.append(float(loss.detach()))
    assert all(other == full for other in same)
    assert len({str(value) for value in full.values()}) == len(full)
    assert MOST[0] == 1
    assert model.head.weight is model.embedding.weight
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert losses[2] < losses[0]


class Forgetful(Layer):
    """A module that leaves a buffer out."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


@on_ranks(1)
def test_a_buffer_that_gets_no_values_is_named() -> None:
    with torch.device("meta"):
        module: Any = Forgetful()
    fully_shard(module)
    x = torch.ones(1, *module.weight.shape[1:])
    text = said(RuntimeError, lambda: module(x))
    module.scale.fill_(2.0)
    assert "scale of unit the root (Forgetful) had no values on the meta device" in text
    assert module(x).isfinite().all()


class Bare(nn.Module):
    """A module that cannot initialize itself, as most of model libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("table", torch.arange(5))
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, self.table] @ self.weight)


@on_ranks(2, strategy=["optim", "optim_grads_params"])
def test_modules_that_cannot_initialize_themselves_take_a_state_dict(strategy: str) -> None:
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
        model(batch(0))
        model.reshard()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        backward_both(plain, model)
        step_all(*optimizers)
        distances[how] = weight_error(model, plain)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            nn.init.constant_(param, 0.5)
    full = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
    assert all("table, weight of unit 0 (Bare) had no values" in error for error in errors)
    assert max(distances.values()) < 1e-6, distances
    assert bool((full == 0.5).all())


@on_ranks(2)
def test_modules_of_a_unit_draw_in_the_order_they_were_constructed_in() -> None:
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
    fully_shard(model)
    assert all(
        torch.equal(param.full_tensor(), expected)  # type: ignore[attr-defined]
        for param, expected in zip(model.parameters(), real.parameters(), strict=True)
    )


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


@on_ranks(2, copies=[False, True])
def test_what_an_initialization_registered_anew_keeps_its_marks_and_values(copies: bool) -> None:
    with torch.device("meta"):
        module: Any = Rewrapping(copies=copies)
    fully_shard(module)
    weight = module.weight
    assert torch.equal(weight.full_tensor(), torch.arange(24.0).view(6, 4))
    module.unshard()
    for param in (weight, module.weight):
        assert (param.sequence_parallel, param.from_the_constructor) == (True, 1)


class Reshaping(Layer):
    """Registers something of another shape."""

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.zeros(3, 11))


@on_ranks(1)
def test_an_initialization_that_changes_a_shape_is_named() -> None:
    with torch.device("meta"):
        module = Reshaping()
    text = said(ValueError, lambda: fully_shard(module))
    assert "initialization of Reshaping left weight of shape (3, 11)" in text


class LeftAsItIs(nn.Module):
    """A module that its initialization gives other memory, which is full of NaN on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))

    def reset_parameters(self) -> None:
        self.weight.data = torch.full((5, 3), float("nan") if dist.get_rank() else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@on_ranks(2)
def test_ranks_agree_on_whether_weights_have_values() -> None:
    with torch.device("meta"):
        module: Any = LeftAsItIs()
    fully_shard(module)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(2.0)
    assert float(module(torch.ones(1, 5)).sum()) == 30.0


class Tables(nn.Module):
    """Buffers of dtypes that no backend sums, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        for dtype in TABLE_DTYPES:
            self.register_buffer(str(dtype)[6:], torch.empty(2, 3, dtype=dtype).t())

    def reset_parameters(self) -> None:
        for tensor in (self.weight, *self.buffers()):
            tensor.copy_(torch.full_like(tensor, dist.get_rank() + 1, dtype=torch.float32))


TABLE_DTYPES = (torch.int16, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn)


@on_ranks(2, answers_as_nccl=[False, True])
def test_buffers_of_any_dtype_are_given_the_first_ranks_values(answers_as_nccl: bool) -> None:
    with torch.device("meta"):
        model = Tables()
    with as_on_cuda() if answers_as_nccl else contextlib.nullcontext():
        wrap(model)
    values = {str(b.dtype): {*b.to(torch.complex64).flatten().tolist()} for b in model.buffers()}
    assert values == {str(dtype): {1 + 0j} for dtype in TABLE_DTYPES}


@on_ranks(2)
def test_random_numbers_of_a_program_go_on_as_if_nothing_had_been_sharded() -> None:
    def build(unit_by_unit: bool) -> tuple[Any, bool]:
        torch.manual_seed(7)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        before = torch.get_rng_state()
        for layer in model if unit_by_unit else ():
            fully_shard(layer)
        return fully_shard(model), torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(7)
    expected = [layer.weight for layer in nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))]
    first, first_stays = build(True)
    with torch.no_grad():
        first(torch.ones(1, 4))
    second, second_stays = build(False)
    found = [[layer.weight.full_tensor() for layer in model] for model in (first, second)]
    assert first_stays and second_stays
    for weights in found:
        assert all(map(torch.equal, weights, expected))
