"""One rule for every operation on sharded tensors: on the rows that are here, or on the whole.

An operation that is known to keep rows (`keeps_rows`) runs on each rank's rows, and its result is
sharded alike. Every other one runs on whole plain tensors, which are gathered for it, and returns
replicated DTensors. Either way autograd records what is done with plain tensors, and five functions
between those and DTensors; so no backward needs a collective, and none sees rows as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, override

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp_v2.dtensor.attributes import (
    PLAIN_FUNCTIONS,
    AttributesAtOnce,
    without_torch_function,
)
from megatron_fsdp_v2.dtensor.norms import ShardedNorm, cut_axes
from megatron_fsdp_v2.dtensor.optimizer_kinds import rejection, stepped_by_all
from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows, in_rows_of, rows_like, whole_of

__all__ = [
    "ReplicatedDTensor",
    "Rule",
    "as_dtensors",
    "common_rule",
    "gathered",
    "in_rows",
    "is_tracked",
    "keeps_rows",
    "local_rows",
    "norm_of_all",
    "on_rows",
    "on_whole",
    "replicated",
    "sum_of_all",
]

_KEEP_ROWS = (
    "absolute bfloat16 bool byte char contiguous cpu cuda divide double empty_like fill float "
    "full_like half int long masked_fill multiply negative ones_like rsub short subtract to "
    "true_divide type type_as where zero zeros_like"
)
"""Names of functions that keep rows although the dispatcher does not call them pointwise."""


@functools.cache
def keeps_rows(name: str) -> bool:
    """Whether a function, by its name, computes every element from those in the same place."""
    base = name.strip("_")
    if name.startswith("__r") and not hasattr(torch.ops.aten, base):
        base = base[1:]  # as in 1 / tensor
    packet: Any = getattr(torch.ops.aten, base, None)
    if base in _KEEP_ROWS.split():
        return True
    if base == "equal" or not hasattr(packet, "overloads"):
        return False
    found = [getattr(packet, overload) for overload in packet.overloads()]
    computed = [
        overload
        for overload in found
        if isinstance(overload._schema.arguments[0].type, torch.TensorType)
        and not any(argument.is_out for argument in overload._schema.arguments)
    ]
    return bool(computed) and all(torch.Tag.pointwise in o.tags for o in computed)


# -- what autograd sees ----------------------------------------------------------------------------


class _Local(torch.autograd.Function):
    """A DTensor's local tensor, in the same memory."""

    @staticmethod
    @override
    def forward(ctx: Any, source: Any) -> Any:
        ctx.like = source
        return source._local_tensor.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        _before_accumulation(ctx.like)
        return _Like.apply(grads[0], ctx.like)  # type: ignore[no-untyped-call]


