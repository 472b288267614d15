"""DTensors whose rows are sharded unevenly over a mesh.

Torch's `Shard(0)` implies even chunks. A slice of a flat buffer holds other row ranges, so
`full_tensor()` and the checkpoint entries of a plain `DTensor` over it would be wrong without an
error. `ShardedRows` computes both from the row ranges of all ranks.

Autograd records operations on plain tensors (local or whole) and `linear` functions that convert
between these and DTensors, so no backward needs a collective.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import GetSetDescriptorType
from typing import Any, Self, cast, override

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_fsdp_v2._compiler import break_graph
from megatron_fsdp_v2.comm.calls import all_gather_single
from megatron_fsdp_v2.comm.interface import naming_failures
from megatron_fsdp_v2.dtensor.linear import is_tracked, linear, local_part
from megatron_fsdp_v2.dtensor.optimizer_kinds import rejected, rejection, running_optimizer
from megatron_fsdp_v2.dtensor.row_shards import Chunk, RowShards

# -- fast attributes -------------------------------------------------------------------------------
#
# PyTorch passes every read of `grad`, `dtype` or `requires_grad` to `__torch_function__`, which
# takes some microseconds; a read from a DTensor takes a tenth of one. Optimizers, gradient clipping
# and `zero_grad` read several attributes per parameter. Here each is a property that calls the
# descriptor of `TensorBase` directly.

without_torch_function: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""Called with `(function, types, args, kwargs)`; runs the function as for a DTensor, in C."""

_BASE: Any = torch._C.TensorBase
raw_grad: Callable[[torch.Tensor], Any] = _BASE.grad.__get__
set_raw_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _BASE.grad.__set__
raw_post_hooks: Callable[[torch.Tensor], Any] = _BASE._post_accumulate_grad_hooks.__get__
raw_requires_grad: Callable[[torch.Tensor], bool] = _BASE.requires_grad.__get__
raw_hooks: Callable[[torch.Tensor], Any] = _BASE._backward_hooks.__get__
raw_version: Callable[[torch.Tensor], int] = _BASE._version.__get__
"""Getters and setters of attributes of any tensor, in C. Call them inside
`torch._C.DisableTorchFunctionSubclass()`; outside, they are much slower than attribute access."""


COMPUTED = ("H", "T", "data", "imag", "mH", "mT", "real")
"""Names of attributes that compute a new tensor; handled by `__torch_function__`."""


class FastAttributes(DTensor):
    """A DTensor whose attributes and size methods bypass `__torch_function__`."""


def _directly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of `TensorBase` such that it runs as for a plain DTensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return without_torch_function(function, None, args, kwargs)

    return call


for _name, _own in vars(_BASE).items():
    if isinstance(_own, GetSetDescriptorType) and _name not in COMPUTED:
        _access = [_directly(each) for each in (_own.__get__, _own.__set__, _own.__delete__)]
        setattr(FastAttributes, _name, property(_access[0], _access[1], _access[2]))
for _name in ("dim", "element_size", "is_complex", "is_floating_point", "numel", "size", "stride"):
    setattr(FastAttributes, _name, _directly(getattr(_BASE, _name)))


# -- sharded tensors -------------------------------------------------------------------------------


class _BlockShard(Shard):
    """`Shard` that returns this rank's block when torch computes its even chunk.

    Attributes:
        block: Size and offset; None in a copy that torch makes of the placement.
        is_of_several: Whether this rank holds a block of each of several fused sub-tensors.
        rows: Row ranges of every rank.
    """

    block: tuple[int, int] | None = None
    is_of_several: bool = False
    rows: RowShards | None = None

    @override
    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        if self.is_of_several:
            raise RuntimeError(
                "this rank holds one block of each sub-tensor of a fused parameter, and torch "
                "supports one block only; load with broadcast_from_rank0=False, or from a "
                "checkpoint"
            )
        even = super()._local_shard_size_and_offset
        return self.block or even(curr_local_size, num_chunks, rank)

    @override
    def __hash__(self) -> int:
        # Torch hashes the placements of a plain DTensor before it computes with the DTensor.
        if self.rows is not None and not self.rows.is_even:
            why = (
                f"a plain DTensor has the placements of {self.rows.label or 'a sharded tensor'}, "
                "and torch would compute as if every rank held equally many rows; make it with "
                "torch.zeros_like(param) or param.detach().clone(), which keep the row ranges of "
                "all ranks, and copy local rows into its to_local()"
            )
            optimizer = running_optimizer()
            raise RuntimeError(why) if optimizer is None else rejected(optimizer, why)
        return super().__hash__()


