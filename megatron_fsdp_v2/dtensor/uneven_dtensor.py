"""Sharded parameters, and the rules by which operations run: on local rows or on whole tensors.

An elementwise operation (`keeps_rows`) runs on each rank's rows, and its result is sharded like its
input. Every other operation gathers its operands, runs on whole plain tensors and returns
replicated DTensors.
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

from megatron_fsdp_v2.dtensor.norms import ShardedNorm, check_mesh, local_norms, order_of, unscale
from megatron_fsdp_v2.dtensor.optimizer_kinds import RejectedError, rejected, running_optimizer
from megatron_fsdp_v2.dtensor.sharded_rows import (
    COMPUTED,
    FastAttributes,
    Overwrite,
    ShardedRows,
    is_tracked,
    keeps_rows,
    linear,
    local_of,
    local_part,
    local_rows,
    rows_like,
    shard_like,
    sharded_axes,
)

type Rule = Callable[[Callable[..., Any], Any, dict[str, Any]], Any]
"""Runs a function of torch with positional and keyword arguments."""


class UnevenDTensor(ShardedRows):
    """A `ShardedRows` that runs every operation of torch by one of the rules of this file."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the local rows or on the whole tensor."""
        return _run(rule_of(func), func, args, kwargs)

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
    result = func(*local, **named)
    if result is named.get("out", local[0]):
        if is_written and tracked:
            Overwrite.apply(target, result)  # type: ignore[no-untyped-call]
        elif is_written:
            torch.autograd.graph.increment_version(target)
        return target

    def sharded(item: torch.Tensor) -> Any:
        if not tracked:
            return rows_like(item, first)
        return linear(item, lambda local: rows_like(local, first), local_part)

    if isinstance(result, tuple):
        return type(result)(map(sharded, result))
    return sharded(result) if isinstance(result, torch.Tensor) else result


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
        meta = TensorMeta(local.shape, local.stride(), local.dtype)
        spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        return DTensor.__new__(ReplicatedDTensor, local, spec, requires_grad=False)

    return cast("ReplicatedDTensor", linear(local, wrap, local_part))


