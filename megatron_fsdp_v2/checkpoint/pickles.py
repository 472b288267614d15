"""A pickle taken apart without making anything that is in it.

Python's unpicklers, restricted ones too, call what a pickle names and set attributes of what they
are handed: of a class that is shared by the whole process, for example. Here a name stays a name, a
call stays a record of a call, and both are gone with the pickle. Nothing is imported, called,
hashed or compared, so that the bytes decide about nothing but the tree that is returned.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Call",
    "Mapping",
    "Name",
    "PersistentId",
    "PickleError",
    "read_pickle",
    "reject_all_names",
]


class PickleError(ValueError):
    """A pickle is cut short, or holds what is not read here."""


@dataclass(slots=True, eq=False)
class Name:
    """A class or function a pickle refers to.

    Attributes:
        module: The module it is said to be in.
        name: Its name there, which may have dots.
    """

    module: str
    name: str

    @property
    def full(self) -> str:
        """Both in one."""
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Mapping:
    """A dictionary: its keys may be anything, and hashing them is left to whoever checked them.

    Attributes:
        pairs: Keys and values.
    """

    pairs: list[tuple[Any, Any]]


_NO_STATE = object()


@dataclass(slots=True, eq=False)
class Call:
    """What a pickle would have made: a call, the state given to its result, and its items.

    Attributes:
        of: What is called.
        args: With what.
        is_new: Whether it is `__new__` of a class that is called.
        pairs: Items set on the result.
    """

    of: Name
    args: tuple[Any, ...]
    is_new: bool
    pairs: list[tuple[Any, Any]]
    _state: Any = _NO_STATE

    @property
    def has_state(self) -> bool:
        """Whether the result was given a state."""
        return self._state is not _NO_STATE

    @property
    def state(self) -> Any:
        """This state; None where there is none."""
        return None if self._state is _NO_STATE else self._state

    def build(self, state: Any) -> None:
        """Note the state.

        Raises:
            PickleError: There is one already.
        """
        if self._state is not _NO_STATE:
            raise PickleError(f"{self.of.full} is given its state twice")
        self._state = state


@dataclass(slots=True, eq=False)
class PersistentId:
    """What the program that wrote a pickle put elsewhere.

    Attributes:
        pid: What it calls that.
    """

    pid: Any


def reject_all_names(module: str, name: str) -> None:
    """Reject every class and function.

    Raises:
        PickleError: Always.
    """
    raise PickleError(f"it refers to {module}.{name}")


def read_pickle(
    content: Any, check_name: Callable[[str, str], None], start: int = 0
) -> tuple[Any, int]:
    """Take a pickle apart.

    Of protocols 2 to 5, the operations that plain data and instances are written with. Memory and
    time are in proportion to the bytes that are read.

    Args:
        content: Bytes, or something that slices to bytes.
        check_name: Told module and name of whatever is referred to; raises what is to be raised
            where that is not allowed.
        start: Where it starts.

    Returns:
        None, bools, numbers, strings, bytes, lists, tuples, sets as `frozenset` calls, and the
        classes of this module; and where the pickle ends.

    Raises:
        PickleError: It is cut short, not well-formed, or has an operation that is not known here.
    """
    machine = _Machine(content, check_name, start)
    try:
        return machine.run(), machine.at
    except (IndexError, struct.error) as error:
        raise PickleError(f"the pickle ends or breaks off at byte {machine.at}") from error
    except KeyError as error:
        raise PickleError(f"it refers to {error}, which it does not hold") from error
    except (UnicodeDecodeError, TypeError) as error:
        raise PickleError(f"the pickle is not well-formed at byte {machine.at}: {error}") from error


_MARK = object()
_SET = Name("builtins", "set")
_FROZEN_SET = Name("builtins", "frozenset")
_CONSTANTS: dict[int, Any] = {
    ord("N"): None,
    0x88: True,
    0x89: False,
    ord(")"): (),
    ord("("): _MARK,
}
_MEMOIZE, _BINGET, _LONG_BINGET, _STOP = 0x94, ord("h"), ord("j"), ord(".")
_UINT32 = struct.Struct("<I")
_MAX_PROTOCOL = 5
_MAX_LINE = 1024

_SIZED = {
    ord("X"): ("<I", str),
    0x8C: ("<B", str),
    0x8D: ("<Q", str),
    ord("C"): ("<B", bytes),
    ord("B"): ("<I", bytes),
    0x8E: ("<Q", bytes),
    # Python 2 wrote strings of bytes this way.
    ord("U"): ("<B", bytes),
}
"""Operations that are followed by a length and as many bytes: how the length is written, and what
the bytes are."""

_NUMBERS = {
    ord(code): (form.unpack_from, form.size)
    for code, form in {
        "J": struct.Struct("<i"),
        "K": struct.Struct("<B"),
        "M": struct.Struct("<H"),
        "G": struct.Struct(">d"),
    }.items()
}


class _Machine:
    """The stack of a pickle and what it remembers."""

    def __init__(self, content: Any, check_name: Callable[[str, str], None], start: int) -> None:
        self.at = start
        self._content = content
        self._check_name = check_name
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._others: dict[int, Callable[[], None]] = {
            0x80: self._protocol,
            0x95: self._frame,
            ord("t"): lambda: self._stack.append(tuple(self._marked())),
            0x85: functools.partial(self._tuple, 1),
            0x86: functools.partial(self._tuple, 2),
            0x87: functools.partial(self._tuple, 3),
            ord("]"): lambda: self._stack.append([]),
            ord("a"): lambda: self._append([self._pop()]),
            ord("e"): lambda: self._append(self._marked()),
            ord("}"): lambda: self._stack.append(Mapping([])),
            ord("s"): lambda: self._set_items([self._pop(), self._pop()][::-1]),
            ord("u"): lambda: self._set_items(self._marked()),
            0x8F: lambda: self._stack.append(Call(_SET, ([],), False, [])),
            0x90: self._add_items,
            0x91: lambda: self._stack.append(Call(_FROZEN_SET, (self._marked(),), False, [])),
            0x8A: self._long,
            ord("q"): lambda: self._remember(self._number("<B")),
            ord("r"): lambda: self._remember(self._number("<I")),
            ord("c"): lambda: self._name(self._line(), self._line()),
            0x93: self._stack_name,
            ord("R"): lambda: self._call(is_new=False),
            0x81: lambda: self._call(is_new=True),
            ord("b"): self._build,
            ord("Q"): lambda: self._stack.append(PersistentId(self._pop())),
        }

    def run(self) -> Any:
        """Work through the operations; what is left in the end is what was pickled."""
        content, stack, memo, at = self._content, self._stack, self._memo, self.at
        while True:
            code = content[at]
            at += 1
            # Most operations of metadata are one of these; a call for each would take three times
            # as long.
            if code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _BINGET:
                stack.append(memo[content[at]])
                at += 1
            elif code in _NUMBERS:
                unpack, size = _NUMBERS[code]
                stack.append(unpack(content, at)[0])
                at += size
            elif code == _LONG_BINGET:
                stack.append(memo[_UINT32.unpack_from(content, at)[0]])
                at += 4
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code == _STOP:
                self.at = at
                return self._result()
            else:
                self.at = at
                self._work(code)
                at = self.at

    def _work(self, code: int) -> None:
        if code in _SIZED:
            length, kind = _SIZED[code]
            found = self._bytes(self._number(length))
            self._stack.append(str(found, "utf-8") if kind is str else found)
        elif code in self._others:
            self._others[code]()
        else:
            raise PickleError(
                f"the pickle has the operation {bytes([code])!r} at byte {self.at - 1}, which is "
                "not allowed"
            )

    def _result(self) -> Any:
        found = self._pop()
        if self._stack:
            raise PickleError(f"{len(self._stack)} values are left over")
        return found

    def _bytes(self, count: int) -> bytes:
        found = bytes(self._content[self.at : self.at + count])
        if len(found) != count:
            raise PickleError(f"the pickle ends {count - len(found)} bytes early")
        self.at += count
        return found

    def _number(self, form: str) -> Any:
        (found,) = struct.unpack_from(form, self._content, self.at)
        self.at += struct.calcsize(form)
        return found

    def _line(self) -> str:
        end = self._content.find(b"\n", self.at, self.at + _MAX_LINE)
        if end < 0:
            raise PickleError("a name in the pickle does not end")
        found = self._bytes(end - self.at)
        self.at += 1
        return str(found, "utf-8")

    def _pop(self) -> Any:
        found = self._stack.pop()
        if found is _MARK:
            raise PickleError("the pickle uses a mark as a value")
        return found

    def _top(self) -> Any:
        return self._stack[-1]

    def _marked(self) -> list[Any]:
        stack = self._stack
        position = len(stack) - 1
        while stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise PickleError("a mark is missing in the pickle")
        found = stack[position + 1 :]
        del stack[position:]
        return found

    def _tuple(self, count: int) -> None:
        found = tuple(self._stack[-count:])
        if len(found) != count or _MARK in found:
            raise PickleError("the pickle uses a mark as a value")
        self._stack[-count:] = [found]

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise PickleError("the pickle appends to something that is not a list")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not Mapping and type(target) is not Call:
            raise PickleError("the pickle sets items of something that is not a dictionary")
        if len(values) % 2:
            raise PickleError("the pickle has a key without a value")
        target.pairs.extend(zip(values[::2], values[1::2], strict=True))

    def _add_items(self) -> None:
        values, target = self._marked(), self._top()
        if type(target) is not Call or target.of is not _SET:
            raise PickleError("the pickle adds items to something that is not a set")
        target.args[0].extend(values)

    def _protocol(self) -> None:
        protocol = self._number("<B")
        if not 2 <= protocol <= _MAX_PROTOCOL:
            raise PickleError(f"the pickle is of protocol {protocol}, not one of 2 to 5")

    def _frame(self) -> None:
        length = self._number("<Q")
        if length > len(self._content) - self.at:
            raise PickleError(f"a frame of {length} bytes is longer than the pickle")

    def _long(self) -> None:
        found = self._bytes(self._number("<B"))
        self._stack.append(int.from_bytes(found, "little", signed=True))

    def _remember(self, number: int) -> None:
        self._memo[number] = self._top()

    def _name(self, module: str, name: str) -> None:
        self._check_name(module, name)
        self._stack.append(Name(module, name))

    def _stack_name(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise PickleError("the pickle refers to something whose name is not a string")
        self._name(module, name)

    def _call(self, *, is_new: bool) -> None:
        args, of = self._pop(), self._pop()
        if type(of) is not Name or type(args) is not tuple:
            raise PickleError("the pickle calls something that is not a name, or without arguments")
        self._stack.append(Call(of, args, is_new, []))

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if type(target) is not Call:
            kind = target.full if type(target) is Name else type(target).__name__
            raise PickleError(f"the pickle sets the state of {kind}, which is not its to change")
        target.build(state)
