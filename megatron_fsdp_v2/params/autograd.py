"""State of the autograd engine, and hooks on the inputs and outputs of a unit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp_v2._compiler import uncompiled

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.unit import ForwardRecord

__all__ = [
    "Inputs",
    "InternalHook",
    "cast_floats",
    "in_backward",
    "is_gathered_weight",
    "map_tensors",
    "may_be_recomputed",
    "next_node_number",
    "save_activations_on_cpu",
    "tensors_within",
    "watch_inputs",
    "watch_outputs",
]


def in_backward() -> bool:
    """Return whether the calling thread runs in the autograd engine."""
    # -1 outside of the engine.
    return torch._C._current_graph_task_id() != -1


def may_be_recomputed() -> bool:
    """Return whether a backward may have to repeat a forward that runs now.

    Recomputation requires that the forward records no graph (reentrant checkpoints) or saves its
    tensors through hooks (non-reentrant ones).
    """
    if not torch.is_grad_enabled():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class InternalHook(functools.partial[None]):
    """A hook of this package on a tensor that may be a parameter, not a user's hook."""


def next_node_number() -> int:
    """Return the sequence number of the next autograd node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested containers and dataclasses.

    Containers are those that `torch.utils._pytree` supports. A dataclass is copied only if one of
    its tensors changed.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, dict) and not value:
        return value
    # Lists are faster than generators, which run a frame per item.
    if type(value) is tuple and all([isinstance(item, torch.Tensor) for item in value]):
        # The common case; the general walk below takes longer than a small layer.
        return tuple([function(item) for item in value])

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _map_dataclass(function, leaf)
        return leaf

    return tree_map(visit, value)


def _map_dataclass(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    result = value
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = map_tensors(function, old)
        # Leaves are compared, since `tree_map` always rebuilds containers.
        if not all(map(operator.is_, tree_leaves(old), tree_leaves(new))):
            result = copy.copy(value) if result is value else result
            # `result` is a new copy; frozen dataclasses reject plain assignment.
            object.__setattr__(result, field.name, new)
    return result


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in nested containers and dataclasses."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


@dataclasses.dataclass(slots=True)
class Inputs:
    """Inputs of a unit's forward that require gradients.

    Attributes:
        views: Views whose autograd nodes have hooks, each with its version when the forward began.
        has_others: Whether an input has no hook.
    """

    views: list[tuple[torch.Tensor, int]] = dataclasses.field(default_factory=list)
    has_others: bool = False

    @property
    def lacks_end_hook(self) -> bool:
        """Whether inputs require gradients, but no hook may mark the end of the unit's backward.

        An in-place op replaces the tensor's grad_fn, so the node with the hook is bypassed.
        """
        if not self.views:
            return self.has_others
        return any([view._version != version for view, version in self.views])


def watch_inputs(record: ForwardRecord, args: Any, kwargs: Any) -> tuple[Any, Any, Inputs]:
    """Replace inputs that require gradients by views whose nodes call `post_backward`.

    In-place operations on a view follow autograd's rules for views. The engine runs ready nodes in
    reverse order of creation, and gradient accumulation first. The node of the first view is the
    unit's earliest node; when it runs, the unit's backward is over and its gradients have arrived.

    Returns:
        The arguments for the forward, and a record of the inputs.
    """
    inputs = Inputs()
    views: dict[int, torch.Tensor] = {}

    def route(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        if tensor.layout is not torch.strided:
            inputs.has_others = True
            return tensor
        view = views.get(id(tensor))
        if view is None:
            is_first = not views
            view = views[id(tensor)] = tensor.view_as(tensor)
            inputs.views.append((view, view._version))
            node = view.grad_fn
            assert node is not None
            # Which inputs receive a gradient is unknown until the backward.
            tell = record.post_backward if is_first else record.defer_post_backward
            node.register_hook(functools.partial(uncompiled(_node_ran), tell))
        return view

    return map_tensors(route, args), map_tensors(route, kwargs), inputs


def _node_ran(tell: Callable[[], None], grad_inputs: Any, grad_outputs: Any) -> None:
    """Call a function from a hook of an autograd node."""
    del grad_inputs, grad_outputs
    tell()


def watch_outputs(record: ForwardRecord, output: Any, since: int) -> None:
    """Register hooks that call `pre_backward` when the first gradient reaches an output.

    Attributes of plain objects are searched too, unlike for inputs: no object is rebuilt here, and
    the backward of a missed tensor would run without gathered weights.

    Args:
        record: The forward, whose `pre_backward` is called.
        output: Output of the forward.
        since: `next_node_number()` when the forward began.
    """
    for tensor in _with_bases(tensors_within(output), since):
        if not tensor.requires_grad:
            continue
        # An output of an inner unit may also be an output of the outer unit. Torch calls hooks in
        # order of registration, inner unit first; one shared hook calls the outer unit first, on
        # all ranks.
        known: tuple[int, list[ForwardRecord]] | None = getattr(tensor, _RECORDS, None)
        if known is not None and known[0] == tensor._version:
            known[1].append(record)
            continue
        records = [record]
        setattr(tensor, _RECORDS, (tensor._version, records))
        hook = InternalHook(uncompiled(_tell_outermost_first), records)
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _with_bases(tensors: Iterable[torch.Tensor], since: int) -> list[torch.Tensor]:
    """Return the tensors and the bases of views that the forward made.

    An in-place op on a view replaces its grad_fn by one whose history begins at the base.
    """
    found = []
    for tensor in tensors:
        found.append(tensor)
        base = tensor._base
        made_by = None if base is None else base.grad_fn
        if base is not None and made_by is not None and made_by._sequence_nr() >= since:
            found.append(base)
    return found


_RECORDS = "_forward_records"


def _tell_outermost_first(records: list[ForwardRecord], grad: torch.Tensor) -> None:
    """Call `pre_backward` of all forwards that returned a tensor, the outermost first."""
    del grad
    for record in reversed(records):
        record.pre_backward()


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in containers, dataclasses and object attributes, without duplicates."""
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if isinstance(item, _LEAVES):
            continue
        if isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, Sequence | Set):
            left += item
        # Containers may have attributes too, such as the output classes of model libraries.
        left += getattr(item, "__dict__", {}).values()
        for cls in type(item).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            left += [getattr(item, name) for name in names if hasattr(item, name)]


