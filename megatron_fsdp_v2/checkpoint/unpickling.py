"""Unpickle checkpoint files without running code from them.

The standard library's unpickler calls whatever a pickle names. `SafeUnpickler` calls only what a
subclass lists, and never puts a class, function or module on the stack where a later instruction
could change it.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, override

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

__all__ = ["Callee", "Ignored", "SafeUnpickler", "check_key", "size_of"]

_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT LONG1 BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 "
    "TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT MEMOIZE BINPUT LONG_BINPUT BINGET "
    "LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID"
)
_SCALARS = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)
_MAX_KEY_PARTS = 100
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Callee:
    """A class or function that a pickle may call.

    Attributes:
        call: What is called instead; checks its arguments.
    """

    call: Callable[..., Any]


class Ignored:
    """Stands for an object that is neither needed nor created."""

    def __init__(self, *args: Any) -> None:
        del args


_PythonUnpickler: Any = pickle._Unpickler
"""Private, and in the standard library since Python 3.0; the one in C cannot be restricted."""


class SafeUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Unpickles plain containers and calls only listed names.

    Subclasses implement `find_class` and `set_state`. Time and memory are proportional to the
    length of the pickle: calls and states may not reuse a large argument again and again, and
    dictionary keys are small.

    Args:
        content: The pickle, of protocol 2 to 5.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: _PythonUnpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _OPCODES.split())
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._budget = 1000 + 4 * len(content)

    @override
    def load(self) -> Any:
        """Unpickle.

        Raises:
            ValueError: The pickle is truncated, malformed, or refers to something not listed.
        """
        try:
            return super().load()
        except ValueError:
            raise
        except KeyError as error:
            raise ValueError(f"instruction or key {error} is not allowed") from error
        except Exception as error:
            raise ValueError(f"malformed pickle: {error or type(error).__name__}") from error

    @override
    def find_class(self, module: str, name: str) -> Any:
        """Return the `Callee`, or the constant, for a name.

        Raises:
            ValueError: The name is not listed.
        """
        raise ValueError(f"it refers to {module}.{name}, which is not allowed")

    def set_state(self, target: Any, state: Any) -> None:
        """Set the state of an object.

        Raises:
            ValueError: Objects of this kind have no state.
        """
        raise ValueError(f"it sets the state of a {type(target).__name__}")

    def _spend(self, *arguments: Any) -> None:
        self._budget -= sum(len(a) for a in arguments if hasattr(a, "__len__"))
        if self._budget < 0:
            raise ValueError("it uses the same large argument too often")

    def _load_call(self) -> None:
        arguments, callee = self.stack.pop(), self.stack.pop()
        if type(callee) is not Callee or type(arguments) is not tuple:
            raise ValueError(f"it calls a {type(callee).__name__}")
        self._spend(arguments, *arguments)
        self.append(callee.call(*arguments))

    def _load_state(self) -> None:
        state = self.stack.pop()
        self._spend(state)
        self.set_state(self.stack[-1], state)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict, Counter):
            raise ValueError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            target[key] = value

    def _load_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    dispatch |= {
        pickle.REDUCE[0]: _load_call,
        pickle.NEWOBJ[0]: _load_call,
        pickle.BUILD[0]: _load_state,
        pickle.SETITEM[0]: _load_item,
        pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
    }


def check_key(key: Any) -> None:
    """Check that a dictionary key is small.

    Hashing visits a tuple that contains another one twice as a tree: 60 nested pairs take forever.

    Raises:
        ValueError: It has too many parts, or a part that is not a key.
    """
    parts = [key]
    for part in parts:
        if type(part) in (tuple, torch.Size) and len(part) + len(parts) <= _MAX_KEY_PARTS:
            parts.extend(part)
        elif type(part) is MetadataIndex and len(parts) < _MAX_KEY_PARTS:
            parts.extend(vars(part).values())
        elif type(part) not in _SCALARS and type(part) is not Ignored:
            raise ValueError(f"a {type(part).__name__} is a dictionary key, or part of a long one")


def size_of(lengths: Any) -> torch.Size:
    """Make a `torch.Size`.

    Raises:
        ValueError: It is not a tuple or list of at most 64 integers from 0 to 2**63 - 1.
    """
    is_size = isinstance(lengths, tuple | list) and len(lengths) <= _MAX_DIMS
    if not is_size or not all(type(n) is int and 0 <= n < 1 << 63 for n in lengths):
        raise ValueError("a shape or an offset is not a tuple of at most 64 lengths")
    return torch.Size(lengths)
