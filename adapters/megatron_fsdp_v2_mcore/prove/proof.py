"""A proof: the trainings of every shrunk run, and what differs between them."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_fsdp_v2_mcore.prove import sides
from megatron_fsdp_v2_mcore.prove.compare import (
    EXACT,
    LOSS,
    NORM,
    STATE,
    Bounds,
    Difference,
    Options,
    numbers,
    options,
    relative,
    whole,
)
from megatron_fsdp_v2_mcore.prove.memory import planned
from megatron_fsdp_v2_mcore.prove.ranks import Pool, RankError
from megatron_fsdp_v2_mcore.prove.shrink import ITERATIONS, Flags, ShrunkRun, as_words
from megatron_fsdp_v2_mcore.prove.sides import Side
from megatron_fsdp_v2_mcore.prove.worker import Job, Outcome, forget, train

SAVED = ITERATIONS // 2
"""The iteration of the checkpoint."""
TIMEOUT_S = 300.0
WITHOUT_EVALUATION: Flags = {"--eval-interval": ("1000",), "--eval-iters": ("0",)}

FP32 = Bounds()
ROUNDED = Bounds(2e-6, 2e-6, 2e-5, 2e-4, 2e-2, 0.3, 0.5)
"""Equal weights give equal results. A later weight rounds to the next bf16 value on one side."""
REDUCED_IN_16_BITS = replace(ROUNDED, norm=1e-3, gradient=3e-2)
QUANTIZED = Bounds(2e-6, 1e-3, 1e-2, 1e-3, 5e-2, 0.6, 0.8)
"""Quantization turns the last bit of a gradient into a step of an FP8 number."""
SAME_GRADIENTS = Bounds(math.inf, 4e-6, 0.0, math.inf, 4e-6, 0.0, 2e-5, rounding=0.05)
"""Of steps with equal gradients: a weight rounds to a neighbor, within 1e-6 of the largest one."""
OTHER_SIZE = replace(FP32, loss=1e-5, norm=1e-4, later_loss=1e-5, later_norm=1e-4)

DIFFERING_REPLICAS = "--fsdp-save-differing-replicas"
_ONE_REPLICA = (
    f"replicas differ: a save needs {DIFFERING_REPLICAS}, and has the values of the first rank"
)
_REFERENCE, _SAVED = "reference", "saved"
STEPS = "steps with equal gradients"
TRAINING = "training, in fp32"
OWN = "training, in its own precision"
RESUME = "resumed at the same size"
SHRUNK = "resumed on one rank"
ONE_RANK = "on one rank"
REPLICAS = "replicas of tensor-parallel ranks"


@dataclass
class ProofPhase:
    """One comparison of a run.

    Attributes:
        name: What was compared.
        differences: Differences that exceed the bounds, the first one first.
        loss: Largest relative difference of losses.
        norm: Largest relative difference of gradient norms.
        is_ours: Whether a difference is a fault of this package; otherwise it is Megatron's.
        seconds: Duration.
        curves: Losses and norms of both sides, ours first.
        first: Number of the curves' first iteration.
        num_compared: Compared elements of weights and gradients.
        error: Error of a training that did not run, in one line.
        traceback: Tracebacks of its ranks.
    """

    name: str
    differences: list[Difference] = field(default_factory=list)
    loss: float = 0.0
    norm: float = 0.0
    is_ours: bool = True
    seconds: float = 0.0
    curves: tuple[Sequence[float], ...] = ()
    first: int = 1
    num_compared: int = 0
    error: str = ""
    traceback: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and not self.error


@dataclass
class RunResult:
    """The comparisons of a run.

    Attributes:
        run: The run.
        phases: The comparisons.
        memory: Measured and planned bytes, by what a rank keeps; of the rank with most.
        unplanned: Reason why there is no plan.
    """

    run: ShrunkRun
    phases: list[ProofPhase] = field(default_factory=list)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    unplanned: str = ""


Trains = Callable[[Job], Outcome]
Advance = Callable[[int, int], object]


def num_trainings(run: ShrunkRun) -> int:
    """Return the number of trainings that `prove_run` starts."""
    flags = sides.sharded(run).flags
    return 5 + 2 * sides.is_low_precision(flags) + sides.has_dropout(run.flags)


class Prover:
    """Runs the trainings of proofs.

    Args:
        pools: Pools of ranks by size.
        impl: Layers of the rehearsal; None if ranks do not rehearse.
        trains: Function that trains on a rank.
        advance: Called after every training.
    """

    def __init__(
        self,
        pools: Callable[[int], Pool],
        impl: str | None,
        trains: Trains = train,
        *,
        advance: Callable[[], object] = lambda: None,
    ) -> None:
        self._pools, self._trains = pools, trains
        self._impl, self._advance = impl, advance
        self._result: RunResult
        self._pool: Pool

    def prove(self, run: ShrunkRun) -> RunResult:
        """Train and compare a run."""
        self._result = RunResult(run)
        # Its ranks keep values from one training to the next.
        self._pool = self._pools(run.world_size)
        self._pool.run(forget, timeout_s=TIMEOUT_S)
        with tempfile.TemporaryDirectory(prefix="prove-") as folder:
            fp32, own = f"{folder}/fp32", f"{folder}/own"
            saved = self._beside_ddp(run, TRAINING, sides.in_fp32, FP32, fp32)
            continued, kind, folder_of = saved, sides.in_fp32, fp32
            flags = sides.sharded(run).flags
            if saved and sides.is_low_precision(flags):
                kind, folder_of = sides.in_own_precision, own
                continued = self._beside_ddp(run, OWN, kind, _own_bounds(flags), own)
            if continued:
                self._compare_memory(kind(sides.sharded(run)), continued.memory)
            if saved and saved.replicas:
                # A checkpoint has the values of the first rank.
                self._result.phases.append(ProofPhase(RESUME, is_ours=False, error=_ONE_REPLICA))
                return self._result
            if continued:
                self._resumed(run, continued, kind, folder_of)
            if saved:
                self._on_one_rank(run, saved, fp32)
        return self._result

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[ProofPhase]:
        phase, start, before = ProofPhase(name), time.monotonic(), len(self._result.phases)
        try:
            yield phase
        except RankError as error:
            phase.error, phase.traceback = str(error), error.tracebacks
        phase.differences.sort(key=lambda each: each.order)
        inner = sum(each.seconds for each in self._result.phases[before:])
        phase.seconds = time.monotonic() - start - inner
        self._result.phases.append(phase)

    def _train(self, side: Side, **options: Any) -> Outcome:
        """Train on all ranks, and merge what they measured."""
        pool = self._pools(1) if side.world_size == 1 else self._pool
        words, rehearses = self._words(side), self._impl is not None
        job = Job(words, exact_norms=side.exact_norms, rehearses=rehearses, **options)
        outcomes = pool.run(self._trains, job, timeout_s=TIMEOUT_S)
        self._advance()
        # The union of counters has the larger counts.
        memory = functools.reduce(operator.or_, (each.memory for each in outcomes))
        return Outcome(
            next((each.losses for each in outcomes if each.losses), []),
            outcomes[0].grad_norms,
            [difference for each in outcomes for difference in each.differences],
            sum(each.num_compared for each in outcomes),
            {name: values for each in outcomes for name, values in each.whole.items()},
            {name: values for each in outcomes for name, values in each.state.items()},
            list(dict.fromkeys(found for each in outcomes for found in each.replicas)),
            memory,
            [
                _merged(of_ranks)
                for of_ranks in zip(*(each.options for each in outcomes), strict=True)
            ],
        )

    def _words(self, side: Side) -> tuple[str, ...]:
        flags = side.flags | WITHOUT_EVALUATION
        return as_words(sides.on_cpu(flags, self._impl) if self._impl else flags)

    def _compare_memory(self, side: Side, measured: Mapping[str, int]) -> None:
        args = self._words(side), side.world_size
        try:
            ((found, reason),) = self._pools(1).run(planned, *args, timeout_s=TIMEOUT_S)
        except RankError as error:
            found, reason = {}, str(error)
        self._result.memory = {name: (measured[name], nbytes) for name, nbytes in found.items()}
        self._result.unplanned = reason

    def _beside_ddp(
        self, run: ShrunkRun, name: str, kind: Callable[[Side], Side], bounds: Bounds, folder: str
    ) -> Outcome | None:
        """Train with Megatron's DDP and with this package; None if one of them fails."""
        with self._phase(name) as phase:
            theirs = self._train(kind(sides.reference(run)), keep=_REFERENCE)
            if name == TRAINING:
                self._compare_steps(run, theirs)
            saves = kind(_saving(sides.sharded(run), folder))
            mine = self._train(saves, keep=_SAVED, against=_REFERENCE, bounds=bounds, whole=SAVED)
            _compare(phase, mine, theirs, bounds)
            phase.differences += mine.differences
            phase.num_compared = mine.num_compared
        if phase.error:
            return None
        if name == TRAINING and theirs.replicas:
            found = sorted(theirs.replicas, key=lambda each: each.order)
            self._result.phases.append(ProofPhase(REPLICAS, found, is_ours=False))
        return mine

    def _compare_steps(self, run: ShrunkRun, theirs: Outcome) -> None:
        """Step with the gradients of Megatron's DDP, so that only the optimizer may differ.

        Updates with own gradients differ by the rounding of gradients, which Adam enlarges. Weight
        decay and other small terms of an update would disappear in it.
        """
        with self._phase(STEPS) as phase:
            side = sides.with_fp32_state(sides.in_fp32(sides.sharded(run)))
            bounds = SAME_GRADIENTS
            mine = self._train(side, against=_REFERENCE, has_its_gradients=True, bounds=bounds)
            _compare(phase, mine, theirs, bounds)
            phase.differences += mine.differences
            phase.num_compared = mine.num_compared

    def _resumed(
        self, run: ShrunkRun, saved: Outcome, kind: Callable[[Side], Side], folder: str
    ) -> None:
        with self._phase(RESUME) as phase:
            loads = kind(_loading(sides.sharded(run), folder))
            mine = self._train(loads, against=_SAVED, bounds=EXACT, num_before=SAVED)
            continued = Outcome(saved.losses[SAVED:], saved.grad_norms[SAVED:])
            _compare(phase, mine, continued, EXACT, SAVED + 1)
            phase.differences += mine.differences
            phase.num_compared = mine.num_compared

    def _on_one_rank(self, run: ShrunkRun, saved: Outcome, folder: str) -> None:
        """Resume on one rank: with equal weights, and with Megatron's results of several ranks."""
        loads = sides.in_fp32(_loading(sides.sharded(run), folder))
        alone = sides.on_one_rank(loads)
        if sides.has_dropout(run.flags):
            loads, alone = sides.without_dropout(loads), sides.without_dropout(alone)
            theirs = self._train(loads)
        else:
            theirs = Outcome(saved.losses[SAVED:], saved.grad_norms[SAVED:])
        with self._phase(SHRUNK) as phase:
            mine = self._train(alone, whole=0)
            phase.differences += whole(mine.whole, saved.whole)
            phase.differences += whole(mine.state, saved.state, STATE)
            phase.differences += options(mine.options, saved.options[SAVED:], SAVED + 1)
        if phase.is_equal:
            with self._phase(ONE_RANK) as phase:
                phase.is_ours = False
                _compare(phase, mine, theirs, OTHER_SIZE, SAVED + 1)


