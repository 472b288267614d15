"""Every dtype of a policy is where it says, and gradients are scaled as documented."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.wrapping import STRATEGIES, batch, held_error, listen, mesh_of, wrap
from tests.ranks import RankPools
from tests.reference.models import MixedDtypes, Stack

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# -- where each dtype is seen ---------------------------------------------------------------------


@dataclass(frozen=True)
class Dtypes:
    """Dtypes seen in a step; `given` is what the model is built in."""

    given: torch.dtype
    compute: torch.dtype
    optimizer: torch.dtype
    grad: torch.dtype
    wire: torch.dtype
    output: torch.dtype


POLICIES: dict[str, tuple[dict[str, Any], Dtypes]] = {
    "as the parameters are": ({}, Dtypes(FP32, FP32, FP32, FP32, FP32, FP32)),
    "compute": ({"param_dtype": BF16}, Dtypes(FP32, BF16, FP32, FP32, FP32, BF16)),
    "main weights": ({"main_params_dtype": FP64}, Dtypes(FP32, FP32, FP64, FP64, FP64, FP32)),
    "main weights of a bf16 model": (
        {"main_params_dtype": FP32},
        Dtypes(BF16, BF16, FP32, FP32, FP32, BF16),
    ),
    "main gradients": (
        {"param_dtype": BF16, "main_grads_dtype": BF16},
        Dtypes(FP32, BF16, FP32, BF16, BF16, BF16),
    ),
    "wire": ({"grad_comm_dtype": BF16}, Dtypes(FP32, FP32, FP32, FP32, BF16, FP32)),
    "all": (
        {
            "param_dtype": FP16,
            "main_params_dtype": FP64,
            "main_grads_dtype": FP32,
            "grad_comm_dtype": BF16,
            "output_dtype": FP64,
        },
        Dtypes(FP32, FP16, FP64, FP32, BF16, FP64),
    ),
}


def dtypes_of_a_step(strategy: str, name: str) -> tuple[Dtypes, set[torch.dtype], bool]:
    """What a step shows of a policy: dtypes, dtypes of gathers, whether all weights moved."""
    options, expected = POLICIES[name]
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(**options)
    model = Stack(2).to(expected.given)
    # Every unit casts its own outputs: the root's layers want them in the compute dtype.
    inside = dataclasses.replace(policy, output_dtype=None)
    for block in model.blocks:
        wrap(block, units=(), sharding_strategy=strategy, mp_policy=inside)
    wrap(model, units=(), sharding_strategy=strategy, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wire = listen(model)
    seen: set[torch.dtype] = set()

    def look(module: nn.Module, args: Any) -> None:
        seen.update({module.weight.dtype, module.bias.dtype, args[0].dtype})

    model.input.register_forward_pre_hook(look)
    model.blocks[1].down.register_forward_pre_hook(look)
    before = [param.to_local().detach().clone() for param in model.parameters()]
    output = model(batch(dist.get_rank(), dtype=expected.given))
    output.float().square().mean().backward()
    grads = {param.grad.dtype for param in model.parameters() if param.grad is not None}
    optimizer.step()
    moved = [
        not torch.equal(param.to_local(), old)
        for param, old in zip(model.parameters(), before, strict=True)
        if old.numel()
    ]
    (compute,), (grad,), (sent,) = seen, grads, wire.dtypes(gathers=False)
    (held,) = {param.dtype for param in model.parameters()}
    found = Dtypes(expected.given, compute, held, grad, sent, output.dtype)
    return found, wire.dtypes(gathers=True), all(moved)


def all_dtypes() -> dict[tuple[str, str], tuple[Dtypes, set[torch.dtype], bool]]:
    """`dtypes_of_a_step` for every strategy and policy."""
    return {(s, name): dtypes_of_a_step(s, name) for s in STRATEGIES for name in POLICIES}


def test_each_dtype_of_a_policy_is_seen_where_it_says(pools: RankPools) -> None:
    for found in pools(2).run(all_dtypes):
        assert len(found) == len(STRATEGIES) * len(POLICIES)
        for (strategy, name), (dtypes, gathers, moved) in found.items():
            expected = POLICIES[name][1]
            assert dtypes == expected, (strategy, name)
            assert gathers == (set() if strategy == "no_shard" else {expected.compute}), strategy
            assert moved, f"a step with {name} at {strategy} left a weight where it was"


# -- inputs and outputs ---------------------------------------------------------------------------


@dataclass
class Features:
    """An input in a dataclass."""

    values: torch.Tensor
    index: torch.Tensor


class Noting(nn.Module):
    """Notes the dtypes of its inputs; takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.blocks: list[nn.Module] = []
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, nested: Any = None, *, features: Any = None) -> Any:
        self.seen["x"] = x.dtype
        if nested is not None:
            (inner, ids), flag = nested["list"], nested["flag"]
            self.seen["nested"] = (inner.dtype, ids.dtype, flag.dtype, nested["text"])
        if features is not None:
            self.seen["features"] = (features.values.dtype, features.index.dtype)
        y = self.linear(x.to(self.linear.weight.dtype))
        return {"plain": y, "ids": torch.ones(2, dtype=torch.int64), "dataclass": Features(y, y)}


