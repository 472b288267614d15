"""Communication and computation of a matrix optimizer in a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim.engine import BUCKET_NUMEL
from megatron_fsdp_v2.optim.exchange import plan_buckets
from megatron_fsdp_v2.optim.matrix_layout import Grid, MatrixLayout
from megatron_fsdp_v2.optim.newton_schulz import newton_schulz_flops
from megatron_fsdp_v2.optim.ownership import Matrix, Ownership
from megatron_fsdp_v2.plan.description import TrainingDescription
from megatron_fsdp_v2.plan.optimizer_state import OPTIMIZERS
from megatron_fsdp_v2.plan.run import PlannedGroup
from megatron_fsdp_v2.plan.step import StepCollective

MOST_PAIRS = 200_000
"""Largest product of matrices and pairs of ranks for which owners are planned, not estimated."""


@dataclass(slots=True)
class MatrixWork:
    """Cost of a step of a matrix optimizer, on the rank that sends most or as the mean over ranks.

    Attributes:
        collectives: All-to-alls.
        flops: FLOPs of the busiest rank.
        temporary_nbytes: Bytes of updates and of buckets in flight.
    """

    collectives: Counter[StepCollective] = field(default_factory=Counter)
    flops: float = 0.0
    temporary_nbytes: int = 0


@dataclass(slots=True)
class _Shared:
    """Matrices that share a grid.

    Attributes:
        grid: The grid of ranks.
        axes: Mesh axes of the grid's axes.
        sizes: Ranks along the axes of the mesh.
        mesh: Name of the mesh.
        layouts: Layouts of the matrices.
    """

    grid: Grid
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    mesh: str
    layouts: list[MatrixLayout] = field(default_factory=list)

    def collective(self, training: TrainingDescription, axis: int, nbytes: int) -> StepCollective:
        """An all-to-all along an axis of the grid."""
        position = self.axes[axis]
        is_inner = position == len(self.sizes) - 1
        stride = training.meshes[self.mesh].stride * (1 if is_inner else self.sizes[-1])
        return StepCollective(
            "all_to_all",
            "optimizer",
            self.mesh,
            "inner" if is_inner else "outer",
            self.sizes[position],
            stride,
            nbytes,
        )


def matrix_work(training: TrainingDescription, groups: Sequence[PlannedGroup]) -> MatrixWork:
    """Plan the exchange and computation of matrices; each TP-local shard is a matrix.

    Args:
        training: The training.
        groups: Its parameter groups.
    """
    work = MatrixWork()
    if not OPTIMIZERS[training.optimizer].is_of_matrices:
        return work
    itemsize = training.matrix_dtype.itemsize
    for shared in _shared(training, groups):
        shapes = [(layout.count, *layout.matrix_shape) for layout in shared.layouts]
        ranks = shared.grid.num_ranks
        numel = sum(math.prod(shape) for shape in shapes)
        num_shards = math.prod(shared.grid.sizes[axis] for axis in shared.grid.sharded_axes)
        bucket = min(BUCKET_NUMEL, numel // ranks)
        work.temporary_nbytes += (numel // num_shards + 3 * bucket) * itemsize
        if sum(count for count, *_ in shapes) * ranks * ranks <= MOST_PAIRS:
            flops, hops = _planned(shared)
        else:
            flops, hops = _mean(shared, shapes, numel)
        work.flops += flops
        for axis, sent in hops:
            work.collectives[shared.collective(training, axis, sent * itemsize)] += 1
    return work


type _Hops = list[tuple[int, int]]
"""Axis and elements of every all-to-all."""


def _planned(shared: _Shared) -> tuple[float, _Hops]:
    """FLOPs of the busiest rank, and the all-to-alls of the rank that sends most."""
    matrices = [
        matrix
        for index, layout in enumerate(shared.layouts)
        for matrix in Matrix.of(index, layout, newton_schulz_flops(*layout.matrix_shape))
    ]
    ownership = Ownership.plan(matrices, shared.grid.num_ranks, BUCKET_NUMEL)
    plans = [
        plan_buckets(shared.layouts, ownership, shared.grid, rank)
        for rank in range(shared.grid.num_ranks)
    ]
    most = max(plans, key=lambda plan: sum(bucket.sent_numel for bucket in plan))
    hops = [
        (hop.axis, hop.sent_numel)
        for bucket in most
        for hop in (*bucket.gathers, *bucket.returns)
        if hop.is_needed
    ]
    return max(ownership.flops), hops


def _mean(
    shared: _Shared, shapes: Sequence[tuple[int, int, int]], numel: int
) -> tuple[float, _Hops]:
    """Return means over ranks of the work, by the formulas of docs/muon.md."""
    grid = shared.grid
    each = [newton_schulz_flops(m, n) for _, m, n in shapes]
    total = sum(shape[0] * flops for shape, flops in zip(shapes, each, strict=True))
    num_buckets = max(1, math.ceil(numel / grid.num_ranks / BUCKET_NUMEL))
    replicas = math.prod(grid.sizes[axis] for axis in grid.copy_axes)
    held = numel / math.prod(grid.sizes[axis] for axis in grid.sharded_axes)
    hops: _Hops = []
    for axis, size in enumerate(grid.sizes):
        leaving = held * (size - 1) / size / num_buckets
        if grid.is_sharded[axis]:
            hops += [(axis, int(leaving / replicas))] * (2 * num_buckets)
        else:
            hops += [(axis, int(leaving))] * num_buckets
    # With more ranks than matrices, the busiest rank computes a whole matrix.
    return max(total / grid.num_ranks, max(each)), hops


def _shared(training: TrainingDescription, groups: Sequence[PlannedGroup]) -> list[_Shared]:
    """Trained matrices by the grid they are spread over, in the order of the model."""
    order = {
        (unit.name, param.name): (number, index)
        for number, unit in enumerate(training.units)
        for index, param in enumerate(unit.params)
    }
    matrices = [
        (order[planned.unit.name, param.name], planned, cast("UnevenDTensor", sharded))
        for planned in groups
        if planned.group.spec.requires_grad
        for param, sharded in zip(planned.params, planned.group.sharded_params, strict=True)
        if param.is_matrix
    ]
    found: dict[Any, _Shared] = {}
    for _, planned, sharded in sorted(matrices, key=lambda each: each[0]):
        sizes = tuple(axis.size for axis in planned.group.axes)
        rows = sharded.row_shards
        spreads = training.spreads_replicated or any(rows.strides)
        used = tuple(axis for axis, size in enumerate(sizes) if size > 1 and spreads)
        strides = tuple(rows.strides[axis] for axis in used)
        grid = Grid(tuple(sizes[axis] for axis in used), tuple(map(bool, strides)))
        key = (planned.unit.mesh, grid, planned.group.spec.dtypes.main_weight)
        shared = found.setdefault(key, _Shared(grid, used, sizes, planned.unit.mesh))
        shared.layouts.append(MatrixLayout(grid, rows, tuple(sharded.shape), strides))
    return list(found.values())
