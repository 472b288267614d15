"""On CUDA the host never waits inside a step: checked on fake tensors without a GPU.

`CudaStreams` and `NcclCollectives` run unmodified. Fake tensors have no values: the parity matrix
checks numerical results, on a CPU and by `make test-gpu`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from benchmarks.common import Block, ours, wrap_with_fsdp2
from megatron_fsdp_v2 import MixedPrecisionPolicy, RuntimeOptions
from megatron_fsdp_v2.comm import streams as comm_streams
from megatron_fsdp_v2.optim import Muon, engine
from megatron_fsdp_v2.runtime.module import named_units
from tests.cases import longer, quick_if, quick_only
from tests.distributed import fake_cuda
from tests.distributed.wrapping import BF16, MESHES, STRATEGIES, step_all, strategies_on, wrap
from tests.gpu import sanitized_step
from tests.ranks import RankPool, rank_pools
from tests.reference.failing import PlannedFailure, fail, failing
from tests.reference.models import Checkpointed, Skipping, Stack, TiedInside, UnusedParameter

WORLD_SIZE = 4
RANK = 1
ON_MESHES = ("4", "HSDP 2x2", "HFSDP 2x2")
SWITCHES = ("enable_unshard_prefetch", "enable_async_reduce_grad")
QUICK_OPTIMIZERS = ("AdamW, fused", "Muon")
UNCHECKED = RuntimeOptions(check_ranks="never")
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": BF16}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, for-loop": functools.partial(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW, fused": functools.partial(torch.optim.AdamW, fused=True),
    "SGD, momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Muon": lambda params: Muon([p for p in params if p.ndim == 2], lr=0.1),
}
CAPTURABLE = functools.partial(torch.optim.AdamW, lr=0.1, capturable=True)
MODELS: dict[str, Callable[[], Any]] = {
    "plain": Stack,
    "checkpointing, non-reentrant": functools.partial(Checkpointed, use_reentrant=False),
    "checkpointing, reentrant": functools.partial(Checkpointed, use_reentrant=True),
    "tied": TiedInside,
    "unused parameter": UnusedParameter,
    "unused unit": lambda: _skipping(Skipping()),
}


def _skipping(model: Skipping) -> Skipping:
    model.skip = 1
    return model


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    """A process with a permanent fake CUDA device, which no other test may use."""
    with rank_pools() as pools:
        yield pools(1)


@functools.cache
def _host() -> fake_cuda.FakeCuda:
    host = fake_cuda.enter(WORLD_SIZE, RANK)
    for name in ON_MESHES:
        _mesh(MESHES[name][0])
    host.mode.__enter__()
    # Ranks compare values at the first use, and fake tensors have none.
    engine.compare_units = lambda records, axes, device: None
    return host


@functools.cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    # Created outside the `FakeTensorMode`: a mesh compares its ranks by value.
    return init_device_mesh("cuda", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def run_steps(
    mesh_name: str,
    strategy: str,
    precision: str = "bf16",
    *,
    optimizer: str = "AdamW",
    model: str = "checkpointing, non-reentrant",
    plant: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Run two steps of two micro-batches with evaluations between; return the host's records."""
    policy, make = POLICIES[precision], OPTIMIZERS[optimizer]
    host, built, stepped = _built(mesh_name, strategy, model, make, mp_policy=policy, **options)
    host.record_memory(built)
    with _PLANTS[plant](built), host.step():
        for step in range(2):
            _train(built, stepped, last_only=step == 1)
    device = "cpu" if "offload_policy" in options else "cuda"
    assert all(p.device.type == device for p in built.parameters())
    return {
        "waits": host.waits,
        "violations": host.violations(),
        "collectives": Counter(host.collectives),
        "num_threads": len(host.threads),
    }


def _train(model: Any, optimizer: torch.optim.Optimizer, *, last_only: bool) -> None:
    for micro in range(2):
        with model.no_sync() if last_only and micro == 0 else contextlib.nullcontext():
            model(torch.randn(4, 5, device="cuda")).float().square().mean().backward()
        _evaluate(model)
    assert sum(p.grad is not None for p in model.parameters()) > 0
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    step_all(optimizer)


def _built(
    mesh_name: str,
    strategy: str,
    model: str = "plain",
    optimizer: Callable[[Any], torch.optim.Optimizer] = CAPTURABLE,
    **options: Any,
) -> tuple[fake_cuda.FakeCuda, Any, torch.optim.Optimizer]:
    host = _host()
    host.reset()
    with torch.device("cuda"):
        built = MODELS[model]()
    _shard(built, mesh_name, strategy, **options)
    return host, built, optimizer(built.parameters())