def dtypes_of_inputs(casts: bool) -> dict[str, Any]:
    """Dtypes seen of nested inputs and outputs, with and without casting."""
    policy = MixedPrecisionPolicy(
        param_dtype=BF16, cast_forward_inputs=casts, output_dtype=FP64 if casts else None
    )
    model = wrap(Noting(), mp_policy=policy)
    ids = torch.arange(3)
    nested = {"list": [torch.ones(2, 5), ids], "flag": torch.tensor([True]), "text": "as it is"}
    output = model(
        torch.ones(2, 5), nested, features=Features(torch.ones(2, dtype=FP64), torch.ones(1) > 0)
    )
    kinds = {name: output[name].dtype for name in ("plain", "ids")}
    kinds["dataclass"] = output["dataclass"].values.dtype
    return {**model.seen, "output": kinds}


def test_floating_inputs_and_outputs_are_cast_and_others_untouched(pools: RankPools) -> None:
    for seen in pools(2).run(dtypes_of_inputs, True):
        assert seen["x"] is BF16
        assert seen["nested"] == (BF16, torch.int64, torch.bool, "as it is")
        assert seen["output"]["plain"] is FP64
        assert seen["output"]["ids"] is torch.int64


def test_tensors_in_dataclasses_are_cast_too(pools: RankPools) -> None:
    for seen in pools(2).run(dtypes_of_inputs, True):
        assert seen["features"] == (BF16, torch.bool)
        assert seen["output"]["dataclass"] is FP64


def test_without_cast_forward_inputs_inputs_stay_as_they_are(pools: RankPools) -> None:
    for seen in pools(2).run(dtypes_of_inputs, False):
        assert seen["x"] is FP32
        assert seen["nested"] == (FP32, torch.int64, torch.bool, "as it is")
        assert seen["features"] == (FP64, torch.bool)
        assert seen["output"]["plain"] is BF16


# -- main weights ---------------------------------------------------------------------------------


def shared_storages() -> dict[tuple[str, bool], bool]:
    """Whether main and model weight share storage: by strategy, and whether dtypes are equal."""
    found = {}
    for strategy in STRATEGIES:
        for param_dtype in (None, BF16):
            policy = MixedPrecisionPolicy(param_dtype=param_dtype)
            model = wrap(Stack(1), sharding_strategy=strategy, mp_policy=policy)
            (group,) = unit_of(model.blocks[0]).groups
            main, weight = group.main_weight.tensor, group.model_weight.tensor
            shares = main.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            found[strategy, param_dtype is None] = shares
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_main_weights_exist_only_where_dtype_or_placement_differs(
    pools: RankPools, world_size: int
) -> None:
    # ZeRO-1 and ZeRO-2 keep the whole model weight and a piece of the main weight; along an axis
    # of one rank the piece is the whole.
    placement_differs = {"optim", "optim_grads"} if world_size > 1 else set()
    for found in pools(world_size).run(shared_storages):
        for (strategy, same_dtype), shares in found.items():
            expected = same_dtype and strategy not in placement_differs
            assert shares is expected, (strategy, same_dtype)


# -- mixed dtypes and requires_grad ---------------------------------------------------------------