class _Like(torch.autograd.Function):
    """A local tensor as a DTensor that is placed as another one."""

    @staticmethod
    @override
    def forward(ctx: Any, local: Any, like: Any) -> Any:
        ctx.set_materialize_grads(False)
        return rows_like(local.detach(), like)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        if grad is None or not isinstance(grad, DTensor):
            return grad, None
        if any(placement.is_partial() for placement in grad.placements):
            return grad.full_tensor(), None
        return _Local.apply(grad), None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Rows to the whole, on every rank. Its gradient is replicated, or summed as placements say."""

    @staticmethod
    @override
    def forward(ctx: Any, source: Any, grad_placements: Any) -> Any:
        ctx.like, ctx.grad_placements = source, grad_placements
        return whole_of(source)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, mesh = grads[0], ctx.like.device_mesh
        if ctx.grad_placements is not None:
            grad = DTensor.from_local(grad, mesh, ctx.grad_placements).full_tensor()
        _before_accumulation(ctx.like)
        return _Scatter.apply(grad, ctx.like), None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """A replicated whole to the rows of this rank. No communication but in its backward."""

    @staticmethod
    @override
    def forward(ctx: Any, whole: Any, like: Any) -> Any:
        ctx.like = like
        return in_rows_of(like, whole)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = rows_like(grads[0]._local_tensor, ctx.like)
        return _Gather.apply(grad, None), None  # type: ignore[no-untyped-call]


class _Overwrite(torch.autograd.Function):
    """Put another local tensor into a DTensor, which is what autograd calls an in-place change."""

    @staticmethod
    @override
    def forward(ctx: Any, target: Any, local: Any) -> Any:
        ctx.mark_dirty(target)
        if local.data_ptr() != target._local_tensor.data_ptr():
            target._local_tensor.copy_(local)
        return target

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, _Local.apply(grads[0])  # type: ignore[no-untyped-call]


def _before_accumulation(target: DTensor) -> None:
    """Autograd is about to add to the `grad` of a parameter, if this is one."""
    if isinstance(target, ShardedRows) and target.is_leaf:
        group = target._row_shards.holders.group()
        if group is not None:
            group.before_direct_gradient()


def is_tracked(*values: Any) -> bool:
    """Whether autograd has to see what is done with these."""
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    )


def local_rows(source: DTensor) -> torch.Tensor:
    """The local tensor, which autograd knows where it comes from if it has to."""
    if is_tracked(source):
        return cast("torch.Tensor", _Local.apply(source))  # type: ignore[no-untyped-call]
    return source._local_tensor.detach()


def gathered(
    source: ShardedRows, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """The whole, likewise. Collective; its gradient is that of a replicated tensor.

    Args:
        source: A sharded tensor.
        grad_placements: How gradients of the whole are placed, if not equal on all ranks.

    Raises:
        ValueError: They are sharded, which gradients of the whole are not.
    """
    if grad_placements is not None and any(p.is_shard() for p in grad_placements):
        raise ValueError(
            f"full_tensor: the gradient of the whole tensor of shape {tuple(source.shape)} cannot "
            f"be placed as {tuple(grad_placements)}; grad_placements takes Replicate() (the "
            "default: equal on all ranks) and Partial() (to be summed over ranks) per mesh axis"
        )
    if is_tracked(source):
        whole = _Gather.apply(source, grad_placements)  # type: ignore[no-untyped-call]
        return cast("torch.Tensor", whole)
    return whole_of(source)


def replicated(local: torch.Tensor, mesh: DeviceMesh) -> ReplicatedDTensor:
    """A tensor that is equal on all ranks, as a DTensor."""
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    like: Any = DTensor.__new__(ReplicatedDTensor, local.detach(), spec, requires_grad=False)
    if not is_tracked(local):
        return cast("ReplicatedDTensor", like)
    return cast("ReplicatedDTensor", _Like.apply(local, like))  # type: ignore[no-untyped-call]


# -- on the rows that are here ---------------------------------------------------------------------


def on_rows(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation that keeps rows on the local ones.

    Returns:
        What it returns, sharded like its operands; what `on_whole` returns where these do not go
        together row by row.
    """
    first = next((arg for arg in args if isinstance(arg, ShardedRows)), None)
    name = func.__name__
    is_in_place = name == "__setitem__" or (name[-1] == "_" and name[-2] != "_")
    target: Any = kwargs.get("out", args[0] if args else first)
    if first is None or ((is_in_place or "out" in kwargs) and not isinstance(target, ShardedRows)):
        return on_whole(func, args, kwargs)
    tracked = is_tracked(*args, *kwargs.values())
    if is_in_place and tracked and first.is_leaf and first.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)  # which autograd does not allow
    try:
        local = [_rows_beside(first, arg, tracked) for arg in args]
        named = {key: _rows_beside(first, arg, tracked) for key, arg in kwargs.items()}
    except _NeedsWholeError:
        return on_whole(func, args, kwargs)
    written = named.get("out", local[0] if local else None)
    version = written._version if isinstance(written, torch.Tensor) else 0
    result = func(*local, **named)
    if isinstance(written, torch.Tensor):
        if written._version != version and tracked:
            _note_written(func, target, written, is_recorded=is_tracked(written))
        elif written._version != version:
            torch.autograd.graph.increment_version(target)
        if result is written:
            return target
    if isinstance(result, torch.Tensor):
        return _sharded(result, first)
    if isinstance(result, tuple):
        return type(result)(_sharded(item, first) for item in result)
    return result


def _sharded(result: torch.Tensor, like: ShardedRows) -> Any:
    if is_tracked(result):
        return _Like.apply(result, like)  # type: ignore[no-untyped-call]
    return rows_like(result, like)


_broadcast: Callable[..., torch.Size] = torch.broadcast_shapes


class _NeedsWholeError(Exception):
    """Operands do not go together row by row."""