def _shard(model: Any, mesh_name: str, strategy: str, **options: Any) -> Any:
    shape, outer = MESHES[mesh_name]
    options = {"check_ranks": "never", "outer_dp_sharding_strategy": outer, **options}
    return wrap(model, mesh=_mesh(shape), sharding_strategy=strategy, **options)


def _evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.randn(4, 5, device="cuda"))


def captured(mesh_name: str, strategy: str) -> dict[str, Any]:
    """Run a step, two evaluations, a captured step, two evaluations; count the gathers of each."""
    host, model, optimizer = _built(mesh_name, strategy)
    gathers, wrong = [], []

    def noted() -> None:
        gathers.append(sum("allgather" in name for name, _ in host.collectives))
        host.collectives.clear()

    with host.step():
        _train(model, optimizer, last_only=False)
        noted()
        for _ in range(2):
            _evaluate(model)
            noted()
        with host.capture() as wrong:
            _train(model, optimizer, last_only=False)
        noted()
        for _ in range(2):
            _evaluate(model)
            noted()
    return {"gathers": gathers, "wrong": wrong, "waits": host.waits}


def captured_after(what: str, mesh_name: str, strategy: str) -> list[str]:
    """Capture a step after something that its stream must not wait for; return CUDA's errors."""
    host, model, optimizer = _built(mesh_name, strategy, "unused unit")
    with host.step():
        model.skip = None
        _train(model, optimizer, last_only=False)
        if what == "an evaluation that skips a unit":
            model.skip = 1
            _evaluate(model)
            model.skip = None
        else:
            model.unshard()
        with host.capture() as wrong:
            _train(model, optimizer, last_only=False)
    return wrong


def captured_muon(*, has_adamw: bool) -> tuple[list[str], str]:
    """Capture a step with Muon; return CUDA's errors, and the error of the optimizer."""

    def muon(params: Any) -> Muon:
        params = list(params)
        groups = [{"params": [p for p in params if p.ndim == 2]}]
        others = {"params": [p for p in params if p.ndim != 2], "use_muon": False}
        return Muon([*groups, others] if has_adamw else groups, lr=0.1)

    host, model, optimizer = _built("4", STRATEGIES[-1], optimizer=muon)
    with host.step():
        _train(model, optimizer, last_only=False)
        with host.capture() as wrong:
            try:
                _train(model, optimizer, last_only=False)
            except RuntimeError as error:
                return wrong, str(error)
    return wrong + host.waits, ""


def captured_mistakes() -> list[str]:
    """In a capture, wait for an operation queued before it, and leave a stream not joined."""
    host = _host()
    host.reset()
    side, earlier = torch.cuda.Stream(), torch.cuda.current_stream().record_event()
    with host.step(), host.capture() as wrong:
        current = torch.cuda.current_stream()
        current.wait_event(earlier)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            torch.ones(3, device="cuda")
    return wrong


def two_streams(strategy: str, *, is_itself: bool, unshards: bool = False) -> dict[str, Any]:
    """Run a teacher, or the model itself, on a side stream between a forward and its backward."""
    host, student, optimizer = _built("4", strategy)
    host.record_memory(student)
    teacher = student
    if not is_itself:
        with torch.device("cuda"):
            teacher = _shard(Stack(), "4", strategy)
        host.record_memory(teacher)
    side, compute = torch.cuda.Stream(name="side"), torch.cuda.current_stream()
    kept = []

    def evaluate() -> None:
        batch = torch.randn(4, 5, device="cuda")
        side.wait_stream(compute)
        with torch.cuda.stream(side), torch.no_grad():
            kept.append((batch, teacher(batch)))

    waits = 0
    with host.step():
        for _ in range(3):
            loss = student(torch.randn(4, 5, device="cuda")).square().mean()
            evaluate()
            before = len(host.recorder.current_schedule.records)
            loss.backward()
            if is_itself:
                for block in student.blocks if unshards else ():
                    block.unshard()
                evaluate()
                # As without sharding: the step writes what the evaluations read.
                compute.wait_stream(side)
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            waits += sum(
                (getattr(each, "awaited", ""), each.stream) == ("side", "compute")
                for each in host.recorder.current_schedule.records[before:]
            )
    del loss
    return {"violations": host.violations(), "waits for the side stream": waits}


