"""DTensors whose rows are spread unevenly over a mesh, and what operations make of them.

`UnevenDTensor` hands the row range of every rank on to whatever elementwise operations make of it:
gradients, momenta, copies. What it is by itself is said by `ShardedRows`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, override

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from megatron_fsdp_v2._compiler import leave_to_python
from megatron_fsdp_v2.dtensor.attributes import PLAIN_FUNCTIONS, without_torch_function
from megatron_fsdp_v2.dtensor.foreach import choose_foreach_for, is_elementwise, run_on_rows
from megatron_fsdp_v2.dtensor.found_inf import unscale_and_check
from megatron_fsdp_v2.dtensor.norms import NORMS, local_norms, order_of
from megatron_fsdp_v2.dtensor.reductions import REDUCTIONS, check_supposes_nothing, reduce_rows
from megatron_fsdp_v2.dtensor.row_shards import RowShards, knows_rows
from megatron_fsdp_v2.dtensor.sharded_rows import (
    ShardedRows,
    different_rows,
    gather_rows,
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
            result = run_on_rows(func, args, kwargs or {})
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
            args = (args[0], in_rows_of(args[0], args[1]), *args[2:])
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
                    result = reduce_rows(func, args, kwargs or {})
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
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gather the whole tensor on every rank. Collective over the mesh; not differentiable."""
        del grad_placements
        if self._row_shards.holders.stored is not None:
            raise RuntimeError(
                f"a sharded tensor of shape {tuple(self.shape)} that was loaded from a file has "
                "one rank's rows and no process groups; load it into a model that is sharded like "
                "the one it was saved from, and take the parameter's full_tensor()"
            )
        return gather_rows(self)

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
            # It adds no storage of its own, so the object can change class in place; making
            # another one would cost as much as the operation that made the first.
            result.__class__ = UnevenDTensor
            cast(UnevenDTensor, result)._row_shards = like._row_shards
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
            raise different_rows(func, first, arg)


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


choose_foreach_for(UnevenDTensor)
