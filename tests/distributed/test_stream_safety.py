"""No step of any strategy has a race, and every planted one is found."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.comm.interface import Collective
from megatron_fsdp_v2.comm.streams import StreamCommunicator
from megatron_fsdp_v2.diagnostics.stream_safety import Fault, Recording, record_streams
from megatron_fsdp_v2.diagnostics.stream_safety.schedule import Free
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.wrapping import BF16
from tests.parity.patterns import PATTERNS, Pattern
from tests.ranks import RankPools
from tests.reference.models import Checkpointed, Skipping, Stack
from tests.reference.training import train_sharded

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MESHES = {"1-D": ((2,), "no_shard"), "HSDP": ((2, 2), "no_shard"), "HFSDP": ((2, 2), "optim")}
SLOW = [pytest.mark.functional]
QUICK = ("1-D", "bf16")
FLAT = (STRATEGIES[-1], "fp32")
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": BF16}


@functools.cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def _sharded(model: Any, mesh_name: str, strategy: str, **options: Any) -> Any:
    shape, outer = MESHES[mesh_name]
    for module in [*model.blocks, model]:
        fully_shard(
            module,
            mesh=_mesh(shape),
            sharding_strategy=strategy,
            outer_dp_sharding_strategy=outer,
            **options,
        )
    return model


def _trained(model: Any, *, recorded: bool) -> tuple[list[torch.Tensor], Recording | None]:
    """Two steps of two micro-batches, evaluations between; this rank's gradients and weights."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    grads = []
    with record_streams(model) if recorded else contextlib.nullcontext() as recording:
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
    return [*grads, *(p.to_local().clone() for p in model.parameters())], recording


def schedules_of(mesh_name: str, strategy: str, precision: str) -> list[dict[str, Any]]:
    """For every setting of the switches: faults, what ran where, and the error of the numbers."""

    def built(prefetch: bool, asynchronous: bool) -> Any:
        torch.manual_seed(0)
        return _sharded(
            Checkpointed(use_reentrant=False),
            mesh_name,
            strategy,
            mp_policy=POLICIES[precision],
            enable_unshard_prefetch=prefetch,
            enable_async_reduce_grad=asynchronous,
        )

    results = []
    plain, _ = _trained(built(True, True), recorded=False)
    for prefetch, asynchronous in itertools.product((True, False), repeat=2):
        numbers, recording = _trained(built(prefetch, asynchronous), recorded=True)
        assert recording is not None
        pairs = zip(plain, numbers, strict=True)
        operations = recording.schedule.operations()
        results.append(
            {
                "prefetch": prefetch,
                "asynchronous": asynchronous,
                "violations": [str(violation) for violation in recording.violations()],
                "ran": Counter((op.stream, op.name) for op in operations),
                "on": Counter(op.stream for op in operations),
                "error": max(float((a - b).norm() / (a.norm() + 1e-3)) for a, b in pairs),
            }
        )
    return results


@pytest.mark.parametrize(
    ("mesh_name", "strategy", "precision"),
    [
        # What shares most with another case is for longer runs.
        pytest.param(*case, marks=[] if case[::2] == QUICK or case[1:] == FLAT else SLOW)
        for case in itertools.product(MESHES, STRATEGIES, POLICIES)
        # An outer axis is sharded only where the inner one is; two axes are slow in one precision.
        if case[:2] != ("HFSDP", "no_shard") and not (case[0] != "1-D" and case[2] == "fp32")
    ],
)
def test_two_whole_steps_have_no_race_and_the_numbers_of_the_plain_communicator(
    pools: RankPools, mesh_name: str, strategy: str, precision: str
) -> None:
    world_size = 2 if mesh_name == "1-D" else 4
    for results in pools(world_size).run(schedules_of, mesh_name, strategy, precision):
        for result in results:
            assert result["violations"] == []
            assert result["error"] < (1e-5 if precision == "fp32" else 2e-2), result["error"]
            _assert_lanes_are_used(result, mesh_name, strategy)


