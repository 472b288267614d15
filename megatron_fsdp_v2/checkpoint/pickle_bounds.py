"""Bounds the memory of an untrusted pickle by its length, before and after it is unpickled.

A pickle of a few bytes can ask Python's unpickler for a memo of gigabytes, call a class with the
number of bytes to allocate, or nest one object in itself so often that its text has gigabytes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_INDEXED = ("PUT", "LONG_BINPUT")
_EXTENSIONS = ("EXT1", "EXT2", "EXT4")
_NUM_SKIPPED = {
    code: opcode.arg.n if opcode.arg is not None else 0
    for code, opcode in _OPCODES.items()
    if (opcode.arg is None or opcode.arg.n >= 0) and opcode.name not in (*_INDEXED, *_EXTENSIONS)
}
"""Bytes that follow an opcode, for those that need no check: `pickletools.genops` decodes all."""


def check_opcodes(content: bytes) -> None:
    """Check that unpickling allocates no more than a multiple of the pickle's length.

    Raises:
        ValueError: The index of a memo or the length of a string is larger than the pickle, it
            refers to objects that a process has registered with copyreg, or it has no end.
    """
    stream = io.BytesIO(content)
    while (code := stream.read(1)) != pickle.STOP:
        if code in _NUM_SKIPPED:
            stream.seek(_NUM_SKIPPED[code], io.SEEK_CUR)
            continue
        if code not in _OPCODES:
            raise ValueError("it has an unknown opcode" if code else "it has no end")
        opcode = _OPCODES[code]
        if opcode.name in _EXTENSIONS:
            raise ValueError("it refers to objects that a process has registered with copyreg")
        assert opcode.arg is not None
        # Raises a ValueError if fewer bytes are left than the argument says.
        argument = opcode.arg.reader(stream)
        if opcode.name in _INDEXED and not 0 <= argument <= len(content):
            raise ValueError(f"it has the index {argument} and {len(content)} bytes")


def check_call(name: str, arguments: tuple[Any, ...]) -> None:
    """Check that a call of a pickle does not allocate memory of a size that it names.

    Args:
        name: What it calls, with its module.
        arguments: The arguments.

    Raises:
        ValueError: It does, and no library's pickles do so.
    """
    module, _, function = name.rpartition(".")
    match module.partition(".")[0], function:
        case (("builtins" | "__builtin__"), ("bytes" | "bytearray")):
            is_allowed = not any(isinstance(argument, int) for argument in arguments)
        case "_codecs", "encode":
            # Other codecs than the one that pickles name make a string longer.
            is_allowed = arguments[1:] in (("latin1",), ("latin-1",))
        case "numpy", "ndarray":
            is_allowed = not arguments
        case "numpy", "_reconstruct":
            is_allowed = arguments[1:2] == ((0,),)
        case _:
            is_maker = function.endswith(("Tensor", "Storage"))
            is_allowed = not (module.startswith("torch") and is_maker)
    if not is_allowed:
        raise ValueError(f"it calls {name[:_MOST_CHARACTERS]} with a size")


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
