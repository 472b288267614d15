"""DTensors whose rows are spread unevenly over a mesh.

Torch's `Shard(0)` implies one particular chunking. A slice of a flat buffer holds other row
ranges, so a plain `DTensor` over it answers `full_tensor()` and checkpoint questions wrongly and
without complaint. `UnevenDTensor` carries the row range of every rank, answers both from it, and
hands it on to whatever elementwise operations make of it: gradients, momenta, copies.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast, override

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron_fsdp_v2._compiler import leave_to_python
from megatron_fsdp_v2.comm.calls import all_gather_single
from megatron_fsdp_v2.comm.errors import naming_failures
from megatron_fsdp_v2.dtensor.attributes import (
    PLAIN_FUNCTIONS,
    AttributesAtOnce,
    without_torch_function,
)
from megatron_fsdp_v2.dtensor.foreach import choose_foreach_for, is_elementwise, run_on_rows
from megatron_fsdp_v2.dtensor.found_inf import unscale_and_check
from megatron_fsdp_v2.dtensor.norms import NORMS, local_norms, order_of
from megatron_fsdp_v2.dtensor.reductions import REDUCTIONS, check_supposes_nothing, reduce_rows
from megatron_fsdp_v2.dtensor.row_shards import (
    Chunk,
    RowShards,
    TensorShard,
    knows_rows,
    placements_with_rows,
)

__all__ = ["UnevenDTensor", "local_of", "plain_attributes", "rows_of", "with_rows_of"]


class UnevenDTensor(AttributesAtOnce):
    """A DTensor sharded along dimension 0 at the row ranges of a `RowShards`.

    Where tensor parallelism cut the parameter before, rows are those of this rank's part of it;
    shape and chunks are those of the whole.
    """

    _row_shards: RowShards

    @staticmethod
    def from_rows(
        local: torch.Tensor, mesh: DeviceMesh, row_shards: RowShards, shape: Sequence[int]
    ) -> UnevenDTensor:
        """Describe local rows as part of a global tensor. No communication, no copy.

        Args:
            local: This rank's rows, of shape `(rows, *part shape[1:])`, on any device.
            mesh: The mesh; this rank is in it.
            row_shards: Row ranges over the mesh.
            shape: Global shape, contiguous.
        """
        stride = torch.empty(tuple(shape), device="meta").stride()
        if local.device.type not in (mesh.device_type, "meta"):
            # `from_local` would copy what is offloaded to the device of the mesh.
            meta = TensorMeta(torch.Size(shape), stride, local.dtype)
            spec = DTensorSpec(mesh, row_shards.placements, tensor_meta=meta)
            return UnevenDTensor.from_spec(local, spec, row_shards)
        plain = DTensor.from_local(
            local,
            mesh,
            row_shards.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        return _wrap(plain, row_shards)

    @staticmethod
    def from_spec(local: torch.Tensor, spec: DTensorSpec, row_shards: RowShards) -> UnevenDTensor:
        """`from_rows` for one more tensor like another, whose spec it shares; far cheaper."""
        return _wrap(DTensor.__new__(DTensor, local, spec, requires_grad=False), row_shards)

    @property
    def row_shards(self) -> RowShards:
        """Row ranges of every rank."""
        return self._row_shards

    @property
    def local_rows(self) -> tuple[int, int]:
        """Row range of this rank."""
        coordinate = self.device_mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError("this rank is not part of the tensor's mesh")
        return self._row_shards.rows_at(coordinate)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what data parallelism shards: the whole, or this rank's tensor-parallel part."""
        return self._row_shards.part_shape(self.shape)

    @property
    @override
    def placements(self) -> tuple[Placement, ...]:
        """`Shard` along cut axes; they know this rank's rows when torch asks for a chunk."""
        return placements_with_rows(self._row_shards, self.local_rows, self.part_shape)

    @property
    def owns_replica(self) -> bool:
        """Whether this rank comes first of the data-parallel ranks that hold the same rows."""
        coordinate = self.device_mesh.get_coordinate() or ()
        steps = zip(coordinate, self._row_shards.strides, strict=False)
        return all(stride or c == 0 for c, stride in steps)

    def pieces(self) -> list[UnevenDTensor]:
        """The pieces that were cut one by one, each as a tensor of its own; views.

        Raises:
            ValueError: They are pieces of another dimension than rows.
        """
        tensor = self._row_shards.tensor
        if tensor is None or len(tensor.pieces) < 2:
            return [self]
        if tensor.dim not in (None, 0):
            raise ValueError(f"pieces along dimension {tensor.dim} are not blocks of rows")
        found, start = [], 0
        for number, length in enumerate(tensor.pieces):
            found.append(self._narrowed(start, start + length, tensor.only(number)))
            start += length
        return found

    def _narrowed(self, start: int, end: int, tensor: TensorShard | None) -> UnevenDTensor:
        first, last = self.local_rows
        low, high = min(max(first, start), last), min(max(first, end), last)
        shards = self._row_shards.narrowed(start, end, tensor)
        return UnevenDTensor.from_rows(
            self._local_tensor.detach()[low - first : high - first],
            self.device_mesh,
            shards,
            shards.global_shape((end - start, *self.part_shape[1:])),
        )

    @override
    def _with_rows(self, grad: torch.Tensor) -> torch.Tensor:
        # Autograd may have made it, of a loss of the sharded parameter itself.
        return cast("torch.Tensor", _carry(grad, (self,)))

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation as DTensor does and hand the row ranges on to its results."""
        if func in PLAIN_FUNCTIONS:
            return without_torch_function(func, types, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("__set__", "__get__") and func.__self__ is torch.Tensor.data:  # type: ignore[attr-defined]
            # `.data` has a version counter of its own, and a write through it would go unseen.
            return _set_data(*args) if name == "__set__" else args[0].detach()
        if name == "__setitem__" and isinstance(args[1], UnevenDTensor):
            # DTensor has no rule for a mask; here it has the same rows.
            func(*(item._local_tensor if isinstance(item, DTensor) else item for item in args))
            torch.autograd.graph.increment_version(args[0])
            return args[0]
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return unscale_and_check(*args, **(kwargs or {}))
        if is_elementwise(name, args):
            result = run_on_rows(cls, func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        if func is torch.Tensor.storage:
            # What safetensors asks for.
            raise RuntimeError(
                f"a sharded tensor of shape {tuple(args[0].shape)} has no storage of its own: this "
                "rank holds some of its rows. Write a gathered state dict "
                "(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
                "torch.distributed.checkpoint.state_dict), or save with "
                "megatron_fsdp_v2.checkpoint.save and export"
            )
        if func is torch.Tensor.copy_ and type(args[0]) is cls:
            args = (args[0], _source_rows(args[0], args[1]), *args[2:])
        elif len(args) > 1:
            _check_same_rows(func, args, kwargs)
        check_supposes_nothing(func, args)
        if func in NORMS:
            norms = _sharded_norms(func, args, kwargs or {})
            if norms is not None:
                return norms
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if func in REDUCTIONS and type(args[0]) is cls:
                    result = reduce_rows(func, args, kwargs or {}, _gradient_rows)
                else:
                    result = func(*args, **(kwargs or {}))
        except Exception as error:
            found = _used_while_sharded(args, kwargs)
            if found is None:
                raise
            raise _misuse_while_sharded(func, found) from error
        return _carry(result, args)

    @override
    def __tensor_flatten__(self) -> Any:
        """What it consists of, for torch's subclass machinery.

        Compiled, it would become a DTensor, whose rows torch has its own idea of.
        """
        leave_to_python(f"a sharded tensor of shape {tuple(self.shape)}")
        return super().__tensor_flatten__()  # type: ignore[no-untyped-call]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> UnevenDTensor:
        """Copy the local rows; the mesh and the row ranges are shared."""
        if id(self) in memo:
            copied: UnevenDTensor = memo[id(self)]
            return copied
        local = self._local_tensor.detach().clone()
        result: Any = UnevenDTensor.from_rows(
            local, self.device_mesh, self._row_shards, tuple(self.shape)
        )
        if isinstance(self, torch.nn.Parameter):
            result = torch.nn.Parameter(result)
        result.requires_grad_(self.requires_grad)
        memo[id(self)] = result
        return result  # type: ignore[no-any-return]

    def __copy__(self) -> UnevenDTensor:
        """Another tensor over the same local rows."""
        result: Any = UnevenDTensor.from_rows(
            self._local_tensor.detach(), self.device_mesh, self._row_shards, tuple(self.shape)
        )
        if isinstance(self, torch.nn.Parameter):
            result = torch.nn.Parameter(result, requires_grad=self.requires_grad)
        return cast(UnevenDTensor, result)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this rank's rows and which rows all ranks hold, and nothing of their groups."""
        del protocol
        is_param = isinstance(self, torch.nn.Parameter)
        return stored_rows, (
            self._local_tensor.detach(),
            self.device_mesh,
            self._row_shards.packed(),
            self._row_shards.held(self.local_rows),
            tuple(self.shape),
            (is_param, self.requires_grad),
        )

    @override
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gather the whole tensor on every rank. Collective over the mesh; not differentiable."""
        del grad_placements
        if self._row_shards.holders.stored is not None:
            raise RuntimeError(
                f"a sharded tensor of shape {tuple(self.shape)} that was loaded from a file has "
                "one rank's rows and no process groups; load it into a model that is sharded like "
                "the one it was saved from, and take the parameter's full_tensor()"
            )
        return _gather_rows(self)

    @override
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        **kwargs: Any,
    ) -> DTensor:
        """Return self for unchanged placements, or a replicated DTensor. Collective.

        Raises:
            NotImplementedError: Any other target; go through `full_tensor()`.
        """
        del async_op, kwargs
        mesh = self.device_mesh if device_mesh is None else device_mesh
        target = self.placements if placements is None else tuple(placements)
        if mesh == self.device_mesh and target == self.placements:
            return self
        if mesh == self.device_mesh and all(p.is_replicate() for p in target):
            return DTensor.from_local(self.full_tensor(), mesh, target, run_check=False)
        raise NotImplementedError(
            f"an unevenly sharded DTensor of shape {tuple(self.shape)} can be gathered but not "
            f"redistributed to {target}; use full_tensor() and distribute_tensor()"
        )

    def chunks(self) -> list[Chunk]:
        """The blocks of the whole tensor that are here, from integers alone."""
        return list(self._row_shards.chunks(self.local_rows, self.part_shape))

    @override
    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What torch's distributed checkpoint writes for this rank: its blocks, or nothing.

        A tensor without elements has no blocks and is written as one, or its name would be missing.
        """
        del object
        chunks = self.__create_chunk_list__()
        if not self.numel():
            chunks = [ChunkStorageMetadata(torch.Size([0] * self.ndim), self.shape)]
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._local_tensor),
                    size=self.shape,
                ),
            )
            for chunk in chunks
        ]

    @override
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Offsets and sizes of this rank's blocks."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes))
            for c in self.chunks()
        ]

    @override
    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """A block, which torch's distributed checkpoint reads from and writes into."""
        for chunk in self.chunks():
            if index.offset is None or tuple(index.offset) == chunk.offsets:
                return self._local_tensor[chunk.local]
        if not self.numel():
            return self._local_tensor.new_empty(self.shape)
        raise ValueError(f"this rank holds no block of {index.fqn} that starts at {index.offset}")