class MixedUnit(nn.Module):
    """Two floating dtypes, a frozen parameter of each kind, an integer table."""

    def __init__(self) -> None:
        super().__init__()
        # Rows of 16 bytes and more, so that each of three ranks holds some of everything trained.
        self.coarse = nn.Parameter(torch.ones(5, 4))
        self.fine = nn.Parameter(torch.ones(7, 4, dtype=FP64))
        self.frozen = nn.Parameter(torch.full((5, 4), 2.0), requires_grad=False)
        self.table = nn.Parameter(torch.arange(9), requires_grad=False)
        self.blocks: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.table.dtype is torch.int64
        y = (x @ (self.coarse * self.frozen)).double() @ self.fine.t()
        return y[:, self.table[:4]]


def mixed_unit() -> dict[str, Any]:
    """What a step of one unit with everything mixed leaves behind."""
    model = wrap(MixedUnit())
    wire = listen(model)
    model(batch(dist.get_rank())).sum().backward()
    reduced = sum(s.numel for s in wire.sent if s.kind != "all_gather")
    needed = sum(g.layout.numel for g in unit_of(model).groups if g.spec.requires_grad)
    dtypes = {n: (p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    frozen = [model.frozen.grad, model.table.grad]
    grads = {p.grad.dtype for p in (model.coarse, model.fine) if p.grad is not None}
    return {"dtypes": dtypes, "frozen": frozen, "reduced": (reduced, needed), "grads": grads}


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_unit_takes_mixed_dtypes_and_requires_grad(pools: RankPools, world_size: int) -> None:
    for found in pools(world_size).run(mixed_unit):
        assert found["dtypes"] == {
            "coarse": (FP32, True),
            "fine": (FP64, True),
            "frozen": (FP32, False),
            "table": (torch.int64, False),
        }
        assert found["frozen"] == [None, None]
        assert found["grads"] == {FP32, FP64}
        reduced, needed = found["reduced"]
        assert reduced == needed, "gradients of frozen parameters went over the wire"


# -- gradient scaling -----------------------------------------------------------------------------


class Dot(nn.Module):
    """A loss whose gradient is its input, whatever the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 3))
        self.blocks: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _small_integers(rank: int) -> torch.Tensor:
    # Exact in every dtype, and so are their sums.
    return ((torch.arange(21) * (rank + 2)) % 7 - 2).float().view(7, 3)


def scaled_gradients(shape: tuple[int, ...], outer: str) -> list[str]:
    """Cases in which the gradient is not exactly factor times sum."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    total = sum((_small_integers(r) for r in range(world_size)), torch.zeros(7, 3))
    wrong = []
    for strategy in STRATEGIES:
        if outer == "optim" and strategy == "no_shard":
            continue
        for factor in (None, 1.0, 0.25):
            for wire in (FP32, BF16, FP16):
                policy = MixedPrecisionPolicy(grad_comm_dtype=wire)
                model = wrap(
                    Dot(),
                    mesh=mesh_of(*shape),
                    sharding_strategy=strategy,
                    outer_dp_sharding_strategy=outer,
                    mp_policy=policy,
                    gradient_scaling_factor=factor,
                )
                model(_small_integers(rank)).backward()
                # The factor is applied once, in the dtype of the main gradient.
                expected = total * (1.0 / world_size if factor is None else factor)
                grad = model.weight.grad
                start, end = model.weight.local_rows
                right = (
                    start == end
                    if grad is None
                    else torch.equal(grad.to_local(), expected[start:end])
                )
                model(_small_integers(rank)).backward()
                if grad is not None:
                    right = right and held_error(model.weight.grad, 2 * expected) < 1e-5
                if not right:
                    wrong.append(f"{strategy}, factor {factor}, {wire} communicated")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_is_the_factor_times_the_sum_over_ranks(
    pools: RankPools, world_size: int
) -> None:
    for wrong in pools(world_size).run(scaled_gradients, (world_size,), "no_shard"):
        assert wrong == []


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_the_factor_counts_both_axes_of_a_mesh(pools: RankPools, outer: str) -> None:
    for wrong in pools(4).run(scaled_gradients, (2, 2), outer):
        assert wrong == []


def outer_wire() -> set[tuple[int, torch.dtype]]:
    """Mesh axis sizes and dtypes of the reductions of an HSDP step with bf16 communicated."""
    policy = MixedPrecisionPolicy(grad_comm_dtype=BF16)
    model = wrap(Stack(1), mesh=mesh_of(2, 1), mp_policy=policy)
    wire = listen(model)
    model(batch(dist.get_rank())).sum().backward()
    return {(s.axis_size, s.dtype) for s in wire.sent if s.kind != "all_gather"}


def test_grad_comm_dtype_is_on_the_wire_of_the_outer_axis_too(pools: RankPools) -> None:
    for sent in pools(2).run(outer_wire):
        assert {dtype for _, dtype in sent} == {BF16}


# -- whole trainings ------------------------------------------------------------------------------

STEPS, LEARNING_RATE = 3, 0.05


def _emulate(build: Any, policy: MixedPrecisionPolicy, world_size: int) -> list[torch.Tensor]:
    """Main weights after a training in one process, every cast written out."""
    torch.manual_seed(0)
    model = build()
    dtypes = [policy.resolve(param.dtype) for param in model.parameters()]
    mains = [
        param.detach().to(d.main_weight)
        for param, d in zip(model.parameters(), dtypes, strict=True)
    ]
    for param, d in zip(model.parameters(), dtypes, strict=True):
        param.data = param.data.to(d.model_weight)
    for step in range(STEPS):
        totals = [
            torch.zeros_like(m, dtype=d.main_grad) for m, d in zip(mains, dtypes, strict=True)
        ]
        for param, main in zip(model.parameters(), mains, strict=True):
            param.data.copy_(main)
        for rank in range(world_size):
            model.zero_grad()
            inputs = batch(rank, step).to(policy.param_dtype or FP32)
            model(inputs).float().square().mean().backward()
            for param, total, d in zip(model.parameters(), totals, dtypes, strict=True):
                total.add_(param.grad.to(d.grad_comm).to(d.main_grad))
        for main, total in zip(mains, totals, strict=True):
            main.add_(total.mul_(1.0 / world_size), alpha=-LEARNING_RATE)
    return mains


TRAININGS: dict[str, tuple[Any, MixedPrecisionPolicy, float]] = {
    "fp32": (Stack, MixedPrecisionPolicy(), 1e-6),
    "bf16 compute": (Stack, MixedPrecisionPolicy(param_dtype=BF16), 1e-6),
    "bf16 model": (
        lambda: Stack().bfloat16(),
        MixedPrecisionPolicy(param_dtype=BF16, main_params_dtype=FP32),
        1e-6,
    ),
    # Without sharding the sum itself is made in the communication dtype.
    "bf16 communicated": (
        Stack,
        MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype=BF16),
        2e-3,
    ),
    "bf16 gradients": (
        Stack,
        MixedPrecisionPolicy(param_dtype=BF16, main_grads_dtype=BF16),
        2e-3,
    ),
    "two dtypes in a unit": (MixedDtypes, MixedPrecisionPolicy(main_params_dtype=FP64), 1e-6),
}


def training_errors() -> dict[tuple[str, str], float]:
    """Relative error of every training and strategy against the emulation."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for name, (build, policy, _) in TRAININGS.items():
        expected = _emulate(build, policy, world_size)
        for strategy in STRATEGIES:
            torch.manual_seed(0)
            model = wrap(build(), sharding_strategy=strategy, mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
            for step in range(STEPS):
                optimizer.zero_grad()
                model(batch(rank, step)).float().square().mean().backward()
                optimizer.step()
            largest = max(float(full.abs().max()) for full in expected)
            found[name, strategy] = max(
                held_error(param, full) / largest
                for param, full in zip(model.parameters(), expected, strict=True)
            )
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_mixed_precision_trainings_equal_an_unsharded_emulation(
    pools: RankPools, world_size: int
) -> None:
    for found in pools(world_size).run(training_errors):
        assert len(found) == len(TRAININGS) * len(STRATEGIES)
        for (name, strategy), error in found.items():
            assert error < TRAININGS[name][2], (name, strategy, error)