def optimizer_on_side_stream(strategy: str) -> list[str]:
    """Step on another stream, which the next gathers wait for by an event; return violations."""
    host = _host()
    host.reset()
    with torch.device("cuda"):
        model = Stack()
    # The usual layout: units own all parameters, and the root none.
    _shard(model, "4", strategy, units=[model.input, *model.blocks, model.output])
    optimizer = CAPTURABLE(model.parameters())
    host.record_memory(model)
    side = torch.cuda.Stream(name="side")
    with host.step():
        for _ in range(3):
            model(torch.randn(4, 5, device="cuda")).square().mean().backward()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                optimizer.step()
            model.set_post_optim_event(side.record_event())
            optimizer.zero_grad()
    return host.violations()


class Positions(Stack):
    """Two buffers and an attribute that is one of them, as in rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(5, device="cpu"))
        self.original = self.offset
        self.input.register_buffer("scale", torch.ones(7, device="cpu"), persistent=False)

    def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> torch.Tensor:
        hidden = self.input(x * self.offset + self.original + more["bias"][0]) * self.input.scale
        return self.output(self.run_blocks(hidden))


def buffers_on_the_cpu(strategy: str) -> dict[str, Any]:
    """Shard a model with buffers on the CPU, and run it and a block alone on CPU inputs."""
    host = _host()
    host.reset()
    # Gathered parameters of a fake tensor would keep its device.
    with torch.device("cuda"):
        model: Any = Positions()
    buffer = model.offset
    _shard(model, "4", strategy)
    bias = torch.ones(5)
    more = {"bias": [bias]}
    found = {str(each.device) for each in (*model.buffers(), model.original, *model.parameters())}
    with host.step():
        output = model(torch.randn(4, 5, device="cpu"), more=more)
        output.square().mean().backward()
        copies, host.waits = len(host.waits), []
        alone = model.blocks[1](torch.randn(4, 7))
    return {
        "devices": found | {str(output.device), str(alone.device)},
        "same objects": buffer is model.offset is model.original and more["bias"][0] is bias,
        "copies": (copies, len(host.waits)),
    }


class Failing(torch.autograd.Function):
    """Fails in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise PlannedFailure


FAILURES: dict[str, Callable[[Any], Any]] = {
    "a module": lambda model: model.blocks[1].register_forward_hook(
        lambda module, args, output: Failing.apply(output)
    ),
    "a hook": lambda model: model.blocks[1].up.weight.register_post_accumulate_grad_hook(fail),
}


def failed_backward(strategy: str, failure: str, **options: Any) -> dict[str, Any]:
    """Train, fail in a backward, and train again; return the host's records."""
    # A capturable optimizer has its weights on the device.
    make = torch.optim.AdamW if options else CAPTURABLE
    host, model, optimizer = _built("4", strategy, optimizer=make, **options)
    host.record_memory(model)
    groups = [group for _, unit in named_units(model) for group in unit.groups]

    def live() -> set[str]:
        rows = [(group.name, group.temporaries().items()) for group in groups]
        return {f"{name} {kind}" for name, each in rows for kind, buffer in each if buffer.is_live}

    with host.step():
        _train(model, optimizer, last_only=False)
        at_rest, num_failed = live(), 0
        for _ in range(2):
            with failing(FAILURES[failure](model)):
                num_failed += 1
                model(torch.randn(4, 5, device="cuda")).square().mean().backward()
                num_failed -= 1
            optimizer.zero_grad()
            _train(model, optimizer, last_only=False)
    found = {"failed": num_failed, "waits": host.waits, "violations": host.violations()}
    return found | {"left": live() - at_rest}


def streams_asked(engine: str) -> dict[str, float]:
    """How often a step asks for the current stream per additional unit of four parameters."""
    host, found = _host(), []
    for num_units in (4, 8):
        host.reset()
        with torch.device("cuda"):
            model = nn.Sequential(*(Block(8) for _ in range(num_units)))
        wrap_with = wrap_with_fsdp2 if engine == "FSDP2" else ours(engine, options=UNCHECKED)
        wrap_with(model, _mesh((WORLD_SIZE,)))
        for _ in range(3):
            host.asked.clear()
            model(torch.randn(4, 8, device="cuda")).square().mean().backward()
            model.zero_grad()
        found.append(dict(host.asked))
    few, many = found
    return {how: (many[how] - few[how]) / 4 for how in many}


