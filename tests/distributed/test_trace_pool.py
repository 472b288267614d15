"""The traced pool: close to the lower bound, no allocations, stable addresses, the same bits."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from examples.pool_picture import pool_picture
from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import on_mesh, said, shards_of, step_all, wrap
from tests.reference.models import Block, Stack

WIDTH = 48


class Deep(nn.Module):
    """A transformer's shape: an embedding, many equal layers, an output."""

    def __init__(self, num_blocks: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(num_blocks))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


class ExpertBlock(nn.Module):
    """A layer with a larger unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Block(WIDTH)
        self.experts = Block(2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        return x + self.experts(torch.cat([x, x], dim=-1))[..., :WIDTH]


class Mixture(Deep):
    """Layers with experts that are units of their own."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(num_blocks))


def _sharded(model: Any, mesh_name: str = "2", **options: Any) -> Any:
    inner = ([b.experts, b] if isinstance(b, ExpertBlock) else [b] for b in model.blocks)
    options = {"enable_trace_pool": True, **on_mesh(mesh_name), **options}
    return wrap(model, itertools.chain(*inner), **options)


def _step(model: Any, *, num_micro: int = 1, evaluates: bool = False, rows: int = 2) -> None:
    for micro in range(num_micro):
        is_last = micro == num_micro - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            model(torch.randn(rows, model.input.in_features)).square().mean().backward()
        if evaluates:
            with torch.no_grad():
                model(torch.randn(1, model.input.in_features))


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "training": (lambda: Deep(32), {}, {}),
    "training with evaluations between": (lambda: Deep(32), {}, {"evaluates": True}),
    "recomputation": (lambda: Deep(32, recomputes=True), {}, {}),
    "4 micro-batches": (lambda: Deep(32), {}, {"num_micro": 4}),
    "mixture of experts": (lambda: Mixture(12), {}, {}),
    "HSDP 2x2": (lambda: Deep(12), {"mesh_name": "HSDP 2x2"}, {"num_micro": 2}),
    "bf16 with fp32 gradients": (
        lambda: Deep(12),
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {},
    ),
    "ZeRO-1": (lambda: Deep(12), {"sharding_strategy": "optim"}, {"num_micro": 2}),
}


BOUNDED = ("training", "training with evaluations between", "recomputation", "4 micro-batches")


def _places(model: Any, steps: dict[str, Any]) -> dict[str, set[int]]:
    """By buffer, the addresses it had in a step."""
    seen: dict[str, set[int]] = {}

    def look(*_: Any) -> None:
        for module in [*model.blocks, model]:
            for group in unit_of(module).groups:
                temporaries = group.weights.temporaries() | group.grads.temporaries()
                for buffer in temporaries.values():
                    if buffer.is_live:
                        seen.setdefault(buffer.name, set()).add(buffer.tensor.data_ptr())

    handles = [module.register_forward_hook(look) for module in model.blocks]
    handles += [module.register_full_backward_hook(look) for module in model.blocks]
    _step(model, **steps)
    for handle in handles:
        handle.remove()
    return seen


@on_ranks(lambda name: 4 if "mesh_name" in CASES[name][1] else 2, name=CASES)
def test_plans_are_within_5_percent_and_nothing_is_allocated_after_warm_up(name: str) -> None:
    """And buffers lie where they lay in the step before."""
    build, options, steps = CASES[name]
    model = _sharded(build(), **options)
    for _ in range(4):
        _step(model, **steps)
    pool = model.trace_pool()
    before = pool.num_allocations
    first, second = (_places(model, steps) for _ in range(2))
    reports = pool.reports()
    planned = sum(report.plan.nbytes for report in reports)
    assert max(report.plan.excess for report in reports) <= 0.05, pool.report()
    # Of everything at once: weights and gradients in one block could not be smaller either.
    assert pool.peak_nbytes <= planned <= 1.05 * pool.peak_nbytes
    if name in BOUNDED:
        root, block = (unit_of(m).groups[0].layout.numel for m in (model, model.blocks[0]))
        two_units = 4 * 2 * (root + 2 * block)
        # The root's gradients come last, when no block is gathered any more.
        assert 0.9 * two_units < pool.peak_nbytes <= two_units
    assert pool.num_allocations == before
    assert not any(report.beside for report in reports)
    assert len(first) > 12
    assert first == second
    assert {name: len(at) for name, at in first.items() if len(at) > 1} == {}