class _Placements(tuple[Placement, ...]):
    """Placements of a `ShardedRows`, valid as the key of a dict. DTensors of torch copy them."""

    __slots__ = ()

    @override
    def __hash__(self) -> int:
        return hash(tuple(Shard(p.dim) if isinstance(p, Shard) else p for p in self))


class ShardedRows(FastAttributes):
    """A DTensor sharded along dimension 0 at the row ranges of a `RowShards`.

    With tensor parallelism, rows are rows of this rank's tensor-parallel part; shape and chunks are
    those of the whole.

    Attributes:
        row_shards: Row ranges of every rank.
        recipe: Set on the result of an operation on rows that autograd recorded: returns the same
            result on whole tensors, whose gradient reaches the whole parameters.
        main_grad_slot: Set on a `param.grad` that a reduction published: the flat main gradient,
            which this reference keeps allocated, and the index of the parameter in the group.
        decoupled_grad: Alias of `grad`, which may have another dtype than the parameter. Fused
            optimizers with Transformer Engine's `use_decoupled_grad` read gradients from this
            attribute, and skip parameters without it.
    """

    row_shards: RowShards
    recipe: Callable[[], torch.Tensor] | None = None
    main_grad_slot: tuple[torch.Tensor, int] | None = None
    decoupled_grad: torch.Tensor | None

    @classmethod
    def from_rows(
        cls, local: torch.Tensor, mesh: DeviceMesh, row_shards: RowShards, shape: Sequence[int]
    ) -> Self:
        """Describe local rows as part of a global tensor. No communication, no copy.

        Args:
            local: This rank's rows, of shape `(rows, *part shape[1:])`, on any device, detached.
            mesh: The mesh; it contains this rank.
            row_shards: Row ranges over the mesh.
            shape: Global shape, contiguous.
        """
        stride = torch.empty(tuple(shape), device="meta").stride()
        # `from_local` would copy offloaded rows to the device of the mesh.
        meta = TensorMeta(torch.Size(shape), stride, local.dtype)
        spec = DTensorSpec(mesh, row_shards.placements, tensor_meta=meta)
        result: Any = DTensor.__new__(cls, local, spec, requires_grad=False)
        result.row_shards = row_shards
        return cast("Self", result)

    def move(self, local: torch.Tensor, like: ShardedRows) -> None:
        """Describe other local rows from now on, sharded like another tensor of this shape.

        Args:
            local: This rank's rows.
            like: The other tensor.
        """
        self._local_tensor, self.row_shards = local, like.row_shards
        placements, meta = like._spec.placements, self._spec.tensor_meta
        self._spec = DTensorSpec(like.device_mesh, placements, tensor_meta=meta)

    @property
    def local_rows(self) -> tuple[int, int]:
        """Row range of this rank."""
        coordinate = self.device_mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError("this rank is not part of the tensor's mesh")
        return self.row_shards.rows_at(coordinate)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape that data parallelism shards: of the whole, or of the tensor-parallel part."""
        tensor = self.row_shards.tensor
        return tuple(self.shape) if tensor is None else tensor.part_shape(self.shape)

    @property
    @override
    def placements(self) -> tuple[Placement, ...]:
        """Placements whose `Shard`s return this rank's block instead of an even chunk.

        `set_model_state_dict(broadcast_from_rank0=True)` copies this block of the whole tensor to
        `to_local()`; torch's own `Shard` would select an even chunk.
        """
        first, last = self.local_rows
        offsets, sizes = [first, *(0 for _ in self.shape[1:])], [last - first, *self.part_shape[1:]]
        tensor, is_of_several = self.row_shards.tensor, False
        if tensor is not None and tensor.dim is not None:
            is_of_several = tensor.size > 1 and len(tensor.pieces) > 1
            offsets[tensor.dim] += tensor.rank * self.part_shape[tensor.dim]
        found: list[Placement] = []
        # The last axis that shards a dimension returns the block; earlier ones return the whole.
        for placement in reversed(self._spec.placements):
            if isinstance(placement, Shard):
                dim = placement.dim
                found.append(shard := _BlockShard(dim))
                shard.block, shard.is_of_several = (sizes[dim], offsets[dim]), is_of_several
                shard.rows = self.row_shards
                sizes[dim], offsets[dim] = self.shape[dim], 0
            else:
                found.append(placement)
        return _Placements(reversed(found))

    @property
    def owns_replica(self) -> bool:
        """Whether this rank is the first data-parallel rank that holds these rows."""
        steps = zip(self.device_mesh.get_coordinate() or (), self.row_shards.strides, strict=False)
        return all(stride or c == 0 for c, stride in steps)

    def pieces(self) -> list[Self]:
        """Return the fused sub-tensors that tensor parallelism split one by one, as views.

        Raises:
            ValueError: The sub-tensors are fused along another dimension than rows.
        """
        shards, (first, last) = self.row_shards, self.local_rows
        if shards.tensor is None or len(shards.tensor.pieces) < 2:
            return [self]
        if shards.tensor.dim not in (None, 0):
            raise ValueError(f"pieces along dimension {shards.tensor.dim} are not blocks of rows")
        tensor, found, start = dataclasses.replace(shards.tensor, pieces=()), [], 0
        for length in shards.tensor.pieces:
            end = start + length
            held = [[min(max(row, start), end) - start for row in r] for r in shards.row_ranges]
            piece = RowShards([(low, high) for low, high in held], shards.strides, tensor)
            low, high = (min(max(row, first), last) - first for row in (start, end))
            local, shape = self._local_tensor.detach()[low:high], (length, *self.part_shape[1:])
            found.append(self.from_rows(local, self.device_mesh, piece, tensor.global_shape(shape)))
            start = end
        return found

    @override
    def __tensor_flatten__(self) -> Any:
        """Reject tracing: torch.compile would rebuild a DTensor with even rows."""
        what = f"a sharded tensor of shape {tuple(self.shape)}"
        if (optimizer := running_optimizer()) is not None:
            why = f"its step is compiled whole (fullgraph=True), and {what}"
            break_graph(*rejection(optimizer, why))
        break_graph(what)
        return super().__tensor_flatten__()  # type: ignore[no-untyped-call]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the local rows; the mesh and the row ranges are shared."""
        local = self._local_tensor.detach().clone()
        return memo.setdefault(id(self), saved_rows(*self._parts(local, self.row_shards)))

    def __copy__(self) -> Any:
        """Return another tensor over the same local rows."""
        return saved_rows(*self._parts(self._local_tensor.detach(), self.row_shards))

    def _parts(self, local: torch.Tensor, row_shards: RowShards) -> tuple[Any, ...]:
        """Return the arguments of `saved_rows` for a tensor like this one."""
        rows = local, self.device_mesh, row_shards, tuple(self.shape)
        return type(self), rows, isinstance(self, torch.nn.Parameter), self.requires_grad

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this rank's rows and the row ranges of all ranks, without process groups."""
        del protocol
        held = self.row_shards.held(self.local_rows)
        shards = dataclasses.replace(self.row_shards, saved=held)
        return saved_rows, self._parts(self._local_tensor.detach(), shards)

    @override
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the local rows, which share memory with this tensor. Differentiable.

        Writes into the rows of a parameter are used by the next forward if they advance the version
        counter of the result. `data` of the result, numpy and collectives do not: call
        `torch.autograd.graph.increment_version([param])` after such a write, on all ranks.

        Raises:
            ValueError: `grad_placements` are not the placements of this tensor.
        """
        if grad_placements is not None and tuple(grad_placements) != self._spec.placements:
            raise ValueError(
                f"to_local: the gradient of local rows has placements {self._spec.placements}, "
                f"not grad_placements={tuple(grad_placements)}; omit grad_placements"
            )
        return local_rows(self) if torch.is_grad_enabled() else self._local_tensor

    @override
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gather the whole tensor on every rank. Collective over the mesh; differentiable.

        The gradient of a parameter is reduced with the gradients of its unit: it is the sum over
        data-parallel ranks, times the unit's `gradient_scaling_factor` (the mean, by default).

        Args:
            grad_placements: Placement of its gradient per mesh axis, to override this:
                `Replicate()` if ranks compute the same gradient, which is used as it is, or
                `Partial()` if their gradients must be summed.

        Raises:
            ValueError: `grad_placements` contains a `Shard`.
        """
        if grad_placements is not None and any(p.is_shard() for p in grad_placements):
            raise ValueError(
                f"full_tensor: the gradient of the whole tensor of shape {tuple(self.shape)} "
                f"cannot be placed as {tuple(grad_placements)}; grad_placements takes Replicate() "
                "(equal on all ranks, the default) and Partial() (summed over ranks) per mesh axis"
            )

        # A hook on this tensor, or its own gradient, is that of rows.
        is_plain = grad_placements is None and not (self._backward_hooks or self.retains_grad)
        if self.recipe is not None and is_plain and is_tracked(self):
            return self.recipe()
        collect = None if grad_placements is not None else _collector_of(self)

        def to_rows(grad: torch.Tensor) -> Any:
            if grad_placements is not None:
                grad = DTensor.from_local(grad, self.device_mesh, grad_placements).full_tensor()
            return shard_like(self, grad)

        def gather(rows: DTensor) -> torch.Tensor:
            # A gradient that autograd has summed is a plain DTensor.
            return whole_of(rows_like(_plain_rows(rows._local_tensor, self.dtype), self))

        whole: torch.Tensor = linear(self, gather, _gradient_for(self, to_rows), collect)
        return whole if sharded_axes(self) else whole.clone()

    def chunks(self) -> list[Chunk]:
        """Return the blocks of the whole tensor that this rank holds."""
        return list(self.row_shards.chunks(self.local_rows, self.part_shape))

    @override
    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return the write items of torch's distributed checkpoint: this rank's blocks.

        A tensor without elements has no blocks and is written as one empty block, since its name
        would be missing otherwise.
        """
        del object
        chunks = self._blocks()
        if not self.numel():
            chunks = [ChunkStorageMetadata(torch.Size([0] * self.ndim), self.shape)]
        kind, about = WriteItemType.SHARD, TensorProperties.create_from_tensor(self._local_tensor)
        data = [TensorWriteData(chunk, about, self.shape) for chunk in chunks]
        return [WriteItem(MetadataIndex(fqn, d.chunk.offsets), kind, tensor_data=d) for d in data]

    @override
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the offsets and sizes of this rank's blocks, which a load will write.

        Ranks without blocks must notice the load too, since stale weights are refreshed together.
        """
        torch.autograd.graph.increment_version(self._local_tensor)
        return self._blocks()

    def _blocks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(*map(torch.Size, (c.offsets, c.sizes))) for c in self.chunks()]

    @override
    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return a block, which torch's distributed checkpoint reads and writes."""
        for chunk in self.chunks():
            if index.offset is None or tuple(index.offset) == chunk.offsets:
                # Quantized state of torchao has no rule for an index of all rows.
                is_all = self._local_tensor.shape == chunk.sizes
                return self._local_tensor if is_all else self._local_tensor[chunk.local]
        if not self.numel():
            return self._local_tensor.new_empty(self.shape)
        raise ValueError(f"this rank holds no block of {index.fqn} that starts at {index.offset}")


