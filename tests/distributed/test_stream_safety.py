"""Steps on the pool, of every pattern and with side streams have no race; planted races are found.

`test_fake_cuda.py` covers steps of every strategy, precision and mesh.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.comm import streams
from megatron_fsdp_v2.params.gradients import GroupGrads
from tests.cases import quick_if
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    MESHES,
    STRATEGIES,
    batch,
    on_mesh,
    own_loss,
    train_own,
    wrap,
)
from tests.parity.patterns import PATTERNS, Pattern
from tests.reference.models import WIDTH, Checkpointed, Skipping, Stack
from tests.reference.training import train_sharded
from tests.stream_safety import Fault, Recording, record_streams
from tests.stream_safety.recorder import RecordedStream


def _recorded(model: Any) -> Recording:
    """Record two steps of two micro-batches, with evaluations between."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    with record_streams(model) as recording:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                # The first step synchronizes every backward, the second only the last one.
                with model.no_sync() if step == 1 and micro == 0 else nullcontext():
                    batch = torch.randn(4, 5, generator=generator)
                    model(batch).float().square().mean().backward()
                with torch.no_grad():
                    model(torch.ones(2, 5))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return recording


@pytest.mark.parametrize(("mesh_name", "policy"), [("2", None), ("HSDP 2x2", BF16)])
@on_ranks("mesh_name")
def test_steps_on_the_trace_pool_have_no_race(mesh_name: str, policy: Any) -> None:
    model = Checkpointed(use_reentrant=False)
    options = {"mp_policy": policy, "enable_trace_pool": True, **on_mesh(mesh_name)}
    recording = _recorded(wrap(model, **options))
    on_pool = [
        op
        for op in recording.schedule.operations()
        if op.stream != "compute"
        and any("trace pool" in region.buffer.name for region in op.reads + op.writes)
    ]
    assert [str(violation) for violation in recording.violations()] == []
    # The last backward gathers and reduces three blocks and the root on communication streams.
    assert len(on_pool) >= 6


@on_ranks(2)
def test_evaluations_on_another_stream_use_the_trace_pool_in_turn() -> None:
    model = wrap(Stack(5), enable_trace_pool=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record_streams(model) as recording:
        compute, side = recording.current_stream(), recording.new_compute_stream("side")
        for step in range(4):
            side.wait_stream(compute)
            with recording.use(side), torch.no_grad():
                model(batch(0))
            own_loss(model, step).backward()
            # As without sharding: the step writes what the evaluation read.
            compute.wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
    on_pool = {
        op.stream
        for op in recording.schedule.operations()
        if any("trace pool" in region.buffer.name for region in op.reads)
    }
    assert [str(violation) for violation in recording.violations()] == []
    assert {"compute", "side"} <= on_pool


@on_ranks(2)
def test_weights_gathered_beside_the_memory_of_their_saved_views_have_no_race() -> None:
    model: Any = wrap(Skipping(5), enable_trace_pool=True)
    with record_streams(model) as recording:
        for step, skip in enumerate((None, None, None, 2)):
            num_earlier = len(recording.schedule.operations())
            model.skip = skip
            own_loss(model, step).backward()
    assert [str(violation) for violation in recording.violations()] == []
    last = recording.schedule.operations()[num_earlier:]
    gathered = {region.buffer.name for op in last if op.stream != "compute" for region in op.writes}
    assert "blocks.1/0 weights gathered" in gathered, "nothing is gathered beside the pool"


def _recorded_pattern(pattern: Pattern, strategy: str) -> Recording:
    """Record the training of a parity pattern, from the creation of its optimizer on."""
    roots: list[Any] = []
    recordings: list[Recording] = []

    def shard(module: Any) -> None:
        # The root is sharded last.
        roots.append(fully_shard(module, sharding_strategy=strategy, **pattern.options))

    with ExitStack() as stack:

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            recordings.append(stack.enter_context(record_streams(roots[-1])))
            return pattern.optimizer(parameters)

        train_sharded(dataclasses.replace(pattern, optimizer=optimizer), shard)
    return recordings[0]


def _strategies_of_patterns(gathers: bool) -> dict[str, str]:
    """A strategy for every pattern: ZeRO-3, or one of the others in turn."""
    others = itertools.cycle(STRATEGIES[:3])
    # ZeRO-3 does not support a unit that only some ranks skip.
    return {
        name: "optim_grads_params" if gathers else next(others)
        for name, pattern in PATTERNS.items()
        if not (gathers and pattern.skips)
    }


@pytest.mark.functional
@on_ranks(2, gathers=[True, False])
def test_no_pattern_of_the_parity_matrix_has_a_race(gathers: bool) -> None:
    found = {}
    for name, strategy in _strategies_of_patterns(gathers).items():
        recording = _recorded_pattern(PATTERNS[name], strategy)
        on_streams = [op for op in recording.schedule.operations() if op.stream != "compute"]
        found[name] = (len(on_streams), [str(violation) for violation in recording.violations()])
    assert found.keys() == _strategies_of_patterns(gathers).keys()
    assert {name: violations for name, (_, violations) in found.items() if violations} == {}
    assert min(on_streams for on_streams, _ in found.values()) > 0


# -- planted faults -------------------------------------------------------------------------------


_reduce = GroupGrads.reduce


def _freed_early(grads: GroupGrads, *, async_op: bool) -> None:
    _reduce(grads, async_op=async_op)
    grads.full.drop()


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "collectives are not waited for": lambda: mock.patch.object(
        streams._EventWork, "wait", lambda work: None
    ),
    "gradients freed early": lambda: mock.patch.object(GroupGrads, "reduce", _freed_early),
    "streams do not wait for each other": lambda: mock.patch.object(
        RecordedStream, "wait_stream", lambda stream, other: None
    ),
}


