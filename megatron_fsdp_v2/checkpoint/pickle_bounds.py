"""Bounds the memory of an untrusted pickle by its length, before and after it is unpickled.

A pickle of a few bytes can ask Python's unpickler for a memo of gigabytes, call a class with the
number of bytes to allocate, or nest one object in itself so often that its text has gigabytes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

_LINE, _TWO_LINES, _LENGTH_1, _LENGTH_4, _LENGTH_8, _PUT, _LONG_PUT, _EXTENSION, _STOP = range(
    -9, 0
)
"""Kinds of opcodes that are not followed by a fixed number of bytes, or that are checked."""

_BY_ARGUMENT = {
    pickletools.UP_TO_NEWLINE: _LINE,
    pickletools.TAKEN_FROM_ARGUMENT1: _LENGTH_1,
    pickletools.TAKEN_FROM_ARGUMENT4: _LENGTH_4,
    pickletools.TAKEN_FROM_ARGUMENT4U: _LENGTH_4,
    pickletools.TAKEN_FROM_ARGUMENT8U: _LENGTH_8,
}
_BY_NAME = {
    **{"GLOBAL": _TWO_LINES, "INST": _TWO_LINES, "PUT": _PUT, "LONG_BINPUT": _LONG_PUT},
    **{"EXT1": _EXTENSION, "EXT2": _EXTENSION, "EXT4": _EXTENSION, "STOP": _STOP},
}


def _kind(opcode: pickletools.OpcodeInfo) -> int:
    length = opcode.arg.n if opcode.arg is not None else 0
    return _BY_NAME.get(opcode.name, _BY_ARGUMENT.get(length, length))


_KINDS = {ord(opcode.code): _kind(opcode) for opcode in pickletools.opcodes}
"""By opcode: its kind, or the number of bytes that follow."""


def check_opcodes(content: bytes) -> None:
    """Check that unpickling allocates no more than a multiple of the pickle's length.

    Raises:
        ValueError: The index of a memo or the length of a string is larger than the pickle, it
            refers to objects that a process has registered with copyreg, or it has no end.
    """
    position, end = 0, len(content)
    while position < end:
        kind = _KINDS.get(content[position])
        position += 1
        if kind is None:
            raise ValueError("it has an unknown opcode")
        if kind >= 0:
            position += kind
        elif kind == _LENGTH_1:
            position += 1 + content[position] if position < end else 1
        elif kind in (_LENGTH_4, _LENGTH_8):
            size = 4 if kind == _LENGTH_4 else 8
            length = int.from_bytes(content[position : position + size], "little")
            position += size + length
        elif kind == _LONG_PUT:
            _check_index(int.from_bytes(content[position : position + 4], "little"), end)
            position += 4
        elif kind in (_LINE, _TWO_LINES, _PUT):
            start = position
            for _ in range(2 if kind == _TWO_LINES else 1):
                position = content.find(b"\n", position) + 1 or end
            if kind == _PUT:
                _check_index(int(content[start:position]), end)
        elif kind == _EXTENSION:
            raise ValueError("it refers to objects that a process has registered with copyreg")
        else:
            return
    raise ValueError("it has no end")


def _check_index(index: int, most: int) -> None:
    if not 0 <= index <= most:
        raise ValueError(f"it has the index {index} and {most} bytes")


def check_call(name: str, arguments: tuple[Any, ...]) -> None:
    """Check that a call of a pickle does not allocate memory of a size that it names.

    Args:
        name: What it calls, with its module.
        arguments: The arguments.

    Raises:
        ValueError: It does, and no library's pickles do so.
    """
    module, _, function = name.rpartition(".")
    if module.startswith("torch") and function.endswith(("Tensor", "Storage")):
        is_allowed = False
    else:
        is_allowed = _ALLOWED.get((module.partition(".")[0], function), _always)(arguments)
    if not is_allowed:
        raise ValueError(f"it calls {name[:_MOST_CHARACTERS]} with a size")


def _always(arguments: tuple[Any, ...]) -> bool:
    del arguments
    return True


def _has_no_number(arguments: tuple[Any, ...]) -> bool:
    return not any(isinstance(argument, int) for argument in arguments)


_ALLOWED: Mapping[tuple[str, str], Callable[[tuple[Any, ...]], bool]] = {
    **{(module, "bytes"): _has_no_number for module in ("builtins", "__builtin__")},
    **{(module, "bytearray"): _has_no_number for module in ("builtins", "__builtin__")},
    # Other codecs than the one that pickles name make a string longer.
    ("_codecs", "encode"): lambda arguments: arguments[1:] in (("latin1",), ("latin-1",)),
    ("numpy", "ndarray"): lambda arguments: not arguments,
    ("numpy", "_reconstruct"): lambda arguments: arguments[1:2] == ((0,),),
}
"""Whether a call with these arguments is allowed, by package and function."""

_MOST_CHARACTERS = 100

_EXPANSION = 64
_MOST_EXPANDED = 1 << 24


def check_expansion(value: Any, nbytes: int) -> None:
    """Check that the text of an object is not much longer than its pickle.

    An object that refers several times to one that refers several times to another one, and so on,
    is small in memory, and grows exponentially when it is printed or copied.

    Args:
        value: What was unpickled.
        nbytes: Length of the pickle.

    Raises:
        ValueError: It expands to more than 64 times its pickle, and 16 million characters.
    """
    if _expanded(value) > max(_EXPANSION * nbytes, _MOST_EXPANDED):
        raise ValueError("its objects contain each other too often")


def _expanded(value: Any) -> int:
    """Return about the length of the text of an object. What contains itself counts once."""
    known: dict[int, int] = {}
    # An object comes up twice: before those that it contains, and after them.
    pending = [(value, False)]
    while pending:
        item, has_sizes = pending.pop()
        inside = _contained(item)
        if has_sizes:
            known[id(item)] = 1 + sum(known[id(other)] for other in inside)
        elif id(item) not in known:
            known[id(item)] = 1 + (len(item) if isinstance(item, str | bytes) else 0)
            if inside:
                pending += [(item, True), *((other, False) for other in inside)]
    return known[id(value)]


def _contained(item: Any) -> list[Any]:
    """Return what an object contains. The objects of one call are those of the next."""
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    attributes = getattr(item, "__dict__", None)
    return list(attributes.values()) if type(attributes) is dict else []