def _read_grad(self: ShardedRows) -> torch.Tensor | None:
    grad: torch.Tensor | None = without_torch_function(raw_grad, None, (self,))
    # Autograd sums several gradients of losses of the sharded parameter into a DTensor.
    return rows_like(local_of(grad), self) if type(grad) is DTensor else grad


_BASE_GRAD: Any = vars(FastAttributes)["grad"]
ShardedRows.grad = ShardedRows.decoupled_grad = _BASE_GRAD.getter(_read_grad)


def saved_rows(cls: type[ShardedRows], rows: Any, is_param: bool, requires_grad: bool) -> Any:
    """Rebuild a sharded tensor from a file or for a copy.

    Args:
        cls: Class of the tensor.
        rows: Arguments of `from_rows`: rows of the rank that saved the tensor, and the row ranges
            of all ranks. In a file, the mesh may have no process groups.
        is_param: Whether the tensor is a parameter.
        requires_grad: Whether the tensor requires a gradient.
    """
    made = cls.from_rows(*rows)
    if is_param:
        return torch.nn.Parameter(made, requires_grad=requires_grad)
    return made.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([saved_rows])


def with_rows_of(value: Any, like: Any) -> ShardedRows | None:
    """Convert a plain DTensor over the local rows of a sharded parameter into a sharded tensor.

    Transformer Engine's optimizers wrap state of local rows as a `DTensor` with the parameter's
    placements.

    Args:
        value: Any object.
        like: The parameter.

    Returns:
        A sharded tensor that shares memory with the value; `None` if the value is not such a
        DTensor.
    """
    if type(value) is not DTensor or not isinstance(like, ShardedRows):
        return None
    local, spec, theirs = value._local_tensor, like._spec, value._spec
    is_alike = theirs.shape == spec.shape and theirs.placements == spec.placements
    is_alike = is_alike and theirs.mesh == spec.mesh and local.shape == local_of(like).shape
    # With torch's own `Shard`, the rows are an even chunk, which may have the same length.
    is_torchs = Shard in map(type, theirs.placements)
    return rows_like(local, like) if is_alike and not is_torchs else None


