"""No step of any strategy has a race, and every planted one is found."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.comm.interface import Collective
from megatron_fsdp_v2.comm.streams import StreamCommunicator
from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.cases import longer, quick_if
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, STRATEGIES, on_mesh, shards_of, strategies_on, wrap
from tests.parity.patterns import PATTERNS, Pattern
from tests.reference.models import Checkpointed, Skipping, Stack
from tests.reference.training import train_sharded
from tests.stream_safety import Fault, Recording, record_streams
from tests.stream_safety.schedule import Free

QUICK = ("2", "bf16")
FLAT = (STRATEGIES[-1], "fp32")
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": BF16}


def _sharded(
    model: Any, mesh_name: str = "2", strategy: str = STRATEGIES[-1], **options: Any
) -> Any:
    return wrap(model, sharding_strategy=strategy, **on_mesh(mesh_name), **options)


def _recomputed(*how: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return _sharded(Checkpointed(use_reentrant=False), *how, **options)


def _error(plain: list[torch.Tensor], numbers: list[torch.Tensor]) -> float:
    pairs = zip(plain, numbers, strict=True)
    return max(float((a - b).norm() / (a.norm() + 1e-3)) for a, b in pairs)


def _recorded(model: Any) -> tuple[list[torch.Tensor], Recording]:
    """`_trained`, and what was recorded."""
    with record_streams(model) as recording:
        return _trained(model), recording


def _trained(model: Any) -> list[torch.Tensor]:
    """Two steps of two micro-batches, evaluations between; this rank's gradients and weights."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    grads = []
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            # Once each way: gradients synchronized in every backward, and in the last one.
            unsynced = model.no_sync() if step == 1 and micro == 0 else None
            with unsynced or contextlib.nullcontext():
                batch = torch.randn(4, 5, generator=generator)
                model(batch).float().square().mean().backward()
            with torch.no_grad():
                model(torch.ones(2, 5))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grads += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*grads, *shards_of(model)]


@pytest.mark.parametrize(
    ("mesh_name", "strategy", "precision"),
    [
        # What shares most with another case is for longer runs.
        quick_if(case[::2] == QUICK or case[1:] == FLAT, *case)
        for case in itertools.product(("2", "HSDP 2x2", "HFSDP 2x2"), STRATEGIES, POLICIES)
        # An outer axis is sharded only where the inner one is; two axes are slow in one precision.
        if case[1] in strategies_on(case[0]) and (case[0] == "2" or case[2] == "bf16")
    ],
)
@on_ranks("mesh_name")
def test_two_whole_steps_have_no_race_and_the_numbers_of_the_plain_communicator(
    mesh_name: str, strategy: str, precision: str
) -> None:
    case, policy = (mesh_name, strategy), POLICIES[precision]
    plain = _trained(_recomputed(*case, mp_policy=policy))
    for prefetch, asynchronous in itertools.product((True, False), repeat=2):
        options = {"enable_unshard_prefetch": prefetch, "enable_async_reduce_grad": asynchronous}
        model = _recomputed(*case, mp_policy=policy, **options)
        numbers, recording = _recorded(model)
        assert [str(violation) for violation in recording.violations()] == []
        assert _error(plain, numbers) < (1e-5 if precision == "fp32" else 2e-2)
        _assert_lanes_are_used(recording, *case, prefetch=prefetch, asynchronous=asynchronous)


def _assert_lanes_are_used(
    recording: Recording, mesh_name: str, strategy: str, *, prefetch: bool, asynchronous: bool
) -> None:
    """Work is on communication streams exactly where the switches say so."""
    operations = recording.schedule.operations()
    ran = Counter((op.stream, op.name) for op in operations)
    on = Counter(op.stream for op in operations)
    collectives = ("all_gather", "reduce_scatter", "all_reduce")
    assert on["compute"] > 500
    # ZeRO-3 gathers ahead; ZeRO-1 and -2 bring weights up to date all at once at the root's
    # forward, unless that takes two gathers in a row.
    refreshed = strategy in ("optim", "optim_grads") and mesh_name != "HFSDP 2x2"
    if prefetch and (strategy == "optim_grads_params" or refreshed):
        # Two steps of four forwards and two backwards over three blocks; the first has no guess.
        assert ran["gather", "all_gather"] >= (8 if refreshed else 10)
    else:
        assert on["gather"] == 0
    reduced = sum(ran["reduce", name] for name in collectives)
    reduced_outer = sum(ran["outer", name] for name in collectives)
    if asynchronous:
        # Four groups, at least once a step each; ZeRO-2 and -3 in every backward.
        assert reduced >= (16 if strategy.startswith("optim_grads") else 12)
        assert reduced_outer >= (0 if mesh_name == "2" else 8)
    else:
        assert on["reduce"] == on["outer"] == 0
        assert sum(ran["compute", name] for name in collectives) > 0
    assert set(on) <= {"compute", "gather", "reduce", "outer"}