def _merged(options_of_ranks: Iterable[Options]) -> Options:
    return {name: found for each in options_of_ranks for name, found in each.items()}


def _own_bounds(flags: Flags) -> Bounds:
    if not sides.QUANTIZATION.isdisjoint(flags):
        return QUANTIZED
    in_16_bits = {
        "--grad-reduce-in-bf16",
        "--megatron-fsdp-grad-comm-dtype",
        "--megatron-fsdp-main-grads-dtype",
    }
    return ROUNDED if in_16_bits.isdisjoint(flags) else REDUCED_IN_16_BITS


def _saving(side: Side, folder: str) -> Side:
    saving: Flags = {"--save": (folder,), "--save-interval": (str(SAVED),)}
    return replace(side, flags=side.flags | saving | {DIFFERING_REPLICAS: ()})


def _loading(side: Side, folder: str) -> Side:
    return replace(side, flags=side.flags | {"--load": (folder,), "--ckpt-step": (str(SAVED),)})


def _compare(
    phase: ProofPhase, mine: Outcome, theirs: Outcome, bounds: Bounds, first: int = 1
) -> None:
    phase.differences += numbers(LOSS, mine.losses, theirs.losses, bounds, first)
    phase.differences += numbers(NORM, mine.grad_norms, theirs.grad_norms, bounds, first)
    pairs = zip(mine.losses, theirs.losses, strict=False)
    phase.loss = max((relative(a, b) for a, b in pairs), default=math.inf)
    pairs = zip(mine.grad_norms, theirs.grad_norms, strict=False)
    phase.norm = max((relative(a, b) for a, b in pairs), default=math.inf)
    phase.curves = (mine.losses, theirs.losses, mine.grad_norms, theirs.grad_norms)
    phase.first = first