def rows_like[DTensorT: DTensor](local: torch.Tensor, like: DTensorT) -> DTensorT:
    """Wrap local rows as a DTensor sharded like another one. No communication, no copy.

    Args:
        local: As many rows as this rank has of `like`, of any dtype, on any device, detached.
        like: A sharded tensor, even or not.
    """
    spec = like._spec
    # A property of `like` would take a third of this function's time.
    if local.dtype != like._local_tensor.dtype:
        meta = TensorMeta(like.shape, spec.stride, local.dtype)
        spec = DTensorSpec(like.device_mesh, spec.placements, tensor_meta=meta)
    # `from_local` takes longer than most operations.
    result: Any = DTensor.__new__(type(like), local, spec, requires_grad=False)
    if isinstance(like, ShardedRows):
        result.row_shards = like.row_shards
    return result  # type: ignore[no-any-return]


local_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""The local tensor of a sharded tensor; `to_local()` makes a view of it.

Implemented in C, since each step reads it several times per parameter.
"""


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of any DTensor, which data parallelism shards; or a plain tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors whose memory a tensor uses, such as those of a quantized tensor."""
    local: Any = plain_of(tensor)
    if not is_traceable_wrapper_subclass(local):
        yield local
        return
    for name in local.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(local, name))


def sharded_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return `param.grad` of a sharded parameter; a DTensor of any placement is converted.

    Raises:
        RuntimeError: A plain tensor was assigned to it.
    """
    grad = param.grad
    if grad is None or isinstance(grad, DTensor):
        return grad
    label = param.row_shards.label if isinstance(param, ShardedRows) else None
    raise RuntimeError(
        f"p.grad of {label or 'a sharded parameter'} was assigned a plain tensor of shape "
        f"{tuple(grad.shape)}, and the gradient of a sharded parameter is sharded. Write a whole "
        "gradient, equal on all ranks, with p.grad = torch.zeros_like(p); p.grad.copy_(whole), or "
        "this rank's rows with p.grad.to_local().copy_(rows)"
    )


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharded or not, sharing memory."""
    return local_of(tensor) if isinstance(tensor, ShardedRows) else tensor.detach()


