"""Dtypes of a policy, scaling of gradients, and parameters of unusual dtypes and shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from megatron_fsdp_v2 import MixedPrecisionPolicy, checkpoint
from megatron_fsdp_v2.checkpoint.exporting import export
from megatron_fsdp_v2.checkpoint.verifying import verify
from tests.distributed.checkpoint_trainings import digests
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    held_error,
    mesh_of,
    of_all_ranks,
    on_mesh,
    own_loss,
    pair,
    record_collectives,
    shards_of,
    step_all,
    strategies_on,
    wrap,
)
from tests.reference.failing import PlannedFailure
from tests.reference.models import Elementless, Formula, MixedDtypes, Stack

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# -- dtypes of a policy ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Dtypes:
    """Dtypes in a step; `given` is the dtype in which the model is built."""

    given: torch.dtype
    compute: torch.dtype
    optimizer: torch.dtype
    grad: torch.dtype
    comm: torch.dtype
    output: torch.dtype


POLICIES: dict[str, tuple[dict[str, Any], Dtypes]] = {
    "parameters' dtype": ({}, Dtypes(FP32, FP32, FP32, FP32, FP32, FP32)),
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
    "communication": ({"grad_comm_dtype": BF16}, Dtypes(FP32, FP32, FP32, FP32, BF16, FP32)),
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


@on_ranks(2, strategy=STRATEGIES[::3], name=POLICIES)
def test_each_dtype_of_a_policy_is_applied(strategy: str, name: str) -> None:
    options, expected = POLICIES[name]
    policy = MixedPrecisionPolicy(**options)
    model = Stack(2).to(expected.given)
    # Every unit casts its own outputs: the root's layers need them in the compute dtype.
    inside = dataclasses.replace(policy, output_dtype=None)
    for block in model.blocks:
        wrap(block, sharding_strategy=strategy, mp_policy=inside)
    wrap(model, (), sharding_strategy=strategy, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recorded = record_collectives(model)
    seen: set[torch.dtype] = set()

    def look(module: nn.Module, args: Any) -> None:
        seen.update({module.weight.dtype, module.bias.dtype, args[0].dtype})

    model.input.register_forward_pre_hook(look)
    model.blocks[1].down.register_forward_pre_hook(look)
    before = shards_of(model)
    output = model(batch(dist.get_rank(), dtype=expected.given))
    output.float().square().mean().backward()
    flags = recorded.sent.pop()
    assert (flags.kind, flags.numel) == ("all_reduce", len(list(model.parameters())))
    grads = {param.grad.dtype for param in model.parameters() if param.grad is not None}
    optimizer.step()
    (compute,), (grad,), (sent,) = seen, grads, recorded.dtypes(gathers=False)
    (held,) = {param.dtype for param in model.parameters()}
    assert Dtypes(expected.given, compute, held, grad, sent, output.dtype) == expected
    assert recorded.dtypes(gathers=True) == (
        set() if strategy == "no_shard" else {expected.compute}
    )
    moved = zip(before, shards_of(model), strict=True)
    assert not any(torch.equal(a, b) for a, b in moved if a.numel()), "a weight stayed as it was"


# -- inputs and outputs ---------------------------------------------------------------------------


@dataclass
class Features:
    """An input in a dataclass."""

    values: torch.Tensor
    index: torch.Tensor


class Noting(nn.Module):
    """Records the dtypes of its nested inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, nested: Any, *, features: Any) -> Any:
        (inner, ids), flag = nested["list"], nested["flag"]
        self.seen["x"] = x.dtype
        self.seen["nested"] = (inner.dtype, ids.dtype, flag.dtype, nested["text"])
        self.seen["features"] = (features.values.dtype, features.index.dtype)
        y = self.linear(x.to(self.linear.weight.dtype))
        return {"plain": y, "ids": torch.ones(2, dtype=torch.int64), "dataclass": Features(y, y)}


# Options, and dtypes of inputs, of inputs in a dataclass, and of outputs.
CASTS: list[tuple[dict[str, Any], torch.dtype, torch.dtype, torch.dtype]] = [
    ({"cast_forward_inputs": True, "output_dtype": FP64}, BF16, BF16, FP64),
    ({"cast_forward_inputs": False}, FP32, FP64, BF16),
]


