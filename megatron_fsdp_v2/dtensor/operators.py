"""One rule for every operation on sharded tensors: on the rows that are here, or on the whole.

An operation that is known to keep rows (`keeps_rows`) runs on each rank's rows, and its result is
sharded alike. Every other one runs on whole plain tensors, which are gathered for it, and returns
replicated DTensors. Either way autograd records what is done with plain tensors, and `_Linear`
between those and DTensors; so no backward needs a collective, and none sees rows as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, override

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp_v2.dtensor.attributes import (
    PLAIN_FUNCTIONS,
    AttributesAtOnce,
    without_torch_function,
)
from megatron_fsdp_v2.dtensor.norms import ShardedNorm, cut_axes
from megatron_fsdp_v2.dtensor.optimizer_kinds import rejection, stepped_by_all
from megatron_fsdp_v2.dtensor.sharded_rows import (
    ShardedRows,
    all_gather,
    in_rows_of,
    rows_like,
    whole_of,
)

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
    "run",
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


class _Linear(torch.autograd.Function):
    """A linear function between DTensors and plain tensors whose adjoint is given as well."""

    @staticmethod
    @override
    def forward(ctx: Any, source: Any, function: Any, adjoint: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.adjoint = function, adjoint
        return function(source)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = None if grads[0] is None else linear(grads[0], ctx.adjoint, ctx.function)
        return grad, None, None


def linear(source: Any, function: Callable[[Any], Any], adjoint: Callable[[Any], Any]) -> Any:
    """Apply a linear function, which autograd differentiates by its adjoint."""
    if not is_tracked(source):
        return function(source)
    return _Linear.apply(source, function, adjoint)  # type: ignore[no-untyped-call]


def _local(source: Any) -> Any:
    """The local tensor of a DTensor, or of a gradient of one, in the same memory."""
    if not isinstance(source, DTensor):
        return source
    if any(placement.is_partial() for placement in source._spec.placements):
        return source.full_tensor().detach()
    return source._local_tensor.detach()


def _gradient_for(like: DTensor, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The adjoint `function`; before it, order the accumulation into `like.grad` of a parameter."""

    def adjoint(grad: Any) -> Any:
        if isinstance(like, ShardedRows) and like.is_leaf:
            group = like._row_shards.holders.group()
            if group is not None:
                group.before_direct_gradient()
        return function(grad)

    return adjoint


class _Overwrite(torch.autograd.Function):
    """Replace the local values of a DTensor; autograd records an in-place operation."""

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
        return None, local_rows(grads[0])


def is_tracked(*values: Any) -> bool:
    """Whether autograd records operations on these values."""
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    )


def local_rows(source: DTensor) -> torch.Tensor:
    """Return the local tensor of a DTensor. Differentiable."""
    to_rows = _gradient_for(source, lambda local: rows_like(local.detach(), source))
    return cast("torch.Tensor", linear(source, _local, to_rows))


