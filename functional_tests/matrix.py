"""What a row of a matrix is: what is trained, beside what, and how close it has to come.

A row trains the same tiny model twice: by Megatron's own DDP, or by this package with other flags,
and sharded by this package with each of the row's strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.mcore.flags import MODEL_FLAGS, NO_SHARD, ZERO1, ZERO2, ZERO3, fsdp

ITERATIONS = 10
SAVED, RESUMED_TO = 4, 8
"""Iterations of a run that is resumed: after which one, and how many there are."""

DDP = "ddp"
"""In place of a sharding strategy: Megatron's own, whose checkpoints are `torch_dist`."""
MEGATRONS = ("--ckpt-format", "torch_dist")
STRATEGIES = (ZERO3, ZERO2, ZERO1, NO_SHARD)
SHARDED = (ZERO3, ZERO2, ZERO1)
TOLERANCE = 1e-6

COMMON = (*MODEL_FLAGS, "--global-batch-size", "8")


@dataclass(frozen=True, slots=True)
class Row:
    """One combination.

    Attributes:
        name: What the row shows; unique.
        world_size: Number of ranks.
        flags: Flags of both sides.
        ours: Flags of the compared run alone.
        theirs: Flags of the reference alone.
        strategies: Sharding strategies to train with.
        freezes: Patterns; parameters in whose name one is found are frozen on both sides.
        iterations: How many both train, and log unless flags say otherwise.
        tolerance: Largest relative difference of losses; None: 1e-6 in fp32, and 0 in 16 bits with
            `exact_norms`, since one weight that is rounded another way moves all later losses.
        norms: That of norms of gradients and parameters; None: the same.
        exact_norms: Whether norms of gradients are added up in fp64, where no order shows.
        beside_itself: Whether the reference is sharded in the same way.
        probe: Called with the chunks and the optimizer of the compared run when it is over.
        finds: What the probe returns on every rank.
        quick: How many of its strategies are trained by `make test`, from the first one on.
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
    beside_itself: bool = False
    probe: Callable[[Any, Any], Any] | None = None
    finds: Any = None
    quick: int = 0

    @property
    def is_bitwise(self) -> bool:
        """Whether all numbers must be equal: weights of 16 bits, and no tolerance given."""
        rounds = not {"--bf16", "--fp16"}.isdisjoint(self.flags.split())
        return rounds and self.tolerance is None

    @property
    def bounds(self) -> tuple[float, float]:
        """Largest relative differences of losses and of norms."""
        default = 0.0 if self.is_bitwise else TOLERANCE
        loss = default if self.tolerance is None else self.tolerance
        return loss, loss if self.norms is None else self.norms

    def reference(self, strategy: str) -> Run:
        """The run of Megatron's own DDP, or of this package."""
        selected = fsdp(strategy) if self.beside_itself else ()
        return self._run(*self.flags.split(), *selected, *self.theirs.split())

    def sharded(self, strategy: str) -> Run:
        """The run that is compared."""
        run = self._run(*self.flags.split(), *fsdp(strategy), *self.ours.split())
        return run if self.probe is None else replace(run, probe=self.probe)

    def _run(self, *words: str) -> Run:
        steps = ("--train-iters", str(self.iterations))
        flags = (*COMMON, *steps, *words)
        return Run(self.world_size, flags, self.freezes, self.exact_norms or self.is_bitwise)


@dataclass(frozen=True, slots=True)
class Run:
    """A training: equal runs give equal numbers.

    Attributes:
        world_size: Number of ranks.
        flags: All flags but those of the rehearsal.
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
        """The same training with more flags."""
        return replace(self, flags=(*self.flags, *flags))


@dataclass(frozen=True, slots=True)
class Setup:
    """How many ranks share a model, and how.

    Attributes:
        world_size: Number of ranks.
        strategy: Sharding strategy, or `DDP`.
        flags: Parallel sizes, and others that differ from the run that saves to the one that loads.
    """

    world_size: int
    strategy: str
    flags: str = ""

    def __str__(self) -> str:
        return f"{self.strategy} at {self.world_size} {self.flags}".strip()


@dataclass(frozen=True, slots=True)
class Resume:
    """A run that saves, and one that continues from there with other parallel sizes.

    A checkpoint of a sharded run is exported for Megatron's own DDP.

    Attributes:
        name: What changes; unique.
        flags: Flags of both runs, the model above all.
        saves: The run that saves (and continues, for comparison).
        loads: The run that loads.
        tolerance: Largest relative difference of losses; 0: norms and loss scales are equal too.
        values: Whether parameters and optimizer state are compared bitwise after a load.
        freezes: See `Row`.
        exact_norms: See `Row`.
        quick: Whether `make test` runs it as well.
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
        """One of the two runs, without the folder of the checkpoint."""
        kind = MEGATRONS if setup.strategy == DDP else fsdp(setup.strategy)
        words = (*self.flags.split(), *setup.flags.split(), "--train-iters", str(RESUMED_TO))
        flags = (*COMMON, *kind, *words)
        return Run(setup.world_size, flags, self.freezes, self.exact_norms)
