"""The checks, in the order they run: what is cheap and says most comes first."""

from __future__ import annotations

import functools
import json
from typing import Any

from tests.gpu.kit import (
    bandwidth,
    delays,
    graphs,
    host,
    memcheck,
    overlap,
    quantized,
    speed,
    trainings,
)
from tests.gpu.kit import on_ranks as ranked
from tests.gpu.kit.running import Check, Outcome, Request, command, on_ranks, python
from tests.parity.patterns import PATTERNS
from tests.parity.test_parity import STRATEGIES

FP32 = {"cpu": 1e-6, "cuda": 1e-5}
BF16 = 6e-2
"""Of a training whose weights are rounded to 8 bits, against one in fp32."""
BF16_PATTERNS = ("plain", "accumulation under no_sync", "checkpointing, non-reentrant")
SMALL = ("plain",)
SLACK = 4 << 20
"""Bytes that torch's allocator and libraries may have besides: rounding, workspaces."""


def parity(kind: str, precision: str, request: Request) -> Outcome:
    """Every pattern and strategy against an unsharded loop on the same device."""
    ranks = request.ranks if kind == "1-D" else request.ranks - request.ranks % 2
    shape = (ranks,) if kind == "1-D" else (2, ranks // 2)
    outer = "optim" if kind == "HFSDP" else "no_shard"
    strategies = STRATEGIES[1:] if kind == "HFSDP" else STRATEGIES
    patterns: Any = PATTERNS if precision == "fp32" else BF16_PATTERNS
    if request.is_small:
        patterns = SMALL
    by_rank: list[dict[str, dict[str, float]]] = [{} for _ in range(ranks)]
    for skips in (False, True):
        # At ZeRO-3 a unit cannot be skipped on some ranks only.
        named = [p for p in patterns if PATTERNS[p].skips == skips]
        used = [s for s in strategies if not (skips and ranks > 1 and s == STRATEGIES[-1])]
        if not named:
            continue
        found = on_ranks(
            request, ranks, ranked.parity, request.device, shape, outer, precision, named, used
        )
        for errors, more in zip(by_rank, found, strict=True):
            errors.update(more)
    worst = {
        name: {s: max(errors[name][s] for errors in by_rank) for s in by_rank[0][name]}
        for name in by_rank[0]
    }
    bound = FP32[request.device] if precision == "fp32" else BF16
    error = max(max(of_pattern.values()) for of_pattern in worst.values())
    wrong = [f"{n}, {s}" for n, by in worst.items() for s, e in by.items() if not e <= bound]
    text = f"{len(worst)} patterns on {shape}: errors up to {error:.1e}, allowed are {bound:.0e}"
    return Outcome.of(not wrong, "; ".join([text, *wrong]), errors=worst, bound=bound)


def same_bits(switch: str, setting: bool, request: Request) -> Outcome:
    """A switch changes no bit."""
    patterns = SMALL if request.is_small else ("plain", "accumulation under no_sync")
    found = on_ranks(
        request, request.ranks, ranked.switched, request.device, switch, setting, patterns
    )
    changed = sorted({name for names in found for name in names})
    return Outcome.of(not changed, f"changed: {', '.join(changed) or 'nothing'}")


def muon(request: Request) -> Outcome:
    """Muon of sharded parameters against Muon of whole ones."""
    found = on_ranks(request, request.ranks, ranked.muon, request.device)
    worst = {s: max(errors[s] for errors in found) for s in STRATEGIES}
    error = max(worst.values())
    bound = 10 * FP32[request.device]
    text = f"errors up to {error:.1e}, allowed are {bound:.0e}"
    return Outcome.of(error < bound, text, errors=worst)


def async_save(request: Request) -> Outcome:
    """An asynchronous save holds the values of its moment."""
    folder = str(request.folder / "checkpoints")
    found = on_ranks(request, request.ranks, ranked.async_save, request.device, folder)
    wrong = sorted({name for names in found for name in names})
    return Outcome.of(not wrong, f"other values: {', '.join(wrong) or 'none'}")


def memory(request: Request) -> Outcome:
    """A step keeps to the bound; torch's allocator agrees."""
    width = 1024 if request.on_cuda else 64
    found = on_ranks(request, request.ranks, ranked.memory, request.device, width)
    wrong = []
    for rank, by_strategy in enumerate(found):
        for strategy, step in by_strategy.items():
            allowed = step["bound"] * 1.02 + (SLACK if request.on_cuda else 0)
            if max(step["peak"], step.get("allocated", 0)) > allowed:
                wrong.append(f"rank {rank}, {strategy}: {step}")
    text = "; ".join(wrong) or "no step passes its bound"
    return Outcome.of(not wrong, text, memory=found[0])


def compiled(request: Request) -> Outcome:
    """Compiled blocks give the losses of blocks that are not."""
    backend = "inductor" if request.on_cuda else "aot_eager"
    width = 64 if request.on_cuda else 8
    found = on_ranks(request, request.ranks, ranked.compiled, request.device, backend, width)
    worst = {s: max(errors[s] for errors in found) for s in STRATEGIES}
    error = max(worst.values())
    return Outcome.of(error < 1e-4, f"{backend}: losses differ by {error:.1e}", errors=worst)


def pytest_files(request: Request, file: str, on_cpu: tuple[str, ...]) -> Outcome:
    """Test files that need a GPU; on a CPU, what rehearses them."""
    log = request.folder / "output.log"
    if request.on_cuda:
        done = command(python("-m", "pytest", "-q", "-m", "gpu", file), log)
        last = done.checked().output.strip().splitlines()[-1]
        # Tests that skip themselves are no proof; what needs two GPUs does so where there is one.
        is_whole = " passed" in last and ("skipped" not in last or request.ranks == 1)
        return Outcome.of(is_whole, last)
    done = command(python(*on_cpu), log).checked()
    return Outcome.of(True, done.output.strip().splitlines()[-1])


def fake_cuda(request: Request) -> Outcome:
    """Whole steps on fake tensors: no device is used, nor wanted."""
    words = ["-m", "pytest", "-q", "tests/distributed/test_fake_cuda.py"]
    if request.is_small:
        words += ["-m", "not functional"]
    log = request.folder / "output.log"
    done = command(python(*words), log, environment={"CUDA_VISIBLE_DEVICES": ""}).checked()
    return Outcome.of(True, done.output.strip().splitlines()[-1])


def bench(request: Request) -> Outcome:
    """Steps beside those of peers, measured and not judged."""
    sizes = {"layers": 16, "width": 1024, "batch": 64, "rounds": 10}
    if not request.on_cuda:
        sizes = {"layers": 2, "width": 64, "batch": 2, "rounds": 1, "most": 1}
    words = ["-m", "benchmarks", "--device", request.device, "--ranks", str(request.ranks)]
    words += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    words += ["--steps-only", "--out", str(request.folder)]
    command(python(*words), request.folder / "output.log").checked()
    record = json.loads((request.folder / "bench.json").read_text())
    engines = record["settings"][0]["engines"]
    text = ", ".join(f"{name} {found['over_baseline']:.2f}" for name, found in engines.items())
    step_s = {name: found["step_s"] for name, found in engines.items()}
    outcome = Outcome.of(True, f"step time over FSDP2's: {text}", step_s=step_s)
    return Outcome(outcome.status, outcome.text, outcome.numbers, ("bench.png",))


def _parity(kind: str, precision: str) -> Any:
    return functools.partial(parity, kind, precision)


def _switch(name: str, setting: bool) -> Any:
    return functools.partial(same_bits, name, setting)


def _on_gpus(name: str, proves: str, file: str, *on_cpu: str) -> Check:
    """A file of tests, and the words of a Python that rehearses it on a CPU."""
    run = functools.partial(pytest_files, file=file, on_cpu=on_cpu)
    return Check(name, proves, run, only_cuda=True, is_rehearsed=name == "sanitizer")


def _like_ddp(
    name: str, what: str = "", row: str = "", ranks: int | None = None, **options: Any
) -> Check:
    """A row of the functional matrix beside Megatron's own DDP."""
    run = functools.partial(trainings.beside_ddp, name=row or name, ranks=ranks, **options)
    proves = f"losses of ten iterations are those of Megatron's own DDP, with {what or name}"
    found = ranks or trainings.row(row or name).world_size
    return Check(f"Megatron, {name}", proves, run, least_ranks=found)


CHECKS: tuple[Check, ...] = (
    Check(
        "parity, fp32",
        "every strategy trains every pattern as an unsharded loop does, over NCCL on GPUs",
        _parity("1-D", "fp32"),
    ),
    Check("parity, bf16", "likewise with bf16 weights and communication", _parity("1-D", "bf16")),
    *(
        Check(
            f"parity, {kind}, {precision}",
            f"likewise on two axes, {kind}, in {precision}",
            _parity(kind, precision),
            least_ranks=4,
        )
        for kind in ("HSDP", "HFSDP")
        for precision in ("fp32", "bf16")
    ),
    _on_gpus(
        "parity of one rank",
        "every pattern on CUDA at world size 1, where every axis takes its short cut",
        "tests/gpu/test_parity.py",
    ),
    Check("trace pool", "planned addresses change no bit", _switch("enable_trace_pool", True)),
    Check(
        "prefetch",
        "gathering ahead on a stream of its own changes no bit",
        _switch("enable_unshard_prefetch", False),
    ),
    Check(
        "asynchronous reduction",
        "reducing on a stream of its own changes no bit",
        _switch("enable_async_reduce_grad", False),
    ),
    Check("Muon", "Muon of sharded parameters is Muon of whole ones", muon),
    Check("async save", "a save holds the values of its moment while training goes on", async_save),
    Check("compile", "compiled blocks give the losses of blocks that are not", compiled),
    Check(
        "memory",
        "no step passes the bound that is computed beforehand; torch's allocator agrees",
        memory,
    ),
    _on_gpus(
        "memory at rest",
        "torch's allocator holds what the layout says, at rest and at the peak",
        "tests/gpu/test_memory.py",
    ),
    _on_gpus(
        "streams",
        "streams wait for what they need; a trace shows collectives beside computation",
        "tests/gpu/test_streams.py",
    ),
    _on_gpus(
        "sanitizer",
        "torch's CUDA sanitizer finds no unordered access in two steps of any strategy",
        "tests/gpu/test_sanitizer.py",
        *("-m", "tests.gpu.sanitized_step", STRATEGIES[-1], "2x2", "optim", "cpu"),
    ),
    memcheck.CHECK,
    delays.CHECK,
    graphs.CHECK,
    host.CHECK,
    overlap.CHECK,
    bandwidth.CHECK,
    quantized.CHECK,
    Check(
        "fake CUDA",
        "the host waits for the device nowhere in a step that uses every unit, and streams are "
        "ordered, on fake tensors",
        fake_cuda,
    ),
    Check("bench", "a step's time beside those of peers (measured, not judged)", bench),
    *(
        Check(
            f"speed, {model}",
            f"{model} parameters train; step time, MFU and memory beside FSDP2 and Megatron-FSDP "
            "(measured, not judged)",
            functools.partial(speed.run, model),
            least_ranks=2,
        )
        for model in speed.MODELS
    ),
    _like_ddp("one rank", "", "dense", 1, strategies=4),
    _like_ddp("DP", "two ranks and every strategy", "dense", 2, strategies=4),
    _like_ddp("DP, bf16", "bf16 weights", "dense, bf16", 2, strategies=4),
    *map(_like_ddp, ("TP2", "PP2, tied", "EP2", "Muon", "trace pool, evaluation in between")),
    *map(_like_ddp, ("TP2 x DP2, sequence parallel", "EP2 x DP2, all-to-all")),
    _like_ddp("TP2 x PP2 x DP2", "three parallelisms at once"),
    Check(
        "Megatron, FP8",
        "weights gathered in FP8 train as under DDP, which quantizes whole ones",
        trainings.fp8,
        least_ranks=2,
    ),
    Check(
        "Megatron, resume",
        "a ZeRO-1 run goes on from a ZeRO-3 run's checkpoint as if it had not stopped",
        trainings.resumes,
        least_ranks=2,
    ),
    Check(
        "Megatron, async save",
        "likewise from a checkpoint that was written while training went on",
        lambda request: trainings.resumes(request, "--async-save"),
        least_ranks=2,
    ),
    Check(
        "Megatron, real text",
        "`make pretrain`: trains on real text, saves, resumes, and repeats its losses",
        trainings.real_text,
    ),
)