def _assert_lanes_are_used(result: dict[str, Any], mesh_name: str, strategy: str) -> None:
    """Work is on communication streams exactly where the switches say so."""
    ran, on = result["ran"], result["on"]
    collectives = ("all_gather", "reduce_scatter", "all_reduce")
    assert on["compute"] > 500
    # ZeRO-3 gathers ahead; ZeRO-1 and -2 bring weights up to date all at once at the root's
    # forward, unless that takes two gathers in a row.
    refreshed = strategy in ("optim", "optim_grads") and mesh_name != "HFSDP"
    if result["prefetch"] and (strategy == "optim_grads_params" or refreshed):
        # Two steps of four forwards and two backwards over three blocks; the first has no guess.
        assert ran["gather", "all_gather"] >= (8 if refreshed else 10)
    else:
        assert on["gather"] == 0
    reduced = sum(ran["reduce", name] for name in collectives)
    reduced_outer = sum(ran["outer", name] for name in collectives)
    if result["asynchronous"]:
        # Four groups, at least once a step each; ZeRO-2 and -3 in every backward.
        assert reduced >= (16 if strategy.startswith("optim_grads") else 12)
        assert reduced_outer >= (0 if mesh_name == "1-D" else 8)
    else:
        assert on["reduce"] == on["outer"] == 0
        assert sum(ran["compute", name] for name in collectives) > 0
    assert set(on) <= {"compute", "gather", "reduce", "outer"}


def seen_operations() -> list[bool]:
    """Whether a recording saw forward, backward, gradients, optimizer, and memory that goes."""
    torch.manual_seed(0)
    model = _sharded(Checkpointed(use_reentrant=True), "1-D", "optim_grads_params")
    _, recording = _trained(model, recorded=True)
    assert recording is not None
    operations = recording.schedule.operations("compute")
    touched: dict[str, set[str]] = {}
    for op in operations:
        names = {region.buffer.name for region in op.reads + op.writes}
        touched.setdefault(op.name.removeprefix("aten.").split(".")[0], set()).update(names)
    kinds = Counter(type(record).__name__ for record in recording.schedule.records)
    return [
        "blocks.1/0 weights gathered" in touched["addmm"],
        "blocks.1/0 weights gathered" in touched["mm"],
        "blocks.1/0 grads full" in touched["copy_"],
        {"blocks.1/0 weights model", "blocks.1/0 grads main"}
        <= touched["addcdiv_"] | touched["lerp_"],
        "blocks.1/0 grads full" in {r.buffer.name for r in _frees(recording)},
        kinds["Allocation"] > 100 and kinds["EventWait"] > 10 and kinds["StreamWait"] > 10,
    ]


def _frees(recording: Recording) -> list[Any]:
    return [record for record in recording.schedule.records if isinstance(record, Free)]


def test_a_recording_sees_forward_backward_optimizer_and_memory(pools: RankPools) -> None:
    for seen in pools(2).run(seen_operations):
        assert seen == [True] * 6


def steps_on_the_pool(mesh_name: str, precision: str) -> tuple[list[str], int, float]:
    """Violations of steps on the traced pool, operations on communication streams, and error."""

    def built(**options: Any) -> Any:
        torch.manual_seed(0)
        model = Checkpointed(use_reentrant=False)
        policy = POLICIES[precision]
        return _sharded(model, mesh_name, "optim_grads_params", mp_policy=policy, **options)

    plain, _ = _trained(built(), recorded=False)
    numbers, recording = _trained(built(enable_trace_pool=True), recorded=True)
    assert recording is not None
    on_pool = [
        op
        for op in recording.schedule.operations()
        if op.stream != "compute"
        and any("trace pool" in region.buffer.name for region in op.reads + op.writes)
    ]
    pairs = zip(plain, numbers, strict=True)
    error = max(float((a - b).norm() / (a.norm() + 1e-3)) for a, b in pairs)
    return [str(violation) for violation in recording.violations()], len(on_pool), error