@pytest.mark.parametrize(("options", "x", "values", "output"), CASTS, ids=["cast", "not cast"])
@on_ranks(2)
def test_only_floating_point_inputs_and_outputs_are_cast_as_configured(
    options: dict[str, Any], x: torch.dtype, values: torch.dtype, output: torch.dtype
) -> None:
    model = wrap(Noting(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, **options))
    ids, flag = torch.arange(3), torch.tensor([True])
    nested = {"list": [torch.ones(2, 5), ids], "flag": flag, "text": "as it is"}
    features = Features(torch.ones(2, dtype=FP64), torch.ones(1) > 0)
    found = model(torch.ones(2, 5), nested, features=features)
    assert model.seen == {
        "x": x,
        "nested": (x, torch.int64, torch.bool, "as it is"),
        "features": (values, torch.bool),
    }
    dtypes = [found["plain"].dtype, found["dataclass"].values.dtype, found["ids"].dtype]
    assert dtypes == [output, output, torch.int64]


@dataclass
class _Carried:
    """A mutable argument."""

    kept: torch.Tensor
    total: torch.Tensor
    more: dict[str, Any]


@on_ranks(2, mode=["enable_grad", "inference_mode"], fails=[False, True])
def test_cast_arguments_are_the_callers_again_with_what_the_forward_wrote(
    mode: str, fails: bool
) -> None:
    seen = set()

    def forward(model: Any, x: torch.Tensor, state: _Carried) -> torch.Tensor:
        seen.update((x.dtype, state.kept.dtype, state.more["pair"][0].dtype))
        state.total += model.layer(state.kept).sum()
        state.more["new"] = [model.layer(x)]
        if fails:
            raise PlannedFailure
        return x

    model = wrap(
        Formula(forward, layer=nn.Linear(5, 5)), mp_policy=MixedPrecisionPolicy(param_dtype=BF16)
    )
    kept, part, more = torch.ones(2, 5, requires_grad=True), torch.ones(2), {}
    more["pair"], state = (part, 1), _Carried(kept, torch.zeros(()), more)
    with getattr(torch, mode)(), contextlib.suppress(PlannedFailure):
        model(kept, state)
    assert seen == {BF16}
    assert state.kept is kept and state.more is more and more["pair"][0] is part
    assert state.total.dtype == more["new"][0].dtype == BF16 and state.total != 0


# -- gradient scaling -----------------------------------------------------------------------------


def _dot() -> Any:
    """A loss whose gradient is its input, in any dtype."""
    return Formula(lambda m, x: (m.weight * x).sum(), weight=nn.Parameter(torch.zeros(7, 3)))


def _small_integers(rank: int) -> torch.Tensor:
    # Exact in every dtype, and so are their sums.
    return ((torch.arange(21) * (rank + 2)) % 7 - 2).float().view(7, 3)


@on_ranks("mesh_name", comm_dtype=[FP32, FP16], mesh_name=["3", "HSDP 2x2", "HFSDP 2x2"])
def test_a_gradient_is_the_factor_times_the_sum_over_ranks_of_both_axes(
    mesh_name: str, comm_dtype: torch.dtype
) -> None:
    size, own = dist.get_world_size(), _small_integers(dist.get_rank())
    total = sum((_small_integers(rank) for rank in range(size)), torch.zeros(7, 3))
    policy = MixedPrecisionPolicy(grad_comm_dtype=comm_dtype)
    for strategy, factor in itertools.product(strategies_on(mesh_name), (None, 1.0, 0.25)):
        options = {"sharding_strategy": strategy, "gradient_scaling_factor": factor}
        model = wrap(_dot(), mp_policy=policy, **on_mesh(mesh_name), **options)
        # The factor is applied once, in the dtype of the main gradient.
        expected = total * (1.0 / size if factor is None else factor)
        start, end = model.weight.local_rows
        model(own).backward()
        assert torch.equal(model.weight.grad.to_local(), expected[start:end]), options
        model(own).backward()
        assert held_error(model.weight.grad, 2 * expected) < 1e-5, options


