"""A checkpoint folder in Megatron's format.

Its non-tensor entries contain plain data and instances of the few classes that Megatron saves.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import pathlib
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, override

import numpy
from megatron.core.safe_globals import SAFE_GLOBALS

from megatron_fsdp_v2.checkpoint import unpickling
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.unpickling import Callee, PlainUnpickler, blank, set_attributes

__all__ = ["MegatronFolder", "load_plain"]

_NUMBERS = re.compile(r"[<|=]?[biufc]\d{1,2}")


def _dtype(text: str, *_: Any) -> numpy.dtype[Any]:
    if not _NUMBERS.fullmatch(text):
        raise ValueError(f"numpy dtype {text!r} is not numeric")
    return numpy.dtype(text)


def _array(*_: Any) -> Any:
    """Return an empty array; numpy checks the state that is set on it."""
    return numpy.empty(0, "b")


_ARRAY = Callee(_array)


def _path(*parts: Any) -> pathlib.PurePath:
    if any(type(part) is not str for part in parts):
        raise ValueError("a path is not made of strings")
    return pathlib.PurePath(*parts)


_WITH_ATTRIBUTES = tuple(
    cls
    for cls in SAFE_GLOBALS
    if cls in (argparse.Namespace, types.SimpleNamespace) or dataclasses.is_dataclass(cls)
)


def _names() -> Iterator[tuple[str, Any]]:
    """Yield the names of the enumerations and option classes that Megatron saves."""
    for cls in SAFE_GLOBALS:
        if isinstance(cls, enum.EnumMeta):
            yield f"{cls.__module__}.{cls.__qualname__}", Callee(cls)
        elif cls in _WITH_ATTRIBUTES:
            yield f"{cls.__module__}.{cls.__qualname__}", blank(cls)


class _MegatronUnpickler(PlainUnpickler):
    """Creates plain data, arrays of numbers, and the enumerations and options of Megatron."""

    names: ClassVar = {
        **PlainUnpickler.names,
        **dict(_names()),
        "pathlib.PosixPath": Callee(_path),
        "pathlib._local.PosixPath": Callee(_path),
        "numpy.dtype": Callee(_dtype),
        "numpy.ndarray": _ARRAY,
        "numpy.core.multiarray._reconstruct": _ARRAY,
        "numpy._core.multiarray._reconstruct": _ARRAY,
    }

    @override
    def set_state(self, target: Any, state: Any) -> None:
        if isinstance(target, numpy.ndarray):
            target.__setstate__(state)
        elif isinstance(target, numpy.dtype):
            # Byte order, followed by the fields, sizes and flags of non-numeric dtypes.
            if state[1] not in ("<", "|", "=") or state[2:] != (None, None, None, -1, -1, 0):
                raise ValueError("the file changes a numpy dtype")
        elif isinstance(target, _WITH_ATTRIBUTES):
            set_attributes(target, state)
        else:
            super().set_state(target, state)


class MegatronFolder(CheckpointFolder):
    """A folder of torch's distributed checkpoint that Megatron wrote."""

    _unpickler = _MegatronUnpickler


def load_plain(file: Path) -> Any:
    """Load a file of plain data and instances of the few classes that Megatron saves.

    Raises:
        CheckpointError: The file contains other objects.
    """
    return unpickling.load_plain(unpickling.map_file(file), str(file), _MegatronUnpickler)
