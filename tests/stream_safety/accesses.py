"""Which tensors an operation of torch reads and writes, from its schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Accesses", "accesses_of"]


@dataclass(slots=True)
class Accesses:
    """Plain tensors that an operation touches.

    Attributes:
        reads: Those it reads.
        writes: Those it writes, results included.
    """

    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)


def accesses_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Accesses | None:
    """What an operation read and wrote, or None if it looked at shapes only.

    Args:
        func: The overload.
        args: Its arguments.
        kwargs: Likewise, by name.
        result: What it returned.
    """
    if torch.Tag.inplace_view in func.tags:
        return None
    found = Accesses()
    if func.namespace == "c10d":
        # These schemas do not say what is written; all of it may be.
        found.writes += plain_tensors([args, kwargs])
        return found
    schema = func._schema
    base_name = schema.name.split("::")[-1]
    is_factory = base_name.startswith("new_") or base_name.endswith("_like")
    for argument, value in _by_argument(schema, args, kwargs):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.writes += plain_tensors(value)
        elif alias is None and not is_factory:
            found.reads += plain_tensors(value)
    given = {_storage_key(tensor) for tensor in plain_tensors([args, kwargs])}
    # A result in the storage of an argument is that argument, or a view of it.
    made = [tensor for tensor in plain_tensors(result) if _storage_key(tensor) not in given]
    found.writes += made
    if not found.writes and plain_tensors(result):
        return None
    return found


def _by_argument(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    yield from zip(schema.arguments, args, strict=False)
    for argument in schema.arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def plain_tensors(value: Any) -> list[torch.Tensor]:
    """Tensors with storage in nested lists, tuples and dicts; of wrappers, what they wrap."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor):
            return []
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            return [inner for name in names for inner in plain_tensors(getattr(value, name))]
        return [value] if value.layout is torch.strided else []
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in plain_tensors(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in plain_tensors(item)]
    return []
