"""What the autograd engine is doing, and hooks into the graph around a unit."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol, override

import torch
from torch.utils._pytree import tree_map

from megatron_fsdp_v2.parameter_hooks import NotAUsersHook

__all__ = ["cast_floats", "in_backward", "map_tensors", "watch_inputs", "watch_outputs"]


def in_backward() -> bool:
    """Whether the calling thread is inside the autograd engine: a forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class _Watcher(Protocol):
    def pre_backward(self) -> None:
        """The first gradient reached an output."""
        ...

    def post_backward(self) -> None:
        """The last gradient left for an input."""
        ...


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested containers and dataclasses.

    Containers are what `torch.utils._pytree` knows; a dataclass is copied only if one of its
    tensors changed.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, dict) and not value:
        return value
    if type(value) is tuple and all(isinstance(item, torch.Tensor) for item in value):
        # What most forwards take; the general walk costs more than a small layer.
        return tuple(function(item) for item in value)

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
        if not _is_same(old, new):
            result = copy.copy(value) if result is value else result
            # Frozen dataclasses refuse plain assignment, and this is their own new copy.
            object.__setattr__(result, field.name, new)
    return result


def _is_same(old: Any, new: Any) -> bool:
    """Whether mapping changed nothing: the same leaves (containers are rebuilt every time)."""
    return old is new or (not isinstance(old, torch.Tensor) and _leaves(old) == _leaves(new))


def _leaves(value: Any) -> list[int]:
    found: list[int] = []
    map_tensors(lambda tensor: found.append(id(tensor)), value)
    return found


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in nested containers and dataclasses."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


class _PostBackward(torch.autograd.Function):
    """Identity on a unit's inputs; its backward runs after the rest of the unit's backward.

    The engine runs ready nodes latest-made first and gradient accumulation before all others, so
    when this earliest node of the unit runs, the unit's own gradients have arrived.
    """

    @staticmethod
    @override
    def forward(ctx: Any, watcher: _Watcher, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.watcher = watcher
        return inputs

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.watcher.post_backward()
        return (None, *grads)


def watch_inputs(watcher: _Watcher, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Route the inputs that require gradients so that `post_backward` is called.

    Returns:
        The arguments to run the forward with.
    """
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    for value in (args, kwargs):
        map_tensors(note, value)
    if not found:
        return args, kwargs
    routed = iter(_PostBackward.apply(watcher, *found))  # type: ignore[no-untyped-call]

    def route(tensor: torch.Tensor) -> Any:
        return next(routed) if tensor.requires_grad else tensor

    return map_tensors(route, args), map_tensors(route, kwargs)


def watch_outputs(watcher: _Watcher, output: Any) -> None:
    """Have `pre_backward` called when the first gradient reaches one of the outputs.

    Outputs are searched more widely than inputs: nothing is rebuilt here, and a tensor that is
    missed would be computed with after the weights are gone.
    """
    for tensor in _tensors_within(output):
        if not tensor.requires_grad:
            continue
        # What a unit hands on from one inside it is watched for both, and torch calls hooks in the
        # order they were made: then whose backward comes first would depend on what a rank ran.
        known: tuple[int, list[_Watcher]] | None = getattr(tensor, _WATCHERS, None)
        if known is not None and known[0] == tensor._version:
            known[1].append(watcher)
            continue
        watchers = [watcher]
        setattr(tensor, _WATCHERS, (tensor._version, watchers))
        tensor.register_hook(_OutermostFirst(watchers))  # type: ignore[no-untyped-call]


_WATCHERS = "_watchers_of_backward"


class _OutermostFirst(NotAUsersHook):
    """A hook of an output that tells all who watch it."""

    def __init__(self, watchers: list[_Watcher]) -> None:
        self._watchers = watchers

    def __call__(self, grad: torch.Tensor) -> None:
        """The first gradient arrives."""
        del grad
        for watcher in reversed(self._watchers):
            watcher.pre_backward()


def _tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in containers, dataclasses and attributes of plain objects, each once."""
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
        # A container may have attributes as well, such as the output classes of model libraries.
        left += getattr(item, "__dict__", {}).values()
        for cls in type(item).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            left += [getattr(item, name) for name in names if hasattr(item, name)]


# What holds no outputs, and would lead into everything else.
_LEAVES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.nn.Module,
    torch.dtype,
    torch.device,
    torch.Size,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)
