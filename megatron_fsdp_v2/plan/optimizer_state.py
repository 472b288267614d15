"""Bytes of an optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp_v2.plan.description import TrainingDescription
from megatron_fsdp_v2.plan.run import PlannedGroup


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
"""Copies of an offloaded parameter in host memory: main weight and gradient."""


def state_nbytes(training: TrainingDescription, groups: Sequence[PlannedGroup]) -> tuple[int, int]:
    """Bytes of optimizer state on the device and in host memory, of the rank with most.

    Padding has no state, and ranks have different padding. An offloaded optimizer also has copies
    of main weights and gradients in host memory; a rank offloads whole parameters, so that it may
    have more by less than one parameter.

    Args:
        training: The training.
        groups: Its parameter groups.
    """
    kind = OPTIMIZERS[training.optimizer]
    # Fractions of the state of matrices and of other parameters that are in host memory.
    others = 1.0 if training.cpu_offload else training.offload_fraction
    matrices = 0.0 if kind.is_of_matrices and not training.cpu_offload else others
    copies = 0 if training.cpu_offload else _COPIES
    return (
        _largest(training, groups, kind.per_matrix * (1 - matrices), kind.per_other * (1 - others)),
        _largest(
            training,
            groups,
            (kind.per_matrix + copies) * matrices,
            (kind.per_other + copies) * others,
        ),
    )


def _largest(
    training: TrainingDescription,
    groups: Sequence[PlannedGroup],
    per_matrix: float,
    per_other: float,
) -> int:
    """Bytes on the rank with most.

    Args:
        training: The training.
        groups: Its parameter groups.
        per_matrix: Tensors per matrix.
        per_other: Tensors per other parameter.
    """
    by_mesh: dict[tuple[str, int], torch.Tensor] = {}
    known: dict[object, torch.Tensor] = {}
    for planned in groups:
        group = planned.group
        if not group.spec.requires_grad:
            continue
        kind = planned.params, group.layout.num_shards, group.spec.dtypes
        if kind not in known:
            itemsize = _mean_itemsize(training, group.spec.dtypes.main_weight)
            matrices, others = (numels.double() for numels in _state_numels(planned))
            known[kind] = (matrices * per_matrix + others * per_other) * itemsize
        key = (planned.unit.mesh, len(known[kind]))
        by_mesh[key] = by_mesh.get(key, 0) + known[kind]
    return sum(math.ceil(per_slice.max()) for per_slice in by_mesh.values())


def _state_numels(planned: PlannedGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Per slice, elements of matrices and of all other parameters."""
    layout = planned.group.layout
    starts = torch.arange(layout.num_shards, dtype=torch.int64) * layout.shard_numel
    matrices, others = torch.zeros_like(starts), torch.zeros_like(starts)
    for slot, param in zip(layout.slots, planned.params, strict=True):
        first = (starts - slot.offset).clamp(0, slot.numel)
        last = (starts + layout.shard_numel - slot.offset).clamp(0, slot.numel)
        (matrices if param.is_matrix else others).add_(last - first)
    return matrices, others


def _mean_itemsize(training: TrainingDescription, main_weight: torch.dtype) -> float:
    """Mean bytes of an element over the state tensors of a parameter."""
    dtypes = training.optimizer_dtype or main_weight
    each = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    return sum(dtype.itemsize for dtype in each) / len(each)


def step_counter_nbytes(training: TrainingDescription) -> int:
    """Bytes of step counters, which an optimizer may keep in host memory."""
    kind = OPTIMIZERS[training.optimizer]
    counted = sum(
        kind.counts_matrix_steps if param.is_matrix else kind.counts_other_steps
        for unit in training.units
        for param in unit.params
        if param.requires_grad
    )
    return counted * _COUNTER_NBYTES
