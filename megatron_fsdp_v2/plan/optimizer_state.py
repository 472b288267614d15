"""Bytes of an optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_fsdp_v2.plan.description import ParameterDescription, TrainingDescription
    from megatron_fsdp_v2.plan.sharding import PlannedGroup

__all__ = [
    "OPTIMIZERS",
    "OptimizerKind",
    "offloaded_nbytes",
    "state_nbytes",
    "step_counter_nbytes",
]


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """State of an optimizer.

    Attributes:
        per_matrix: State tensors per matrix of a unit.
        per_other: State tensors per other parameter.
        counts_matrix_steps: Whether it has a step counter per matrix.
        counts_other_steps: Whether it has a step counter per other parameter.
        is_of_matrices: Whether it is a matrix optimizer.
    """

    per_matrix: int
    per_other: int
    counts_matrix_steps: bool = False
    counts_other_steps: bool = False
    is_of_matrices: bool = False


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adam": OptimizerKind(2, 2, counts_matrix_steps=True, counts_other_steps=True),
    "sgd": OptimizerKind(0, 0),
    "sgd_momentum": OptimizerKind(1, 1),
    "lion": OptimizerKind(1, 1),
    "muon": OptimizerKind(1, 2, counts_other_steps=True, is_of_matrices=True),
    "adaptive_muon": OptimizerKind(2, 2, counts_other_steps=True, is_of_matrices=True),
    "none": OptimizerKind(0, 0),
}
"""By name; `muon` steps parameters that are not matrices of a unit by AdamW."""

_COUNTER_NBYTES = 4
_COPIES = 2
"""Copies in host memory of a parameter that is stepped there: main weight and gradient."""


def state_nbytes(training: TrainingDescription, groups: Sequence[tuple[PlannedGroup, ...]]) -> int:
    """Bytes of optimizer state on the device, of the rank with most.

    Padding has no state, and ranks have different padding. Offloaded state is not counted.

    Args:
        training: The training.
        groups: Groups of every unit.
    """
    kind = OPTIMIZERS[training.optimizer]
    if training.cpu_offload:
        return 0
    here = 1.0 - training.offload_fraction
    of_matrices = kind.per_matrix * (1.0 if kind.is_of_matrices else here)
    return _largest(training, groups, of_matrices, kind.per_other * here)


def offloaded_nbytes(
    training: TrainingDescription, groups: Sequence[tuple[PlannedGroup, ...]]
) -> int:
    """Bytes of offloaded tensors in host memory, of the rank with most.

    With `cpu_offload` these are main weights, main gradients and state. With an offloaded optimizer
    these are state, and copies of main weights and gradients; a rank offloads whole parameters, so
    that it may have more by less than one parameter.

    Args:
        training: The training.
        groups: Groups of every unit.
    """
    kind = OPTIMIZERS[training.optimizer]
    if training.cpu_offload:
        planned = [group for unit in groups for group in unit]
        main = sum(group.main_weight_nbytes + group.main_grad_nbytes for group in planned)
        return main + _largest(training, groups, kind.per_matrix, kind.per_other)
    there = training.offload_fraction
    of_matrices = 0.0 if kind.is_of_matrices else (kind.per_matrix + _COPIES) * there
    return _largest(training, groups, of_matrices, (kind.per_other + _COPIES) * there)


def _largest(
    training: TrainingDescription,
    groups: Sequence[tuple[PlannedGroup, ...]],
    per_matrix: float,
    per_other: float,
) -> int:
    """Bytes on the rank with most.

    Args:
        training: The training.
        groups: Groups of every unit.
        per_matrix: Tensors per matrix.
        per_other: Tensors per other parameter.
    """
    by_mesh: dict[tuple[str, int], torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for unit, planned in zip(training.units, groups, strict=True):
        for group in planned:
            if not group.requires_grad:
                continue
            if id(group) not in known:
                itemsize = _mean_itemsize(training, group.dtypes.main_weight)
                matrices, others = (numels.double() for numels in group.state_numels)
                known[id(group)] = (matrices * per_matrix + others * per_other) * itemsize
            per_slice = known[id(group)]
            key = (unit.mesh, len(per_slice))
            by_mesh[key] = by_mesh.get(key, 0) + per_slice
    return sum(math.ceil(per_slice.max()) for per_slice in by_mesh.values())


def _mean_itemsize(training: TrainingDescription, main_weight: torch.dtype) -> float:
    """Mean bytes of an element over the state tensors of a parameter."""
    dtypes = training.optimizer_dtype or main_weight
    each = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    return sum(dtype.itemsize for dtype in each) / len(each)


def step_counter_nbytes(training: TrainingDescription) -> int:
    """Bytes of step counters, which an optimizer may keep in host memory."""
    kind = OPTIMIZERS[training.optimizer]
    params = trained_parameters(training)
    counted = sum(
        kind.counts_matrix_steps if param.is_matrix else kind.counts_other_steps for param in params
    )
    return counted * _COUNTER_NBYTES


def trained_parameters(training: TrainingDescription) -> list[ParameterDescription]:
    """All parameters that an optimizer steps."""
    return [p for unit in training.units for p in unit.params if p.requires_grad]
