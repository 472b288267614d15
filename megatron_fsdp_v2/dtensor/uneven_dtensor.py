"""Sharded parameters, and the rules by which operations run: on local rows or on whole tensors.

An elementwise operation (`keeps_rows`) runs on each rank's rows, and its result is sharded like its
input. A view is described, without communication. A read by the host (`item`, `numpy`) is an error,
since one rank may read alone. Every other operation gathers its operands, runs on whole plain
tensors and returns replicated DTensors.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, override

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from megatron_fsdp_v2.dtensor.linear import is_tracked, linear, local_part
from megatron_fsdp_v2.dtensor.local_rules import (
    DRAWS,
    OF_REPLICATED,
    OF_VIEWS,
    READS,
    RULES,
    VIEWS,
    Rule,
    as_dtensors,
    as_metadata,
    changes,
    item_of,
    mixed,
    recipe_of,
    reject_read,
    reject_storage,
    run,
)
from megatron_fsdp_v2.dtensor.norms import ShardedNorm, check_mesh, local_norms, order_of, unscale
from megatron_fsdp_v2.dtensor.optimizer_kinds import running_optimizer
from megatron_fsdp_v2.dtensor.sharded_rows import (
    COMPUTED,
    FastAttributes,
    Overwrite,
    ShardedRows,
    keeps_rows,
    local_of,
    local_rows,
    rows_like,
    shard_like,
    sharded_axes,
)


class UnevenDTensor(ShardedRows):
    """A `ShardedRows` that runs every operation of torch by one of the rules of this file."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the local rows or on the whole tensor."""
        return run(rule_of(func), func, args, kwargs)

    @override
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        """Return self for unchanged placements; else gather and redistribute. Collective.

        Arguments are those of `DTensor.redistribute`. Differentiable.
        """
        mesh = self.device_mesh if device_mesh is None else device_mesh
        target = self.placements if placements is None else tuple(placements)
        if mesh == self.device_mesh and target == self.placements:
            return self
        whole = replicated(self.full_tensor(), self.device_mesh)
        return whole.redistribute(mesh, target, **kwargs)


# Allows torch.load(weights_only=True) of sharded tensors.
torch.serialization.add_safe_globals([UnevenDTensor])


# -- on the local rows -----------------------------------------------------------------------------