def muon_with_rate_on_device() -> list[str]:
    """Step with Muon, whose learning rate is a tensor on the device; return the host's waits."""
    host, model, _ = _built("4", STRATEGIES[-1])
    optimizer = Muon([p for p in model.parameters() if p.ndim == 2])
    optimizer.param_groups[0]["lr"] = torch.full((), 0.1, device="cuda")
    with host.step():
        model(torch.randn(4, 5, device="cuda")).square().mean().backward()
        optimizer.step()
    return host.waits


def sanitized(mesh_name: str, strategy: str) -> dict[str, Any]:
    """Run the steps that a GPU runs under torch's sanitizer; return the host's records."""
    host = _host()
    host.reset()
    shape, outer = MESHES[mesh_name]
    with host.step():
        sanitized_step.train(_mesh(shape), strategy, outer, check_ranks="never")
    return {"violations": host.violations(), "collectives": Counter(host.collectives)}


# -- planted host waits ------------------------------------------------------------------------


def _in_forward(act: Callable[[torch.Tensor], Any]) -> Any:
    @contextlib.contextmanager
    def planted(model: Any) -> Iterator[None]:
        # A hook that returns a value replaces the output.
        handle = model.blocks[1].up.register_forward_hook(
            lambda module, args, output: _then_nothing(act(output))
        )
        yield
        handle.remove()

    return planted


def _then_nothing(value: Any) -> None:
    del value


def _in_backward(act: Callable[[torch.Tensor], Any]) -> Any:
    def watch(output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: _then_nothing(act(grad)))

    return _in_forward(watch)


_PLANTS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "": lambda model: contextlib.nullcontext(),
    "item": _in_forward(lambda tensor: tensor.sum().item()),
    "to the host": _in_backward(lambda tensor: tensor.cpu()),
    "from the host": _in_forward(lambda tensor: torch.ones(3, device="cpu").to(tensor.device)),
    "mix of devices": _in_forward(lambda tensor: tensor + torch.ones(tensor.shape, device="cpu")),
    "synchronize": _in_backward(lambda tensor: torch.cuda.synchronize()),
    "event": _in_forward(lambda tensor: torch.cuda.current_stream().record_event().synchronize()),
    "no wait for work": lambda model: mock.patch.object(
        comm_streams._EventWork, "wait", lambda work: setattr(work, "keep", ())
    ),
    "no wait of the host": lambda model: mock.patch.object(
        comm_streams.StreamCommunicator, "synchronize", lambda self: None
    ),
}


# -- tests -------------------------------------------------------------------------------------


def _cases() -> Iterator[Any]:
    """Cases: mesh, strategy and options of `run_steps`."""
    for mesh_name in ON_MESHES:
        for strategy in strategies_on(mesh_name):
            quick = mesh_name == "4" and strategy != "optim_grads"
            yield quick_if(quick, mesh_name, strategy, {})
    yield "HFSDP 2x2", STRATEGIES[-1], {"precision": "fp32"}
    for name in OPTIMIZERS:
        yield quick_if(name in QUICK_OPTIMIZERS, "4", STRATEGIES[-1], {"optimizer": name})
    yield "4", STRATEGIES[-1], {"model": "unused parameter", "on_missing_grad": "zero"}
    yield longer("4", STRATEGIES[-1], {"model": "tied"})
    for strategy, model, switches in (
        ("optim_grads", "plain", SWITCHES[:1]),
        (STRATEGIES[-1], "checkpointing, reentrant", SWITCHES[1:]),
        (STRATEGIES[-1], "checkpointing, non-reentrant", SWITCHES),
    ):
        yield longer("4", strategy, {"model": model, **dict.fromkeys(switches, False)})


@pytest.mark.parametrize(("mesh_name", "strategy", "options"), list(_cases()))
def test_no_step_waits_for_the_device_and_streams_are_ordered(
    process: RankPool, mesh_name: str, strategy: str, options: dict[str, Any]
) -> None:
    (seen,) = process.run(run_steps, mesh_name, strategy, **options)
    assert seen["waits"] == []
    assert seen["violations"] == []
    # The engine runs a device's backward in a separate thread, unlike a CPU's.
    assert seen["num_threads"] == 2
    if not any(switch in options for switch in SWITCHES):
        streams = {stream for _, stream in seen["collectives"]}
        assert len(streams - {"compute"}) >= (1 if strategy == "no_shard" else 2), streams