def faults_found(fault: str) -> list[tuple[str, str, str]]:
    """Violations in two steps with a planted fault: kind, buffer and explanation."""
    model = wrap(Skipping())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record_streams(model) as recording, FAULTS[fault]():
        for _ in range(2):
            # Gradients accumulate: received gradients pass through a temporary buffer.
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
    return [(v.fault.value, v.buffer.name, str(v)) for v in recording.violations()]


@on_ranks(2, fault=["collectives are not waited for", "streams do not wait for each other"])
def test_premature_reuse_of_trace_pool_memory_is_detected(fault: str) -> None:
    model = wrap(Stack(5), enable_trace_pool=True)
    for _ in range(4):
        model(torch.randn(4, 5)).square().mean().backward()
    with record_streams(model) as recording, FAULTS[fault]():
        model(torch.randn(4, 5)).square().mean().backward()
    found = [
        str(v)
        for v in recording.violations()
        if (v.fault, v.buffer.name) == (Fault.UNORDERED, "trace pool, torch.float32")
    ]
    assert all(any(kind in text for text in found) for kind in ("all_gather", "reduce_scatter"))


WEIGHTS, GRADS = "blocks.1/0 weights gathered", "blocks.1/0 grads full"
GATHERED, REDUCED = "all_gather on 'gather' (writes it)", "reduce_scatter on 'reduce' (reads it)"
USED, FREED = "aten.addmm.default on 'compute' (reads it)", "free on 'compute'"
ALLOCATED, WRITTEN = "allocation on 'compute'", "on 'compute' (writes it)"
MAIN = "blocks.1/0 grads main"
PLANTED: dict[str, list[tuple[Fault, str, str, str]]] = {
    "none": [],
    "collectives are not waited for": [
        (Fault.UNORDERED, WEIGHTS, GATHERED, USED),
        (Fault.PREMATURE_FREE, WEIGHTS, GATHERED, FREED),
        (Fault.PREMATURE_FREE, GRADS, REDUCED, FREED),
        (Fault.UNORDERED, MAIN, "on 'reduce' (writes it)", "on 'compute' (reads it)"),
    ],
    "gradients freed early": [(Fault.PREMATURE_FREE, GRADS, REDUCED, FREED)],
    "streams do not wait for each other": [
        (Fault.UNORDERED_MEMORY, WEIGHTS, ALLOCATED, "all_gather on 'gather' (writes it)"),
        (Fault.UNORDERED, GRADS, WRITTEN, REDUCED),
    ],
}


@on_ranks(2, fault=PLANTED)
def test_planted_fault_is_detected_and_steps_without_faults_are_clean(fault: str) -> None:
    found = faults_found(fault)
    assert bool(found) == bool(PLANTED[fault]), found
    for kind, buffer, first, second in PLANTED[fault]:
        texts = [text for value, name, text in found if value == kind.value and buffer in name]
        assert any(first in text and second in text for text in texts), found
        assert all("has to wait for" in text for text in texts)


@on_ranks(2)
def test_mispredicted_prefetch_does_not_race_with_the_optimizer_step() -> None:
    """An evaluation skips the last unit, which was prefetched; then an optimizer steps weights."""
    model = wrap(Skipping())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record_streams(model) as recording:
        for _ in range(2):
            optimizer.zero_grad()
            model.skip = None
            model(torch.randn(4, 5)).square().mean().backward()
            model.skip = 2
            with torch.no_grad():
                model(torch.randn(4, 5))
            optimizer.step()
    assert [str(violation) for violation in recording.violations()] == []


