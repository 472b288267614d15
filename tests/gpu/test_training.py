"""Trainings of the core on GPUs over NCCL: parity, options, Muon, saves and compiled blocks."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.optim import Muon
from tests.distributed.wrapping import BF16, STRATEGIES, step_all, wrap
from tests.gpu.machine import Machine, mesh_of
from tests.parity.patterns import PATTERNS, Pattern
from tests.reference.models import Stack
from tests.reference.training import Trace, compare, same_bits, train_reference, train_sharded

POLICIES: dict[str, Any] = {
    "fp32": None,
    "bf16": BF16,
    "bf16, fp32 sums": dataclasses.replace(BF16, reduce_scatter_with_fp32_accumulation=True),
}
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-5}
LOW_PRECISION = 6e-2
"""Tolerance of a training in bf16, whose weights have 8 significant bits, against fp32."""
LOW_PRECISION_PATTERNS = ("plain", "accumulation under no_sync", "checkpointing, non-reentrant")


def on_device(pattern: Pattern, device: str) -> Pattern:
    """Return the pattern with its model on a device; the model moves its inputs there.

    For the reference alone: `fully_shard` moves a model and its inputs itself.
    """

    def move(module: nn.Module, args: Any) -> Any:
        return tuple(arg.to(device) for arg in args)

    def build() -> nn.Module:
        model = pattern.build().to(device)
        model.register_forward_pre_hook(move)
        return model

    return dataclasses.replace(pattern, build=build)


def _trained(pattern: Pattern, device: str, *shape: int, **options: Any) -> Trace:
    def shard(module: nn.Module) -> None:
        fully_shard(module, mesh=mesh_of(device, *shape), **pattern.options, **options)

    return train_sharded(pattern, shard)


def _reference(pattern: Pattern, device: str) -> Trace:
    return train_reference(on_device(pattern, device), dist.get_world_size(), dist.get_rank())


def parity(
    device: str,
    shape: tuple[int, ...],
    outer: str,
    precision: str,
    patterns: Sequence[str],
    strategies: Sequence[str],
) -> dict[str, float]:
    """Return the largest relative error against an unsharded loop, by pattern and strategy."""
    assert torch.get_float32_matmul_precision() == "highest"
    options = {"outer_dp_sharding_strategy": outer, "mp_policy": POLICIES[precision]}
    found: dict[str, float] = {}
    for name in patterns:
        reference = _reference(PATTERNS[name], device)
        for strategy in strategies:
            trained = _trained(
                PATTERNS[name], device, *shape, sharding_strategy=strategy, **options
            )
            found[f"{name}, {strategy}"] = compare(trained, reference)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["one axis", "HSDP", "HFSDP", "one rank"])
def test_every_pattern_trains_like_an_unsharded_loop(
    machine: Machine, kind: str, precision: str
) -> None:
    machine.require(4 if kind in ("HSDP", "HFSDP") else 1)
    pairs = machine.ranks // 2
    shape = {"one axis": (machine.ranks,), "one rank": (1,)}.get(kind, (2, pairs))
    outer = "optim" if kind == "HFSDP" else "no_shard"
    strategies = STRATEGIES[1:] if kind == "HFSDP" else STRATEGIES
    names = list(PATTERNS) if precision == "fp32" else list(LOW_PRECISION_PATTERNS)
    if machine.is_small:
        names = ["plain"]
    errors: dict[str, float] = {}
    for skips in (False, True):
        named = [name for name in names if PATTERNS[name].skips == skips]
        # At ZeRO-3 all ranks must run the same units.
        used = strategies[:-1] if skips and kind != "one rank" else strategies
        words = (shape, outer, precision, named, used)
        for found in machine.run(parity, *words, ranks=math.prod(shape)) if named else ():
            for name, error in found.items():
                errors[name] = max(error, errors.get(name, 0.0))
    bound = TOLERANCE[machine.device] if precision == "fp32" else LOW_PRECISION
    assert {name: error for name, error in errors.items() if not error <= bound} == {}


def changed_by(device: str, option: str, setting: bool, patterns: Sequence[str]) -> list[str]:
    """Return the patterns and strategies whose results differ with an option."""
    changed = []
    for name in patterns:
        for strategy in STRATEGIES:
            plain, other = (
                _trained(PATTERNS[name], device, sharding_strategy=strategy, **more)
                for more in ({}, {option: setting})
            )
            if not same_bits(plain, other):
                changed.append(f"{name}, {strategy}")
    return changed


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("enable_trace_pool", True),
        ("enable_unshard_prefetch", False),
        ("enable_async_reduce_grad", False),
    ],
)
def test_option_keeps_results_bitwise_identical(
    machine: Machine, option: str, setting: bool
) -> None:
    patterns = ("plain",) if machine.is_small else ("plain", "accumulation under no_sync")
    assert machine.run(changed_by, option, setting, patterns) == [[]] * machine.ranks


def muon(device: str) -> dict[str, float]:
    """Return the largest relative error of a training with Muon, by strategy."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        # Newton's coefficients; the usual coefficients amplify rounding errors.
        options: dict[str, Any] = {"ns_coefficients": (1.5, -0.5, 0.0), "ns_dtype": torch.float32}
        return Muon([p for p in params if p.ndim == 2], lr=0.02, **options)

    pattern = dataclasses.replace(PATTERNS["plain"], optimizer=optimizer)
    reference = _reference(pattern, device)
    return {
        strategy: compare(_trained(pattern, device, sharding_strategy=strategy), reference)
        for strategy in STRATEGIES
    }