@pytest.mark.parametrize(("mesh_name", "precision"), [("1-D", "fp32"), ("HSDP", "bf16")])
def test_steps_on_the_trace_pool_have_no_race(
    pools: RankPools, mesh_name: str, precision: str
) -> None:
    ranks = pools(2 if mesh_name == "1-D" else 4)
    for violations, num_on_pool, error in ranks.run(steps_on_the_pool, mesh_name, precision):
        assert violations == []
        # The last backward gathers and reduces three blocks and the root on communication streams.
        assert num_on_pool >= 6
        assert error < (1e-5 if precision == "fp32" else 2e-2)


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
        self._root = fully_shard(
            module, mesh=_mesh((2,)), sharding_strategy=self._strategy, **self._pattern.options
        )

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


def violations_of_patterns(gathers: bool) -> dict[str, tuple[int, list[str]]]:
    """By pattern of the parity matrix: operations on communication streams, and violations."""
    found = {}
    for name, strategy in _strategies_of_patterns(gathers).items():
        recording = RecordedTraining(PATTERNS[name], strategy).run()
        on_lanes = [op for op in recording.schedule.operations() if op.stream != "compute"]
        found[name] = (len(on_lanes), [str(violation) for violation in recording.violations()])
    return found


@pytest.mark.slow
@pytest.mark.functional
@pytest.mark.parametrize("gathers", [True, False])
def test_no_pattern_of_the_parity_matrix_has_a_race(pools: RankPools, gathers: bool) -> None:
    for found in pools(2).run(violations_of_patterns, gathers):
        assert found.keys() == _strategies_of_patterns(gathers).keys()
        assert {name: violations for name, (_, violations) in found.items() if violations} == {}
        assert min(on_lanes for on_lanes, _ in found.values()) > 0


# -- what a recording leaves behind ---------------------------------------------------------------


def bits_after_a_recording() -> list[bool]:
    """Whether a model computes with its own communicator and buffers again, and bitwise."""
    models = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = _sharded(Checkpointed(use_reentrant=False), "1-D", "optim_grads_params")
        group = unit_of(model.blocks[0]).groups[0]
        before = [*vars(group.weights).values(), unit_of(model).context.communicator]
        with record_streams(model) if recorded else contextlib.nullcontext():
            pass
        after = [*vars(group.weights).values(), unit_of(model).context.communicator]
        models.append(all(a is b for a, b in zip(before, after, strict=True)))
        models.append(_trained(model, recorded=False)[0])
    kept, first, kept_recorded, second = models
    return [kept, kept_recorded, *map(torch.equal, first, second)]


def test_after_a_recording_the_model_is_what_it_was(pools: RankPools) -> None:
    for same in pools(2).run(bits_after_a_recording):
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
        copied = dataclasses.replace(collective, input=collective.input.clone())
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
        if async_op and self.group.weights.is_gathered:
            other = self.group.weights.gathered.tensor
            collective = dataclasses.replace(collective, output=other)
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
    torch.manual_seed(0)
    model = _sharded(Skipping(), "1-D", "optim_grads_params")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record_streams(model) as recording:
        _plant(fault, model, recording)
        for _ in range(2):
            # Gradients are added to: what comes off the wire goes through a temporary.
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(4, 5)).square().mean().backward()
            if fault == "gathered weights freed early":
                unit_of(model.blocks[1]).unshard(async_op=True)
                unit_of(model.blocks[1]).groups[0].weights.release()
                unit_of(model.blocks[1]).reshard()
            optimizer.step()
    return [(v.fault.value, v.buffer.name, str(v)) for v in recording.violations()]


def faults_found_on_the_pool(fault: str) -> set[tuple[str, str]]:
    """Kinds and buffers of violations of a step on the traced pool with a fault."""
    torch.manual_seed(0)
    model = Stack(5)
    _sharded(model, "1-D", "optim_grads_params", enable_trace_pool=True)
    for _ in range(4):
        model(torch.randn(4, 5)).square().mean().backward()
    with record_streams(model) as recording:
        _plant(fault, model, recording)
        model(torch.randn(4, 5)).square().mean().backward()
    return {(v.fault.value, v.buffer.name) for v in recording.violations()}