def stored_rows(
    local: torch.Tensor,
    mesh: DeviceMesh,
    packed: tuple[Any, ...],
    held: tuple[int, ...],
    shape: tuple[int, ...],
    parameter: tuple[bool, bool],
) -> UnevenDTensor:
    """A sharded tensor as it comes from a file.

    Args:
        local: Rows of the rank that saved it.
        mesh: The mesh they were sharded over; it may have no process groups here.
        packed: Which rows all ranks held, of `RowShards.packed`.
        held: What the rank held that saved it, of `RowShards.held`.
        shape: Global shape.
        parameter: Whether it is a parameter, and whether it requires a gradient.
    """
    shards = RowShards.unpacked(packed, mesh, held)
    result: Any = UnevenDTensor.from_rows(local, mesh, shards, shape)
    is_param, requires_grad = parameter
    if is_param:
        return cast(UnevenDTensor, torch.nn.Parameter(result, requires_grad=requires_grad))
    return cast(UnevenDTensor, result.requires_grad_(requires_grad))


# So that torch.load(weights_only=True) takes sharded tensors.
torch.serialization.add_safe_globals([stored_rows])


local_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""The local rows of a sharded tensor themselves, where `to_local()` makes a new view.

In C, as it is asked for several times a step of every parameter.
"""


def with_rows_of(value: Any, like: Any) -> UnevenDTensor | None:
    """A plain DTensor as what it is: rows of the same numbers as those of an uneven one.

    Transformer Engine's optimizers wrap what they compute of local rows as a `DTensor` with the
    placements of the parameter.

    Args:
        value: Anything.
        like: The parameter.

    Returns:
        An `UnevenDTensor` that shares memory with the value; `None` for everything else.
    """
    if type(value) is not DTensor or not isinstance(like, UnevenDTensor):
        return None
    local = value._local_tensor
    is_whole = like._row_shards.is_replicated
    placements = value._spec.placements
    if (
        value.shape != like.shape
        or local.shape != like._local_tensor.shape
        or value.device_mesh != like.device_mesh
        or not (placements == like._spec.placements if is_whole else knows_rows(placements))
    ):
        return None
    return UnevenDTensor.from_rows(local, like.device_mesh, like._row_shards, like.shape)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharded or not, sharing its memory."""
    return local_of(tensor) if isinstance(tensor, UnevenDTensor) else tensor.detach()