def _rows_beside(first: ShardedRows, value: Any, tracked: bool) -> Any:
    """What an operation on local rows takes for an argument."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, list):
            raise _NeedsWholeError
        return value
    if isinstance(value, ShardedRows):
        if value is not first and not (
            value.shape == first.shape
            and value._row_shards == first._row_shards
            and value.device_mesh == first.device_mesh
        ):
            raise _NeedsWholeError
        return local_rows(value) if tracked else value._local_tensor
    if (tracked and value.requires_grad) or not (value.ndim == 0 or isinstance(value, DTensor)):
        raise _NeedsWholeError
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.shape == first.shape:
        return in_rows_of(first, value)._local_tensor
    tensor = first._row_shards.tensor
    broadcasts = value.ndim < first.ndim or value.shape[0] == 1
    is_same = broadcasts and _broadcast(value.shape, first.shape) == first.shape
    is_whole = tensor is None or tensor.dim is None
    if value.ndim and not (is_same and is_whole):
        raise _NeedsWholeError
    return value


# -- on the whole ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Viewed:
    """What views of a gathered tensor are views of.

    Attributes:
        source: The sharded tensor.
        whole: What it was gathered into, or its own local tensor.
        version: Of the sharded tensor, when it was.
    """

    source: ShardedRows
    whole: torch.Tensor
    version: int


class ReplicatedDTensor(AttributesAtOnce):
    """What an operation on whole tensors made: equal on all ranks.

    Attributes:
        viewed: Sharded tensors in whose gathered memory it is; what is written here goes there.
    """

    viewed: Sequence[_Viewed] = ()

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation on local tensors, as it may have no rule for DTensors."""
        rule = common_rule(func, is_sharded=False) or on_whole
        try:
            return rule(func, args, kwargs or {})
        except Exception as error:
            rejected = rejection(error)
            if rejected is None:
                raise
            raise rejected from error