# Main weights and gradients are in host memory, and the optimizer runs on the host.
OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}


@pytest.mark.parametrize("strategy", quick_only(STRATEGIES, STRATEGIES[-1]))
def test_offloaded_steps_are_ordered_on_streams_and_host(process: RankPool, strategy: str) -> None:
    (seen,) = process.run(run_steps, "4", strategy, **OFFLOAD)
    assert seen["violations"] == []
    # The engine runs a device's backward in a separate thread, unlike a CPU's.
    assert seen["num_threads"] == 2


@pytest.mark.parametrize("strategy", quick_only(STRATEGIES, STRATEGIES[-1]))
@pytest.mark.parametrize("failure", ["a module", longer("a hook")])
def test_failed_backward_with_offload_leaves_no_race_and_no_memory(
    process: RankPool, strategy: str, failure: str
) -> None:
    (seen,) = process.run(failed_backward, strategy, failure, **OFFLOAD)
    assert (seen["failed"], seen["violations"], seen["left"]) == (2, [], set())


def test_offloaded_step_without_a_wait_of_the_host_is_detected(process: RankPool) -> None:
    (seen,) = process.run(run_steps, "4", STRATEGIES[-1], plant="no wait of the host", **OFFLOAD)
    assert any("'host'" in violation for violation in seen["violations"])


@pytest.mark.parametrize("mesh_name", ON_MESHES)
def test_steps_of_the_gpu_sanitizer_run_on_fake_cuda(process: RankPool, mesh_name: str) -> None:
    (seen,) = process.run(sanitized, mesh_name, STRATEGIES[-1])
    assert seen["violations"] == []
    assert seen["collectives"].total() > 0


@pytest.mark.parametrize("strategy", quick_only(STRATEGIES, "optim", STRATEGIES[-1]))
def test_models_on_two_streams_do_not_wait_for_each_other(process: RankPool, strategy: str) -> None:
    (seen,) = process.run(two_streams, strategy, is_itself=False)
    assert seen == {"violations": [], "waits for the side stream": 0}


@pytest.mark.parametrize(
    ("strategy", "unshards"),
    [
        *(longer(each, False) for each in STRATEGIES[:-1]),
        (STRATEGIES[-1], False),
        (STRATEGIES[-1], True),
    ],
)
def test_model_evaluated_on_another_stream_before_its_backward_has_no_race(
    process: RankPool, strategy: str, unshards: bool
) -> None:
    (seen,) = process.run(two_streams, strategy, is_itself=True, unshards=unshards)
    assert seen["violations"] == []


@pytest.mark.parametrize("strategy", quick_only(STRATEGIES, "optim", STRATEGIES[-1]))
def test_gathers_wait_for_an_optimizer_on_another_stream(process: RankPool, strategy: str) -> None:
    assert process.run(optimizer_on_side_stream, strategy) == [[]]


@pytest.mark.parametrize("strategy", quick_only(STRATEGIES, STRATEGIES[-1]))
def test_buffers_and_inputs_on_the_cpu_are_moved_to_the_device(
    process: RankPool, strategy: str
) -> None:
    (seen,) = process.run(buffers_on_the_cpu, strategy)
    assert seen == {"devices": {"cuda:0"}, "same objects": True, "copies": (2, 1)}


# The engine runs a model on a device in a thread of its own, which may still hold a failed backward
# when the caller goes on.
@pytest.mark.parametrize(
    ("strategy", "failure"),
    [
        (STRATEGIES[-1], "a module"),
        (STRATEGIES[-1], "a hook"),
        ("optim", "a module"),
        longer("no_shard", "a hook"),
    ],
)
def test_failed_backward_leaves_no_race_and_no_memory(
    process: RankPool, strategy: str, failure: str
) -> None:
    (seen,) = process.run(failed_backward, strategy, failure)
    # Below ZeRO-3, the repair reads which parameters other ranks had gradients of.
    waits = [wait for wait in seen.pop("waits") if "context.py" not in wait]
    assert waits == []
    assert seen == {"failed": 2, "violations": [], "left": set()}


# Objects: torch's own context that selects a stream asks once per collective. Handles: per unit and
# step 4 gradients, and per gather and reduction the issue, the wait, the allocation, the free, and
# the writers of gradients.
ASKED = {
    "no_shard": {"object": 1, "handle": 12},
    "optim": {"object": 2, "handle": 14},
    "optim_grads": {"object": 2, "handle": 14},
    "optim_grads_params": {"object": 3, "handle": 20},
}


