"""State of the autograd engine, and hooks on the inputs and outputs of a unit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_fsdp_v2._compiler import uncompiled


def in_backward() -> bool:
    """Return whether the calling thread runs in the autograd engine."""
    # -1 outside of the engine.
    return torch._C._current_graph_task_id() != -1


class InternalHook(functools.partial[None]):
    """A hook of this package on a tensor that may be a parameter, not a user's hook."""


def next_node_number() -> int:
    """Return the sequence number of the next autograd node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested containers and dataclasses.

    Containers are those that `torch.utils._pytree` supports. Lists, deques, dicts and dataclasses
    stay the same objects, in which changed tensors are replaced, so that their owner sees what a
    forward writes into them. Other containers and frozen dataclasses are copied if they change.
    """
    # The common cases; the general walk takes longer than a small layer.
    if type(value) is dict and not value:
        return value
    # Lists are faster than generators, which run a frame per item.
    if type(value) is tuple and all([isinstance(item, torch.Tensor) for item in value]):
        return tuple([function(item) for item in value])
    return _map(function, value, set())


def _map(function: Callable[[torch.Tensor], Any], value: Any, seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    kind = type(value)
    if kind is PackedSequence:
        # Its fourth tensor, the batch sizes, belongs to the host.
        old = (value.data, value.sorted_indices, value.unsorted_indices)
        data, *order = [_map(function, item, seen) for item in old]
        if all(map(operator.is_, (data, *order), old)):
            return value
        return PackedSequence(data, value.batch_sizes, *order)
    if kind is tuple:
        items = [_map(function, item, seen) for item in value]
        return value if all(map(operator.is_, items, value)) else tuple(items)
    if id(value) in seen:
        return value
    if kind is list or kind is deque:
        seen.add(id(value))
        for index, item in enumerate(value):
            value[index] = _map(function, item, seen)
        return value
    if isinstance(value, dict) and (kind in _DICTS or not _is_leaf(_flatten(value)[0], value)):
        seen.add(id(value))
        for key, item in value.items():
            new = _map(function, item, seen)
            if new is not item:
                value[key] = new
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        seen.add(id(value))
        return _map_dataclass(function, value, seen)
    parts, spec = _flatten(value)
    if _is_leaf(parts, value):
        return value
    items = [_map(function, part, seen) for part in parts]
    return value if all(map(operator.is_, items, parts)) else tree_unflatten(items, spec)


_PLAIN = (types.NoneType, bool, int, float, str)
_NO_CONTAINERS = (torch.Tensor, *_PLAIN)
_DICTS = (dict, OrderedDict, defaultdict)


def _flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the direct parts of a container, or the value itself if it is not a container."""
    return tree_flatten(value, is_leaf=lambda part: part is not value)


def _is_leaf(parts: Sequence[Any], value: Any) -> bool:
    return len(parts) == 1 and parts[0] is value


def _map_dataclass(function: Callable[[torch.Tensor], Any], value: Any, seen: set[int]) -> Any:
    result = value
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = _map(function, old, seen)
        if new is old:
            continue
        try:
            setattr(result, field.name, new)
        except dataclasses.FrozenInstanceError:
            result = copy.copy(value) if result is value else result
            object.__setattr__(result, field.name, new)
    return result


def cast_floats(value: Any, dtype: torch.dtype, replaced: ReplacedTensors | None = None) -> Any:
    """Cast every floating-point tensor in nested containers and dataclasses.

    Args:
        value: The containers.
        dtype: Dtype to cast to.
        replaced: Receives the tensors that are replaced.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        return _converted(tensor, dtype, replaced)

    return map_tensors(cast, value)


def to_device(value: Any, device: torch.device, replaced: ReplacedTensors) -> Any:
    """Move every tensor in nested containers and dataclasses to a device.

    Args:
        value: The containers.
        device: Device to move to.
        replaced: Receives the tensors that are replaced.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else _converted(tensor, device, replaced)

    return map_tensors(move, value)


def _converted(
    tensor: torch.Tensor, to: torch.dtype | torch.device, replaced: ReplacedTensors | None
) -> torch.Tensor:
    if replaced is None or not replaced.containers:
        return tensor.to(to)
    if torch.is_inference_mode_enabled():
        # Tensors made in inference mode have no version counter.
        with torch.inference_mode(False), torch.no_grad():
            new = tensor.to(to)
    else:
        new = tensor.to(to)
    replaced.originals[id(new)] = (new, tensor, new._version)
    return new


@dataclasses.dataclass(slots=True)
class ReplacedTensors:
    """Tensors that are replaced in the arguments of a forward: by moves, by casts, by views.

    Attributes:
        containers: Arguments that may hold tensors.
        originals: By `id()` of a replacement: the replacement, its original, and its version, which
            changes if the forward writes into it; None for a view, which shares memory with its
            original.
    """

    containers: list[Any] = dataclasses.field(default_factory=list)
    originals: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = dataclasses.field(
        default_factory=dict
    )

    def hold(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of a forward that begins."""
        values = (*args, *kwargs.values())
        self.containers += [v for v in values if not isinstance(v, _NO_CONTAINERS)]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the containers hold now."""
        found: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        if self.containers:
            map_tensors(note, self.containers)
        return found

    def written(self, since: int) -> list[torch.Tensor]:
        """Return the tensors in the containers that the forward made.

        Args:
            since: `next_node_number()` when the forward began.
        """
        if not self.containers:
            return []
        held = [self._original(tensor) for tensor in self.tensors()]
        nodes = [tensor.grad_fn for tensor in held]
        return [t for t, n in zip(held, nodes, strict=True) if n and n._sequence_nr() >= since]

    def restore(self) -> None:
        """Put the originals back into the containers, except for casts that were written."""
        if self.originals:
            map_tensors(self._original, self.containers)
            self.originals.clear()
        self.containers.clear()

    def _original(self, tensor: torch.Tensor) -> torch.Tensor:
        while (known := self.originals.get(id(tensor))) is not None:
            _, original, version = known
            if version is not None and tensor._version != version:
                break
            tensor = original
        return tensor


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


def watch_inputs(
    at_first: Callable[[], None],
    at_others: Callable[[], None],
    args: Any,
    kwargs: Any,
    inputs: Inputs,
    replaced: ReplacedTensors,
) -> tuple[Any, Any]:
    """Replace inputs that require gradients by views whose nodes call a function in the backward.

    In-place operations on a view follow autograd's rules for views. The engine runs ready nodes in
    reverse order of creation, and gradient accumulation first. The node of the first view is the
    unit's earliest node; when it runs, the unit's backward is over and its gradients have arrived.

    Args:
        at_first: Called by the node of the first view.
        at_others: Called by the nodes of the other views.
        args: Positional arguments of the forward.
        kwargs: Keyword arguments of the forward.
        inputs: Receives the inputs.
        replaced: Receives the tensors that are replaced.

    Returns:
        The arguments for the forward.
    """
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
            if replaced.containers:
                replaced.originals[id(view)] = (view, tensor, None)
            node = view.grad_fn
            assert node is not None
            # Which inputs receive a gradient is unknown until the backward.
            function = at_first if is_first else at_others
            node.register_hook(functools.partial(uncompiled(_node_ran), function))
        return view

    return map_tensors(route, args), kwargs and map_tensors(route, kwargs)


def _node_ran(function: Callable[[], None], grad_inputs: Any, grad_outputs: Any) -> None:
    """Call a function from a hook of an autograd node."""
    del grad_inputs, grad_outputs
    function()


def watch_outputs(function: Callable[[], None], output: Any, since: int) -> None:
    """Register hooks that call a function when the first gradient reaches an output.

    Attributes of plain objects are searched too, unlike for inputs: no object is rebuilt here, and
    the backward of a missed tensor would run without gathered weights.

    Args:
        function: Called with no argument, perhaps several times.
        output: Output of the forward.
        since: `next_node_number()` when the forward began.
    """
    for tensor in _with_bases(tensors_within(output), since):
        if not tensor.requires_grad:
            continue
        # An output of an inner unit may also be an output of the outer unit. Torch calls hooks in
        # order of registration, inner unit first; one shared hook calls the outer unit first, on
        # all ranks.
        known: tuple[int, list[Callable[[], None]]] | None = getattr(tensor, _FUNCTIONS, None)
        if known is not None and known[0] == tensor._version:
            known[1].append(function)
            continue
        functions = [function]
        setattr(tensor, _FUNCTIONS, (tensor._version, functions))
        hook = InternalHook(uncompiled(_call_outermost_first), functions)
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


_FUNCTIONS = "_at_first_gradient"


def _call_outermost_first(functions: list[Callable[[], None]], grad: torch.Tensor) -> None:
    """Call the functions of all units that returned a tensor, the outermost unit's first."""
    del grad
    for function in reversed(functions):
        function()


def tensors_within(value: Any) -> list[torch.Tensor]:
    """Return all tensors in containers, dataclasses and object attributes, without duplicates."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
            continue
        if isinstance(item, _LEAVES):
            continue
        kind = type(item)
        if kind is tuple or kind is list:
            left += item
            continue
        if isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, Sequence | Set):
            left += item
        # Containers may have attributes too, such as the output classes of model libraries.
        left += getattr(item, "__dict__", {}).values()
        for cls in kind.__mro__:
            slots = cls.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            left += [getattr(item, name) for name in names if hasattr(item, name)]
    return found


# Objects that hold no outputs; searching their attributes would reach the whole program.
_LEAVES = (*_PLAIN, bytes, type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType)


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
