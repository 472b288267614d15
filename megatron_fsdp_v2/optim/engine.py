"""Functions of whole matrices, each computed once, for matrices that are sharded over ranks.

`MatrixEngine` makes a plan and executes it in every run: ranks send rows to the owner of their
matrix, the owner computes matrices of equal shape in one batch, and sends the results back. The
communication of one bucket of matrices overlaps the computation of another.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.comm.backends import communicator_for
from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.comm.rank_checks import UnitRecord, compare_units
from megatron_fsdp_v2.dtensor.row_shards import RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim.exchange import BucketPlan, Key, Transfer, plan_buckets
from megatron_fsdp_v2.optim.matrix_layout import Grid, MatrixLayout, Rectangle
from megatron_fsdp_v2.optim.ownership import Matrix, Ownership

BUCKET_NUMEL = 32 * 2**20
"""Elements of an owner's part of a bucket: enough to saturate a link, few compared with shards."""


type _Place = tuple[Key, int, tuple[Any, ...]]
"""A rectangle on this rank, the index of its parameter, and its index in the local tensor."""


@dataclass(frozen=True, slots=True)
class MatrixFunction:
    """A function of whole matrices.

    Attributes:
        apply: Maps a stack `(count, m, n)` to a stack of the same shape, matrix by matrix.
        flops: Returns the cost of one `m x n` matrix. Only ratios matter.
        block_rows: Rows of each block of an `(m, n)` parameter that is a matrix of its own; None if
            the parameter is one matrix. Matrices of a stack are not divided.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    flops: Callable[[int, int], int]
    block_rows: int | None = None


class MatrixEngine:
    """Distributes functions of matrices over the ranks that hold parts of the matrices.

    Parameters may be plain tensors, which every rank computes itself, and parameters of
    `fully_shard` on any meshes and with any strategy. Parameters with the same process groups share
    their work.

    Args:
        params: 2-D parameters, or stacks `(..., m, n)` of matrices.
        functions: One function per parameter. Matrices of equal shape and function form a batch.
        joins_tensor_parallel: Whether a matrix is the whole weight, joined from tensor-parallel
            parts. Otherwise each part is a matrix.
        spreads_replicated: Whether ranks with whole parameters (`no_shard`) share the work and
            exchange results. Otherwise every rank does all of it.

    Raises:
        ValueError: A parameter has less than two dimensions, or is a DTensor that `fully_shard` did
            not make.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        functions: Sequence[MatrixFunction],
        *,
        joins_tensor_parallel: bool = True,
        spreads_replicated: bool = True,
    ) -> None:
        self._num_params = len(params)
        shared: dict[Any, list[_Member]] = {}
        for index, (param, function) in enumerate(zip(params, functions, strict=True)):
            axes, layout = _place(param, joins_tensor_parallel, spreads_replicated)
            if param.ndim == 2:
                layout = dataclasses.replace(layout, block_rows=function.block_rows)
            names = tuple(axis.group.group_name for axis in axes)
            key = (names, layout.grid, param.device, param.dtype)
            name = param.row_shards.label if isinstance(param, UnevenDTensor) else None
            member = _Member(index, name or "", layout, function, axes, param.device)
            shared.setdefault(key, []).append(member)
        self.works = [GridWork(members) for members in shared.values()]

    def run(self, updates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Apply the functions to matrices shaped and sharded like the parameters. Collective.

        Args:
            updates: This rank's local part per parameter, which may be empty. Parameters with the
                same process groups must have one dtype.

        Returns:
            Local parts of the results, in the dtypes of the updates.

        Raises:
            ValueError: The numbers of updates and parameters differ.
            RuntimeError: Ranks have different parameters, or another order of them. Checked at the
                first run.
        """
        if len(updates) != self._num_params:
            raise ValueError(f"expected {self._num_params} updates, got {len(updates)}")
        results = [torch.empty_like(update) for update in updates]
        for work in self.works:
            work.run([updates[i] for i in work.params], [results[i] for i in work.params])
        return results


class _Member(NamedTuple):
    """A parameter of a `GridWork`, with its index in the engine."""

    param: int
    name: str
    layout: MatrixLayout
    function: MatrixFunction
    axes: tuple[Axis, ...]
    device: torch.device


class GridWork:
    """The work that the ranks of one grid share.

    Args:
        members: The parameters, all on one grid.

    Attributes:
        params: Indices of the parameters.
        layouts: Layout of each parameter.
        ownership: Owners and buckets of all matrices.
        grid: Grid of ranks.
        axes: Axes of the grid as this rank sees them.
        plan: This rank's part of every bucket.
        communicator: Runs the collectives.
    """

    def __init__(self, members: Sequence[_Member]) -> None:
        self.params = [member.param for member in members]
        self.layouts = [member.layout for member in members]
        self.axes, self._device = members[0].axes, members[0].device
        self.grid = self.layouts[0].grid
        self._members = members
        # Distinct functions, whose indices are the kinds of matrices.
        self._functions: list[MatrixFunction] = []
        matrices: list[Matrix] = []
        for index, member in enumerate(members):
            if member.function not in self._functions:
                self._functions.append(member.function)
            kind = self._functions.index(member.function)
            flops = member.function.flops(*member.layout.matrix_shape)
            matrices += Matrix.of(index, member.layout, flops, kind)
        self.ownership = Ownership.plan(matrices, self.grid.num_ranks, BUCKET_NUMEL)
        self._rank = self.grid.rank([axis.rank for axis in self.axes])
        self.plan = plan_buckets(self.layouts, self.ownership, self.grid, self._rank)
        self.communicator = communicator_for(self._device)
        self._is_checked = False
        # Positions of exchanged rectangles in local tensors; every run reads them twice.
        self._places = [list(self._local(bucket)) for bucket in self.plan]

    def run(self, updates: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Compute the results. Collective over the grid; see `MatrixEngine.run`."""
        self._check()
        self.communicator.begin_pass(reuses_memory=False)
        arriving = self._fetch(0, updates) if self.plan else None
        returning: tuple[int, Transfer] | None = None
        for number, bucket in enumerate(self.plan):
            assert arriving is not None
            pieces = arriving.wait()
            # The exchange of the next bucket overlaps this computation; the return of these results
            # overlaps the next one.
            if number + 1 < len(self.plan):
                arriving = self._fetch(number + 1, updates)
            done = self._compute(bucket, pieces, updates[0])
            self._finish(returning, results)
            returning = number, self._transfer(bucket.returns, done, updates[0])
        self._finish(returning, results)

    def _check(self) -> None:
        if self._is_checked or not self.axes:
            return
        nothing = (0,) * len(self.axes)
        records = [
            UnitRecord(
                name,
                f"parameter {index} of a matrix optimizer, of shape {layout.shape} and layout "
                f"{layout.fingerprint}",
                nothing,
            )
            for index, name, layout, *_ in self._members
        ]
        # The hash also covers costs, kinds and the bucket size, which determine the owners.
        plan = hashlib.sha256(repr(self.ownership).encode()).hexdigest()[:16]
        records.append(UnitRecord("matrix optimizer", f"plan {plan}", nothing))
        compare_units(records, self.axes, self._device)
        self._is_checked = True

    def _fetch(self, bucket: int, updates: Sequence[torch.Tensor]) -> Transfer:
        pieces = {key: updates[param][local] for key, param, local in self._places[bucket]}
        return self._transfer(self.plan[bucket].gathers, pieces, updates[0])

    def _transfer(
        self, hops: Sequence[Any], pieces: dict[Key, torch.Tensor], like: torch.Tensor
    ) -> Transfer:
        return Transfer(hops, pieces, self.axes, self.communicator, like)

    def _finish(
        self, returning: tuple[int, Transfer] | None, results: Sequence[torch.Tensor]
    ) -> None:
        """Wait for returned results, and copy them into the result tensors."""
        if returning is None:
            return
        bucket, transfer = returning
        pieces = transfer.wait()
        _copy_all(
            (results[param][local], pieces[key]) for key, param, local in self._places[bucket]
        )

    def _local(self, plan: BucketPlan) -> Iterator[_Place]:
        """Yield the rectangles of a bucket that this rank holds."""
        here = [axis.rank for axis in self.axes]
        for index in dict.fromkeys(index for index, _ in plan.held):
            matrix = self.ownership.matrices[index]
            for rect, local in self.layouts[matrix.param].pieces_at(matrix.number, here):
                yield (index, rect), matrix.param, local

    def _compute(
        self, plan: BucketPlan, pieces: dict[Key, torch.Tensor], like: torch.Tensor
    ) -> dict[Key, torch.Tensor]:
        """Apply the functions to this rank's matrices, one batch per shape and function."""
        batches: dict[tuple[int, tuple[int, int]], list[tuple[int, tuple[Rectangle, ...]]]] = {}
        for index, rects in plan.owned:
            matrix = self.ownership.matrices[index]
            batches.setdefault((matrix.kind, matrix.shape), []).append((index, rects))
        done = {}
        for (kind, shape), members in batches.items():
            stack = like.new_empty((len(members), *shape))
            _copy_all(
                (_view(stack[position], rect), pieces[index, rect])
                for position, (index, rects) in enumerate(members)
                for rect in rects
            )
            result = self._functions[kind].apply(stack).to(like.dtype)
            for position, (index, rects) in enumerate(members):
                for rect in rects:
                    done[index, rect] = _view(result[position], rect)
        return done


def _view(matrix: torch.Tensor, rect: Rectangle) -> torch.Tensor:
    return matrix[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]


def _copy_all(places: Any) -> None:
    pairs = [(into, source.view(into.shape)) for into, source in places]
    if pairs:
        into, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(into, sources)


def _place(
    param: torch.Tensor, joins: bool, spreads: bool
) -> tuple[tuple[Axis, ...], MatrixLayout]:
    """Return the axes of the grid that holds a parameter's matrices, and the layout on it."""
    shape = tuple(param.shape)
    if len(shape) < 2:
        raise ValueError(f"expected a 2-D parameter or a stack of matrices, got shape {shape}")
    if not isinstance(param, UnevenDTensor):
        if isinstance(param, DTensor):
            raise ValueError(
                f"a DTensor of shape {shape} was not sharded by fully_shard of megatron_fsdp_v2, "
                "and only such parameters and plain tensors are supported"
            )
        return (), MatrixLayout(Grid((), ()), RowShards(((0, shape[0]),), ()), shape, ())
    mesh, shards = param.device_mesh, param.row_shards
    tensor = shards.tensor
    # Per axis of the mesh: its stride in the row ranges, and whether it shards the matrices.
    strides, sharded = [*shards.strides], [*map(bool, shards.strides)]
    spreads = spreads or any(sharded)
    tensor_axis = None
    if tensor is not None and tensor.mesh is not None and joins:
        tensor_axis = len(strides) if tensor.dim is not None and tensor.size > 1 else None
        strides.append(0)
        sharded.append(tensor.dim is not None)
    used = [a for a in range(len(strides)) if mesh.size(a) > 1 and (sharded[a] or spreads)]
    axes = tuple(
        Axis(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)) for axis in used
    )
    grid = Grid(tuple(axis.size for axis in axes), tuple(sharded[axis] for axis in used))
    index = None if tensor_axis is None else used.index(tensor_axis)
    of_grid = tuple(strides[axis] for axis in used)
    return axes, MatrixLayout(grid, shards, param.part_shape, of_grid, index)