plain_attributes: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""Read and write `grad`, `requires_grad`, ... of DTensors without their Python dispatch."""


def _sharded_norms(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Norms over all elements of tensors; None for any other kind of norm."""
    if len(args) > 2 or not kwargs.keys() <= {"ord"}:
        return None
    order = order_of(args, kwargs)
    if func is not torch._foreach_norm:
        return local_norms(args[:1], order)[0] if type(args[0]) is UnevenDTensor else None
    is_ours = [type(tensor) is UnevenDTensor for tensor in args[0]]
    ours = iter(local_norms(list(itertools.compress(args[0], is_ours)), order))
    # A list may have FSDP2's DTensors and plain tensors among ours, as a loop over them may.
    others = [tensor for tensor in args[0] if type(tensor) is not UnevenDTensor]
    theirs = iter([torch.linalg.vector_norm(tensor, order) for tensor in others])
    return [next(ours if mine else theirs) for mine in is_ours]


def _wrap(plain: DTensor, row_shards: RowShards) -> UnevenDTensor:
    # A DTensor subclass adds no storage of its own, so the object can change class in place;
    # making a second wrapper would cost as much as the operation that made the first.
    plain.__class__ = UnevenDTensor
    assert isinstance(plain, UnevenDTensor)
    plain._row_shards = row_shards
    return plain