class ReplicatedDTensor(FastAttributes):
    """The result of an operation on whole tensors: equal on all ranks.

    Attributes:
        bases: The sharded tensors that it is a view of. Writes into it are copied to them.
    """

    bases: Sequence[_Whole] = ()

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on local tensors, as DTensor may have no rule for it."""
        rule = rule_of(func)
        # The result of detach() must keep its bases.
        is_common = rule in _COMMON and not func.__name__.startswith("detach")
        return _run(rule if is_common else on_whole, func, args, kwargs)


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
    wholes = {key: _Whole(name, tensor) for key, tensor in tensors.items()}
    plain = [wholes[id(leaf)].plain if id(leaf) in wholes else leaf for leaf in leaves]
    plain_args, plain_kwargs = tree_unflatten(plain, structure)
    result = func(*plain_args, **plain_kwargs)
    untracked = set(map(id, _untracked_writes(func, name, args, kwargs)))
    for key, whole in wholes.items():
        whole.write_back(is_written=key in untracked)
    sources = {id(whole.plain): whole.tensor for whole in wholes.values()}

    def distributed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in sources:
            return sources.get(id(leaf), leaf)
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise RuntimeError(
                f"{name} of a sharded tensor returns one of layout {leaf.layout}; compute with "
                "full_tensor()"
            )
        made = replicated(leaf, mesh)
        bases = [base for whole in wholes.values() for base in whole.bases]
        memory = leaf.untyped_storage()._cdata
        made.bases = [base for base in bases if base.plain.untyped_storage()._cdata == memory]
        return made

    return tree_map(distributed, result)


def _common_mesh(name: str, operands: Sequence[torch.Tensor]) -> DeviceMesh:
    """Return the mesh of the sharded operands; raise if the operands cannot be combined."""
    plain = [o for o in operands if not isinstance(o, DTensor | ShardedNorm)]
    # In the step of an optimizer, plain tensors are assumed to be equal on every rank.
    if any(operand.ndim for operand in plain) and running_optimizer() is None:
        raise _mixed(name, operands, [tuple(operand.shape) for operand in plain])
    meshes = [operand.device_mesh for operand in operands if isinstance(operand, FastAttributes)]
    check_mesh(name, meshes)
    return meshes[0]


def _mixed(name: str, operands: Sequence[torch.Tensor], shapes: Sequence[Any]) -> RuntimeError:
    """Return the error for an operation that mixes sharded and plain tensors."""
    plain = [operand for operand in operands if not isinstance(operand, DTensor)]
    for operand in operands:
        label = _parameter_label(operand)
        if label is None:
            continue
        if plain and all(isinstance(each, torch.nn.Parameter) for each in plain):
            return RuntimeError(
                f"{name} computes with {label}, which is sharded, and with a plain parameter. If "
                "that is the gathered weight of another module, which stays gathered after a "
                "forward with gradients enabled (a frozen teacher), call reshard() on that module "
                "before, or run its forward under torch.no_grad()"
            )
        return RuntimeError(
            f"{name} computes with {label}, which is sharded: this rank holds some of its "
            "rows. Its module or weight was used outside of the forward of the unit that "
            "gathers it. Call unshard() on that unit before and reshard() after, or register "
            "the method with register_fsdp_forward_method(unit, name), or call fully_shard on "
            "the module itself, before its unit; if the forward of another unit reads the weight, "
            "give that unit UnitOptions(used_params=...)"
        )
    return RuntimeError(
        f"{name} mixes sharded tensors, or what was computed from them, with plain tensors of "
        f"shapes {shapes}, which may differ between ranks; make those DTensors "
        "(distribute_tensor), or compute with full_tensor()"
    )


def _parameter_label(operand: torch.Tensor) -> str | None:
    """Return the name of the parameter that an operand is, or is a view of, such as a transpose."""
    bases = operand.bases if isinstance(operand, ReplicatedDTensor) else ()
    for tensor in (operand, *(base.tensor for base in bases)):
        if isinstance(tensor, ShardedRows) and isinstance(tensor, torch.nn.Parameter):
            return tensor.row_shards.label
    return None


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
    """An operand of an operation on whole tensors. Writes into it are copied back to its rows.

    Attributes:
        tensor: The operand.
        plain: The whole operand as a plain tensor.
        version: Version of the operand when `plain` was made.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self.tensor = self.plain = tensor
        self.version = tensor._version
        if any(base.tensor._version != base.version for base in self.bases):
            raise self._rejected("reads a view that was made before a change of")
        if isinstance(tensor, ReplicatedDTensor):
            self.plain = local_rows(tensor)
        elif isinstance(tensor, DTensor | ShardedNorm):
            self.plain = tensor.full_tensor()
        self._before = self.plain._version, self.plain.grad_fn

    @property
    def bases(self) -> Sequence[_Whole]:
        """The sharded tensors that the operand is a view of."""
        if isinstance(self.tensor, ReplicatedDTensor):
            return self.tensor.bases
        return [self] if isinstance(self.tensor, ShardedRows) else ()

    def write_back(self, *, is_written: bool) -> None:
        """Copy values that the operation wrote back into the operand and its bases.

        Args:
            is_written: Whether the operation writes it without advancing its version counter.
        """
        tensor: Any = self.tensor
        plain = self.plain
        if not is_written and self._before == (plain._version, plain.grad_fn):
            return
        if plain.shape != tensor.shape:
            raise self._rejected("changes the shape of")
        is_torchs = type(tensor) is DTensor and bool(sharded_axes(tensor))
        if plain.grad_fn is not self._before[1] and isinstance(tensor, DTensor):
            if self.bases or is_torchs:
                raise self._rejected("writes, recorded by autograd, into")
            Overwrite.apply(tensor, plain)  # type: ignore[no-untyped-call]
            return
        for base in self.bases:
            rows = shard_like(cast("ShardedRows", base.tensor), base.plain.detach())
            with torch.no_grad():
                local_of(base.tensor).copy_(local_of(rows))
            torch.autograd.graph.increment_version(base.tensor)
            base.version = base.tensor._version
        if is_torchs:
            whole = replicated(plain.detach(), tensor.device_mesh)
            with torch.no_grad():
                tensor.copy_(whole.redistribute(placements=tensor.placements))
        elif isinstance(tensor, DTensor) and not isinstance(tensor, ShardedRows):
            torch.autograd.graph.increment_version(tensor)

    def _rejected(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self._name} {what} a sharded tensor (shape {tuple(self.tensor.shape)}); compute "
            "another tensor, and copy_() it over the sharded one"
        )


