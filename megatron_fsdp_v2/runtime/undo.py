"""How to put back what `fully_shard` changes, for where a later step of it fails.

Each function here notes the present state on a stack of things to undo. It is called before the
change, so that there is no moment at which an error would leave something behind.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

__all__ = ["keep_attributes", "keep_module", "keep_values"]

_TABLES = (dict, OrderedDict, set)
"""What modules keep parameters, buffers and hooks in; handles of hooks refer to these objects."""


def keep_module(module: nn.Module, undo: ExitStack) -> None:
    """Put back a module's class and attributes, and what is registered on it, hooks included."""
    tables = [
        (value, copy.copy(value)) for value in vars(module).values() if type(value) in _TABLES
    ]
    undo.callback(_put_module_back, module, type(module), dict(vars(module)), tables)


def _put_module_back(
    module: nn.Module, cls: type, attributes: dict[str, Any], tables: Iterable[tuple[Any, Any]]
) -> None:
    # What torch.compile() makes of a module hands on what is set on it.
    object.__setattr__(module, "__class__", cls)
    state = vars(module)
    state.clear()
    state.update(attributes)
    for table, content in tables:
        table.clear()
        table.update(content)


def keep_attributes(target: object, names: Iterable[str], undo: ExitStack) -> None:
    """Put back some attributes of an object."""
    for name in names:
        undo.callback(setattr, target, name, getattr(target, name))


def keep_values(tensors: Iterable[torch.Tensor], undo: ExitStack) -> None:
    """Put back the values of tensors, which are copied for it."""
    for tensor in tensors:
        undo.callback(_set_values, tensor, tensor.detach().clone())


def _set_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values)