@on_ranks(2)
def test_a_recording_sees_forward_backward_optimizer_and_memory() -> None:
    model = _sharded(Checkpointed(use_reentrant=True))
    _, recording = _recorded(model)
    operations = recording.schedule.operations("compute")
    touched: dict[str, set[str]] = {}
    for op in operations:
        names = {region.buffer.name for region in op.reads + op.writes}
        touched.setdefault(op.name.removeprefix("aten.").split(".")[0], set()).update(names)
    kinds = Counter(type(record).__name__ for record in recording.schedule.records)
    freed = {r.buffer.name for r in recording.schedule.records if isinstance(r, Free)}
    stepped = {"blocks.1/0 weights model", "blocks.1/0 grads main"}
    assert "blocks.1/0 weights gathered" in touched["addmm"] & touched["mm"]
    assert "blocks.1/0 grads full" in touched["copy_"] & freed
    assert stepped <= touched["addcdiv_"] | touched["lerp_"]
    assert kinds["Allocation"] > 100 and kinds["EventWait"] > 10 and kinds["StreamWait"] > 10


@pytest.mark.parametrize(("mesh_name", "precision"), [("2", "fp32"), ("HSDP 2x2", "bf16")])
@on_ranks("mesh_name")
def test_steps_on_the_trace_pool_have_no_race(mesh_name: str, precision: str) -> None:
    policy = POLICIES[precision]
    plain = _trained(_recomputed(mesh_name, mp_policy=policy))
    pooled = _recomputed(mesh_name, mp_policy=policy, enable_trace_pool=True)
    numbers, recording = _recorded(pooled)
    on_pool = [
        op
        for op in recording.schedule.operations()
        if op.stream != "compute"
        and any("trace pool" in region.buffer.name for region in op.reads + op.writes)
    ]
    assert [str(violation) for violation in recording.violations()] == []
    # The last backward gathers and reduces three blocks and the root on communication streams.
    assert len(on_pool) >= 6
    assert _error(plain, numbers) < (1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize(
    ("mesh_name", "strategy", "precision"),
    [
        longer("2", STRATEGIES[0], "fp32"),
        ("2", STRATEGIES[1], "bf16"),
        ("HSDP 2x2", STRATEGIES[3], "bf16"),
        longer("HFSDP 2x2", STRATEGIES[3], "fp32"),
    ],
)
@on_ranks("mesh_name")
def test_steps_in_buckets_have_no_race(mesh_name: str, strategy: str, precision: str) -> None:
    case, policy = (mesh_name, strategy), POLICIES[precision]
    plain = _trained(_recomputed(*case, mp_policy=policy))
    for pool in (False, True):
        options = {"bucket_bytes": 4800, "enable_trace_pool": pool}
        numbers, recording = _recorded(_recomputed(*case, mp_policy=policy, **options))
        assert [str(violation) for violation in recording.violations()] == []
        assert _error(plain, numbers) < (1e-5 if precision == "fp32" else 2e-2)


class RecordedTraining:
    """The training of a pattern of the parity matrix, recorded from its optimizer's making on."""

    def __init__(self, pattern: Pattern, strategy: str) -> None:
        self._pattern = pattern
        self._strategy = strategy

    def run(self) -> Recording:
        with contextlib.ExitStack() as self._stack:
            recorded = dataclasses.replace(self._pattern, optimizer=self._optimizer)
            train_sharded(recorded, self._shard)
        return self._recording

    def _shard(self, module: Any) -> None:
        # The root is the last one.
        self._root = fully_shard(module, sharding_strategy=self._strategy, **self._pattern.options)

    def _optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        self._recording = self._stack.enter_context(record_streams(self._root))
        return self._pattern.optimizer(parameters)


def _strategies_of_patterns(gathers: bool) -> dict[str, str]:
    """A strategy for every pattern: ZeRO-3, or one of the others in turn."""
    others = itertools.cycle(STRATEGIES[:3])
    # A unit that some ranks skip cannot be gathered for use.
    return {
        name: "optim_grads_params" if gathers else next(others)
        for name, pattern in PATTERNS.items()
        if not (gathers and pattern.skips)
    }


@pytest.mark.slow
@pytest.mark.functional
@on_ranks(2, gathers=[True, False])
def test_no_pattern_of_the_parity_matrix_has_a_race(gathers: bool) -> None:
    found = {}
    for name, strategy in _strategies_of_patterns(gathers).items():
        recording = RecordedTraining(PATTERNS[name], strategy).run()
        on_lanes = [op for op in recording.schedule.operations() if op.stream != "compute"]
        found[name] = (len(on_lanes), [str(violation) for violation in recording.violations()])
    assert found.keys() == _strategies_of_patterns(gathers).keys()
    assert {name: violations for name, (_, violations) in found.items() if violations} == {}
    assert min(on_lanes for on_lanes, _ in found.values()) > 0


# -- what a recording leaves behind ---------------------------------------------------------------


@on_ranks(2)
def test_after_a_recording_the_model_is_what_it_was() -> None:
    models = []
    for recorded in (False, True):
        model = _recomputed()
        group = unit_of(model.blocks[0]).groups[0]
        before = [*vars(group.weights).values(), unit_of(model).context.communicator]
        with record_streams(model) if recorded else contextlib.nullcontext():
            pass
        after = [*vars(group.weights).values(), unit_of(model).context.communicator]
        models.append(all(a is b for a, b in zip(before, after, strict=True)))
        models.append(_trained(model))
    kept, first, kept_recorded, second = models
    same = [kept, kept_recorded, *map(torch.equal, first, second)]
    assert len(same) > 20
    assert all(same)


def test_a_module_without_units_is_rejected() -> None:
    with (
        pytest.raises(ValueError, match="Linear holds no unit"),
        record_streams(torch.nn.Linear(2, 2)),
    ):
        pass


# -- planted faults -------------------------------------------------------------------------------


class Tampering:
    """A communicator around another one, of which a subclass spoils something."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class NoWait:
    """A work handle that orders nothing, and keeps memory as long as the real one would."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def wait(self) -> None:
        return None


class GathersWithoutWait(Tampering):
    def issue(self, collective: Collective, *, async_op: bool) -> Any:
        work = self.inner.issue(collective, async_op=async_op)
        return NoWait(work) if async_op else work


class ReducesWithoutWait(Tampering):
    def issue(self, collective: Collective, *, async_op: bool) -> Any:
        return NoWait(self.inner.issue(collective, async_op=async_op))


class DropsTickets(Tampering):
    """Hands over a copy, and forgets the work at once, and with it the copy."""

    def issue(self, collective: Collective, *, async_op: bool) -> Any:
        copied = collective._replace(input=collective.input.clone())
        self.inner.issue(copied, async_op=async_op)
        return NoWait(None)


class FreesGradientsEarly(Tampering):
    def __init__(self, inner: Any, group: Any) -> None:
        super().__init__(inner)
        self.group = group

    def issue(self, collective: Collective, *, async_op: bool) -> Any:
        work = self.inner.issue(collective, async_op=async_op)
        self.group.grads.buffers.drop(self.group.grads.buffers.full)
        return work


class GathersIntoAnother(Tampering):
    """What one unit gathers ahead lands in the buffer that another one computes with."""

    def __init__(self, inner: Any, group: Any) -> None:
        super().__init__(inner)
        self.group = group

    def issue(self, collective: Collective, *, async_op: bool) -> Any:
        if async_op and self.group.weights.uses:
            other = self.group.weights.gathered.tensor
            collective = collective._replace(output=other)
        return self.inner.issue(collective, async_op=async_op)


class DeafStream:
    """A stream that does not wait for others."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def wait_stream(self, stream: Any) -> None:
        return None


class DeafLanes:
    """A device whose new streams wait for nobody."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def new_stream(self, name: str) -> Any:
        return DeafStream(self.inner.new_stream(name))

    def current_stream(self) -> Any:
        return self.inner.current_stream()

    def is_current(self, stream: Any) -> bool:
        return bool(self.inner.is_current(stream))

    def use(self, stream: Any) -> Any:
        return self.inner.use(stream.inner)


def _plant(fault: str, model: Any, recording: Recording) -> None:
    """Put a fault between the units and the recorded communicator."""
    inner = recording.communicator
    deaf = StreamCommunicator(DeafLanes(recording.recorder), recording.collectives)
    groups = [unit_of(module).groups[0] for module in [*model.blocks, model]]
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        if fault == "gather not waited for":
            group.weights.replace_communicator(GathersWithoutWait(inner))
        elif fault == "reduction not waited for":
            group.grads.replace_communicator(ReducesWithoutWait(inner))
        elif fault == "work dropped":
            group.grads.replace_communicator(DropsTickets(inner))
        elif fault == "gradients freed early":
            group.grads.replace_communicator(FreesGradientsEarly(inner, group))
        elif fault == "comm_stream does not wait":
            group.weights.replace_communicator(deaf)
            group.grads.replace_communicator(deaf)
        elif fault == "buffer reused" and following in groups[:-1]:
            following.weights.replace_communicator(GathersIntoAnother(inner, group))


def faults_found(fault: str) -> list[tuple[str, str, str]]:
    """What the checker says of two steps with a fault: fault, buffer, explanation."""
    model = _sharded(Skipping())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record_streams(model) as recording:
        _plant(fault, model, recording)
        for _ in range(2):
            # Gradients are added to: what comes off the wire goes through a temporary.
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(4, 5)).square().mean().backward()
            if fault == "gathered weights freed early":
                unit_of(model.blocks[1]).unshard(WeightUse.BOTH, async_op=True)
                unit_of(model.blocks[1]).groups[0].weights.release()
                unit_of(model.blocks[1]).reshard()
            optimizer.step()
    return [(v.fault.value, v.buffer.name, str(v)) for v in recording.violations()]