def _uneven_leaves(args: Sequence[Any], position: int | None = None) -> Iterator[UnevenDTensor]:
    """Uneven tensors among arguments; of list arguments only the element at `position`."""
    for arg in args:
        if type(arg) is UnevenDTensor:
            yield arg
        elif isinstance(arg, list | tuple):
            items = arg if position is None else arg[position : position + 1]
            yield from (item for item in items if type(item) is UnevenDTensor)


def _carry(result: Any, args: Sequence[Any]) -> Any:
    if type(result) is DTensor:
        _match(result, _uneven_leaves(args))
    elif isinstance(result, list | tuple):
        for position, item in enumerate(result):
            if type(item) is DTensor:
                _match(item, _uneven_leaves(args, position))
    return result


def _match(result: DTensor, candidates: Iterator[UnevenDTensor]) -> None:
    for like in candidates:
        if (
            result.shape == like.shape
            and result._spec.placements == like._spec.placements
            and result._local_tensor.shape == like._local_tensor.shape
        ):
            _wrap(result, like._row_shards)
            if result.dtype == like.dtype:
                # DTensor remembers results by what meshes look like; this one's groups are live.
                result._spec = like._spec
            return


def _check_same_rows(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
) -> None:
    first: UnevenDTensor | None = None
    for arg in args:
        if type(arg) is not UnevenDTensor:
            continue
        if first is None:
            first = arg
        elif arg._row_shards is not first._row_shards and arg._row_shards != first._row_shards:
            found = _used_while_sharded(args, kwargs)
            if found is not None:
                raise _misuse_while_sharded(func, found)
            raise ValueError(
                f"{getattr(func, '__name__', func)} mixes two tensors of shapes "
                f"{tuple(first.shape)} and {tuple(arg.shape)} whose rows are sharded "
                "differently; gather one with full_tensor() and copy_() it over first"
            )


def _used_while_sharded(args: Sequence[Any], kwargs: dict[str, Any] | None) -> str | None:
    """The name of a sharded parameter that is computed with as if it were whole, if one is.

    That is, together with a tensor that is not sharded, as a module's forward does.
    """
    leaves = [*args, *(kwargs or {}).values()]
    if all(isinstance(leaf, DTensor) or not _is_data(leaf) for leaf in leaves):
        return None
    for leaf in leaves:
        if type(leaf) is UnevenDTensor:
            group = leaf._row_shards.holders.group()
            if group is not None and group.holds(leaf):
                return group.name_of(leaf)
    return None


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _misuse_while_sharded(func: Callable[..., Any], name: str) -> RuntimeError:
    return RuntimeError(
        f"{getattr(func, '__name__', func)} computes with {name}, which is sharded: this rank "
        "holds some of its rows. Its module was run, or its weight used, outside of the forward "
        "of the unit that gathers it. Call unshard() on that unit before and reshard() after, "
        "or register the method that runs it with register_fsdp_forward_method(unit, name), or "
        "call fully_shard on the module itself, before its unit"
    )


