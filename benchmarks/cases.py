"""Models and settings of the benchmarks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

__all__ = ["CASES", "CHOSEN", "TRANSFORMER", "Case", "Setting", "every_setting"]


@dataclass(frozen=True)
class Case:
    """Shape of a model of layers and of its micro-batches.

    Attributes:
        layers: Number of layers, each a unit: an MLP with a residual, or a transformer layer.
        width: Width of the hidden state.
        vocabulary: Vocabulary size of a transformer, whose embedding and output layer belong to the
            root unit. 0 for a stack of MLPs, whose root has no parameters.
        experts: Experts of a layer, of which a token uses one; 0 for one MLP without a router.
        batch: Sequences of a micro-batch on a rank.
        length: Tokens of a sequence.
    """

    layers: int
    width: int
    vocabulary: int = 0
    experts: int = 0
    batch: int = 1
    length: int = 32


CASES = {
    "wide": Case(layers=8, width=512),
    "deep": Case(layers=64, width=64),
    "moe": Case(layers=4, width=256, vocabulary=512, experts=8),
}
TRANSFORMER = Case(layers=8, width=512, vocabulary=512, batch=2)
"""Shape whose memory is measured."""


@dataclass(frozen=True)
class Setting:
    """One setting of the comparison, trained by all engines.

    Attributes:
        case: Name of the shape.
        shape: The shape itself.
        dtype: `fp32`, or `bf16` for compute in bf16 with main weights in fp32.
        micro_batches: Micro-batches of a step.
        recomputes: Whether layers are recomputed in the backward.
        ranks: Data-parallel ranks.
        optimizer: Implementation of AdamW: `default`, torch's default for the device (a loop on a
            CPU), or `foreach`, torch's default for GPUs.
    """

    case: str
    shape: Case
    dtype: str = "fp32"
    micro_batches: int = 1
    recomputes: bool = False
    ranks: int = 2
    optimizer: str = "default"

    @property
    def name(self) -> str:
        """The case, dtype and ranks, and all other options that are not the default."""
        words = [self.case, self.dtype, f"{self.ranks} ranks"]
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        if self.recomputes:
            words.append("recomputation")
        if self.optimizer != "default":
            words.append(f"AdamW with {self.optimizer}")
        return ", ".join(words)

    @property
    def in_bf16(self) -> bool:
        """Whether compute is in bf16."""
        return self.dtype == "bf16"


def _chosen() -> list[Setting]:
    """Return every shape in its base setting, then settings with one change each."""
    wide, deep, moe = (Setting(name, shape) for name, shape in CASES.items())
    return [
        wide,
        deep,
        moe,
        replace(wide, dtype="bf16"),
        replace(wide, micro_batches=4),
        replace(deep, recomputes=True),
        replace(deep, optimizer="foreach"),
        replace(wide, ranks=4),
    ]


CHOSEN = _chosen()
"""Default settings, which take a few minutes."""


def every_setting() -> list[Setting]:
    """Return all combinations of options."""
    axes = (CASES, (2, 4), ("fp32", "bf16"), (1, 4), (False, True), ("default", "foreach"))
    return [
        Setting(case, CASES[case], dtype, micro_batches, recomputes, ranks, optimizer)
        for case, ranks, dtype, micro_batches, recomputes, optimizer in itertools.product(*axes)
    ]