@pytest.mark.parametrize("strategy", quick_only(STRATEGIES, STRATEGIES[-1]))
def test_host_rarely_asks_for_the_current_stream(process: RankPool, strategy: str) -> None:
    (found,), (fsdp2,) = (process.run(streams_asked, each) for each in (strategy, "FSDP2"))
    assert found == ASKED[strategy]
    # A handle is one call in C. FSDP2 asks for 13 objects with torch 2.11.
    assert found["object"] < fsdp2["object"] / 2


def test_muon_reads_a_learning_rate_on_the_device_once(process: RankPool) -> None:
    (waits,) = process.run(muon_with_rate_on_device)
    assert len(waits) == 1 and "muon.py" in waits[0], waits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_name", "strategy"),
    [*(("4", each) for each in STRATEGIES), *((name, "optim_grads") for name in ON_MESHES[1:])],
)
def test_captured_step_gathers_weights_and_marks_them_stale(
    process: RankPool, mesh_name: str, strategy: str
) -> None:
    (seen,) = process.run(captured, mesh_name, strategy)
    assert seen["wrong"] == []
    assert seen["waits"] == []
    step, first, second, in_graph, third, fourth = seen["gathers"]
    # A replay of the graph changes weights without notice, so every forward gathers them.
    if strategy != "no_shard":
        assert third == fourth == first > 0 and in_graph > step - first
    # Without a captured step, up-to-date weights are not gathered again below ZeRO-3.
    if strategy not in ("no_shard", STRATEGIES[-1]):
        assert second < first
    elif len(mesh_name) == 1:
        assert second == first


@pytest.mark.parametrize(
    ("what", "mesh_name", "strategy"),
    [
        ("an evaluation that skips a unit", "4", "optim"),
        ("unshard", "4", STRATEGIES[-1]),
        longer("an evaluation that skips a unit", "HFSDP 2x2", "optim"),
        longer("unshard", "4", "no_shard"),
    ],
)
def test_capture_does_not_wait_for_earlier_work(
    process: RankPool, what: str, mesh_name: str, strategy: str
) -> None:
    (wrong,) = process.run(captured_after, what, mesh_name, strategy)
    assert wrong == []


@pytest.mark.functional
def test_muon_is_captured_unless_it_counts_steps_of_adamw(process: RankPool) -> None:
    """Replays would not count them, and the bias correction would be that of the capture."""
    assert process.run(captured_muon, has_adamw=False) == [([], "")]
    ((_, error),) = process.run(captured_muon, has_adamw=True)
    assert "replays of a CUDA graph would not count" in error


def test_wrong_capture_is_detected(process: RankPool) -> None:
    (wrong,) = process.run(captured_mistakes)
    outside, not_joined = wrong
    assert outside.endswith("waits for what is not captured")
    assert not_joined.endswith("is not joined")


@pytest.mark.functional
@pytest.mark.parametrize("model", ["unused unit", "unused parameter"])
def test_only_a_missing_gradient_makes_the_host_wait(process: RankPool, model: str) -> None:
    (seen,) = process.run(run_steps, "4", "optim_grads", model=model)
    # The host reads whether another rank had it in the first backward of each step, which finds
    # gradients of None. Here, each value of a list (one per parameter) is read separately.
    num_params = len(list(MODELS[model]().parameters()))
    assert len(seen["waits"]) == 2 * num_params
    assert all("a device tensor's value at context.py" in wait for wait in seen["waits"])


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        ("item", "a device tensor's value"),
        ("to the host", "device to host"),
        ("event", "Event.synchronize"),
        ("synchronize", "torch.cuda.synchronize"),
        longer("from the host", "host to device"),
    ],
)
def test_host_wait_is_detected(process: RankPool, plant: str, named: str) -> None:
    (seen,) = process.run(run_steps, "4", "optim_grads_params", plant=plant)
    assert any(named in wait and "test_fake_cuda.py" in wait for wait in seen["waits"])


def test_mix_of_devices_is_detected(process: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"found (two different|at least two) devices"):
        process.run(run_steps, "4", "optim_grads_params", plant="mix of devices")


def test_missing_stream_wait_is_detected(process: RankPool) -> None:
    (seen,) = process.run(run_steps, "4", "optim_grads_params", plant="no wait for work")
    assert any("reduce_scatter" in violation for violation in seen["violations"])
    assert any("allgather" in violation for violation in seen["violations"])