def gathered(
    source: ShardedRows, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Gather the whole tensor. Collective and differentiable; its gradient is replicated.

    Args:
        source: A sharded tensor.
        grad_placements: Placements of the gradient of the whole tensor; `Replicate()` when None.

    Raises:
        ValueError: They are sharded, which gradients of the whole are not.
    """
    if grad_placements is not None and any(p.is_shard() for p in grad_placements):
        raise ValueError(
            f"full_tensor: the gradient of the whole tensor of shape {tuple(source.shape)} cannot "
            f"be placed as {tuple(grad_placements)}; grad_placements takes Replicate() (the "
            "default: equal on all ranks) and Partial() (to be summed over ranks) per mesh axis"
        )

    def to_rows(grad: torch.Tensor) -> Any:
        if grad_placements is not None:
            grad = DTensor.from_local(grad, source.device_mesh, grad_placements).full_tensor()
        return in_rows_of(source, grad)

    def gather(rows: DTensor) -> torch.Tensor:
        # A gradient that autograd has summed up is a plain DTensor.
        return whole_of(rows_like(rows._local_tensor.detach(), source))

    return cast("torch.Tensor", linear(source, gather, _gradient_for(source, to_rows)))


def replicated(local: torch.Tensor, mesh: DeviceMesh) -> ReplicatedDTensor:
    """A tensor that is equal on all ranks, as a DTensor."""

    def wrap(local: torch.Tensor) -> Any:
        meta = TensorMeta(local.shape, local.stride(), local.dtype)
        spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        local = local.detach() if local.requires_grad else local
        return DTensor.__new__(ReplicatedDTensor, local, spec, requires_grad=False)

    return cast("ReplicatedDTensor", linear(local, wrap, _local))


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
    written = named.get("out", local[0])
    version = written._version if isinstance(written, torch.Tensor) else 0
    result = func(*local, **named)
    if isinstance(written, torch.Tensor) and written._version != version:
        if is_tracked(written):
            _Overwrite.apply(target, written)  # type: ignore[no-untyped-call]
        else:
            torch.autograd.graph.increment_version(target)
    if result is written:
        return target
    if isinstance(result, tuple):
        return type(result)(_sharded(item, first) for item in result)
    return _sharded(result, first) if isinstance(result, torch.Tensor) else result


def _sharded(result: torch.Tensor, like: ShardedRows) -> Any:
    if not is_tracked(result):
        return rows_like(result, like)
    return linear(result, lambda local: rows_like(local.detach(), like), _local)


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
class _Base:
    """Whole memory that results are views of, and the sharded tensor that it was gathered from.

    Attributes:
        source: The sharded tensor.
        whole: What it was gathered into, or its own local tensor.
        version: Of the sharded tensor, when it was.
    """

    source: ShardedRows
    whole: torch.Tensor
    version: int

    def write(self) -> None:
        """Copy what was written into the whole to the rows."""
        rows = self.source._local_tensor
        if self.whole.untyped_storage()._cdata != rows.untyped_storage()._cdata:
            with torch.no_grad():
                rows.copy_(in_rows_of(self.source, self.whole.detach())._local_tensor)
        torch.autograd.graph.increment_version(self.source)
        self.version = self.source._version


class ReplicatedDTensor(AttributesAtOnce):
    """What an operation on whole tensors made: equal on all ranks.

    Attributes:
        bases: Of what it is a view of; what is written here goes there.
    """

    bases: Sequence[_Base] = ()

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation on local tensors, as it may have no rule for DTensors."""
        rule = common_rule(func, is_sharded=False) or on_whole
        return run(rule, func, args, kwargs)


def on_whole(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run any operation on whole plain tensors. Collective where an operand is sharded.

    What it writes into one of them, or later operations into a view of one, is written to the rows.

    Returns:
        What it returns, with replicated DTensors for tensors.

    Raises:
        RuntimeError: A plain tensor is among the operands, which ranks may hold different ones of;
            or something that was written cannot be put back into rows.
        ValueError: Operands are distributed over different meshes.
    """
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    name = getattr(func, "__name__", str(func))
    mesh = _common_mesh(name, operands)
    wholes = {id(operand): _whole(name, operand) for operand in operands}
    bases_of = {id(operand): _bases(operand, wholes[id(operand)]) for operand in operands}
    before = {key: (whole._version, whole.grad_fn) for key, whole in wholes.items()}
    plain = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (args, kwargs))
    result = func(*plain[0], **plain[1])
    unseen = set(map(id, _written_unseen(func, name, args, kwargs)))
    same: dict[int, torch.Tensor] = {}
    for operand in operands:
        whole = wholes[id(operand)]
        same[id(whole)] = operand
        version, node = before[id(operand)]
        if whole._version != version or whole.grad_fn is not node or id(operand) in unseen:
            is_recorded = whole.grad_fn is not node
            _write_back(name, operand, whole, bases_of[id(operand)], is_recorded=is_recorded)
    bases = [base for found in bases_of.values() for base in found]

    def distributed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in same:
            return same.get(id(leaf), leaf)
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise RuntimeError(
                f"{name} of a sharded tensor returns one of layout {leaf.layout}; compute with "
                "full_tensor()"
            )
        made = replicated(leaf, mesh)
        memory = leaf.untyped_storage()._cdata
        made.bases = [base for base in bases if base.whole.untyped_storage()._cdata == memory]
        return made

    return tree_map(distributed, result)


def _common_mesh(name: str, operands: Sequence[torch.Tensor]) -> DeviceMesh:
    """The mesh of our operands; an error where they do not go together."""
    ours = [operand for operand in operands if isinstance(operand, AttributesAtOnce)]
    is_mixed = any(not _is_distributed(operand) and operand.ndim for operand in operands)
    # An optimizer that all ranks step makes the same plain tensors on each.
    if is_mixed and stepped_by_all() is None:
        raise _mixed(name, operands)
    mesh = ours[0].device_mesh
    for other in ours:
        if other.device_mesh is not mesh and other.device_mesh != mesh:
            raise ValueError(
                f"{name} mixes tensors over two meshes, {mesh} and {other.device_mesh}. Compute "
                "with those of each mesh apart (clip their gradients apart, for one); or, where "
                "some are plain tensors beside DTensors of a tensor-parallel mesh, tell "
                "fully_shard that they are replicated over it: tensor_shards=tensor_parallel."
                "tensor_shards(module, mesh=mesh, rules=[TensorParallelRule(torch.nn.Module, "
                "REPLICATED)])"
            )
    return mesh


def _is_distributed(operand: torch.Tensor) -> bool:
    return isinstance(operand, DTensor | ShardedNorm)


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


def _whole(name: str, operand: torch.Tensor) -> torch.Tensor:
    """A plain tensor of all of an operand."""
    if isinstance(operand, ShardedRows):
        return gathered(operand)
    if isinstance(operand, ReplicatedDTensor):
        if any(base.source._version != base.version for base in operand.bases):
            raise _in_place(name, operand, "is given what was a view, before a change, of")
        return local_rows(operand)
    return operand.full_tensor() if isinstance(operand, DTensor | ShardedNorm) else operand


def _bases(operand: torch.Tensor, whole: torch.Tensor) -> Sequence[_Base]:
    if isinstance(operand, ShardedRows):
        return [_Base(operand, whole, operand._version)]
    return operand.bases if isinstance(operand, ReplicatedDTensor) else ()


def _write_back(
    name: str,
    operand: torch.Tensor,
    whole: torch.Tensor,
    bases: Sequence[_Base],
    *,
    is_recorded: bool,
) -> None:
    """Have a DTensor, and what it is a view of, be what was written into a plain tensor of it."""
    if whole.shape != operand.shape:
        raise _in_place(name, operand, "changes the shape of")
    if is_recorded and isinstance(operand, DTensor):
        if isinstance(operand, ReplicatedDTensor) and bases:
            raise _in_place(name, operand, "writes, where autograd records it, into a view of")
        if isinstance(operand, ShardedRows):
            rows = functools.partial(in_rows_of, operand)
            whole = local_rows(linear(whole, rows, whole_of))
        _Overwrite.apply(operand, whole)  # type: ignore[no-untyped-call]
        return
    for base in bases:
        base.write()
    if isinstance(operand, DTensor) and not isinstance(operand, ShardedRows):
        if cut_axes(operand):
            made = replicated(whole.detach(), operand.device_mesh)
            local = made.redistribute(placements=operand.placements).to_local()
            operand._local_tensor.copy_(local)
        torch.autograd.graph.increment_version(operand)


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


def run(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run a function by its rule; an error in an optimizer's step names the optimizer."""
    try:
        return rule(func, args, kwargs or {})
    except Exception as error:
        rejected = rejection(error)
        if rejected is None:
            raise
        raise rejected from error


_COMPUTED_ATTRIBUTES = ("H", "T", "imag", "mH", "mT", "real", "data")
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
        return on_whole if func.__self__.__name__ in _COMPUTED_ATTRIBUTES else as_dtensors
    if func in PLAIN_FUNCTIONS:
        return lambda func, args, kwargs: without_torch_function(func, (), args, kwargs)
    if name in _DRAWS_OF_ALL.split():
        return _reject_random
    if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
        return _grad if func is torch.autograd.grad else _backward
    is_listed = name in _AS_DTENSORS.split() and (is_sharded or not name.startswith("detach"))
    return as_dtensors if is_listed else None


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
    """Run `Tensor.backward` or `torch.autograd.backward`, from local tensors. No communication."""
    is_method = func is torch.Tensor.backward
    last = ("inputs",) if is_method else ("grad_variables", "inputs")
    grad = "gradient" if is_method else "grad_tensors"
    names = ("tensors", grad, "retain_graph", "create_graph", *last)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors, grads = _sequence(given["tensors"]), _sequence(given.get(grad))
    with torch.enable_grad():
        roots = [local_rows(t) if isinstance(t, DTensor) else t for t in tensors]
    grads = grads or (None,) * len(roots)
    create_graph = bool(given.get("create_graph"))
    keeps_graph = given.get("retain_graph")
    # By the engine itself: `torch.autograd.backward` would come here again for its `inputs`, and
    # hooks in the backward are to find the rules of this file.
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(roots),
        tuple(map(_local_gradient, tensors, roots, grads)),
        create_graph if keeps_graph is None else keeps_graph,
        create_graph,
        tuple(_sequence(given.get("inputs"))),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else () if value is None else (value,)


def _local_gradient(tensor: Any, root: torch.Tensor, grad: Any) -> torch.Tensor:
    """The gradient of the local part of a tensor, from that of the tensor."""
    if grad is None:
        if tensor.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(root)
    if isinstance(tensor, ShardedRows):
        return local_rows(in_rows_of(tensor, grad))
    return local_rows(grad) if isinstance(grad, ReplicatedDTensor) else grad


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
    return replicated(_of_ranks(source, local_rows(source).sum(**kwargs)).sum(), source.device_mesh)


def norm_of_all(source: ShardedRows, order: float) -> ReplicatedDTensor:
    """The p-norm of all elements, for a p of 1 or more. Collective."""
    rows = local_rows(source)
    norm = torch.linalg.vector_norm(rows, order) if rows.numel() else rows.sum()
    whole = torch.linalg.vector_norm(_of_ranks(source, norm), order)
    return replicated(whole, source.device_mesh)


def _of_ranks(source: ShardedRows, number: torch.Tensor) -> torch.Tensor:
    """One number of every rank that holds other elements, as a vector. Collective."""
    mesh, axes = source.device_mesh, sorted(cut_axes(source))

    def gather(number: torch.Tensor) -> torch.Tensor:
        vector = number.detach().reshape(1)
        for axis in reversed(axes):
            vector = all_gather(vector, mesh, axis)
        return vector

    def own(vector: torch.Tensor) -> torch.Tensor:
        index = 0
        for axis in axes:
            index = index * mesh.size(axis) + mesh.get_local_rank(axis)
        return vector[index].clone()

    return cast("torch.Tensor", linear(number, gather, own))