# -- the same bits, whatever happens --------------------------------------------------------------


class Scenario:
    """Things done to a model in an order that the first passes did not have; what came out."""

    def __init__(self, model: Any, *, pooled: bool) -> None:
        self.model = model
        self.pooled = pooled
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.bits: list[torch.Tensor] = []

    def loss(self, rows: int = 3) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(rows, 5, generator=self.generator))
        loss = loss.square().mean()
        self.bits.append(loss.detach().clone())
        return loss

    def step(self) -> None:
        self.bits += [
            p.grad.to_local().clone() for p in self.model.parameters() if p.grad is not None
        ]
        step_all(self.optimizer)

    def train(self, times: int = 1, rows: int = 3) -> None:
        for _ in range(times):
            self.loss(rows).backward()
            self.step()

    def evaluate(self, *, inference: bool = False) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            self.loss()

    def pool(self, method: str) -> None:
        if self.pooled:
            getattr(self.model.trace_pool(), method)()


def _evaluation_before_a_backward(run: Scenario) -> None:
    run.train(4)
    loss = run.loss()
    run.evaluate()
    run.evaluate(inference=True)
    loss.backward()
    run.step()


def _one_forward_one_backward(run: Scenario) -> None:
    """A pipeline's order: up to three forwards wait for their backward."""
    for _ in range(4):
        waiting = [run.loss(rows) for rows in (2, 3)]
        for rows in (1, 4, 2):
            waiting.append(run.loss(rows))
            waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()
        run.step()


def _other_batch_sizes(run: Scenario) -> None:
    for rows in (3, 3, 3, 3, 1, 7, 2):
        run.train(rows=rows)


def _another_reshard(run: Scenario) -> None:
    run.train(4)
    run.model.blocks[1].set_reshard_after_forward(False)
    run.train(3)
    run.model.set_reshard_after_forward(False)
    run.train(3)
    run.model.set_reshard_after_forward(True)
    run.train(2)


def _modules_skipped(run: Scenario) -> None:
    blocks = run.model.blocks
    run.train(4)
    run.model.blocks = blocks[1:]
    run.train(2)
    run.model.blocks = blocks[::2]
    run.train(4)
    run.model.blocks = blocks[::-1]
    run.train(4)
    run.model.blocks = blocks
    run.train(2)


def _layers_frozen(run: Scenario) -> None:
    run.train(4)
    run.model.blocks[2].requires_grad_(False)
    run.train(3)
    run.model.blocks[2].requires_grad_(True)
    run.model.blocks[0].requires_grad_(False)
    run.train(3)


def _memory_given_back(run: Scenario) -> None:
    run.train(4)
    run.pool("release")
    run.train()
    loss = run.loss()
    run.pool("release")
    loss.backward()
    run.step()
    loss = run.loss()
    run.pool("reset")
    loss.backward()
    run.step()
    run.train(4)


def _gathered_by_hand(run: Scenario) -> None:
    run.train(4)
    for block in run.model.blocks:
        block.unshard()
    run.train(1)
    run.model.set_modules_to_forward_prefetch(list(run.model.blocks))
    run.train(3)


def _a_view_is_kept(run: Scenario) -> None:
    run.train()
    run.model.blocks[1].unshard()
    kept = run.model.blocks[1].up.weight.detach()
    run.model.blocks[1].reshard()
    run.train(4)
    del kept
    run.train(2)


SCENARIOS: dict[str, Callable[[Scenario], None]] = {
    scenario.__name__: scenario
    for scenario in (
        _evaluation_before_a_backward,
        _one_forward_one_backward,
        _other_batch_sizes,
        _another_reshard,
        _modules_skipped,
        _layers_frozen,
        _memory_given_back,
        _gathered_by_hand,
        _a_view_is_kept,
    )
}