def on_rows(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operation on local rows.

    Returns:
        Its result, sharded like its operands. Operands that cannot be combined row by row are
        passed to `on_whole`.
    """
    first = next((arg for arg in args if isinstance(arg, ShardedRows)), None)
    name = func.__name__
    is_in_place = name[-1] == "_" and (name[-2] != "_" or name.startswith("__i"))
    is_written = is_in_place or "out" in kwargs
    target: Any = kwargs.get("out", args[0] if args else None)
    if first is None or (is_written and not isinstance(target, ShardedRows)):
        return on_whole(func, args, kwargs)
    tracked = is_tracked(*args, *kwargs.values())
    if is_in_place and tracked and first.is_leaf and first.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)  # raises autograd's error
    try:
        local = [_local_operand(first, arg, tracked) for arg in args]
        named = {key: _local_operand(first, arg, tracked) for key, arg in kwargs.items()}
    except _NeedsWholeError:
        return on_whole(func, args, kwargs)
    recipe = recipe_of(func, args, kwargs) if tracked else None
    result = func(*local, **named)
    if result is named.get("out", local[0]):
        if is_written and tracked:
            Overwrite.apply(target, result)  # type: ignore[no-untyped-call]
            target.recipe = recipe
        elif is_written:
            torch.autograd.graph.increment_version(target)
        return target

    def sharded(item: torch.Tensor) -> Any:
        if not tracked:
            return rows_like(item, first)
        return linear(item, lambda local: rows_like(local, first), local_part)

    if isinstance(result, tuple):
        made = type(result)(map(sharded, result))
        for index, each in enumerate(made):
            each.recipe = None if recipe is None else item_of(recipe, index)
        return made
    if not isinstance(result, torch.Tensor):
        return result
    made = sharded(result)
    made.recipe = recipe
    return made


class _NeedsWholeError(Exception):
    """The operands cannot be combined row by row."""


def _local_operand(first: ShardedRows, value: Any, tracked: bool) -> Any:
    """Convert an argument for an operation on local rows."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, list):
            raise _NeedsWholeError
        return value
    if isinstance(value, ShardedRows):
        if not _is_alike(first, value):
            raise _NeedsWholeError
        return local_rows(value) if tracked else value._local_tensor
    if (tracked and value.requires_grad) or not (value.ndim == 0 or isinstance(value, DTensor)):
        raise _NeedsWholeError
    if isinstance(value, ShardedView):
        raise _NeedsWholeError
    if isinstance(value, DTensor):
        value = value.full_tensor() if sharded_axes(value) else value._local_tensor
    if value.ndim == 0:
        return value
    try:
        whole = value.expand(first.shape)
    except RuntimeError:
        raise _NeedsWholeError from None
    return shard_like(first, whole)._local_tensor


def _is_alike(mine: DTensor, other: DTensor) -> bool:
    """Whether two DTensors have equal placements, so that their local parts can be combined."""
    rows, others = getattr(mine, "row_shards", None), getattr(other, "row_shards", None)
    # Results and optimizer states share this object with their parameter.
    if rows is not None and rows is others:
        return True
    if rows != others:
        return False
    spec, theirs = mine._spec, other._spec
    is_same = spec.shape == theirs.shape and spec.placements == theirs.placements
    return is_same and spec.mesh == theirs.mesh and not any(p.is_partial() for p in spec.placements)


_LISTS_OF_WHOLES = ("_foreach_max", "_foreach_mm", "_foreach_powsum")
"""Reductions, and products of matrices (torch 2.15)."""


def on_lists(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a foreach or fused operation on the local rows of lists of tensors.

    A list may mix sharded tensors with plain tensors and DTensors of torch.

    Returns:
        Its result; each tensor is sharded like the first operand at its index. Operations that
        need whole tensors or that autograd records are passed to `on_whole`.
    """
    first, name = args[0], func.__name__

    def to_local_operand(value: Any) -> Any:
        if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            return list(itertools.starmap(_local_list_operand, zip(first, value, strict=True)))
        return _local_list_operand(None, value) if isinstance(value, torch.Tensor) else value

    tracked = torch.is_grad_enabled() and is_tracked(*tree_leaves((args, kwargs)))
    if name in _LISTS_OF_WHOLES or tracked:
        return on_whole(func, args, kwargs)
    try:
        local = list(map(to_local_operand, args))
        named = {key: to_local_operand(value) for key, value in kwargs.items()}
    except _NeedsWholeError:
        return on_whole(func, args, kwargs)
    results = func(*local, **named)
    if name.endswith("_"):
        # In-place foreach and fused operations advance no version counter by themselves.
        torch.autograd.graph.increment_version([t for t in first if isinstance(t, DTensor)])
        return first
    pairs = zip(results, first, strict=True)
    return type(results)(rows_like(r, f) if isinstance(f, DTensor) else r for r, f in pairs)


def _local_list_operand(own: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Convert an operand at one index of the lists for an operation on local rows."""
    if isinstance(own, ShardedRows):
        # Most optimizer states share this object with their parameter.
        is_alike = isinstance(other, ShardedRows) and other.row_shards is own.row_shards
        return local_of(other) if is_alike else _local_operand(own, other, tracked=False)
    if isinstance(other, ShardedView):
        raise _NeedsWholeError
    if not isinstance(other, DTensor):
        if other.ndim and isinstance(own, DTensor):
            raise _NeedsWholeError
        return other
    if sharded_axes(other) and not (type(own) is DTensor is type(other) and _is_alike(own, other)):
        raise _NeedsWholeError
    return other._local_tensor


# -- on the whole ----------------------------------------------------------------------------------


def replicated(local: torch.Tensor, mesh: DeviceMesh) -> ReplicatedDTensor:
    """Wrap a tensor that is equal on all ranks as a DTensor."""

    def wrap(local: torch.Tensor) -> Any:
        spec = _replicated(local, mesh)
        return DTensor.__new__(ReplicatedDTensor, local, spec, requires_grad=False)

    return cast("ReplicatedDTensor", linear(local, wrap, local_part))


def _replicated(local: torch.Tensor, mesh: DeviceMesh) -> DTensorSpec:
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)


class ReplicatedDTensor(FastAttributes):
    """The result of an operation on whole tensors: equal on all ranks.

    Attributes:
        is_copy: Whether it shares memory with the gathered copy of a sharded tensor, which is not
            sharded again if it is written into.
    """

    is_copy = False

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on local tensors, as DTensor may have no rule for it."""
        rule = rule_of(func)
        return run(rule if rule in OF_REPLICATED else on_whole, func, args, kwargs)


class ShardedView(FastAttributes):
    """A view of a sharded tensor that is not gathered. Its local tensor is on the meta device.

    Every operation gathers the sharded tensor, runs on the view of it, and shards it again if the
    operation wrote into the view.

    Attributes:
        base: The sharded tensor.
        make: Returns the view of the whole plain tensor.
    """

    base: ShardedRows
    make: Callable[[torch.Tensor], torch.Tensor]

    device = property(lambda self: self.base.device)
    is_cpu = property(lambda self: self.base.is_cpu)
    is_cuda = property(lambda self: self.base.is_cuda)
    is_meta = property(lambda self: self.base.is_meta)

    @override
    def to_local(self, **kwargs: Any) -> Any:
        return reject_read(DTensor.to_local, (self,), kwargs)

    @override
    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        """Return the view of the whole tensor. Collective; differentiable."""
        return self.of(self.base.full_tensor(**kwargs))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of a gathered base."""
        return self.make(whole if self.requires_grad else whole.detach())

    @override
    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Gather the view and redistribute it. Collective; differentiable."""
        return replicated(self.full_tensor(), self.device_mesh).redistribute(*args, **kwargs)

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedView(shape={tuple(self.shape)}, dtype={self.dtype}, base={self.base!r})"

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return reject_storage(type(self).__reduce_ex__, (self,), {})

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Describe a view of the view; run any other operation on the whole tensor."""
        return run(_OF_VIEWS.get(rule_of(func), on_whole), func, args, kwargs)


def _same(whole: torch.Tensor) -> torch.Tensor:
    return whole


def as_view(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Describe a view of a sharded tensor. No communication.

    Functions that copy are passed to `on_whole`: `reshape` of a transpose, an index of tensors.
    """
    source = args[0] if args else None
    if func.__name__.endswith("_as") and len(args) == 2:
        # Only the shape of the other tensor is read.
        args = source, torch.empty(args[1].shape, device="meta")
    others = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor)]
    is_indexed = any(not other.is_meta for other in others)
    if not isinstance(source, ShardedRows | ShardedView) or is_indexed:
        return on_whole(func, args, kwargs)
    if isinstance(source, ShardedView):
        meta, make = source._local_tensor, source.make
    else:
        meta, make = torch.empty(source.shape, dtype=source.dtype, device="meta"), _same
    found, structure = tree_flatten(func(meta, *args[1:], **kwargs))
    memory = meta.untyped_storage()._cdata
    if any(view.untyped_storage()._cdata != memory for view in found):
        return on_whole(func, args, kwargs)
    mesh, base = source.device_mesh, _base_of(source)
    is_detached = func is torch.Tensor.detach or not is_tracked(source)

    def made(index: int, meta: torch.Tensor) -> ShardedView:
        def of(whole: torch.Tensor) -> torch.Tensor:
            views: Sequence[torch.Tensor] = tree_leaves(func(make(whole), *args[1:], **kwargs))
            return views[index]

        tracked = (meta.is_floating_point() or meta.is_complex()) and not is_detached
        view: Any = DTensor.__new__(
            ShardedView, meta, _replicated(meta, mesh), requires_grad=tracked
        )
        view.base, view.make = base, of
        return cast("ShardedView", view)

    return tree_unflatten(list(itertools.starmap(made, enumerate(found))), structure)


def on_whole(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run any operation on whole plain tensors. Collective if an operand is sharded.

    Writes into an operand, or later into a view of it, are copied back to its rows.

    Returns:
        Its result, with tensors as replicated DTensors.

    Raises:
        RuntimeError: An operand is a plain tensor, which may differ between ranks; or a write
            cannot be copied back to rows.
        ValueError: Operands are distributed over different meshes.
    """
    name = getattr(func, "__name__", str(func))
    leaves, structure = tree_flatten((args, kwargs))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    mesh = _common_mesh(name, list(tensors.values()))
    # Views of one tensor are views of one gathered copy, which then has the writes into all.
    bases = {_memory_of(each): _base_of(each) for each in tensors.values()}
    wholes = {key: _Whole(name, base) for key, base in bases.items()}
    operands = {key: wholes[_memory_of(each)].operand(each) for key, each in tensors.items()}
    plain = [operands.get(id(leaf), leaf) for leaf in leaves]
    plain_args, plain_kwargs = tree_unflatten(plain, structure)
    result = func(*plain_args, **plain_kwargs)
    untracked = {_memory_of(each) for each in _untracked_writes(func, name, args, kwargs)}
    for key, whole in wholes.items():
        whole.write_back(is_written=key in untracked)
    sources = {id(operand): tensors[key] for key, operand in operands.items()}
    copies = {whole.plain.untyped_storage()._cdata for whole in wholes.values() if whole.is_copy}

    def distributed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in sources:
            return sources.get(id(leaf), leaf)
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise RuntimeError(
                f"{name} of a sharded tensor returns one of layout {leaf.layout}; compute with "
                "full_tensor()"
            )
        made = replicated(leaf, mesh)
        made.is_copy = leaf.untyped_storage()._cdata in copies
        return made

    return tree_map(distributed, result)


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sharded tensor that a tensor is a view of, or the tensor."""
    return tensor.base if isinstance(tensor, ShardedView) else tensor


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of the memory of an operand or of its base.

    Two handles of one parameter (`p.data`, `p.detach()`) have equal keys, on ranks without rows
    too. An operand that autograd records has a key of its own.
    """
    base = _base_of(tensor)
    if not isinstance(base, ShardedRows) or (base.requires_grad and torch.is_grad_enabled()):
        return (id(base),)
    memory = local_of(base).untyped_storage()._cdata
    return id(base.row_shards), memory, base.dtype, base.shape


def _common_mesh(name: str, operands: Sequence[torch.Tensor]) -> DeviceMesh:
    """Return the mesh of the sharded operands; raise if the operands cannot be combined."""
    operands = list(map(_base_of, operands))
    plain = [o for o in operands if not isinstance(o, DTensor | ShardedNorm)]
    # In the step of an optimizer, plain tensors are assumed to be equal on every rank.
    if any(operand.ndim for operand in plain) and running_optimizer() is None:
        raise mixed(name, operands, [tuple(operand.shape) for operand in plain])
    meshes = [operand.device_mesh for operand in operands if isinstance(operand, FastAttributes)]
    check_mesh(name, meshes)
    return meshes[0]


def _untracked_writes(func: Any, name: str, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield operands that a foreach operation or a custom operator writes, by its schema.

    These operations advance no version counters.
    """
    if name.startswith(("_foreach_", "_fused_")):
        func = getattr(torch.ops.aten, name, func)
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])  # type: ignore[no-untyped-call]
    declared = func._schema.arguments if isinstance(func, torch._ops.OpOverload) else ()
    for index, argument in enumerate(declared):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))


class _Whole:
    """A tensor of an operation on whole tensors. Writes into it are copied back to its rows.

    Attributes:
        tensor: The tensor: an operand, or the base of operands that are views.
        plain: The whole tensor as a plain tensor.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self.tensor = self.plain = tensor
        self._views: list[tuple[torch.Tensor, torch.Size, Any]] = []
        if isinstance(tensor, ReplicatedDTensor):
            self.plain = local_rows(tensor)
        elif isinstance(tensor, DTensor | ShardedNorm):
            self.plain = tensor.full_tensor()
        self._before = self.plain._version, self.plain.grad_fn

    @property
    def is_copy(self) -> bool:
        """Whether it is the gathered copy of a sharded tensor, or shares memory with one."""
        tensor = self.tensor
        return isinstance(tensor, ShardedRows) or getattr(tensor, "is_copy", False)

    def operand(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor of an operand: the whole, or a view of it."""
        if not isinstance(tensor, ShardedView):
            return self.plain
        view = tensor.of(self.plain)
        self._views.append((view, view.shape, view.grad_fn))
        return view

    def write_back(self, *, is_written: bool) -> None:
        """Copy values that the operation wrote into the operands back into the tensor.

        Args:
            is_written: Whether the operation writes one without advancing its version counter.
        """
        tensor: Any = self.tensor
        plain = self.plain
        version, node = self._before
        operands = [(plain, tensor.shape, node), *self._views]
        if any(operand.shape != shape for operand, shape, _ in operands):
            raise self._rejected("changes the shape of")
        is_recorded = any(operand.grad_fn is not before for operand, _, before in operands)
        if not is_written and not is_recorded and plain._version == version:
            return
        if getattr(tensor, "is_copy", False):
            raise self._rejected("writes into a copy of")
        is_torchs = type(tensor) is DTensor and bool(sharded_axes(tensor))
        if is_recorded and isinstance(tensor, DTensor):
            if isinstance(tensor, ShardedRows) or is_torchs:
                raise self._rejected("writes, recorded by autograd, into")
            Overwrite.apply(tensor, plain)  # type: ignore[no-untyped-call]
            return
        if isinstance(tensor, ShardedRows):
            rows = shard_like(tensor, plain.detach())
            with torch.no_grad():
                local_of(tensor).copy_(local_of(rows))
            torch.autograd.graph.increment_version(tensor)
        elif is_torchs:
            whole = replicated(plain.detach(), tensor.device_mesh)
            with torch.no_grad():
                tensor.copy_(whole.redistribute(placements=tensor.placements))
        elif isinstance(tensor, DTensor):
            torch.autograd.graph.increment_version(tensor)

    def _rejected(self, what: str) -> RuntimeError:
        return changes(what, self._name, self.tensor)


# -- rules -----------------------------------------------------------------------------------------


def _draw(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Draw numbers for the whole tensor, and keep this rank's.

    Each rank's rows are then those of an unsharded tensor for the seed. DTensor draws so on devices
    whose generators have an offset; on a CPU, ranks with one seed would draw equal rows.
    """
    # Functions of `nn.init` give their tensor by name, and disable gradients themselves.
    is_init = inspect.isfunction(func)
    target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    if isinstance(target, UnevenDTensor) and func.__name__.endswith("_"):
        target.row_shards.info.is_drawn = True
    given = [*args, *kwargs.values()]
    if (
        not isinstance(target, UnevenDTensor)
        or local_of(target).device.type != "cpu"
        or (is_tracked(target) and not is_init)
        or sum(map(torch.is_tensor, given)) > 1
    ):
        return as_dtensors(func, args, kwargs)
    whole = torch.empty(target.shape, dtype=target.dtype)
    args, kwargs = tree_map(lambda value: whole if value is target else value, (args, kwargs))
    with torch.no_grad():
        drawn = func(*args, **kwargs)
        return target.copy_(whole) if drawn is whole else shard_like(target, drawn)


def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source, *more = args
    if not isinstance(target, UnevenDTensor) or is_tracked(target, source):
        return on_whole(func, args, kwargs)
    return on_rows(func, (target, shard_like(target, source), *more), kwargs)


def _set_item(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    target, index, value = args
    is_mask = isinstance(index, UnevenDTensor) and index.dtype == torch.bool
    # torch assigns several values to masked elements in their order in the whole tensor.
    if is_mask and not (isinstance(value, torch.Tensor) and value.ndim):
        target.masked_fill_(index, value)
    elif (
        isinstance(value, int | float)
        and not is_tracked(target)
        and not any(map(torch.is_tensor, tree_leaves(index)))
    ):
        mask = torch.zeros(target.shape, dtype=torch.bool)
        mask[index] = True
        target.masked_fill_(shard_like(target, mask), value)
    else:
        on_whole(func, args, kwargs)


def _new(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a new tensor, sharded if it has the shape of its source. No communication."""
    source, mesh = args[0], args[0].device_mesh
    made = func(local_of(source), *args[1:], **kwargs)
    return shard_like(source, made) if made.shape == source.shape else replicated(made, mesh)


def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the p-norm of all elements without a gather."""
    source, rest = args[0], [*args[1:], *kwargs.values()]
    order = rest[0] if rest and rest[0] not in (None, "fro") else 2.0
    is_of_all = len(rest) < 2 and kwargs.keys() <= {"p", "ord"} and isinstance(order, int | float)
    if not is_of_all or is_tracked(source):
        return on_whole(func, args, kwargs)
    (norm,) = local_norms([source], float(order))
    if func is torch.linalg.vector_norm and running_optimizer() is None:
        return norm
    return replicated(norm.full_tensor(), source.device_mesh)


def _norms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if len(args) > 2 or not kwargs.keys() <= {"ord"} or is_tracked(*args[0]):
        return on_whole(func, args, kwargs)
    order = order_of(args, kwargs)
    if running_optimizer() is not None:
        return [torch.linalg.vector_norm(tensor, order) for tensor in args[0]]
    is_ours = [type(tensor) is UnevenDTensor for tensor in args[0]]
    ours = iter(local_norms(list(itertools.compress(args[0], is_ours)), order))
    # A list may mix sharded tensors with FSDP2's DTensors and plain tensors.
    pairs = zip(args[0], is_ours, strict=True)
    return [next(ours) if mine else torch.linalg.vector_norm(t, order) for t, mine in pairs]


def _data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # `data` has its own version counter in torch, which would hide writes.
    return args[0].detach()


def _detach(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = as_dtensors(func, args, kwargs)
    # So have the rows of DTensor's own result.
    result._local_tensor = local_of(args[0]).detach()
    return result


def _format(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    tensor, spec = args
    return format(tensor.item(), spec) if spec else repr(tensor)


def _read(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Read values on the host, if this rank holds them or every rank steps an optimizer."""
    tensor: Any = _base_of(args[0])
    is_local = all(tensor.device_mesh.size(axis) == 1 for axis in sharded_axes(tensor))
    rule = on_whole if is_local or running_optimizer() is not None else reject_read
    return rule(func, args, kwargs)


_RULES: dict[Any, Rule] = {
    **RULES,
    **dict.fromkeys(READS.split(), _read),
    **dict.fromkeys(VIEWS.split(), as_view),
    **dict.fromkeys((f"{name}.__get__" for name in COMPUTED), as_view),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"), _new),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys(DRAWS.split(), _draw),
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    "__format__": _format,
    "__setitem__": _set_item,
    "_foreach_norm": _norms,
    "copy_": _copy,
    "data.__get__": _data,
    "detach": _detach,
}

_OF_VIEWS = {**OF_VIEWS, _detach: as_view, **{r: r for r in (as_view, _data, _format, _read)}}


@functools.cache
def rule_of(func: Any) -> Rule:
    """Return the rule by which a function of torch runs on an `UnevenDTensor`."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        default = as_metadata if name == "__get__" else as_dtensors
        return _RULES.get(f"{func.__self__.__name__}.{name}", default)
    if func in _RULES or name in _RULES:
        return _RULES.get(func) or _RULES[name]
    if name.startswith(("_foreach_", "_fused_")):
        return on_lists
    return on_rows if keeps_rows(name) else on_whole


# Optimizers and clipping use foreach and fused implementations for the exact types in two lists, to
# which `torch.distributed.tensor` adds DTensor but not its subclasses.
for _module in (optimizers, _foreach_utils):
    getattr(_module, "_foreach_supported_types", []).append(UnevenDTensor)