# -- rules for sharded and replicated tensors ------------------------------------------------------


def _run(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run a function by its rule. Add the optimizer's name to an error raised in its step."""
    try:
        return rule(func, args, kwargs or {})
    except Exception as error:
        optimizer = None if isinstance(error, RejectedError) else running_optimizer()
        if optimizer is None:
            raise
        raise rejected(optimizer, str(error) or type(error).__name__) from error


def as_dtensors(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function by DTensor's own rule. The result is sharded like the first operand."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    like = next((value for value in (*args, *kwargs.values()) if isinstance(value, DTensor)), None)
    return in_rows(result, like)


def in_rows(result: Any, like: Any) -> Any:
    """Convert a DTensor that torch made from a sharded tensor into a sharded tensor."""
    if type(result) is not DTensor or not isinstance(like, ShardedRows):
        return result
    # `ShardedRows` adds no storage, so the object can change class in place.
    result.__class__ = type(like)
    made = cast("ShardedRows", result)
    made.row_shards = like.row_shards
    if made.dtype == like.dtype:
        # DTensor caches results per mesh layout; the cached mesh may have destroyed groups.
        made._spec = like._spec
    return made


def _reject_random(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        f"{func.__name__} of a sharded tensor draws random numbers, which would differ between "
        "ranks; draw from generators in the same state, and compute with full_tensor()"
    )


def _backward(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Run `Tensor.backward` or `torch.autograd.backward` from local tensors. No communication."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    tensors = _sequence(given.get("tensors", given.get("self")))
    grads = _sequence(given.get("grad_tensors", given.get("gradient")))
    with torch.enable_grad():
        roots = [local_rows(t) if isinstance(t, DTensor) else t for t in tensors]
    grads = grads or [None] * len(roots)
    create_graph = bool(given.get("create_graph"))
    keeps_graph = given.get("retain_graph")
    # Calls the engine directly: `torch.autograd.backward` would dispatch here again for its
    # `inputs`, and disabling the dispatch would also disable it for hooks in the backward.
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
    """Return the gradient of a tensor's local part, given the gradient of the tensor."""
    if grad is None:
        if tensor.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(root)
    if isinstance(tensor, ShardedRows):
        return local_rows(shard_like(tensor, grad))
    return local_rows(grad) if isinstance(grad, ReplicatedDTensor) else grad


def _grad(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if running_optimizer() is not None and not any(o.requires_grad for o in _sequence(args[0])):
        raise RuntimeError("it differentiates gradients, which are sums over ranks without a graph")
    with torch._C.DisableTorchFunctionSubclass():
        grads = func(*args, **kwargs)
    return tuple(map(in_rows, grads, _sequence(args[1])))


_AS_DTENSORS = (
    "__hash__ __len__ __repr__ _has_compatible_shallow_copy_type can_cast constant_ "
    "detach detach_ get_device has_names is_complex is_contiguous is_floating_point is_inference "
    "is_nonzero is_pinned is_same_size is_shared is_signed nelement ndimension "
    "numel pin_memory register_post_accumulate_grad_hook requires_grad_ result_type "
    "retain_grad share_memory_ storage_offset untyped_storage "
    # Every rank draws random numbers for its own rows.
    "alpha_dropout bernoulli dropout feature_alpha_dropout"
)
"""Names of functions that read no values or write all elements; DTensor runs them locally."""

_DRAWS_OF_ALL = (
    "binomial dropout1d dropout2d dropout3d fractional_max_pool2d fractional_max_pool3d "
    "gumbel_softmax multinomial normal pca_lowrank poisson rrelu rrelu_ svd_lowrank"
)
"""Names of functions that draw random numbers for the whole tensor."""

_DRAWS = (
    "bernoulli_ cauchy_ exponential_ geometric_ kaiming_normal_ kaiming_uniform_ log_normal_ "
    "normal_ rand_like randint_like randn_like random_ uniform_"
)
"""Names of functions that draw a random number for every element, and read no values."""

# -- rules for sharded tensors only ----------------------------------------------------------------


def _reject_storage(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # Called by safetensors.
    raise RuntimeError(
        f"this rank holds some rows of a sharded tensor of shape {tuple(args[0].shape)}. Write a "
        "gathered state dict (torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True))), or save with "
        "megatron_fsdp_v2.checkpoint.save and export"
    )


def _set_data(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Use the local rows of the value. The group copies them into its main weight at the next use.

    A copy into the own rows would change tensors that `data` returned before.
    """
    target, value = args
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ValueError(
            f"a sharded tensor of shape {tuple(target.shape)} and {target.dtype} cannot take data "
            f"of shape {tuple(value.shape)} and {value.dtype}; change both before sharding"
        )
    # Tensors made in inference mode have no version counter.
    with torch.inference_mode(False), torch.no_grad():
        rows = local_of(shard_like(target, value)).detach().to(local_of(target).device)
        target._local_tensor = rows.clone() if rows.is_inference() else rows
    torch.autograd.graph.increment_version(target)


def _data_ptr(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return 0: the tensor has no memory of its own, only its local tensor has.

    Torch would return the offset of the local tensor, which its stagers take for memory.
    """
    if running_optimizer() is not None:
        # The optimizer may branch on the address, which differs between ranks.
        raise RuntimeError("it asks for the address of a tensor, which differs between ranks")
    return 0


def _draw(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Draw numbers for the whole tensor, and keep this rank's.

    Each rank's rows are then those of an unsharded tensor for the seed. DTensor draws so on devices
    whose generators have an offset; on a CPU, ranks with one seed would draw equal rows.
    """
    # Functions of `nn.init` give their tensor by name, and disable gradients themselves.
    is_init = inspect.isfunction(func)
    target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
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
    else:
        on_whole(func, args, kwargs)


def _new(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a new tensor, sharded if it has the shape of its source. No communication."""
    source, mesh = args[0], args[0].device_mesh
    made = func(local_of(source), *args[1:], **kwargs)
    return shard_like(source, made) if made.shape == source.shape else replicated(made, mesh)


def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the p-norm of all elements without a gather, for p of at least 1."""
    source, rest = args[0], [*args[1:], *kwargs.values()]
    order = rest[0] if rest and rest[0] not in (None, "fro") else 2.0
    is_of_all = len(rest) < 2 and kwargs.keys() <= {"p", "ord"} and isinstance(order, int | float)
    if not is_of_all or order < 1 or is_tracked(source):
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


def _register_hook(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, hook = args
    with torch._C.DisableTorchFunctionSubclass():
        return func(tensor, lambda grad: hook(in_rows(grad, tensor)))


_COMMON = (as_dtensors, _reject_random, _backward, _grad, _data_ptr)
"""Rules that apply to replicated results as well as to sharded tensors."""

_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_AS_DTENSORS.split(), as_dtensors),
    **dict.fromkeys(_DRAWS_OF_ALL.split(), _reject_random),
    **dict.fromkeys((f"{name}.__get__" for name in COMPUTED), on_whole),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), _new),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys((torch.Tensor.backward, torch.autograd.backward), _backward),
    **dict.fromkeys(_DRAWS.split(), _draw),
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    "__setitem__": _set_item,
    "_foreach_norm": _norms,
    "copy_": _copy,
    # `data` has its own version counter in torch, which would hide writes.
    "data.__get__": lambda func, args, kwargs: args[0].detach(),
    "data.__set__": _set_data,
    "data_ptr": _data_ptr,
    "register_hook": _register_hook,
    "storage": _reject_storage,
    torch.autograd.grad: _grad,
}


@functools.cache
def rule_of(func: Any) -> Rule:
    """Return the rule by which a function of torch runs on an `UnevenDTensor`."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _RULES.get(f"{func.__self__.__name__}.{name}", as_dtensors)
    if func in _RULES or name in _RULES:
        return _RULES.get(func) or _RULES[name]
    if name.startswith(("_foreach_", "_fused_")):
        return on_lists
    return on_rows if keeps_rows(name) else on_whole


# Optimizers and clipping use foreach and fused implementations for the exact types in two lists, to
# which `torch.distributed.tensor` adds DTensor but not its subclasses.
for _module in (optimizers, _foreach_utils):
    getattr(_module, "_foreach_supported_types", []).append(UnevenDTensor)