@on_ranks(2, scenario=SCENARIOS)
def test_what_was_not_traced_gives_the_same_bits(scenario: str) -> None:
    bits = []
    for pooled in (False, True):
        torch.manual_seed(0)
        run = Scenario(_sharded(Stack(5), enable_trace_pool=pooled), pooled=pooled)
        SCENARIOS[scenario](run)
        bits.append([*run.bits, *shards_of(run.model)])
    assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True))
    assert all(report.plan is not None for report in run.model.trace_pool().reports())


# -- misuse ---------------------------------------------------------------------------------------


PAIRS = list(itertools.combinations(range(5), 2))


@on_ranks(2)
def test_two_units_that_need_the_same_bytes_are_both_named() -> None:
    model = _sharded(Stack(5))
    for _ in range(4):
        _step(model)
    report = next(r for r in model.trace_pool().reports() if r.kind.is_weight)
    assert report.plan is not None
    weights = [report.names.index(f"blocks.{index}/0/model_weight") for index in range(5)]
    first, second = next(
        (i, j) for i, j in PAIRS if report.plan.overlaps[weights[i]] >> weights[j] & 1
    )
    loss = model(torch.randn(2, 5)).square().mean()
    model.blocks[second].unshard()
    text = said(RuntimeError, model.blocks[first].unshard)
    del loss
    model.blocks[second].reshard()
    for _ in range(3):
        _step(model)
    assert "has to come back to the memory where a forward left views of it" in text
    assert all(f"blocks.{index}/0/model_weight" in text for index in (first, second))
    assert "reset()" in text


@on_ranks(2)
def test_units_of_one_root_must_agree_on_the_pool() -> None:
    texts = []
    for inner in (False, True):
        model = Stack(2)
        for block in model.blocks:
            fully_shard(block, enable_trace_pool=inner)
        others = partial(fully_shard, model, enable_trace_pool=not inner)
        texts.append(said(ValueError, others))
    assert "=True for Stack and enable_trace_pool=False for blocks.0 (Block):" in texts[0]
    assert "give it to the root alone, or the same to all" in texts[1]


@on_ranks(2)
def test_released_memory_goes_back_unless_a_backward_needs_it() -> None:
    model = _sharded(Stack(5))
    for _ in range(4):
        _step(model)
    pool = model.trace_pool()
    planned = sum(report.plan.nbytes for report in pool.reports() if report.plan is not None)
    at_rest, again = pool.release(), pool.release()
    loss = model(torch.randn(2, 5)).square().mean()
    awaited = pool.release()
    loss.backward()
    assert planned == at_rest > 0
    assert (again, awaited) == (0, 0)


@on_ranks(2)
def test_a_plan_is_reported_as_text_and_as_a_picture(tmp_path: Path) -> None:
    path = tmp_path / f"{dist.get_rank()}.svg"
    plain, model = _sharded(Stack(2), enable_trace_pool=False), _sharded(Stack(5))
    early = model.trace_pool().report()
    assert "no plan yet" in said(RuntimeError, lambda: pool_picture(model, path))
    assert "Stack has no trace pool" in said(RuntimeError, plain.trace_pool)
    assert "Stack has no trace pool" in said(RuntimeError, lambda: pool_picture(plain, path))
    for _ in range(4):
        _step(model)
    pool_picture(model, path)
    text = model.trace_pool().report()
    assert early == (
        "float32 weights on cpu: no plan yet; traced: nothing\n\n"
        "float32 gradients on cpu: no plan yet; traced: nothing"
    )
    assert "lower bound" in text
    assert "forward and synchronized backward (3x)" in text
    assert "blocks.0/0/model_weight, blocks.2/0/model_weight" in text
    root = ElementTree.parse(path).getroot()
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    # Each block is gathered twice in a pass, and two patterns were traced.
    assert sum(title.startswith("blocks.1/0/model_weight") for title in titles) == 4
