"""Tensors that an operation of torch reads and writes, from its schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(slots=True)
class Accesses:
    """Plain tensors that an operation accesses.

    Attributes:
        reads: Tensors that the operation reads.
        writes: Tensors that the operation writes, including its results.
    """

    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)


def accesses_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Accesses | None:
    """Return the accesses of an operation; None if it changes or reads metadata only.

    Args:
        func: The operator overload.
        args: Positional arguments.
        kwargs: Keyword arguments.
        result: The result of the operation.
    """
    if torch.Tag.inplace_view in func.tags:
        return None
    found = Accesses()
    if func.namespace == "c10d":
        # Schemas of c10d do not mark written arguments; assume that all tensors are written.
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
    # A result that shares the storage of an argument is the argument or a view of it.
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
    """Return the tensors with storage in nested containers; wrapper subclasses are unwrapped."""
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
