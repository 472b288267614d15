"""Rules by which operations on sharded tensors run without whole tensors, and their errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron_fsdp_v2.dtensor.optimizer_kinds import RejectedError, rejected, running_optimizer
from megatron_fsdp_v2.dtensor.sharded_rows import (
    FastAttributes,
    ShardedRows,
    local_of,
    local_rows,
    shard_like,
)

type Rule = Callable[[Callable[..., Any], Any, dict[str, Any]], Any]
"""Runs a function of torch with positional and keyword arguments."""


def run(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run a function by its rule. Add the optimizer's name to an error raised in its step."""
    if torch.is_inference_mode_enabled():
        # There torch cannot detach DTensors, and new tensors have no version counters.
        with torch.inference_mode(False), torch.no_grad():
            return run(rule, func, args, kwargs)
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


def as_metadata(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function that reads no values."""
    return as_dtensors(func, args, kwargs)


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


def without_views(tensor: Any) -> Any:
    """Return the plain tensor of a view of a sharded tensor, or any other value. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "base") else tensor


def reject_random(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reject a function that draws random numbers for the whole tensor."""
    raise RuntimeError(
        f"{func.__name__} of a sharded tensor draws random numbers, which would differ between "
        "ranks; draw from generators in the same state, and compute with full_tensor()"
    )


def backward(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Run `Tensor.backward` or `torch.autograd.backward` from local tensors. No communication."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    tensors = _sequence(given.get("tensors", given.get("self")))
    grads = _sequence(given.get("grad_tensors", given.get("gradient")))
    with torch.enable_grad():
        tensors = list(map(without_views, tensors))
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
    return local_rows(grad) if isinstance(grad, FastAttributes) else grad


def grad_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `torch.autograd.grad`."""
    if running_optimizer() is not None and not any(o.requires_grad for o in _sequence(args[0])):
        raise RuntimeError("it differentiates gradients, which are sums over ranks without a graph")
    with torch._C.DisableTorchFunctionSubclass():
        grads = func(tree_map(without_views, args[0]), *args[1:], **kwargs)
    return tuple(map(in_rows, grads, _sequence(args[1])))


def mixed(name: str, operands: Sequence[torch.Tensor], shapes: Sequence[Any]) -> RuntimeError:
    """Return the error for an operation that mixes sharded and plain tensors."""
    plain = [operand for operand in operands if not isinstance(operand, DTensor)]
    for operand in operands:
        base: Any = operand
        is_parameter = isinstance(base, ShardedRows) and isinstance(base, torch.nn.Parameter)
        label = base.row_shards.label if is_parameter else None
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


def reject_reshape(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reject a function that changes the shape of its operand in place."""
    raise changes("changes the shape of", func.__name__, args[0])


def changes(what: str, name: str, tensor: torch.Tensor) -> RuntimeError:
    """Return the error that a function cannot change a sharded tensor in a way."""
    return RuntimeError(
        f"{name} {what} a sharded tensor (shape {tuple(tensor.shape)}); compute "
        "another tensor, and copy_() it over the sharded one"
    )


def reject_storage(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reject an access to memory, which holds other rows on every rank."""
    # Called by safetensors.
    tensor = getattr(args[0], "base", args[0])
    raise RuntimeError(
        f"this rank holds some rows of a sharded tensor of shape {tuple(tensor.shape)}. Write a "
        "gathered state dict: on all ranks, state_dict = torch.distributed.checkpoint.state_dict."
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), for "
        "save_pretrained(folder, state_dict=state_dict); or save with megatron_fsdp_v2.checkpoint."
        "save and export"
    )


def reject_view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reject a function of parameters for a view of one."""
    raise RuntimeError(
        f"{func.__name__} is not supported for a view of a sharded tensor; call it on the sharded "
        "tensor, or on the result of full_tensor()"
    )


def reject_read(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reject a read of values by the host: one rank may read alone, and a gather would hang."""
    raise RuntimeError(
        f"{func.__name__} reads a sharded tensor of shape {tuple(args[0].shape)}, of which this "
        "rank holds some rows: call full_tensor() on all ranks, and read its result; or read "
        "this rank's rows, to_local()"
    )


def set_data(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
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
    # A gradient is no view of its main gradient any more.
    target.main_grad_slot = None
    torch.autograd.graph.increment_version(target)


def data_ptr(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return 0: the tensor has no memory of its own, only its local tensor has.

    Torch would return the offset of the local tensor, which its stagers take for memory.
    """
    if running_optimizer() is not None:
        # The optimizer may branch on the address, which differs between ranks.
        raise RuntimeError("it asks for the address of a tensor, which differs between ranks")
    return 0


def data_ptr_of_view(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Reject an access to the memory of a view, which save_pretrained of transformers compares."""
    # In the step of an optimizer, the error names the optimizer.
    data_ptr(func, args, kwargs)
    reject_storage(func, args, kwargs)


def register_hook(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Register a hook that gets gradients as sharded tensors."""
    tensor, hook = args
    with torch._C.DisableTorchFunctionSubclass():
        return func(tensor, lambda grad: hook(in_rows(grad, tensor)))


READS = (
    "__array__ __bool__ __complex__ __dlpack__ __float__ __index__ __int__ __long__ __nonzero__ "
    "is_nonzero item numpy tolist"
)
"""Names of functions that read values on the host."""

VIEWS = (
    "__getitem__ adjoint as_strided atleast_1d atleast_2d atleast_3d broadcast_to chunk diagonal "
    "dsplit expand expand_as flatten hsplit moveaxis movedim narrow permute ravel reshape "
    "reshape_as select split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose "
    "unbind unflatten unfold unsqueeze view view_as view_as_complex view_as_real vsplit"
)
"""Names of functions that return views, if they need no copy."""

DRAWS = (
    "bernoulli_ cauchy_ constant_ exponential_ geometric_ kaiming_normal_ kaiming_uniform_ "
    "log_normal_ normal_ rand_like randint_like randn_like random_ uniform_"
)
"""Names of functions that write every element, mostly with random numbers, and read no values."""

_METADATA = (
    "__dir__ __dlpack_device__ __hash__ __len__ __repr__ _has_compatible_shallow_copy_type "
    "_is_view _is_zerotensor can_cast dense_dim dim dim_order element_size get_device has_names "
    "is_coalesced is_complex is_conj is_contiguous is_distributed is_floating_point is_inference "
    "is_neg is_pinned is_same_size is_shared is_signed ndimension nelement numel result_type size "
    "sparse_dim storage_offset stride"
)
"""Names of functions that read no values."""

_AS_DTENSORS = (
    "detach detach_ pin_memory register_post_accumulate_grad_hook requires_grad_ retain_grad "
    "untyped_storage "
    # Every rank draws random numbers for its own rows.
    "alpha_dropout bernoulli dropout feature_alpha_dropout"
)
"""Names of functions that DTensor runs locally."""

_RESHAPES = (
    "as_strided_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_"
)
"""Names of functions that change a shape in place."""

_STORAGES = "_typed_storage share_memory_ storage storage_type"
"""Names of functions that access memory."""

_DRAWS_OF_ALL = (
    "binomial dropout1d dropout2d dropout3d fractional_max_pool2d fractional_max_pool3d "
    "gumbel_softmax multinomial normal pca_lowrank poisson rrelu rrelu_ svd_lowrank"
)
"""Names of functions that draw random numbers for the whole tensor."""

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_METADATA.split(), as_metadata),
    **dict.fromkeys(_AS_DTENSORS.split(), as_dtensors),
    **dict.fromkeys(_RESHAPES.split(), reject_reshape),
    **dict.fromkeys(_STORAGES.split(), reject_storage),
    **dict.fromkeys(_DRAWS_OF_ALL.split(), reject_random),
    **dict.fromkeys((torch.Tensor.backward, torch.autograd.backward), backward),
    "data.__set__": set_data,
    "data_ptr": data_ptr,
    "register_hook": register_hook,
    torch.autograd.grad: grad_of,
}
"""Rules by function or by its name, or by `attribute.__get__`."""

OF_REPLICATED = (as_metadata, as_dtensors, reject_random, backward, grad_of, data_ptr)
"""Rules that apply to replicated results too."""

_SAME = (as_metadata, reject_random, reject_reshape, reject_storage, backward, grad_of)
OF_VIEWS: dict[Rule, Rule] = {
    **dict(zip(_SAME, _SAME, strict=True)),
    **dict.fromkeys((as_dtensors, register_hook, set_data), reject_view),
    data_ptr: data_ptr_of_view,
}
"""Rules for views of sharded tensors, by the rule of the sharded tensor."""


# -- results as wholes -----------------------------------------------------------------------------


def recipe_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Callable[[], Any]:
    """Return a function that runs an operation on whole tensors, with the operands of now."""
    leaves, structure = tree_flatten((list(args), dict(kwargs)))
    wholes = [_whole_operand(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    is_made = [isinstance(leaf, DTensor) for leaf in leaves]

    def run() -> Any:
        pairs = zip(wholes, is_made, strict=True)
        given, named = tree_unflatten([w() if m else w for w, m in pairs], structure)
        return func(*given, **named)

    return run


def _whole_operand(operand: Any) -> Callable[[], torch.Tensor]:
    """Return a function that gathers an operand of a recorded operation on rows."""
    if isinstance(operand, ShardedRows) and operand.recipe is not None:
        return operand.recipe
    version = operand._version, local_of(operand)._version

    def gather() -> torch.Tensor:
        if version != (operand._version, local_of(operand)._version):
            shards = getattr(operand, "row_shards", None)
            name = (shards and shards.label) or f"a sharded tensor of shape {tuple(operand.shape)}"
            raise RuntimeError(
                f"{name} was changed in place after an operation on it that autograd recorded, and "
                "the result is needed as a whole only now; gather the result (full_tensor()) "
                "before the change"
            )
        return cast("torch.Tensor", operand.full_tensor())

    return gather


def item_of(recipe: Callable[[], Any], index: int) -> Callable[[], Any]:
    """Return a recipe of one of several results."""
    return lambda: recipe()[index]
