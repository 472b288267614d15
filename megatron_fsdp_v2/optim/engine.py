"""Functions of whole matrices, each computed once, on matrices that are spread over ranks.

`MatrixEngine` plans when it first runs and executes the plan from then on: rows travel to the
owner of their matrix, equal shapes are worked on in one batch, and results travel back, one bucket
of matrices while another one is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.comm.backends import communicator_for
from megatron_fsdp_v2.comm.errors import Label
from megatron_fsdp_v2.comm.interface import Axis, Communicator
from megatron_fsdp_v2.comm.rank_checks import UnitRecord, compare_units
from megatron_fsdp_v2.dtensor.row_shards import RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim.exchange import BucketPlan, Key, Transfer, plan_buckets
from megatron_fsdp_v2.optim.matrix_layout import Grid, MatrixLayout, Rect
from megatron_fsdp_v2.optim.ownership import Matrix, Ownership

__all__ = ["MatrixEngine", "MatrixFunction", "SharedWork"]

BUCKET_NUMEL = 32 * 2**20
"""Elements of an owner's part of a bucket: large enough for any link, small beside the shards."""


type _Place = tuple[Key, int, tuple[Any, ...]]
"""A rectangle that is here, its parameter, and where it is in that one's local tensor."""


@dataclass(frozen=True, slots=True)
class MatrixFunction:
    """A function of whole matrices.

    Attributes:
        apply: From a stack `(count, m, n)` to one of the same shape; matrices do not mix.
        flops: What it costs for one `m x n` matrix. Only ratios matter.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    flops: Callable[[int, int], int]


class MatrixEngine:
    """Spreads functions of matrices over the ranks that hold parts of them.

    Parameters may be plain tensors (worked on where they are) and parameters of `fully_shard` on
    any meshes, sharded by any strategy; those that share process groups share their work.

    Args:
        params: 2-D parameters, or 3-D stacks of matrices.
        functions: One per parameter. Matrices of equal shape and function form a batch.
        joins_tensor_parallel: Whether a matrix is the whole weight, put together from
            tensor-parallel parts, or one part.
        shares_replicas: Whether ranks that hold equal rows share the work and exchange
            results, or each do all of it.
        bucket_numel: Elements of an owner's matrices in one all-to-all.

    Raises:
        ValueError: A parameter is neither 2-D nor 3-D, or a DTensor that `fully_shard` did not
            make; or `bucket_numel` is less than 1.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        functions: Sequence[MatrixFunction],
        *,
        joins_tensor_parallel: bool = True,
        shares_replicas: bool = True,
        bucket_numel: int = BUCKET_NUMEL,
    ) -> None:
        if bucket_numel < 1:
            raise ValueError(f"bucket_numel must be at least 1, got {bucket_numel}")
        self._num_params = len(params)
        builders: dict[Any, _Builder] = {}
        for index, (param, function) in enumerate(zip(params, functions, strict=True)):
            placed = _place(param, joins_tensor_parallel, shares_replicas)
            key = (placed.group_names, placed.layout.grid, param.device, param.dtype)
            builder = builders.setdefault(key, _Builder(placed.axes, param.device))
            builder.add(index, placed, function)
        self.works = [builder.work(bucket_numel) for builder in builders.values()]

    def run(self, updates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Apply the functions to matrices shaped and sharded like the parameters. Collective.

        Args:
            updates: Per parameter this rank's local part, which may be empty; of one dtype among
                parameters that share process groups.

        Returns:
            Local parts of the results, in the dtypes of the updates.

        Raises:
            ValueError: There are more or fewer updates than parameters.
            RuntimeError: Ranks were given other parameters, or in another order; at the first run.
        """
        if len(updates) != self._num_params:
            raise ValueError(f"expected {self._num_params} updates, got {len(updates)}")
        results = [torch.empty_like(update) for update in updates]
        for work in self.works:
            work.run([updates[i] for i in work.params], [results[i] for i in work.params])
        return results


@dataclass(slots=True)
class SharedWork:
    """The work that the ranks of one grid share.

    Attributes:
        params: Indices of the parameters.
        names: What to call them in an error.
        layouts: Where each of them is.
        functions: What to do with matrices, by their kind.
        ownership: Who does it.
        grid: The ranks.
        axes: The axes of the grid as this rank sees them.
        plan: This rank's part.
    """

    params: tuple[int, ...]
    names: tuple[str, ...]
    layouts: tuple[MatrixLayout, ...]
    functions: tuple[MatrixFunction, ...]
    ownership: Ownership
    grid: Grid
    axes: tuple[Axis, ...]
    device: torch.device
    communicator: Communicator
    plan: list[BucketPlan]
    _is_checked: bool = field(default=False, init=False)
    _places: list[list[_Place]] = field(init=False)

    def __post_init__(self) -> None:
        """Find once where what travels lies in local tensors; every step asks twice."""
        self._places = [list(self._local(bucket)) for bucket in self.plan]

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sends in a run."""
        return sum(bucket.sent_numel for bucket in self.plan)

    @property
    def flops(self) -> int:
        """Work of this rank in a run."""
        return self.ownership.flops[self.grid.rank([axis.rank for axis in self.axes])]

    def run(self, updates: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Fill results. Collective over the grid; see `MatrixEngine.run`."""
        self._check()
        arriving = self._fetch(0, updates) if self.plan else None
        returning: tuple[int, Transfer] | None = None
        for number, bucket in enumerate(self.plan):
            assert arriving is not None
            pieces = arriving.wait()
            # The next bucket is on its way while this one is computed, and its results are while
            # the next one is.
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
            for index, name, layout in zip(self.params, self.names, self.layouts, strict=True)
        ]
        # What is left that owners follow from: costs, kinds and the size of buckets.
        plan = hashlib.sha256(repr(self.ownership).encode()).hexdigest()[:16]
        records.append(UnitRecord("matrix optimizer", f"plan {plan}", nothing))
        compare_units(records, self.axes, self.device)
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
        """Put results that have arrived in their places."""
        if returning is None:
            return
        bucket, transfer = returning
        pieces = transfer.wait()
        _copy_all(
            (results[param][local], pieces[key]) for key, param, local in self._places[bucket]
        )

    def _local(self, plan: BucketPlan) -> Iterator[_Place]:
        """Rectangles that are here, each with its parameter and its index there."""
        here = [axis.rank for axis in self.axes]
        for index in dict.fromkeys(index for index, _ in plan.held):
            matrix = self.ownership.matrices[index]
            for rect, local in self.layouts[matrix.param].pieces_at(matrix.number, here):
                yield (index, rect), matrix.param, local

    def _compute(
        self, plan: BucketPlan, pieces: dict[Key, torch.Tensor], like: torch.Tensor
    ) -> dict[Key, torch.Tensor]:
        """Apply the functions to what this rank owns, one batch per shape and function."""
        batches: dict[tuple[int, tuple[int, int]], list[tuple[int, tuple[Rect, ...]]]] = {}
        for index, rects in plan.owned:
            matrix = self.ownership.matrices[index]
            batches.setdefault((matrix.kind, matrix.shape), []).append((index, rects))
        done = {}
        for (kind, shape), members in batches.items():
            stack = like.new_empty((len(members), *shape))
            _copy_all(
                (_cut(stack[position], rect), pieces[index, rect])
                for position, (index, rects) in enumerate(members)
                for rect in rects
            )
            result = self.functions[kind].apply(stack).to(like.dtype)
            for position, (index, rects) in enumerate(members):
                for rect in rects:
                    done[index, rect] = _cut(result[position], rect)
        return done


def _cut(matrix: torch.Tensor, rect: Rect) -> torch.Tensor:
    return matrix[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]


def _copy_all(places: Any) -> None:
    pairs = [(into, source.view(into.shape)) for into, source in places]
    if pairs:
        into, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(into, sources)


@dataclass(frozen=True, slots=True)
class _Placed:
    layout: MatrixLayout
    axes: tuple[Axis, ...]
    group_names: tuple[str, ...]
    name: str


def _place(param: torch.Tensor, joins: bool, shares: bool) -> _Placed:
    """Find the grid that a parameter's matrices are spread over, and where they are on it."""
    shape = tuple(param.shape)
    if len(shape) not in (2, 3):
        raise ValueError(f"expected a 2-D parameter or a 3-D stack of matrices, got shape {shape}")
    if not isinstance(param, UnevenDTensor):
        if isinstance(param, DTensor):
            raise ValueError(
                f"a DTensor of shape {shape} was not sharded by fully_shard of megatron_fsdp_v2, "
                "and only such parameters and plain tensors are supported"
            )
        rows = RowShards(((0, shape[0]),), ())
        return _Placed(MatrixLayout(Grid((), ()), rows, shape, ()), (), (), "")
    return _place_sharded(param, joins, shares)


def _place_sharded(param: UnevenDTensor, joins: bool, shares: bool) -> _Placed:
    mesh, shards = param.device_mesh, param.row_shards
    tensor = shards.tensor
    # Per axis of the mesh: whether it cuts the matrices, and how far a step moves in the rows.
    kinds = [(bool(stride), stride) for stride in shards.strides]
    tensor_axis = None
    if tensor is not None and tensor.mesh is not None and joins:
        tensor_axis = len(kinds) if tensor.dim is not None and tensor.size > 1 else None
        kinds.append((tensor.dim is not None, 0))
    used = [
        axis for axis, (cuts, _) in enumerate(kinds) if mesh.size(axis) > 1 and (cuts or shares)
    ]
    axes = tuple(
        Axis(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)) for axis in used
    )
    grid = Grid(tuple(axis.size for axis in axes), tuple(kinds[axis][0] for axis in used))
    layout = MatrixLayout(
        grid,
        shards,
        param.part_shape,
        tuple(kinds[axis][1] for axis in used),
        None if tensor_axis is None else used.index(tensor_axis),
    )
    name = shards.holders.name_of(param) or ""
    return _Placed(layout, axes, tuple(axis.group.group_name for axis in axes), name)


class _Builder:
    """Collects the parameters of one grid."""

    def __init__(self, axes: tuple[Axis, ...], device: torch.device) -> None:
        self._axes, self._device = axes, device
        self._params: list[int] = []
        self._names: list[str] = []
        self._layouts: list[MatrixLayout] = []
        self._functions: list[MatrixFunction] = []
        self._matrices: list[Matrix] = []

    def add(self, param: int, placed: _Placed, function: MatrixFunction) -> None:
        """Add a parameter."""
        layout = placed.layout
        if function not in self._functions:
            self._functions.append(function)
        kind = self._functions.index(function)
        flops = function.flops(*layout.matrix_shape)
        self._matrices += Matrix.of(len(self._params), layout, flops, kind)
        self._params.append(param)
        self._names.append(placed.name)
        self._layouts.append(layout)

    def work(self, bucket_numel: int) -> SharedWork:
        """Decide who does what."""
        grid = self._layouts[0].grid
        ownership = Ownership.plan(self._matrices, grid.num_ranks, bucket_numel)
        rank = grid.rank([axis.rank for axis in self._axes])
        return SharedWork(
            tuple(self._params),
            tuple(self._names),
            tuple(self._layouts),
            tuple(self._functions),
            ownership,
            grid,
            self._axes,
            self._device,
            communicator_for(self._device).labeled(Label("the optimizer's matrices")),
            plan_buckets(self._layouts, ownership, grid, rank),
        )