class _Fused(torch.autograd.Function):
    """A dot product whose gradient of the weight is fp32, as that of a fused kernel."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.x * grads[0].float(), None


@on_ranks(2, strategy=STRATEGIES[::3], is_fused=[False, True])
def test_a_parameters_grad_dtype_is_kept(strategy: str, is_fused: bool) -> None:
    """257 is not a bf16 number: neither the sum over ranks nor the kernel's gradient is rounded."""
    weight = nn.Parameter(torch.zeros(7, 3, dtype=BF16))
    weight.grad_dtype = FP32
    dot = _Fused.apply if is_fused else lambda weight, x: (weight * x).sum()
    model = wrap(Formula(lambda m, x: dot(m.weight, x), weight=weight), sharding_strategy=strategy)
    own = [257.0, 1.0] if is_fused else [256.0, 1.0]
    for _ in range(2):
        model(torch.full((7, 3), own[dist.get_rank()])).backward()
    assert model.weight.dtype == BF16 and model.weight.grad.dtype == FP32
    found = of_all_ranks(model.weight.grad.to_local().unique().tolist())
    assert {value for values in found for value in values} == {sum(own)}


@on_ranks(4, strategy=STRATEGIES)
def test_a_sum_over_both_axes_is_rounded_to_the_main_gradients_dtype_once(strategy: str) -> None:
    policy = MixedPrecisionPolicy(grad_comm_dtype=FP32)
    options = {"sharding_strategy": strategy, "gradient_scaling_factor": 1.0}
    model = wrap(_dot().bfloat16(), mesh=mesh_of(2, 2), mp_policy=policy, **options)
    # The sums along the inner axis, 256.98 and 128.4, are no numbers of bf16.
    own = torch.tensor([256.0, 0.98, 128.0, 0.4], dtype=BF16)
    model(own[dist.get_rank()].expand(7, 3)).backward()
    expected = own.float().sum().bfloat16().expand(7, 3)
    assert held_error(model.weight.grad, expected) == 0


@on_ranks(2, strategy=STRATEGIES)
def test_micro_batches_are_rounded_to_the_main_gradients_dtype_once(strategy: str) -> None:
    policy = MixedPrecisionPolicy(grad_comm_dtype=FP32)
    options = {"sharding_strategy": strategy, "gradient_scaling_factor": 1.0}
    model = wrap(_dot().bfloat16(), mp_policy=policy, **options)
    # 256.98 is no number of bf16, and is rounded to 256.
    values = torch.tensor([256.0, 0.98, 0.98], dtype=BF16)
    for index, value in enumerate(values):
        model.set_requires_gradient_sync(index == len(values) - 1)
        model((value if dist.get_rank() else 0 * value).expand(7, 3)).backward()
    expected = values.float().sum().bfloat16().expand(7, 3)
    assert held_error(model.weight.grad, expected) == 0


FP16_POLICIES = {
    "communication": MixedPrecisionPolicy(grad_comm_dtype=FP16),
    "main": MixedPrecisionPolicy(main_grads_dtype=FP16, grad_comm_dtype=FP32),
    "both": MixedPrecisionPolicy(main_grads_dtype=FP16),
}


@on_ranks(4, strategy=STRATEGIES[1::2], policy=FP16_POLICIES)
def test_an_fp16_mean_does_not_overflow_where_the_sum_would(strategy: str, policy: str) -> None:
    options = {"sharding_strategy": strategy, "mp_policy": FP16_POLICIES[policy]}
    model = wrap(_dot(), mesh=mesh_of(2, 2), **options)
    model(torch.full((7, 3), 60_000.0)).backward()
    values = model.weight.grad.to_local().unique().tolist()
    assert any(of_all_ranks(values))
    assert values == pytest.approx([60_000.0] * len(values), rel=1e-3)


# -- whole trainings ------------------------------------------------------------------------------

STEPS, LEARNING_RATE = 3, 0.05


def _emulate(build: Any, policy: MixedPrecisionPolicy, world_size: int) -> list[torch.Tensor]:
    """Main weights after a training in one process with explicit casts."""
    torch.manual_seed(0)
    model = build()
    params = list(model.parameters())
    dtypes = [policy.resolve(param.dtype) for param in params]
    mains = [p.detach().to(d.main_weight) for p, d in zip(params, dtypes, strict=True)]
    for step in range(STEPS):
        for param, main, d in zip(params, mains, dtypes, strict=True):
            param.data = main.to(d.model_weight, copy=True)
        totals = [
            torch.zeros_like(m, dtype=d.main_grad) for m, d in zip(mains, dtypes, strict=True)
        ]
        for rank in range(world_size):
            model.zero_grad()
            inputs = batch(rank, step).to(policy.param_dtype or FP32)
            model(inputs).float().square().mean().backward()
            for param, total, d in zip(params, totals, dtypes, strict=True):
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
    # Without sharding, the reduction runs in the communication dtype.
    "bf16 communicated": (
        Stack,
        MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype=BF16),
        2e-3,
    ),
    "bf16 gradients": (Stack, MixedPrecisionPolicy(param_dtype=BF16, main_grads_dtype=BF16), 2e-3),
    "two dtypes in a unit": (MixedDtypes, MixedPrecisionPolicy(main_params_dtype=FP64), 1e-6),
}