def on_whole(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run any operation on whole plain tensors. Collective where an operand is sharded.

    What it writes into one of them, or later operations into a view of one, is written to the rows.

    Returns:
        What it returns, with replicated DTensors for tensors.

    Raises:
        RuntimeError: A plain tensor is among the operands, which ranks may hold different ones of;
            or something that was written cannot be put back into rows.
    """
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    name = getattr(func, "__name__", str(func))
    is_mixed = any(not _is_distributed(operand) and operand.ndim for operand in operands)
    # An optimizer that all ranks step makes the same plain tensors on each.
    if is_mixed and stepped_by_all() is None:
        raise _mixed(name, operands)
    wholes = {id(operand): _whole(name, operand) for operand in operands}
    before = {key: (whole._version, whole.grad_fn) for key, whole in wholes.items()}
    plain = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (args, kwargs))
    result = func(*plain[0], **plain[1])
    mesh = next(o.device_mesh for o in operands if isinstance(o, AttributesAtOnce))
    same: dict[int, torch.Tensor] = {}
    for operand in operands:
        whole = wholes[id(operand)]
        same[id(whole)] = operand
        if (whole._version, whole.grad_fn) != before[id(operand)]:
            if whole.shape != operand.shape:
                raise _in_place(name, operand, "changes the shape of")
            recorded = whole.grad_fn != before[id(operand)][1]
            _note_written(func, operand, whole, is_recorded=recorded, of_whole=True)
    for operand in _written_unseen(func, name, args, kwargs):
        _note_written(func, operand, wholes[id(operand)], is_recorded=False, of_whole=True)
    viewed = [view for o in operands for view in _views(o, wholes[id(o)])]
    return tree_map(lambda leaf: _replicated_result(name, leaf, same, viewed, mesh), result)


def _written_unseen(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Operands that an operation writes to without moving their version counters."""
    if name.startswith("_foreach_") and name.endswith("_"):
        return list(args[0])
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])  # type: ignore[no-untyped-call]
    if not isinstance(func, torch._ops.OpOverload):
        return []
    # Another library's, of which the schema says what it writes.
    declared = func._schema.arguments
    given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(declared)]
    pairs = zip(declared, given, strict=True)
    written = [v for a, v in pairs if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def _is_distributed(operand: torch.Tensor) -> bool:
    return isinstance(operand, DTensor | ShardedNorm)


def _whole(name: str, operand: torch.Tensor) -> torch.Tensor:
    """A plain tensor of all of an operand."""
    if isinstance(operand, ShardedRows):
        return gathered(operand)
    if isinstance(operand, ReplicatedDTensor):
        if any(view.source._version != view.version for view in operand.viewed):
            raise _in_place(name, operand, "is given what was a view, before a change, of")
        return local_rows(operand)
    return operand.full_tensor() if isinstance(operand, DTensor | ShardedNorm) else operand


def _views(operand: torch.Tensor, whole: torch.Tensor) -> Sequence[_Viewed]:
    if isinstance(operand, ShardedRows):
        return [_Viewed(operand, whole, operand._version)]
    return operand.viewed if isinstance(operand, ReplicatedDTensor) else ()


def _replicated_result(
    name: str,
    result: Any,
    same: dict[int, torch.Tensor],
    viewed: Sequence[_Viewed],
    mesh: DeviceMesh,
) -> Any:
    if not isinstance(result, torch.Tensor) or id(result) in same:
        return same.get(id(result), result)
    if result.layout is not torch.strided or result.is_quantized:
        raise RuntimeError(
            f"{name} of a sharded tensor returns one of layout {result.layout}; compute with "
            "full_tensor()"
        )
    made = replicated(result, mesh)
    memory = result.untyped_storage()._cdata
    made.viewed = [v for v in viewed if v.whole.untyped_storage()._cdata == memory]
    return made


def _note_written(
    func: Callable[..., Any],
    target: torch.Tensor,
    written: torch.Tensor,
    *,
    is_recorded: bool,
    of_whole: bool = False,
) -> None:
    """Have a DTensor, and what it is a view of, be what was written into a plain tensor of it."""
    viewed = target.viewed if isinstance(target, ReplicatedDTensor) else ()
    if is_recorded:
        if viewed:
            name = getattr(func, "__name__", str(func))
            raise _in_place(name, target, "writes, where autograd records it, into a view of")
        if of_whole and isinstance(target, ShardedRows):
            written = local_rows(_Scatter.apply(written, target))  # type: ignore[no-untyped-call]
        _Overwrite.apply(target, written)  # type: ignore[no-untyped-call]
        return
    if isinstance(target, ShardedRows):
        viewed = [_Viewed(target, written, 0)]
    elif isinstance(target, DTensor):
        if of_whole and cut_axes(target):
            made = replicated(written.detach(), target.device_mesh)
            target._local_tensor.copy_(made.redistribute(placements=target.placements).to_local())
        torch.autograd.graph.increment_version(target)
    for view in viewed:
        rows = view.source._local_tensor
        if view.whole.untyped_storage()._cdata != rows.untyped_storage()._cdata:
            with torch.no_grad():
                rows.copy_(in_rows_of(view.source, view.whole.detach())._local_tensor)
        torch.autograd.graph.increment_version(view.source)
        view.version = view.source._version


def _in_place(name: str, operand: torch.Tensor, what: str) -> RuntimeError:
    return RuntimeError(
        f"{name} {what} a sharded tensor, of which this rank holds some rows (shape "
        f"{tuple(operand.shape)}). Compute another tensor, and copy_() it over the sharded one"
    )


def _mixed(name: str, operands: Sequence[torch.Tensor]) -> RuntimeError:
    """What to raise where an operation mixes sharded tensors and plain ones."""
    for operand in operands:
        group = operand._row_shards.holders.group() if isinstance(operand, ShardedRows) else None
        if group is not None and group.holds(operand):
            return RuntimeError(
                f"{name} computes with {group.name_of(operand)}, which is sharded: this rank "
                "holds some of its rows. Its module was run, or its weight used, outside of the "
                "forward of the unit that gathers it. Call unshard() on that unit before and "
                "reshard() after, or register the method that runs it with "
                "register_fsdp_forward_method(unit, name), or call fully_shard on the module "
                "itself, before its unit"
            )
    shapes = [tuple(o.shape) for o in operands if not _is_distributed(o)]
    return RuntimeError(
        f"{name} mixes sharded tensors, or what was computed from them, with plain tensors of "
        f"shapes {shapes}, which may differ between ranks; make those DTensors "
        "(distribute_tensor), or compute with full_tensor()"
    )


# -- what is done alike with sharded and with replicated tensors -----------------------------------

Rule = Callable[[Callable[..., Any], Any, dict[str, Any]], Any]
"""Runs a function of torch with positional arguments and arguments by name."""

_COMPUTED_ATTRIBUTES = ("H", "T", "imag", "mH", "mT", "real")
_AS_DTENSORS = (
    "__hash__ __len__ __repr__ _has_compatible_shallow_copy_type can_cast constant_ data_ptr "
    "detach detach_ get_device has_names is_contiguous is_inference is_nonzero is_pinned "
    "is_same_size is_shared is_signed kaiming_normal_ kaiming_uniform_ nelement ndimension "
    "pin_memory register_post_accumulate_grad_hook requires_grad_ result_type retain_grad "
    "share_memory_ storage_offset untyped_storage "
    # Random numbers, of which every rank draws those of its rows.
    "alpha_dropout bernoulli bernoulli_ cauchy_ dropout exponential_ feature_alpha_dropout "
    "geometric_ log_normal_ normal_ rand_like randint_like randn_like random_ uniform_"
)
"""Names of functions that look at no value, or write every element; PyTorch runs them on rows."""

_DRAWS_OF_ALL = (
    "binomial dropout1d dropout2d dropout3d fractional_max_pool2d fractional_max_pool3d "
    "gumbel_softmax multinomial normal pca_lowrank poisson rrelu rrelu_ svd_lowrank"
)
"""Names of functions that draw random numbers for the whole."""


def common_rule(func: Any, *, is_sharded: bool = True) -> Rule | None:
    """What a function does with any of our tensors; None where that is to compute with them."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__
        return on_whole if attribute in (*_COMPUTED_ATTRIBUTES, "data") else as_dtensors
    if func in PLAIN_FUNCTIONS:
        return _without_result
    if name in _DRAWS_OF_ALL.split():
        return _reject_random
    if func is torch.Tensor.backward or func is torch.autograd.grad:
        return _backward if func is torch.Tensor.backward else _grad
    is_listed = name in _AS_DTENSORS.split() and (is_sharded or not name.startswith("detach"))
    return as_dtensors if is_listed else None


def _without_result(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function that returns no tensor."""
    return without_torch_function(func, (), args, kwargs)


def as_dtensors(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Have DTensor run what is right for any rows; its result is sharded as the first operand."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    like = next((value for value in (*args, *kwargs.values()) if isinstance(value, DTensor)), None)
    return in_rows(result, like)


def in_rows(result: Any, like: Any) -> Any:
    """A DTensor that torch has made of one of ours, as one of ours."""
    if type(result) is not DTensor or not isinstance(like, ShardedRows):
        return result
    # It adds no storage of its own, so the object can change class in place.
    result.__class__ = type(like)
    made = cast("ShardedRows", result)
    made._row_shards = like._row_shards
    if made.dtype == like.dtype:
        # DTensor remembers results by what meshes look like; this one's groups are live.
        made._spec = like._spec
    return made


def _reject_random(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        f"{func.__name__} of a sharded tensor draws random numbers, which would differ between "
        "ranks; draw them on one rank, or from generators that are in the same state, and compute "
        "with full_tensor()"
    )


def _backward(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    # Hooks that users' backwards call are to find these rules.
    gradient = kwargs.pop("gradient", None)
    torch.autograd.backward(args[0], *(args[1:] or (gradient,)), **kwargs)


def _grad(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    outputs = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    if stepped_by_all() is not None and not any(output.requires_grad for output in outputs):
        raise RuntimeError("it differentiates gradients, which are sums over ranks and in no graph")
    with torch._C.DisableTorchFunctionSubclass():
        grads = func(*args, **kwargs)
    return tuple(map(in_rows, grads, args[1]))


# -- one number ------------------------------------------------------------------------------------


def sum_of_all(source: ShardedRows, **kwargs: Any) -> ReplicatedDTensor:
    """The sum of all elements. Collective."""
    return replicated(_of_all_ranks(source, local_rows(source).sum(**kwargs)).sum(), _mesh(source))


def norm_of_all(source: ShardedRows, order: float) -> ReplicatedDTensor:
    """The p-norm of all elements, for a p of 1 or more. Collective."""
    rows = local_rows(source)
    norm = torch.linalg.vector_norm(rows, order) if rows.numel() else rows.sum()
    whole = torch.linalg.vector_norm(_of_all_ranks(source, norm), order)
    return replicated(whole, _mesh(source))


def _mesh(source: DTensor) -> DeviceMesh:
    return source.device_mesh


def _of_all_ranks(source: DTensor, number: torch.Tensor) -> torch.Tensor:
    """One number of every rank that holds other elements."""
    mesh, cut = source.device_mesh, cut_axes(source)
    placements = [Shard(0) if axis in cut else Replicate() for axis in range(mesh.ndim)]
    return DTensor.from_local(number.reshape(1), mesh, placements).full_tensor()