def test_muon_of_sharded_parameters_matches_muon_of_full_ones(machine: Machine) -> None:
    for errors in machine.run(muon):
        assert max(errors.values()) < 10 * TOLERANCE[machine.device], errors


def _sharded_stack(device: str, strategy: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Stack(), mesh=mesh_of(device), sharding_strategy=strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 5)).square().mean().backward()
    step_all(optimizer)


def _values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return this rank's rows of the weights and of their optimizer states."""
    held = dict(model.named_parameters())
    for name, param in model.named_parameters():
        state = optimizer.state.get(param, {})
        held |= {f"{name} {kind}": state[kind] for kind in ("exp_avg", "exp_avg_sq") if state}
    return {name: tensor.to_local().detach().clone() for name, tensor in held.items()}


def async_save(device: str, folder: str) -> list[str]:
    """Return the strategies whose asynchronous save differs from the values at the call."""
    wrong = []
    for strategy in STRATEGIES:
        model, optimizer = _sharded_stack(device, strategy, seed=0)
        _step(model, optimizer)
        path = Path(folder) / strategy
        future = checkpoint.save(path, model, optimizer, async_save=True)
        assert future is not None
        saved = _values(model, optimizer)
        # Training continues while files are written.
        for _ in range(3):
            _step(model, optimizer)
        future.result()
        dist.barrier()
        other, its_optimizer = _sharded_stack(device, strategy, seed=1)
        checkpoint.load(path, other, its_optimizer)
        loaded = _values(other, its_optimizer)
        if not all(torch.equal(loaded[name], value) for name, value in saved.items()):
            wrong.append(strategy)
    return wrong


def test_asynchronous_save_holds_the_values_at_the_call(machine: Machine, tmp_path: Path) -> None:
    assert machine.run(async_save, str(tmp_path)) == [[]] * machine.ranks


def compiled(device: str, backend: str, width: int) -> dict[str, float]:
    """Return the largest relative difference of losses with compiled blocks, by strategy."""
    if backend == "inductor":
        # Compile in this process: a rank may not start child processes.
        config: Any = importlib.import_module("torch._inductor.config")
        config.compile_threads = 1
    plain = Pattern(functools.partial(Stack, 3, width))

    def build() -> nn.Module:
        model = plain.build()
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend=backend)
        return model

    found = {}
    for strategy in STRATEGIES:
        losses, expected = (
            _trained(pattern, device, sharding_strategy=strategy).losses
            for pattern in (dataclasses.replace(plain, build=build), plain)
        )
        found[strategy] = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return found


def test_compiled_blocks_give_the_losses_of_uncompiled_blocks(machine: Machine) -> None:
    backend, width = ("inductor", 64) if machine.on_cuda else ("aot_eager", 8)
    for errors in machine.run(compiled, backend, width):
        assert max(errors.values()) < 1e-4, errors