@pytest.mark.parametrize(
    "fault", ["gather not waited for", "reduction not waited for", "comm_stream does not wait"]
)
def test_a_place_in_the_trace_pool_used_again_too_early_is_found(
    pools: RankPools, fault: str
) -> None:
    for found in pools(2).run(faults_found_on_the_pool, fault):
        assert (Fault.UNORDERED.value, "trace pool, torch.float32") in found


@pytest.mark.parametrize(
    ("fault", "kind", "buffer", "pair"),
    [
        (
            "gather not waited for",
            Fault.UNORDERED,
            "blocks.1/0 weights gathered",
            ("all_gather on 'gather' (writes it)", "aten.addmm.default on 'compute' (reads it)"),
        ),
        (
            "gather not waited for",
            Fault.PREMATURE_FREE,
            "blocks.1/0 weights gathered",
            ("all_gather on 'gather' (writes it)", "free on 'compute'"),
        ),
        (
            "reduction not waited for",
            Fault.PREMATURE_FREE,
            "blocks.1/0 grads full",
            ("reduce_scatter on 'reduce' (reads it)", "free on 'compute'"),
        ),
        (
            "reduction not waited for",
            Fault.UNORDERED,
            "blocks.1/0 grads main",
            ("on 'reduce' (writes it)", "on 'compute' (reads it)"),
        ),
        (
            "work dropped",
            Fault.PREMATURE_FREE,
            "of aten.clone.default",
            ("reduce_scatter on 'reduce' (reads it)", "free on 'compute'"),
        ),
        (
            "gradients freed early",
            Fault.PREMATURE_FREE,
            "blocks.1/0 grads full",
            ("reduce_scatter on 'reduce' (reads it)", "free on 'compute'"),
        ),
        (
            "gathered weights freed early",
            Fault.PREMATURE_FREE,
            "blocks.1/0 weights gathered",
            ("all_gather on 'gather' (writes it)", "free on 'compute'"),
        ),
        (
            "comm_stream does not wait",
            Fault.UNORDERED_MEMORY,
            "blocks.1/0 weights gathered",
            ("allocation on 'compute'", "all_gather on 'gather 2' (writes it)"),
        ),
        (
            "comm_stream does not wait",
            Fault.UNORDERED,
            "blocks.1/0 grads full",
            ("on 'compute' (writes it)", "reduce_scatter on 'reduce 2' (reads it)"),
        ),
        (
            "buffer reused",
            Fault.UNORDERED,
            "blocks.1/0 weights gathered",
            ("all_gather on 'gather' (writes it)", "aten.addmm.default on 'compute' (reads it)"),
        ),
    ],
)
def test_a_planted_fault_is_found_and_named(
    pools: RankPools, fault: str, kind: Fault, buffer: str, pair: tuple[str, str]
) -> None:
    for found in pools(2).run(faults_found, fault):
        texts = [text for value, name, text in found if value == kind.value and buffer in name]
        assert any(pair[0] in text and pair[1] in text for text in texts), found
        assert all("has to wait for" in text for text in texts)


def test_without_a_fault_the_same_steps_are_clean(pools: RankPools) -> None:
    assert pools(2).run(faults_found, "none") == [[], []]


def violations_when_a_guess_is_wrong() -> list[str]:
    """An evaluation leaves out the last unit, which was gathered ahead; then the weights move."""
    torch.manual_seed(0)
    model = _sharded(Skipping(), "1-D", "optim_grads_params")
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
    return [str(violation) for violation in recording.violations()]


def test_a_unit_gathered_in_vain_is_not_read_while_weights_are_stepped(pools: RankPools) -> None:
    assert pools(2).run(violations_when_a_guess_is_wrong) == [[], []]