# Objects that hold no outputs; searching their attributes would reach the whole program.
_LEAVES = (
    int,
    float,
    str,
    bytes,
    type,
    torch.nn.Module,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
)


# -- saved tensors -----------------------------------------------------------------------------


def is_gathered_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a gathered weight or a view of one, such as its transpose.

    Saved-tensor hooks should return such a tensor unchanged: it has no memory between forward and
    backward, and the backward gathers it again.
    """
    return hasattr(tensor, "_owner_slot") or hasattr(tensor._base, "_owner_slot")


class save_activations_on_cpu(saved_tensors_hooks):
    """`torch.autograd.graph.save_on_cpu` for sharded modules: saves all tensors except weights.

    Torch's version also copies the gathered weights of every unit, though the backward gathers them
    again.

    Args:
        pin_memory: Whether to copy to pinned memory, and back without waiting.
        min_nbytes: Tensors of fewer bytes stay on their device.

    Raises:
        ValueError: `min_nbytes` is negative.
    """

    def __init__(self, pin_memory: bool = False, min_nbytes: int = 0) -> None:
        if min_nbytes < 0:
            raise ValueError(f"min_nbytes is a number of bytes, got {min_nbytes}")

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.nbytes < min_nbytes or is_gathered_weight(tensor):
                return tensor
            packed = torch.empty_like(
                tensor, device="cpu", pin_memory=pin_memory and not tensor.is_sparse
            )
            return tensor.device, packed.copy_(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            device, tensor = packed
            restored: torch.Tensor = tensor.to(device, non_blocking=pin_memory)
            return restored

        super().__init__(pack, unpack)
