"""Read checkpoint files that are not trusted: names, numbers, JSON and pickles.

The standard library's unpickler calls any function that a pickle names. `SafeUnpickler` calls only
functions that a subclass lists, and never puts a class, function or module on the stack where a
later instruction could change it. `load_plain` reads the files of `torch.save`: a zip archive in
which `data.pkl` describes objects, and one uncompressed record holds the elements of each storage.
Loaded tensors are views of the archive in memory.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any, ClassVar, override

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

__all__ = [
    "DTYPES",
    "Archive",
    "Callee",
    "Ignored",
    "PlainUnpickler",
    "SafeUnpickler",
    "blank",
    "check_file_name",
    "check_name",
    "file_inside",
    "integer",
    "load_plain",
    "map_file",
    "read_json",
    "reason_of",
    "set_attributes",
    "shown",
    "size_of",
]

MAX_INT = (1 << 63) - 1
"""Offsets, lengths and sizes of tensors in bytes are at most this."""

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
}
"""Dtypes by their names in pickles."""

_MAX_NAME = 1 << 16
_MAX_FILE_NAME = 255


def check_name(name: Any) -> str:
    """Check that a value can be the name of an entry, and be printed on a terminal.

    Raises:
        ValueError: It is not a string, too long, or not printable.
    """
    if type(name) is not str:
        raise ValueError(f"{shown(name)} is in the place of a name")
    if len(name) > _MAX_NAME or not name.isprintable():
        raise ValueError(f"the name {shown(name)} is too long, or cannot be shown")
    return name


def check_file_name(name: Any, what: str) -> str:
    """Check that a value is the name of a file directly in a folder.

    Args:
        name: The name.
        what: The entry that is stored there, for the error.

    Raises:
        ValueError: It is not a plain file name.
    """
    is_name = type(name) is str and 0 < len(name) <= _MAX_FILE_NAME and name.isprintable()
    if not is_name or name in (".", "..") or "/" in name or "\\" in name:
        raise ValueError(f"the file of {what}, {shown(name)}, is not in the same folder")
    return str(name)


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder.

    Raises:
        CheckpointError: It is a link to a file outside of the folder, or to none.
    """
    file = folder / name
    if not file.is_symlink():
        return file
    # Path.resolve() raises where links go in a circle.
    parent, own = Path(os.path.realpath(file)).parent, Path(os.path.realpath(folder))
    if parent != own or not file.exists():
        raise CheckpointError(
            f"{file} is a link to nothing, or to a file outside of its folder; copy the file there "
            "if you trust it"
        )
    return file


def integer(value: Any, most: int = MAX_INT) -> int:
    """Check a count or an offset.

    Raises:
        ValueError: It is not an integer from 0 to `most`.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{shown(value)} is in the place of a number from 0 to {most}")
    return value


def read_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: It is not valid, not an object, or nested too deeply.
    """
    try:
        found = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if type(found) is not dict:
        raise ValueError("it is not an object")
    return found


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


def blank(cls: Any) -> Callee:
    """A call that makes an instance without attributes, which are set afterwards."""
    return Callee(lambda: cls.__new__(cls))


class Ignored:
    """Stands for an object that is neither needed nor created."""

    def __init__(self, *args: Any) -> None:
        del args


_PythonUnpickler: Any = pickle._Unpickler
"""Private, and in the standard library since Python 3.0; the one in C cannot be restricted."""


class SafeUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Unpickles plain containers and calls only listed names.

    Subclasses list `names` and implement `set_state`. Time and memory are proportional to the
    length of the pickle: calls and states may not reuse a large argument again and again, and
    dictionary keys are small.

    Args:
        content: The pickle, of protocol 2 to 5.

    Attributes:
        names: What a pickle may refer to: constants, and a `Callee` for what it may call.
    """

    names: ClassVar[Mapping[str, Any]] = {}
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: _PythonUnpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _OPCODES.split())
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._budget = 1000 + 4 * len(content)

    @override
    def find_class(self, module: str, name: str) -> Any:
        """Return the `Callee`, or the constant, for a name.

        Raises:
            ValueError: The name is not listed.
        """
        full = f"{module}.{name}"
        if full not in self.names:
            raise ValueError(f"it refers to {full}, which is not allowed")
        return self.names[full]

    def set_state(self, target: Any, state: Any) -> None:
        """Set the state of an object.

        Raises:
            ValueError: Objects of this kind have no state.
        """
        raise ValueError(f"it sets the state of a {type(target).__name__}")

    def spend(self, *arguments: Any) -> None:
        """Count the lengths of arguments; a large one may not be used again and again.

        Raises:
            ValueError: It was.
        """
        self._budget -= sum(len(a) for a in arguments if hasattr(a, "__len__"))
        if self._budget < 0:
            raise ValueError("it uses the same large argument too often")

    def _load_call(self) -> None:
        arguments, callee = self.stack.pop(), self.stack.pop()
        if type(callee) is not Callee or type(arguments) is not tuple:
            raise ValueError(f"it calls a {type(callee).__name__}")
        self.spend(arguments, *arguments)
        self.append(callee.call(*arguments))

    def _load_state(self) -> None:
        state = self.stack.pop()
        self.spend(state)
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


_MAX_DESCRIPTION = 1 << 28
_LOCAL_HEADER, _END_RECORD = 30, 22
"""Bytes of the header before a record, and of the end of an archive without a comment."""


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory; what is changed there does not reach the file.

    Raises:
        CheckpointError: It is empty.
    """
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be loaded as plain data: it is empty") from error