COPY = "aten.copy_.default"


class Overlapping(nn.Module):
    """Two branches of one unit, the second branch on a separate stream.

    Attributes:
        streams: A recording.
        side: The stream of the second branch.
    """

    streams: Any
    side: Any

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.routed = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)
        # A weight with gradients from both streams.
        self.gate = self.routed if tied else nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.on_side():
            shared = self.down(torch.tanh(self.up(x))) * torch.sigmoid(self.gate(x))
        routed = torch.tanh(self.routed(x))
        self.join()
        return x + routed + shared

    @contextmanager
    def on_side(self) -> Iterator[None]:
        self.side.wait_stream(self.streams.current_stream())
        with self.streams.use(self.side):
            yield

    def join(self) -> None:
        self.streams.current_stream().wait_stream(self.side)


class Overlapped(Stack):
    """Blocks with a branch on another stream.

    Attributes:
        recomputed: Whether blocks are recomputed in the backward.
        whole: Whether the whole second block runs on the other stream.
    """

    def __init__(
        self, *, tied: bool = False, recomputed: bool = False, whole: bool = False
    ) -> None:
        super().__init__(block=lambda _: Overlapping(tied=tied))
        self.recomputed = recomputed
        self.whole = whole

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number == 1 and self.whole:
                with block.on_side():
                    x = block(x)
                block.join()
            else:
                x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x


class Parallel(Overlapped):
    """The last block runs beside the others, on the other stream."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        *others, last = self.blocks
        outputs = [block(x) for block in others]
        with last.on_side():
            outputs.append(last(x))
        last.join()
        return torch.stack(outputs).sum(0)


# Arguments of the model, and options of its units.
CASES: dict[str, tuple[dict[str, bool], dict[str, Any]]] = {
    **{strategy: ({}, {"sharding_strategy": strategy}) for strategy in STRATEGIES},
    "bf16": ({}, {"mp_policy": BF16}),
    "HSDP 2x2": ({}, {"mp_policy": BF16}),
    "tied": ({"tied": True}, {}),
    "tied, accumulated": ({"tied": True}, {"sharding_strategy": "optim"}),
    "recomputed": ({"recomputed": True}, {}),
    "whole unit": ({"whole": True}, {}),
    "trace pool": ({}, {"enable_trace_pool": True}),
    "synchronous": ({}, {"enable_async_reduce_grad": False}),
}
LONGER = ("optim", "optim_grads", "HSDP 2x2", "tied, accumulated", "synchronous")


@pytest.mark.slow
@pytest.mark.parametrize("name", [quick_if(name not in LONGER, name) for name in CASES])
@on_ranks(lambda name: 4 if name in MESHES else 2)
def test_gradients_of_a_side_stream_are_reduced_after_they_arrived(name: str) -> None:
    """There is no violation, and the side stream writes gradients."""
    own, options = CASES[name]
    model = wrap(Overlapped(**own), **on_mesh(name if name in MESHES else "2"), **options)
    with record_streams(model) as recording:
        side = recording.new_compute_stream("side")
        with mock.patch.multiple(Overlapping, streams=recording, side=side, create=True):
            train_own(model, num_micro=2)
    on_side: Counter[str] = Counter()
    for op in recording.schedule.operations("side"):
        for region in op.writes:
            is_gradient = region.buffer.name.endswith("grads full") or op.name == COPY
            on_side["gradients" if is_gradient else op.name] += 1
    assert [str(violation) for violation in recording.violations()] == []
    # Weights and biases of two layers of three blocks, in four backwards.
    assert on_side["gradients"] >= 4 * 3 * 4
    assert on_side["aten.tanh_backward.default"] >= 4 * 3


@on_ranks("num_ranks", num_ranks=[1, 2])
def test_buffers_of_a_unit_on_a_side_stream_are_freed_after_their_local_copy(
    num_ranks: int,
) -> None:
    """On one rank, and without reduction over ranks, gradients are copied on the side stream."""
    model = wrap(Parallel(), max_live_grad_buffers=1)
    model.set_requires_gradient_reduction(num_ranks == 1)
    with record_streams(model) as recording:
        side = recording.new_compute_stream("side")
        with mock.patch.multiple(Overlapping, streams=recording, side=side, create=True):
            own_loss(model).backward()
    found = [str(v) for v in recording.violations() if v.buffer.name.startswith("blocks")]
    assert found == []