def add_to_rows(params: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], alpha: float) -> None:
    """Add plain tensors to the local rows in place, in one operation.

    Args:
        params: Parameters, sharded or not. Their version counters are incremented.
        rows: One tensor per parameter, of the shape of its local rows.
        alpha: Factor of `rows`.
    """
    torch._foreach_add_([rows_of(param) for param in params], list(rows), alpha=alpha)
    torch.autograd.graph.increment_version(params)


plain_attributes: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
"""Read and write `grad`, `requires_grad`, ... of DTensors without any Python dispatch."""


def shard_like(target: ShardedRows, source: Any) -> Any:
    """Return the rows of a source, distributed or not, that the target holds on this rank."""
    if isinstance(source, ShardedRows):
        shards, saved = source.row_shards, source.row_shards.saved
        if shards == target.row_shards and saved in (None, shards.held(target.local_rows)):
            return rows_like(source._local_tensor, target) if saved else source
        if saved is not None:
            raise ValueError(
                f"a tensor of shape {tuple(source.shape)} that one rank saved with torch.save "
                "holds other rows than this rank has of the parameter: load the file of this rank "
                "at the same ranks, mesh and sharding, or save with megatron_fsdp_v2.checkpoint or "
                "torch.distributed.checkpoint, which load at any"
            )
    if not isinstance(source, torch.Tensor) or source.shape != target.shape:
        return source
    full = source.full_tensor() if isinstance(source, DTensor) else source
    local = torch.empty_like(target._local_tensor, dtype=full.dtype)
    for chunk in target.chunks():
        local[chunk.local] = full[chunk.block].to(local.device)
    return rows_like(local, target)