@on_ranks(3, name=TRAININGS)
def test_mixed_precision_trainings_equal_an_unsharded_emulation(name: str) -> None:
    build, policy, tolerance = TRAININGS[name]
    expected = _emulate(build, policy, dist.get_world_size())
    largest = max(float(full.abs().max()) for full in expected)
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        model = wrap(build(), sharding_strategy=strategy, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for step in range(STEPS):
            model(batch(dist.get_rank(), step)).float().square().mean().backward()
            step_all(optimizer)
        pairs = zip(model.parameters(), expected, strict=True)
        error = max(held_error(param, full) for param, full in pairs)
        assert error / largest < tolerance, strategy


# -- unusual dtypes and empty parameters ----------------------------------------------------------


class Quantized(nn.Module):
    """A frozen weight of another dtype, its scale, and a trained layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.linspace(-2, 2, 35).view(7, 5)
        values = torch.complex(values, 2 * values) if dtype.is_complex else values
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([0.5]), requires_grad=False)
        self.layer = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.weight.abs() if self.weight.is_complex() else self.weight
        self.seen = self.weight.dtype
        # Cast to the dtype of the other operand.
        return self.layer(x @ weight.to(x.dtype).t() * self.scale.to(x.dtype))


FROZEN = [
    (torch.float8_e4m3fn, False, (2,)),
    (torch.float8_e4m3fn, True, (2, 2)),
    (torch.complex128, False, (2, 2)),
    (torch.int64, True, (3,)),
]


@pytest.mark.parametrize(("dtype", "casts", "shape"), FROZEN)
@on_ranks("shape", strategy=STRATEGIES[1::2])
def test_frozen_weight_of_any_dtype_is_gathered_bitwise(
    dtype: torch.dtype, casts: bool, shape: tuple[int, ...], strategy: str
) -> None:
    options: dict[str, Any] = {"sharding_strategy": strategy, "mesh": mesh_of(*shape)}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if casts else None)
    plain, model = pair(lambda: Quantized(dtype), lambda m: [], mp_policy=policy, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    x = torch.linspace(-1, 1, 20).view(4, 5)
    for _ in range(3):
        for either in (plain, model):
            either(x).float().square().mean().backward()
        step_all(*optimizers)
    with torch.no_grad():
        model(x)
    full, frozen = model.weight.full_tensor(), plain.weight.detach()
    assert held_error(model.layer.weight, plain.layer.weight) < (0.05 if casts else 1e-6)
    assert bool((full.view(torch.uint8) == frozen.view(torch.uint8)).all())
    assert model.seen == dtype


def _shapes(state: Any) -> dict[str, Any]:
    return {name: tuple(value.shape) for name, value in state.items()}


@on_ranks(3, strategy=STRATEGIES[1::2])
def test_parameters_without_elements_are_saved_loaded_and_exported(
    tmp_path: Path, strategy: str
) -> None:
    def made(strategy: str) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Elementless()
        wrap(model, [model.alone], sharding_strategy=strategy)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    path, others = tmp_path / "k", dict(zip(STRATEGIES, reversed(STRATEGIES), strict=True))
    model, optimizer = made(strategy)
    own_loss(model).backward()
    step_all(optimizer)
    checkpoint.save(path, model, optimizer)
    other, its_optimizer = made(others[strategy])
    checkpoint.load(path, other, its_optimizer)
    with torch.device("meta"):
        built, _ = made(strategy)
    checkpoint.load(path, built)
    whole = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    built(batch(0))
    built.load_state_dict(whole)
    assert digests(model, optimizer) == digests(other, its_optimizer)
    assert all(torch.equal(value.full_tensor(), whole[n]) for n, value in built.named_parameters())
    if dist.get_rank() == 0:
        (file,) = export(path, tmp_path / "m.pt").files
        expected = _shapes(Elementless().state_dict())
        assert _shapes(whole) == _shapes(torch.load(file)) == expected
        assert verify(path).problems == verify(file).problems == []