@pytest.mark.parametrize(
    "fault", ["gather not waited for", "reduction not waited for", "comm_stream does not wait"]
)
@on_ranks(2)
def test_a_place_in_the_trace_pool_used_again_too_early_is_found(fault: str) -> None:
    model = _sharded(Stack(5), enable_trace_pool=True)
    for _ in range(4):
        model(torch.randn(4, 5)).square().mean().backward()
    with record_streams(model) as recording:
        _plant(fault, model, recording)
        model(torch.randn(4, 5)).square().mean().backward()
    found = {(v.fault.value, v.buffer.name) for v in recording.violations()}
    assert (Fault.UNORDERED.value, "trace pool, torch.float32") in found


WEIGHTS, GRADS = "blocks.1/0 weights gathered", "blocks.1/0 grads full"
GATHERED, REDUCED = "all_gather on 'gather' (writes it)", "reduce_scatter on 'reduce' (reads it)"
USED, FREED = "aten.addmm.default on 'compute' (reads it)", "free on 'compute'"
MAIN = "blocks.1/0 grads main"
PLANTED = [
    ("gather not waited for", Fault.UNORDERED, WEIGHTS, GATHERED, USED),
    ("gather not waited for", Fault.PREMATURE_FREE, WEIGHTS, GATHERED, FREED),
    ("reduction not waited for", Fault.PREMATURE_FREE, GRADS, REDUCED, FREED),
    (
        *("reduction not waited for", Fault.UNORDERED, MAIN),
        *("on 'reduce' (writes it)", "on 'compute' (reads it)"),
    ),
    ("work dropped", Fault.PREMATURE_FREE, "of aten.clone.default", REDUCED, FREED),
    ("gradients freed early", Fault.PREMATURE_FREE, GRADS, REDUCED, FREED),
    ("gathered weights freed early", Fault.PREMATURE_FREE, WEIGHTS, GATHERED, FREED),
    (
        *("comm_stream does not wait", Fault.UNORDERED_MEMORY, WEIGHTS),
        *("allocation on 'compute'", "all_gather on 'gather 2' (writes it)"),
    ),
    (
        *("comm_stream does not wait", Fault.UNORDERED, GRADS),
        *("on 'compute' (writes it)", "reduce_scatter on 'reduce 2' (reads it)"),
    ),
    ("buffer reused", Fault.UNORDERED, WEIGHTS, GATHERED, USED),
]


@pytest.mark.parametrize(("fault", "kind", "buffer", "first", "second"), PLANTED)
@on_ranks(2)
def test_a_planted_fault_is_found_and_named(
    fault: str, kind: Fault, buffer: str, first: str, second: str
) -> None:
    found = faults_found(fault)
    texts = [text for value, name, text in found if value == kind.value and buffer in name]
    assert any(first in text and second in text for text in texts), found
    assert all("has to wait for" in text for text in texts)


@on_ranks(2)
def test_without_a_fault_the_same_steps_are_clean() -> None:
    assert faults_found("none") == []


@on_ranks(2)
def test_a_unit_gathered_in_vain_is_not_read_while_weights_are_stepped() -> None:
    """An evaluation leaves out the last unit, which was gathered ahead; then the weights move."""
    model = _sharded(Skipping())
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
