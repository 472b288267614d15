"""Sharded parameters, and what operations make of them.

`rule_of` says what each function of torch does with an `UnevenDTensor`; how it is done with rows,
or with the whole, is in `operators`. What a sharded tensor is by itself is said by `ShardedRows`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast, override

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from megatron_fsdp_v2._compiler import leave_to_python
from megatron_fsdp_v2.dtensor.foreach import choose_foreach_for, run_on_rows
from megatron_fsdp_v2.dtensor.found_inf import unscale_and_check
from megatron_fsdp_v2.dtensor.norms import local_norms, order_of
from megatron_fsdp_v2.dtensor.operators import (
    Rule,
    as_dtensors,
    common_rule,
    gathered,
    in_rows,
    is_tracked,
    keeps_rows,
    local_rows,
    norm_of_all,
    on_rows,
    on_whole,
    replicated,
    run,
    sum_of_all,
)
from megatron_fsdp_v2.dtensor.optimizer_kinds import stepped_by_all
from megatron_fsdp_v2.dtensor.row_shards import RowShards, knows_rows
from megatron_fsdp_v2.dtensor.sharded_rows import (
    ShardedRows,
    in_rows_of,
    local_of,
    plain_attributes,
    rows_like,
    rows_of,
)

__all__ = ["UnevenDTensor", "local_of", "plain_attributes", "rows_of", "with_rows_of"]


class UnevenDTensor(ShardedRows):
    """A `ShardedRows` that operations of torch may be run on."""

    @override
    def _with_rows(self, grad: torch.Tensor) -> torch.Tensor:
        # Autograd summed several gradients of a loss of the sharded parameter into a DTensor.
        return rows_like(local_of(grad), self)

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the rows that are here, or on the whole."""
        return run(rule_of(func), func, args, kwargs)

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
        if id(self) not in memo:
            memo[id(self)] = self._over(self._local_tensor.detach().clone())
        copied: UnevenDTensor = memo[id(self)]
        return copied

    def __copy__(self) -> UnevenDTensor:
        """Another tensor over the same local rows."""
        return self._over(self._local_tensor.detach())

    def _over(self, local: torch.Tensor) -> UnevenDTensor:
        is_param = isinstance(self, torch.nn.Parameter)
        return _trained(rows_like(local, self), is_param, self.requires_grad)

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
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The rows that are here, sharing memory. Differentiable.

        Raises:
            ValueError: Gradients of rows are to be placed in another way than those.
        """
        if grad_placements is not None and tuple(grad_placements) != self._spec.placements:
            raise ValueError(
                f"to_local: gradients of rows are placed as {self._spec.placements}, and not as "
                f"grad_placements says, {tuple(grad_placements)}; leave it out"
            )
        return local_rows(self) if torch.is_grad_enabled() else self._local_tensor

    @override
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gather the whole tensor on every rank. Collective over the mesh; differentiable.

        Args:
            grad_placements: How its gradient is placed along every mesh axis: `Replicate()` (the
                default) where ranks compute the same with it, `Partial()` where their gradients
                are to be summed.
        """
        whole = gathered(self, grad_placements)
        return whole.clone() if self._row_shards.is_replicated else whole

    @override
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        """Return self for unchanged placements; else gather, and place that. Collective.

        Arguments are those of `DTensor.redistribute`. Differentiable.
        """
        mesh = self.device_mesh if device_mesh is None else device_mesh
        target = self.placements if placements is None else tuple(placements)
        if mesh == self.device_mesh and target == self.placements:
            return self
        whole = replicated(gathered(self), self.device_mesh)
        return whole.redistribute(mesh, target, **kwargs)


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
    return _trained(UnevenDTensor.from_rows(local, mesh, shards, shape), *parameter)


def _trained(made: UnevenDTensor, is_param: bool, requires_grad: bool) -> UnevenDTensor:
    """A tensor just made, as a parameter if it is to be one."""
    if is_param:
        return cast(UnevenDTensor, torch.nn.Parameter(made, requires_grad=requires_grad))
    return cast(UnevenDTensor, made.requires_grad_(requires_grad))


# So that torch.load(weights_only=True) takes sharded tensors.
torch.serialization.add_safe_globals([stored_rows])


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
    return rows_like(local, like)


# -- what each function does -----------------------------------------------------------------------


