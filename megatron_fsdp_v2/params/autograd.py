"""What the autograd engine is doing, and hooks into the graph around a unit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.params.parameter_hooks import NotAUsersHook

__all__ = [
    "Inputs",
    "cast_floats",
    "in_backward",
    "map_tensors",
    "next_node_number",
    "tensors_within",
    "watch_inputs",
    "watch_outputs",
]


# Looked up once: both are asked for many times a step.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_NO_GRAPH_TASK = -1


def in_backward() -> bool:
    """Whether the calling thread is inside the autograd engine: a forward is a recomputation."""
    return _graph_task() != _NO_GRAPH_TASK


class _Watcher(Protocol):
    def pre_backward(self) -> None:
        """The first gradient reached an output."""
        ...

    def post_backward(self) -> None:
        """The last gradient left for an input."""
        ...

    def nearly_over(self) -> None:
        """A gradient left for an input, and it may be the last one."""
        ...


def next_node_number() -> int:
    """The number that the next node of the graph gets that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested containers and dataclasses.

    Containers are what `torch.utils._pytree` knows; a dataclass is copied only if one of its
    tensors changed.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, dict) and not value:
        return value
    # Lists, since a generator would be a frame for every item.
    if type(value) is tuple and all([isinstance(item, torch.Tensor) for item in value]):
        # What most forwards take; the general walk costs more than a small layer.
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
        if not _is_same(old, new):
            result = copy.copy(value) if result is value else result
            # Frozen dataclasses reject plain assignment, and this is their own new copy.
            object.__setattr__(result, field.name, new)
    return result


def _is_same(old: Any, new: Any) -> bool:
    """Whether mapping changed nothing: the same leaves (containers are rebuilt every time)."""
    return all(map(operator.is_, tree_leaves(old), tree_leaves(new)))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in nested containers and dataclasses."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


class Inputs:
    """The inputs of a unit's forward as they were when it began."""

    __slots__ = ("_has_others", "_views")

    def __init__(self) -> None:
        self._views: list[tuple[torch.Tensor, int]] = []
        self._has_others = False

    def add(self, view: torch.Tensor) -> None:
        """Take in one whose gradient tells something."""
        self._views.append((view, view._version))

    def add_other(self) -> None:
        """Note one that requires a gradient that tells nothing."""
        self._has_others = True

    @property
    def tell_nothing(self) -> bool:
        """Whether the gradient of none of them may tell that the unit's backward is over.

        An operation in place gives what it changes another history, around what would have told.
        """
        if not self._views:
            return self._has_others
        return any([view._version != version for view, version in self._views])


def watch_inputs(watcher: _Watcher, args: Any, kwargs: Any) -> tuple[Any, Any, Inputs]:
    """Route the inputs that require gradients so that `post_backward` is called.

    What the unit gets is a view of each, so that all rules of views hold: also for operations in
    place. The engine runs ready nodes latest-made first and gradient accumulation before all
    others. So when the node of the first view runs, which is the unit's earliest, the rest of the
    unit's backward is over, and its own gradients have arrived.

    Returns:
        The arguments to run the forward with, and what they were then.
    """
    inputs = Inputs()
    views: dict[int, torch.Tensor] = {}

    def route(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        if tensor.layout is not torch.strided:
            inputs.add_other()
            return tensor
        view = views.get(id(tensor))
        if view is None:
            is_first = not views
            view = views[id(tensor)] = tensor.view_as(tensor)
            inputs.add(view)
            node = view.grad_fn
            assert node is not None
            # Which of several get a gradient is known only in the end.
            tell = watcher.post_backward if is_first else watcher.nearly_over
            node.register_hook(functools.partial(uncompiled(_node_ran), tell))
        return view

    args = map_tensors(route, args)
    if kwargs:
        kwargs = map_tensors(route, kwargs)
    return args, kwargs, inputs


def _node_ran(tell: Callable[[], None], grad_inputs: Any, grad_outputs: Any) -> None:
    """A hook of a node that says so and nothing else."""
    del grad_inputs, grad_outputs
    tell()


def watch_outputs(watcher: _Watcher, output: Any, since: int) -> None:
    """Have `pre_backward` called when the first gradient reaches one of the outputs.

    Outputs are searched more widely than inputs: nothing is rebuilt here, and a tensor that is
    missed would be computed with after the weights are gone.

    Args:
        watcher: Whom to tell.
        output: What the forward returned.
        since: `next_node_number()` when the forward began.
    """
    for tensor in _with_bases(tensors_within(output), since):
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
        hook = NotAUsersHook(uncompiled(_tell_outermost_first), watchers)
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _with_bases(tensors: Iterable[torch.Tensor], since: int) -> list[torch.Tensor]:
    """The tensors, and what those are views of that a forward made.

    Whoever changes a view in place gives it another history, which begins at its base.
    """
    found = []
    for tensor in tensors:
        found.append(tensor)
        base = tensor._base
        made_by = None if base is None else base.grad_fn
        if base is not None and made_by is not None and made_by._sequence_nr() >= since:
            found.append(base)
    return found


_WATCHERS = "_watchers_of_backward"


def _tell_outermost_first(watchers: list[_Watcher], grad: torch.Tensor) -> None:
    """A hook of an output that tells all who watch it that the first gradient arrives."""
    del grad
    for watcher in reversed(watchers):
        watcher.pre_backward()


def tensors_within(value: Any) -> Iterable[torch.Tensor]:
    """Every tensor in containers, dataclasses and attributes of plain objects, each once."""
    return (value,) if isinstance(value, torch.Tensor) else _search(value)


def _search(value: Any) -> Iterator[torch.Tensor]:
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