def _plain_rows(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return detached local rows; dequantized, because other ranks' rows may not be quantized."""
    if is_traceable_wrapper_subclass(local):
        return local.dequantize().to(dtype)
    return local.detach()


def whole_of(tensor: ShardedRows) -> torch.Tensor:
    """Gather the whole tensor on every rank; no copy if each rank holds all of it. Collective.

    Rows are gathered axis by axis, padded to the longest range; the padding is dropped.

    Raises:
        RuntimeError: The tensor was loaded from a file that holds one rank's rows.
    """
    mesh, shards = tensor.device_mesh, tensor.row_shards
    if shards.saved is not None:
        raise RuntimeError(
            f"a sharded tensor of shape {tuple(tensor.shape)} loaded from a file has one rank's "
            "rows; load it into a model that is sharded alike, and gather the parameter"
        )
    local, part, axes = tensor._local_tensor.detach(), tensor.part_shape, sharded_axes(tensor)
    if not axes:
        return local
    longest = max(end - start for start, end in shards.row_ranges)
    blocks = local.new_zeros((longest, *part[1:]))
    blocks[: local.shape[0]] = local
    for axis in reversed(axes):
        group, own = mesh.get_group(axis), blocks
        blocks = own.new_empty((mesh.size(axis) * own.shape[0], *own.shape[1:]))
        with naming_failures("all-gather of a whole tensor (full_tensor)", group):
            all_gather_single(blocks, own, group=group)
    full = local.new_zeros(tensor.shape)
    # Coordinates of ranks in the order of blocks; 0 along axes whose ranks hold equal rows.
    places = [range(mesh.size(axis)) if axis in axes else (0,) for axis in range(mesh.ndim)]
    pairs = zip(itertools.product(*places), torch.split(blocks, longest or 1), strict=False)
    for place, block in pairs:
        for chunk in shards.chunks(shards.rows_at(place), part, place[-1]):
            full[chunk.block] = block[chunk.local]
    return full


def sharded_axes(tensor: DTensor) -> list[int]:
    """Return the mesh axes along which a DTensor is not replicated."""
    placements = enumerate(tensor._spec.placements)
    return [axis for axis, placement in placements if not placement.is_replicate()]


_KEEP_ROWS = (
    "absolute bfloat16 bool byte char conj contiguous cpu cuda divide double empty_like fill float "
    "full_like half int long masked_fill multiply negative ones_like resolve_conj resolve_neg rsub "
    "short subtract to true_divide type type_as where zero zeros_like"
)
"""Names of elementwise functions that torch does not tag as pointwise."""


@functools.cache
def keeps_rows(name: str) -> bool:
    """Return whether a function computes every element from elements at the same index."""
    base = name.strip("_")
    if name.startswith("__r") and not hasattr(torch.ops.aten, base):
        base = base[1:]  # as in 1 / tensor
    if base in _KEEP_ROWS.split():
        return True
    packet: Any = getattr(torch.ops.aten, base, None)
    overloads = [getattr(packet, each) for each in getattr(packet, "overloads", list)()]
    tags = [
        each.tags
        for each in overloads
        if isinstance(each._schema.arguments[0].type, torch.TensorType)
        and not any(argument.is_out for argument in each._schema.arguments)
    ]
    return base != "equal" and bool(tags) and all(torch.Tag.pointwise in each for each in tags)


# -- autograd --------------------------------------------------------------------------------------


def _gradient_for(like: DTensor, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `function` as an adjoint that first orders the accumulation into `like.grad`."""

    def adjoint(grad: Any) -> Any:
        if isinstance(like, ShardedRows) and like.is_leaf:
            like.row_shards.info.before_grad_accumulation()
        return function(grad)

    return adjoint


def _collector_of(
    tensor: ShardedRows, rows: tuple[int, int] | None = None
) -> Callable[[torch.Tensor], None] | None:
    """Begin a direct use of a parameter that autograd records; None for any other tensor.

    Args:
        tensor: The tensor.
        rows: The rows that are used; None for all.
    """
    if not (tensor.is_leaf and is_tracked(tensor)):
        return None
    collect = tensor.row_shards.info.begin_direct_use(tensor)
    return None if collect is None else lambda grad: collect(grad, rows)


class Overwrite(torch.autograd.Function):
    """Replace the local values of a DTensor. Autograd records an in-place operation."""

    @staticmethod
    @override
    def forward(ctx: Any, target: Any, local: Any) -> Any:
        ctx.mark_dirty(target)
        target._local_tensor.copy_(local)
        return target

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, local_rows(grads[0])


def local_rows(source: DTensor) -> torch.Tensor:
    """Return the local tensor of a DTensor. Differentiable.

    The gradient of rows that several ranks hold is averaged over these ranks, with the gradients of
    the parameter's unit.
    """
    collect = None
    if isinstance(source, ShardedRows) and not source.row_shards.is_held_once(source.device_mesh):
        collect = _collector_of(source, source.local_rows)
    to_rows = _gradient_for(source, lambda local: rows_like(local.detach(), source))
    return cast("torch.Tensor", linear(source, local_part, to_rows, collect))
