"""Rows of the matrices: a training, its reference, and the largest allowed difference.

A row trains the same tiny model twice: with Megatron's own DDP, or with this package and other
flags, and sharded by this package with each strategy of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.mcore.flags import MODEL_FLAGS, NO_SHARD, ZERO1, ZERO2, ZERO3, fsdp

ITERATIONS = 10
SAVED, RESUMED_TO = 4, 8
"""The saved iteration, and the number of iterations, of a resumed run."""

DDP = "ddp"
"""Used in place of a sharding strategy: Megatron's own DDP, with `torch_dist` checkpoints."""
MEGATRONS = ("--ckpt-format", "torch_dist")
STRATEGIES = (ZERO3, ZERO2, ZERO1, NO_SHARD)
SHARDED = (ZERO3, ZERO2, ZERO1)
TOLERANCE = 1e-6

COMMON = (*MODEL_FLAGS, "--global-batch-size", "8")


@dataclass(frozen=True, slots=True)
class Row:
    """A training to compare with a reference.

    Attributes:
        name: Unique name.
        world_size: Number of ranks.
        flags: Flags of both sides.
        ours: Additional flags of the compared run.
        theirs: Additional flags of the reference.
        strategies: Sharding strategies of the compared runs.
        freezes: Regular expressions; parameters with a matching name are frozen in both runs.
        iterations: Number of iterations of both runs.
        tolerance: Largest relative difference of losses. None means 1e-6 in fp32 and, in 16 bits, 0
            with `exact_norms`: one weight that rounds differently changes all later losses.
        norms: Largest relative difference of norms; `tolerance` if None.
        exact_norms: Whether gradient norms are summed in fp64, where the order does not matter.
        is_reference_sharded: Whether the reference has the same sharding strategy.
        probe: Called with the chunks and the optimizer of the compared run after the training.
        finds: Expected result of the probe on every rank.
        quick: Number of strategies, from the first, that `make test` or most samples train.
    """

    name: str
    world_size: int
    flags: str = ""
    ours: str = ""
    theirs: str = ""
    strategies: tuple[str, ...] = (ZERO3,)
    freezes: tuple[str, ...] = ()
    iterations: int = ITERATIONS
    tolerance: float | None = None
    norms: float | None = None
    exact_norms: bool = False
    is_reference_sharded: bool = False
    probe: Callable[[Any, Any], Any] | None = None
    finds: Any = None
    quick: int = 0

    @property
    def is_bitwise(self) -> bool:
        """Whether all numbers must be equal: a training in 16 bits without a given tolerance."""
        rounds = not {"--bf16", "--fp16"}.isdisjoint(self.flags.split())
        return rounds and self.tolerance is None

    @property
    def bounds(self) -> tuple[float, float]:
        """Largest relative differences of losses and of norms."""
        default = 0.0 if self.is_bitwise else TOLERANCE
        loss = default if self.tolerance is None else self.tolerance
        return loss, loss if self.norms is None else self.norms

    def reference(self, strategy: str) -> Run:
        """Return the run of Megatron's own DDP, or of this package."""
        selected = fsdp(strategy) if self.is_reference_sharded else ()
        return self._run(*self.flags.split(), *selected, *self.theirs.split())

    def sharded(self, strategy: str) -> Run:
        """Return the compared run."""
        run = self._run(*self.flags.split(), *fsdp(strategy), *self.ours.split())
        return run if self.probe is None else replace(run, probe=self.probe)

    def _run(self, *words: str) -> Run:
        steps = ("--train-iters", str(self.iterations))
        flags = (*COMMON, *steps, *words)
        exact_norms = self.exact_norms or self.is_bitwise
        return Run(self.world_size, flags, self.freezes, exact_norms)


@dataclass(frozen=True, slots=True)
class Run:
    """A training. Equal runs have equal results.

    Attributes:
        world_size: Number of ranks.
        flags: All flags except those of the rehearsal.
        freezes: See `Row`.
        exact_norms: See `Row`.
        probe: See `Row`.
    """

    world_size: int
    flags: tuple[str, ...]
    freezes: tuple[str, ...] = ()
    exact_norms: bool = False
    probe: Callable[[Any, Any], Any] | None = None

    def adding(self, *flags: str) -> Run:
        """Return this training with more flags."""
        return replace(self, flags=(*self.flags, *flags))


@dataclass(frozen=True, slots=True)
class Setup:
    """The number of ranks and the sharding of a run.

    Attributes:
        world_size: Number of ranks.
        strategy: Sharding strategy, or `DDP`.
        flags: Flags that differ between the run that saves and the one that loads.
    """

    world_size: int
    strategy: str
    flags: str = ""

    def __str__(self) -> str:
        return f"{self.strategy} at {self.world_size} {self.flags}".strip()


@dataclass(frozen=True, slots=True)
class Resume:
    """A run that saves, and one that continues from its checkpoint with other flags.

    If the loading run is Megatron's own DDP, the checkpoint of a sharded run is exported first.

    Attributes:
        name: Unique name.
        flags: Flags of both runs.
        saves: The run that saves and then continues, for comparison.
        loads: The run that loads.
        tolerance: Largest relative difference of losses. With 0, norms and loss scales are equal.
        values: Whether parameters and optimizer state are compared bitwise after a load.
        freezes: See `Row`.
        exact_norms: See `Row`.
        quick: Whether most samples run it.
    """

    name: str
    flags: str
    saves: Setup
    loads: Setup
    tolerance: float = TOLERANCE
    values: bool = False
    freezes: tuple[str, ...] = ()
    exact_norms: bool = False
    quick: bool = False

    @property
    def is_exported(self) -> bool:
        """Whether the checkpoint is converted between the two runs."""
        return self.loads.strategy == DDP != self.saves.strategy

    def run(self, setup: Setup) -> Run:
        """Return one of the two runs, without the folder of the checkpoint."""
        kind = MEGATRONS if setup.strategy == DDP else fsdp(setup.strategy)
        words = (*self.flags.split(), *setup.flags.split(), "--train-iters", str(RESUMED_TO))
        flags = (*COMMON, *kind, *words)
        return Run(setup.world_size, flags, self.freezes, self.exact_norms)