@dataclass(frozen=True, slots=True, eq=False)
class _StorageType:
    """The type of a storage; an untyped storage has no dtype."""

    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """A storage: its elements as bytes, and their dtype."""

    dtype: torch.dtype | None
    elements: torch.Tensor


class Archive:
    """An archive that `torch.save` wrote.

    Args:
        content: The archive in memory.

    Raises:
        zipfile.BadZipFile: It is not a zip archive, or damaged.
        ValueError: Torch would read other records from it.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        with zipfile.ZipFile(content) as archive:  # type: ignore[call-overload]
            records = archive.infolist()
        # Torch ignores the case and the Unicode Path field of a name, reads the folder of the first
        # record, and expects neither bytes before the first record nor a comment at the end.
        names = {record.orig_filename.casefold() for record in records}
        is_ambiguous = (
            len(names) < len(records)
            or len({name.partition("/")[0] for name in names}) > 1
            or any(record.filename != record.orig_filename for record in records)
            or min((record.header_offset for record in records), default=0) > 0
            or content[-_END_RECORD : -_END_RECORD + 4] != b"PK\5\6"
        )
        if is_ambiguous:
            raise ValueError("two readers of the archive could read different records")
        self._records = {record.filename.partition("/")[2]: record for record in records}

    def description(self) -> bytes:
        """The pickle that describes the objects.

        Raises:
            ValueError: There is none, it is too long, or elements are in another byte order.
        """
        start, length = self._place("data.pkl")
        if length > _MAX_DESCRIPTION:
            raise ValueError("data.pkl is too long")
        if "byteorder" in self._records:
            at, count = self._place("byteorder")
            if self._content[at : at + count] != sys.byteorder.encode():
                raise ValueError("its elements are in another byte order than this machine's")
        return self._content[start : start + length]

    def elements(self, key: str) -> torch.Tensor:
        """The bytes of a storage, sharing memory with the archive.

        Raises:
            ValueError: There is no such storage, or it is not stored as it is.
        """
        start, length = self._place(f"data/{key}")
        if not length:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._content, dtype=torch.uint8, count=length, offset=start)

    def intact(self) -> dict[str, bool]:
        """Whether the bytes of each record have its CRC-32, by name."""
        found = {}
        with memoryview(self._content) as content:
            for name, record in self._records.items():
                start, length = self._place(name)
                found[name] = zlib.crc32(content[start : start + length]) == record.CRC
        return found

    def _place(self, name: str) -> tuple[int, int]:
        """Return the first byte of a record, and its length."""
        record = self._records.get(name)
        if record is None:
            raise ValueError(f"the archive has no {name}")
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 0x1:
            raise ValueError(f"the record {name} is compressed or encrypted")
        at = record.header_offset
        name_length, extra = struct.unpack("<HH", self._content[at + 26 : at + _LOCAL_HEADER])
        start = at + _LOCAL_HEADER + name_length + extra
        if start + record.file_size > len(self._content):
            raise ValueError(f"the record {name} is longer than the archive")
        return start, record.file_size


def _tensor(
    storage: Any, first: Any, shape: Any, stride: Any, grad: Any = None, hooks: Any = None, *of: Any
) -> torch.Tensor:
    dtype, *metadata = of if of and type(of[0]) is torch.dtype else (None, *of)
    if type(storage) is not _Storage or any(metadata):
        raise ValueError("a tensor has no storage, or is a conjugate or negative view")
    elements = storage.elements.view(storage.dtype or dtype)
    return elements.as_strided(size_of(shape), size_of(stride), integer(first))


def _subclassed(rebuild: Any, cls: Any, args: Any, state: Any) -> Any:
    if rebuild not in (_TENSOR, _PARAMETER) or cls is not _TENSOR_CLASS:
        raise ValueError("it calls something that does not make a tensor")
    return rebuild.call(*args)


def _encoded(text: Any, encoding: Any) -> bytes:
    # How protocol 2 writes bytes. Other encodings make a string longer each time.
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError(f"it encodes a {type(text).__name__}")
    return text.encode("latin1")


def _bytearray(*args: Any) -> bytearray:
    # `bytearray(n)` would allocate n zeros.
    return bytearray(_encoded(*args) if len(args) == 2 else b"".join(args))


def _set(values: list[Any]) -> set[Any]:
    for value in values:
        check_key(value)
    return set(values)


def _checked_call(function: Callable[..., Any], *kinds: type) -> Callee:
    """A call with arguments of these types."""

    def call(*args: Any) -> Any:
        if any(type(arg) is not kind for arg, kind in zip(args, kinds, strict=False)):
            raise ValueError(f"it calls something with {[type(arg).__name__ for arg in args]}")
        return function(*args)

    return Callee(call)


_STORAGES = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16},
    **{"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16},
    **{"Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool},
    **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
_TENSOR_CLASS = object()
_TENSOR = Callee(_tensor)
_PARAMETER = _checked_call(lambda data, *_: data, torch.Tensor)


class PlainUnpickler(SafeUnpickler):
    """Creates numbers, strings, containers and tensors, and nothing else.

    Args:
        archive: What `torch.save` wrote.
    """

    names: ClassVar[Mapping[str, Any]] = {
        **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
        "torch.storage.UntypedStorage": _StorageType(None),
        **{f"torch.{name}Storage": _StorageType(dtype) for name, dtype in _STORAGES.items()},
        "torch._utils._rebuild_tensor": _TENSOR,
        "torch._utils._rebuild_tensor_v2": _TENSOR,
        "torch._utils._rebuild_tensor_v3": _TENSOR,
        "torch._utils._rebuild_parameter": _PARAMETER,
        "torch._utils._rebuild_parameter_with_state": _PARAMETER,
        "torch._tensor._rebuild_from_type_v2": Callee(_subclassed),
        "torch.Tensor": _TENSOR_CLASS,
        "torch.nn.parameter.Parameter": _TENSOR_CLASS,
        "torch.Size": Callee(size_of),
        "torch.device": _checked_call(torch.device, str, int),
        "collections.OrderedDict": Callee(lambda: OrderedDict()),
        "collections.Counter": _checked_call(Counter, dict),
        "_codecs.encode": Callee(_encoded),
        "__builtin__.bytes": Callee(lambda: b""),
        "__builtin__.bytearray": Callee(_bytearray),
        "__builtin__.set": _checked_call(_set, list),
        "__builtin__.complex": _checked_call(complex, float, float),
    }

    def __init__(self, archive: Archive) -> None:
        super().__init__(archive.description())
        self._archive = archive
        self._storages: dict[str, torch.Tensor] = {}

    @override
    def persistent_load(self, pid: Any) -> _Storage:
        kind, cls, key, _, numel = pid
        if kind != "storage" or type(cls) is not _StorageType or type(key) is not str:
            raise ValueError("it refers to something that is not a storage")
        if key not in self._storages:
            self._storages[key] = self._archive.elements(key)
        elements = self._storages[key]
        nbytes = integer(numel) * (1 if cls.dtype is None else cls.dtype.itemsize)
        if nbytes > len(elements):
            raise ValueError(f"the storage {key} is shorter than recorded")
        return _Storage(cls.dtype, elements[:nbytes])

    @override
    def set_state(self, target: Any, state: Any) -> None:
        if type(target) is OrderedDict:
            # The state dict of a module has an attribute with versions.
            set_attributes(target, state)
        else:
            super().set_state(target, state)


def set_attributes(target: Any, state: Any) -> None:
    """Set attributes of an object.

    Raises:
        ValueError: They are not a dictionary, or a name is not plain.
    """
    if type(state) is not dict or any(type(k) is not str or k[:2] == "__" for k in state):
        raise ValueError(f"it sets attributes of a {type(target).__name__} without plain names")
    vars(target).update(state)


def load_plain(
    content: bytes | mmap.mmap, what: str, unpickler: type[PlainUnpickler] = PlainUnpickler
) -> Any:
    """Load plain data: numbers, containers and tensors on the CPU.

    Args:
        content: What `torch.save` wrote. Tensors share memory with a map.
        what: What to call it in an error.
        unpickler: Creates the objects.

    Raises:
        CheckpointError: It holds something else.
    """
    try:
        if isinstance(content, bytes):
            memory = mmap.mmap(-1, len(content))
            memory.write(content)
            content = memory
        return unpickler(Archive(content)).load()
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{what} cannot be loaded as plain data: it is damaged or not a zip archive ({error}); "
            "load a file of torch before 1.6 with torch and save it again"
        ) from error
    # Damaged archives and pickles raise nearly anything.
    except Exception as error:
        raise CheckpointError(
            f"{what} cannot be loaded as plain data ({reason_of(error)}); do not use this "
            "checkpoint unless you know where it is from"
        ) from error


def reason_of(error: Exception) -> str:
    """Describe in one line why a file could not be unpickled."""
    return (str(error) if isinstance(error, ValueError) else repr(error)).partition("\n")[0]