@functools.cache
def rule_of(func: Any) -> Rule:
    """What a function of torch does with an `UnevenDTensor`."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__") and func.__self__.__name__ == "data":
        return _get_data if name == "__get__" else _set_data
    found = _SPECIAL.get(func) or _SPECIAL_NAMES.get(name) or common_rule(func)
    if found is not None:
        return found
    if name.startswith(("_foreach_", "_fused_")):
        return _on_lists
    return on_rows if keeps_rows(name) else on_whole


def _on_lists(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = run_on_rows(func, args, kwargs)
    return on_whole(func, args, kwargs) if result is NotImplemented else result


def _reject_storage(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # What safetensors asks for.
    raise RuntimeError(
        f"a sharded tensor of shape {tuple(args[0].shape)} has no storage of its own: this "
        "rank holds some of its rows. Write a gathered state dict "
        "(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
        "torch.distributed.checkpoint.state_dict), or save with "
        "megatron_fsdp_v2.checkpoint.save and export"
    )


def _get_data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # `.data` has a version counter of its own, and a write through it would go unseen.
    return args[0].detach()


def _set_data(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Copy values, where `.data = ...` would give the DTensor storage nobody shards."""
    target, value = args
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ValueError(
            f"a sharded tensor of shape {tuple(target.shape)} and {target.dtype} cannot take the "
            f"data of a tensor of shape {tuple(value.shape)} and {value.dtype}; change shapes and "
            "dtypes before sharding"
        )
    with torch.no_grad():
        target.detach().copy_(value)


def _data_ptr(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if stepped_by_all() is not None:
        # What depends on it would be done on some ranks only.
        raise RuntimeError("it asks for the address of a tensor, of which every rank has another")
    return as_dtensors(func, args, kwargs)


def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source, *more = args
    if not isinstance(target, UnevenDTensor) or is_tracked(target, source):
        return on_whole(func, args, kwargs)
    return on_rows(func, (target, in_rows_of(target, source), *more), kwargs)


def _set_item(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # A mask has the same rows; values that it selects are counted over all of them.
    is_one = not isinstance(args[2], torch.Tensor) or args[2].ndim == 0
    keeps = is_one and isinstance(args[1], UnevenDTensor)
    return (on_rows if keeps else on_whole)(func, args, kwargs)


def _new(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A new tensor, which nobody has to gather anything for."""
    source, *sizes = args
    if "size" in kwargs:
        size = tuple(kwargs["size"])
        kwargs = {key: value for key, value in kwargs.items() if key != "size"}
    elif not sizes or isinstance(sizes[0], int):
        size, sizes = tuple(sizes), []
    else:
        size = tuple(sizes.pop(0))
    made = func(source._local_tensor, tuple(source._local_tensor.shape), *sizes, **kwargs)
    if size == source.shape:
        return rows_like(made, source)
    return replicated(func(source._local_tensor, size, *sizes, **kwargs), source.device_mesh)


def _sum_or_mean(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    (source, *dims), dtype = args, kwargs.get("dtype")
    if dims or not kwargs.keys() <= {"dtype"} or not isinstance(source, UnevenDTensor):
        return on_whole(func, args, kwargs)
    if func.__name__ == "sum":
        return sum_of_all(source, **kwargs)
    if not (dtype or source.dtype).is_floating_point or not source.numel():
        return on_whole(func, args, kwargs)
    return sum_of_all(source, **kwargs) / source.numel()


def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2.0))
    order = 2.0 if order in (None, "fro") else order
    source = args[0]
    if (
        len(args) > 2
        or not kwargs.keys() <= {"p", "ord"}
        or not isinstance(source, UnevenDTensor)
        or not isinstance(order, int | float)
        or order < 1
    ):
        return on_whole(func, args, kwargs)
    is_clipped = func is torch.linalg.vector_norm and stepped_by_all() is None
    if is_clipped and not is_tracked(source):
        return local_norms([source], float(order))[0]
    return norm_of_all(source, float(order))


def _norms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if len(args) > 2 or not kwargs.keys() <= {"ord"} or is_tracked(*args[0]):
        return on_whole(func, args, kwargs)
    order = order_of(args, kwargs)
    if stepped_by_all() is not None:
        return [torch.linalg.vector_norm(tensor, order) for tensor in args[0]]
    is_ours = [type(tensor) is UnevenDTensor for tensor in args[0]]
    ours = iter(local_norms(list(itertools.compress(args[0], is_ours)), order))
    # A list may have FSDP2's DTensors and plain tensors among ours, as a loop over them may.
    others = [tensor for tensor in args[0] if type(tensor) is not UnevenDTensor]
    theirs = iter([torch.linalg.vector_norm(tensor, order) for tensor in others])
    return [next(ours if mine else theirs) for mine in is_ours]


def _register_hook(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, hook = args
    with torch._C.DisableTorchFunctionSubclass():
        return func(tensor, lambda grad: hook(in_rows(grad, tensor)))


_SPECIAL: dict[Any, Rule] = {
    torch._amp_foreach_non_finite_check_and_unscale_: lambda func, args, kwargs: unscale_and_check(
        *args, **kwargs
    ),
}
_SPECIAL_NAMES: dict[str, Rule] = {
    "__setitem__": _set_item,
    "_foreach_norm": _norms,
    "copy_": _copy,
    "data_ptr": _data_ptr,
    "linalg_vector_norm": _norm,
    "mean": _sum_or_mean,
    "norm": _norm,
    "register_hook": _register_hook,
    "storage": _reject_storage,
    "sum": _sum_or_mean,
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), _new),
}


choose_foreach_for(UnevenDTensor)
