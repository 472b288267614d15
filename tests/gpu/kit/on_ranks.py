"""What checks of the core do on every rank of a process group."""

from __future__ import annotations

import dataclasses
import gc
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.diagnostics import memory_tracker
from megatron_fsdp_v2.optim import Muon
from tests.distributed.test_memory_bound import deep
from tests.distributed.wrapping import BF16, step_all, wrap
from tests.gpu.kit.machine import mesh_of
from tests.gpu.test_parity import on_device
from tests.parity.patterns import PATTERNS, Pattern
from tests.parity.test_parity import STRATEGIES, _same_bits, compare
from tests.reference.models import Block, Stack
from tests.reference.training import Trace, train_reference, train_sharded

POLICIES: dict[str, Any] = {"fp32": None, "bf16": BF16}


def _flat(device: str) -> DeviceMesh:
    return mesh_of(device, (dist.get_world_size(),))


def _trained(pattern: Pattern, device: str, mesh: DeviceMesh, **options: Any) -> Trace:
    def shard(module: nn.Module) -> None:
        fully_shard(module, mesh=mesh, **pattern.options, **options)

    return train_sharded(on_device(pattern, device), shard)


def _reference(pattern: Pattern, device: str) -> Trace:
    return train_reference(on_device(pattern, device), dist.get_world_size(), dist.get_rank())


def parity(
    device: str,
    shape: tuple[int, ...],
    outer: str,
    precision: str,
    patterns: Sequence[str],
    strategies: Sequence[str],
) -> dict[str, dict[str, float]]:
    """The largest relative error against an unsharded loop, by pattern and strategy."""
    mesh = mesh_of(device, shape)
    options = {"outer_dp_sharding_strategy": outer, "mp_policy": POLICIES[precision]}
    found: dict[str, dict[str, float]] = {}
    for name in patterns:
        pattern = PATTERNS[name]
        reference = _reference(pattern, device)
        found[name] = {}
        for strategy in strategies:
            found[name][strategy] = compare(
                _trained(pattern, device, mesh, sharding_strategy=strategy, **options), reference
            )
    return found


def switched(device: str, switch: str, setting: bool, patterns: Sequence[str]) -> list[str]:
    """What a switch changes a bit of: patterns and strategies."""
    changed = []
    for name in patterns:
        for strategy in STRATEGIES:
            plain, other = (
                _trained(PATTERNS[name], device, _flat(device), sharding_strategy=strategy, **more)
                for more in ({}, {switch: setting})
            )
            if not _same_bits(plain, other):
                changed.append(f"{name}, {strategy}")
    return changed


def muon(device: str) -> dict[str, float]:
    """The largest relative error of a training with Muon, by strategy."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        # Newton's own coefficients: the usual ones stretch rounding errors.
        options: dict[str, Any] = {"ns_coefficients": (1.5, -0.5, 0.0), "ns_dtype": torch.float32}
        return Muon([p for p in params if p.ndim == 2], lr=0.02, **options)

    pattern = dataclasses.replace(PATTERNS["plain"], optimizer=optimizer)
    reference = _reference(pattern, device)
    return {
        strategy: compare(
            _trained(pattern, device, _flat(device), sharding_strategy=strategy), reference
        )
        for strategy in STRATEGIES
    }


def _sharded_stack(device: str, strategy: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Stack().to(device), mesh=_flat(device), sharding_strategy=strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model: Any, optimizer: torch.optim.Optimizer, device: str) -> None:
    model(torch.ones(4, 5, device=device)).square().mean().backward()
    step_all(optimizer)


def _values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What a rank holds of weights, and of their optimizer state where it holds rows of them."""
    held = dict(model.named_parameters())
    for name, param in model.named_parameters():
        state = optimizer.state.get(param, {})
        held |= {f"{name} {kind}": state[kind] for kind in ("exp_avg", "exp_avg_sq") if state}
    return {name: tensor.to_local().detach().clone() for name, tensor in held.items()}


def async_save(device: str, folder: str) -> list[str]:
    """The strategies with which an asynchronous save does not hold the values of its moment."""
    wrong = []
    for strategy in STRATEGIES:
        model, optimizer = _sharded_stack(device, strategy, seed=0)
        _step(model, optimizer, device)
        path = Path(folder) / strategy
        future = checkpoint.save(path, model, optimizer, async_save=True)
        assert future is not None
        saved = _values(model, optimizer)
        # Training goes on while files are written.
        for _ in range(3):
            _step(model, optimizer, device)
        future.result()
        dist.barrier()
        other, its_optimizer = _sharded_stack(device, strategy, seed=1)
        checkpoint.load(path, other, its_optimizer)
        loaded = _values(other, its_optimizer)
        if not all(torch.equal(loaded[name], value) for name, value in saved.items()):
            wrong.append(strategy)
    return wrong


def memory(device: str, width: int) -> dict[str, dict[str, int]]:
    """Bytes of a step by strategy: its peak, its bound, and what torch's allocator had."""
    found = {}
    # Libraries of matrix products keep memory of their own from their first use on.
    warm = nn.Linear(width, width).to(device)
    warm(torch.ones(2, width, device=device)).sum().backward()
    del warm
    for strategy in STRATEGIES:
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        model = deep(width=width).to(device)
        wrap(model, mesh=_flat(device), sharding_strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(torch.ones(2, width, device=device)).square().mean().backward()
            step_all(optimizer)

        step()
        with memory_tracker(model, optimizer) as tracked:
            step()
        found[strategy] = {"peak": tracked.peak.total, "bound": tracked.bound.total}
        if tracked.max_memory_allocated is not None:
            found[strategy]["allocated"] = tracked.max_memory_allocated - before
        del model, optimizer, step, tracked
    return found


def compiled(device: str, backend: str, width: int) -> dict[str, float]:
    """The largest relative difference of losses with compiled blocks, by strategy."""
    if backend == "inductor":
        # Here, and not in processes of its own: a rank may have none.
        config: Any = importlib.import_module("torch._inductor.config")
        config.compile_threads = 1
    found = {}
    for strategy in STRATEGIES:
        losses: list[list[float]] = []
        for is_compiled in (False, True):
            torch.manual_seed(0)
            model: Any = nn.Sequential(*(Block(width) for _ in range(3))).to(device)
            for block in model if is_compiled else ():
                block.compile(backend=backend)
            wrap(model, list(model), mesh=_flat(device), sharding_strategy=strategy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            losses.append([])
            for step in range(4):
                generator = torch.Generator().manual_seed(step)
                data = torch.randn(4, width, generator=generator).to(device)
                loss = model(data).square().mean()
                loss.backward()
                step_all(optimizer)
                losses[-1].append(float(loss.detach()))
        found[strategy] = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    return found