def _set_data(target: UnevenDTensor, value: torch.Tensor) -> None:
    """Copy values, where `.data = ...` would give the DTensor storage nobody shards."""
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ValueError(
            f"a sharded tensor of shape {tuple(target.shape)} and {target.dtype} cannot take the "
            f"data of a tensor of shape {tuple(value.shape)} and {value.dtype}; change shapes and "
            "dtypes before sharding"
        )
    with torch.no_grad():
        target.detach().copy_(value)


def _source_rows(target: UnevenDTensor, source: Any) -> Any:
    """What to copy into a target's local rows from a source of any distribution."""
    if type(source) is UnevenDTensor:
        stored = source._row_shards.holders.stored
        if source._row_shards == target._row_shards:
            if stored is None:
                return source
            if stored == target._row_shards.held(target.local_rows):
                local = source._local_tensor
                shards = target._row_shards
                return UnevenDTensor.from_rows(local, target.device_mesh, shards, target.shape)
        if stored is not None:
            raise ValueError(
                f"a tensor of shape {tuple(source.shape)} that one rank saved with torch.save "
                f"holds other rows than this rank has of the parameter of shape "
                f"{tuple(target.shape)}: load the file of this rank, with the same ranks, mesh and "
                "sharding, or save with megatron_fsdp_v2.checkpoint or "
                "torch.distributed.checkpoint, which load at any"
            )
    if not isinstance(source, torch.Tensor) or source.shape != target.shape:
        return source
    full = source.full_tensor() if isinstance(source, DTensor) else source
    local = torch.empty_like(target._local_tensor)
    for chunk in target.chunks():
        block = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        local[chunk.local] = full[block].to(local.device, local.dtype)
    return UnevenDTensor.from_rows(local, target.device_mesh, target._row_shards, target.shape)


def _gradient_rows(like: UnevenDTensor, grad: torch.Tensor) -> torch.Tensor:
    """A gradient that autograd made of a result that is not sharded, in the rows of a tensor."""
    return cast("torch.Tensor", _source_rows(like, grad))


def _gather_rows(tensor: UnevenDTensor) -> torch.Tensor:
    """Gather rows axis by axis, padded to the longest range, and drop the padding."""
    mesh, shards = tensor.device_mesh, tensor._row_shards
    local, part = tensor._local_tensor.detach(), tensor.part_shape
    longest = max(end - start for start, end in shards.row_ranges)
    piece = local.new_zeros((longest, *part[1:]))
    piece[: local.shape[0]] = local
    sharded_axes = [axis for axis, stride in enumerate(shards.strides) if stride]
    for axis in reversed(sharded_axes):
        piece = _all_gather(piece, mesh, axis)
    sizes = [mesh.size(axis) for axis in sharded_axes]
    full = local.new_zeros(part)
    for number, block in enumerate(torch.split(piece, longest)) if longest else ():
        coordinate = torch.unravel_index(torch.tensor(number), sizes) if sizes else ()
        index = sum(
            int(c) * shards.strides[axis] for c, axis in zip(coordinate, sharded_axes, strict=True)
        )
        start, end = shards.row_ranges[index]
        full[start:end] = block[: end - start]
    return _join_parts(full, mesh, shards.tensor)


def _all_gather(piece: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    gathered = piece.new_empty((mesh.size(axis) * piece.shape[0], *piece.shape[1:]))
    group = mesh.get_group(axis)
    with naming_failures("all-gather of a whole tensor (full_tensor)", group):
        all_gather_single(gathered, piece.contiguous(), group=group)
    return gathered


def _join_parts(part: torch.Tensor, mesh: DeviceMesh, tensor: TensorShard | None) -> torch.Tensor:
    """The whole, from the parts of all tensor-parallel ranks."""
    if tensor is None or tensor.dim is None or tensor.size == 1:
        return part
    parts = torch.chunk(_all_gather(part, mesh, mesh.ndim - 1), tensor.size)
    lengths = list(tensor.lengths(part.shape[tensor.dim]))
    pieces = zip(*(torch.split(p, lengths, tensor.dim) for p in parts), strict=True)
    return torch.cat([torch.cat(same, tensor.dim) for same in pieces], tensor.dim)


choose_foreach_for(UnevenDTensor)
