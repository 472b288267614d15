"""Read what `torch.save` wrote, without running code from it.

A file is a zip archive: `data.pkl` describes objects, and one uncompressed record holds the
elements of each storage. `data.pkl` is unpickled here into stubs first, which shows where the
elements of a tensor lie, and what `torch.load(weights_only=True)` would be made to call.
"""

from __future__ import annotations

import contextlib
import enum
import io
import math
import os
import re
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, override

import torch

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.trust import DTYPES, integer
from megatron_fsdp_v2.checkpoint.unpickling import (
    Callee,
    Ignored,
    SafeUnpickler,
    check_key,
    size_of,
)

__all__ = [
    "STORAGE_DTYPES",
    "FileView",
    "StoredTensor",
    "checksum",
    "find_tensor",
    "load_plain",
    "open_archive",
    "read_block",
]

STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""Typed storages, which a pickled tensor names instead of its dtype."""

_MAX_DESCRIPTION = 1 << 28
_LOCAL_HEADER = 30
_END = 22
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc]\d{1,2}")


# -- parts of files -------------------------------------------------------------------------------


class FileView(io.RawIOBase):
    """A part of a file as if it were a file.

    Args:
        file: The file, which is not closed with the view.
        offset: First byte of the part.
        length: Bytes of the part.
    """

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._offset + self._position)
        # A raw file may read less than it is asked for; a buffered one does so at its end.
        read: int = self._file.readinto(view[:count])  # type: ignore[attr-defined]
        self._position += read
        return read


def checksum(
    view: FileView, scratch: bytearray, progress: Callable[[int], None] | None = None
) -> tuple[int, int]:
    """Compute the CRC-32 of a part of a file.

    Args:
        view: The part.
        scratch: Buffer for reading.
        progress: Called with the number of bytes of each read.

    Returns:
        The checksum and the number of bytes, less than the length of the part if the file ends.
    """
    view.seek(0)
    crc32, count = 0, 0
    while read := view.readinto(scratch):
        crc32 = zlib.crc32(memoryview(scratch)[:read], crc32)
        count += read
        if progress is not None:
            progress(read)
    return crc32, count


# -- archives -------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_archive(file: Any) -> Iterator[zipfile.ZipFile]:
    """Open an archive that `torch.save` wrote, if Python and torch read the same records from it.

    Args:
        file: Its path, or a seekable binary file.

    Raises:
        ValueError: A record is compressed, encrypted or has two names, two records have the same
            name, records overlap, or something precedes or follows the archive.
        Exception: The archive is damaged; `zipfile` raises many kinds of errors.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        # Torch looks records up without regard to case.
        names = {record.filename.casefold() for record in records}
        if len(names) != len(records) or len({n.partition("/")[0] for n in names}) > 1:
            raise ValueError("two records of the archive have the same name, or are in two folders")
        end = 0
        for record in sorted(records, key=lambda record: record.header_offset):
            # zipfile takes a name from the Unicode Path field (0x7075) that torch does not look at.
            if record.orig_filename != record.filename:
                raise ValueError(f"the record {record.filename!r} has a second name")
            is_plain = record.compress_type == zipfile.ZIP_STORED and not record.flag_bits & 0x1
            if not is_plain or record.compress_size != record.file_size:
                raise ValueError(f"the record {record.filename!r} is compressed or encrypted")
            if record.header_offset < end or (end == 0 and record.header_offset):
                raise ValueError("records of the archive overlap, or something precedes them")
            end = record.header_offset + _LOCAL_HEADER + record.file_size
        content = archive.fp
        assert content is not None
        content.seek(-_END, os.SEEK_END)
        if end > archive.start_dir or archive.comment or content.read(4) != b"PK\x05\x06":
            raise ValueError("records are longer than the archive, or something follows it")
        yield archive


def _record(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo | None:
    """Find a record below the folder that all records are in."""
    folder = archive.namelist()[0].partition("/")[0]
    with contextlib.suppress(KeyError):
        return archive.getinfo(f"{folder}/{name}")
    return None


# -- descriptions of tensors and plain data -------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """A storage, or the class of one: `record` is empty then, and `dtype` None if untyped."""

    dtype: torch.dtype | None
    record: str = ""
    numel: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A tensor as a pickle describes it."""

    storage: _Storage
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def is_contiguous(self) -> bool:
        step = 1
        for length, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length > 1 and stride != step and 0 not in self.shape:
                return False
            step *= length
        return True


class _Instance:
    """An instance of a class that the caller allowed."""

    def __init__(self, *args: Any) -> None:
        del args


class _NumpyDtype(_Instance):
    """A copy of a dtype of numbers; other dtypes are shared by the whole process."""

    def __init__(self, text: str, align: Any = None, copy: Any = None) -> None:
        if not _NUMPY_DTYPE.fullmatch(text) or align not in (0, False) or copy not in (1, True):
            raise ValueError("a dtype of numpy is not a copy of one of numbers")


class _NumpyArray(_Instance):
    """An empty array, whose state numpy compares with the length of its elements."""

    def __init__(self, cls: Any, shape: Any, code: Any) -> None:
        if shape != (0,):
            raise ValueError("an array of numpy is not empty at first")


def _tensor(
    storage: Any, first: Any, shape: Any, stride: Any, grad: Any = None, hooks: Any = None, *of: Any
) -> _Tensor:
    if type(storage) is not _Storage or not storage.record or len(shape) != len(stride):
        raise ValueError("a tensor has no storage, or strides of other dimensions")
    dtype = storage.dtype or (of[0] if of and type(of[0]) is torch.dtype else None)
    return _Tensor(storage, integer(first), size_of(shape), size_of(stride), dtype)


def _parameter(data: Any, grad: Any = None, hooks: Any = None, state: Any = None) -> Any:
    if type(data) is not _Tensor:
        raise ValueError(f"a parameter is made of a {type(data).__name__}")
    _check_attributes(state)
    return data


def _typed(rebuild: Any, cls: Any, args: Any, state: Any) -> Any:
    if rebuild not in (_TENSOR, _PARAMETER) or cls is not _TENSOR_CLASS:
        raise ValueError("it calls something that does not make a tensor")
    _check_attributes(state)
    return rebuild.call(*args)


def _encoded(text: Any, encoding: Any) -> bytes:
    # How protocol 2 writes bytes. Other encodings make a string longer each time.
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError(f"it encodes a {type(text).__name__}")
    return text.encode("latin1")


def _bytearray(*args: Any) -> bytearray:
    # Of a number it would be as many zeros.
    return bytearray(_encoded(*args) if len(args) == 2 else b"".join(args))


def _set(values: Any) -> Ignored:
    for value in values if type(values) is list else [[]]:
        check_key(value)
    return Ignored()


def _checked_call(*kinds: type) -> Callee:
    """A call that is harmless with arguments of these types."""

    def call(*args: Any) -> Ignored:
        if any(type(arg) is not kind for arg, kind in zip(args, kinds, strict=False)):
            raise ValueError(f"it calls something with {[type(arg).__name__ for arg in args]}")
        return Ignored()

    return Callee(call)


def _check_attributes(state: Any) -> None:
    for part in state if type(state) is tuple and len(state) == 2 else (state,):
        if part in (None, ()):
            continue
        if type(part) is not dict or any(type(k) is not str or k[:2] == "__" for k in part):
            raise ValueError("it sets attributes by no plain names")


_TENSOR_CLASS = object()
_TENSOR, _PARAMETER = Callee(_tensor), Callee(_parameter)
_DESCRIBED: dict[str, Any] = {
    **{f"torch.{name}": _Storage(dtype) for name, dtype in STORAGE_DTYPES.items()},
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    "torch._utils._rebuild_tensor": _TENSOR,
    "torch._utils._rebuild_tensor_v2": _TENSOR,
    "torch._utils._rebuild_tensor_v3": _TENSOR,
    "torch.storage.UntypedStorage": _Storage(None),
    "collections.OrderedDict": Callee(lambda: OrderedDict()),
}
"""What a tensor, or a dictionary of some, is described with."""
_PLAIN: dict[str, Any] = _DESCRIBED | {
    "torch._utils._rebuild_parameter": _PARAMETER,
    "torch._utils._rebuild_parameter_with_state": _PARAMETER,
    "torch._tensor._rebuild_from_type_v2": Callee(_typed),
    "torch.Tensor": _TENSOR_CLASS,
    "torch.nn.parameter.Parameter": _TENSOR_CLASS,
    "collections.Counter": _checked_call(dict),
    "torch.Size": Callee(size_of),
    "torch.device": _checked_call(str, int),
    "torch.serialization._get_layout": _checked_call(str),
    "_codecs.encode": Callee(_encoded),
    "__builtin__.bytearray": Callee(_bytearray),
    "__builtin__.set": Callee(_set),
    "__builtin__.complex": _checked_call(float, float),
}


def _allowed(found: Any) -> Callee:
    """Return what is called for a class or function that the caller allowed."""
    if found.__module__.partition(".")[0] == "numpy":
        return Callee(
            {"dtype": _NumpyDtype, "_reconstruct": _NumpyArray}.get(found.__name__, Ignored)
        )
    if isinstance(found, enum.EnumMeta) or not isinstance(found, type):
        # Members of an enumeration are shared by the whole process: they get no state.
        return Callee(Ignored)
    return Callee(type(found.__name__, (_Instance,), {"cls": found}))


class _PlainUnpickler(SafeUnpickler):
    """Describes plain data; creates no class of the caller's, and no tensor.

    Args:
        content: `data.pkl`.
        length_of: Returns the bytes of a storage by its record, None if there is none.
        names: What the pickle may refer to.
    """

    def __init__(
        self, content: bytes, length_of: Callable[[str], int | None], names: dict[str, Any]
    ) -> None:
        super().__init__(content)
        self._length_of, self._names = length_of, names

    @override
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        return self._names[full] if full in self._names else super().find_class(module, name)

    @override
    def persistent_load(self, pid: Any) -> _Storage:
        kind, cls, record, _, numel, *view = pid
        if kind != "storage" or type(cls) is not _Storage or cls.record or any(view):
            raise ValueError("it refers to something that is not a storage")
        length = self._length_of(record) if type(record) is str else None
        itemsize = 1 if cls.dtype is None else cls.dtype.itemsize
        if length is None or integer(numel) * itemsize > length:
            raise ValueError(f"the storage {record!r} is missing, or shorter than it is said to be")
        return _Storage(cls.dtype, record, numel)

    @override
    def set_state(self, target: Any, state: Any) -> None:
        if type(target) is _NumpyDtype:
            # Byte order; then fields, sizes and flags of dtypes that are not numbers.
            if state[1] not in ("<", ">", "|", "=") or state[2:] != (None, None, None, -1, -1, 0):
                raise ValueError("it changes a dtype of numpy")
        elif isinstance(target, _Instance | OrderedDict):
            has_own = hasattr(getattr(target, "cls", None), "__setstate__")
            if not has_own and type(target) is not _NumpyArray:
                _check_attributes(state)
        else:
            super().set_state(target, state)


def _describe(archive: zipfile.ZipFile, names: dict[str, Any]) -> Any:
    """Unpickle the description of an archive into stubs.

    Raises:
        ValueError: It has none, or it is not made of the names that are given.
    """

    def length_of(name: str) -> int | None:
        record = _record(archive, f"data/{name}")
        return None if record is None else record.file_size

    record = _record(archive, "data.pkl")
    if record is None or record.file_size > _MAX_DESCRIPTION:
        raise ValueError("the archive has no data.pkl, or it is too long")
    return _PlainUnpickler(archive.read(record), length_of, names).load()


def load_plain(
    file: Any, what: str, safe_globals: Sequence[Any] = (), *, mmap: bool = False
) -> Any:
    """Load plain data: numbers, containers, tensors, and instances of allowed classes.

    Args:
        file: What `torch.save` wrote: a path or a seekable binary file.
        what: What to call it in an error.
        safe_globals: Classes and functions that are allowed besides those that the program allowed
            with `torch.serialization.add_safe_globals`.
        mmap: Whether to map the file into memory.

    Raises:
        CheckpointError: It holds something else.
    """
    known = torch.serialization.get_safe_globals()
    pairs = (found if isinstance(found, tuple) else (found, "") for found in known)
    # Torch allows its own classes as soon as they are imported: creating a DeviceMesh communicates.
    pairs = (pair for pair in pairs if pair[0].__module__.partition(".")[0] != "torch")
    names = _PLAIN | {
        name or f"{found.__module__}.{found.__qualname__}": _allowed(found)
        for found, name in (*pairs, *((found, "") for found in safe_globals))
    }
    try:
        with open_archive(file) as archive:
            _describe(archive, names)
        if hasattr(file, "seek"):
            file.seek(0)
        # Torch forgets in the end what it is told here, also what the program allowed before.
        with torch.serialization.safe_globals([g for g in safe_globals if g not in known]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{what} cannot be loaded as plain data: it is damaged or not a zip archive ({error}); "
            "load a file of torch before 1.6 with torch and save it again"
        ) from error
    # Damaged archives and pickles raise nearly anything.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{what} cannot be loaded as plain data ({reason}); do not use this checkpoint unless "
            "you know where it is from"
        ) from error


# -- elements of one tensor -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, row after row without gaps.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        offset: Byte of its first element.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def find_tensor(file: Any) -> StoredTensor | None:
    """Find where the elements of a tensor lie.

    Args:
        file: What `torch.save` wrote for one tensor: a seekable binary file.

    Returns:
        None if the elements are not contiguous, or something else was saved: `torch.load` decides.
    """
    # What is wrong is said by `load_plain`.
    with contextlib.suppress(Exception), open_archive(file) as archive:
        order = _record(archive, "byteorder")
        found = _describe(archive, _DESCRIBED)
        is_native = order is None or archive.read(order).decode() == sys.byteorder
        if type(found) is not _Tensor or found.dtype is None or not is_native:
            return None
        data = _record(archive, f"data/{found.storage.record}")
        first = found.first * found.dtype.itemsize
        end = first + math.prod(found.shape) * found.dtype.itemsize
        if data is None or not found.is_contiguous or end > data.file_size:
            return None
        # Names and extra fields in front of the record may differ from those of the directory.
        file.seek(data.header_offset)
        header = file.read(_LOCAL_HEADER)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = data.header_offset + _LOCAL_HEADER + lengths
        return StoredTensor(found.dtype, found.shape, begin + first)
    return None


def read_block(
    file: Any,
    stored: StoredTensor,
    start: Sequence[int],
    target: torch.Tensor,
    scratch: bytearray,
) -> None:
    """Read a block of a tensor into memory, as many bytes at a time as there is room for.

    Args:
        file: The file the tensor is in.
        stored: Where it lies there.
        start: Where the block starts in the tensor, per dimension.
        target: What to fill, of the block's shape; elements are converted to its dtype.
        scratch: Room for bytes on their way, at least for one element.

    Raises:
        EOFError: The file ends before the block does.
    """
    if target.numel() == 0:
        return
    if not stored.shape:
        target.copy_(_read(file, stored, stored.offset, 1, scratch)[0])
        return
    size = stored.dtype.itemsize
    row = math.prod(stored.shape[1:]) * size
    begin = stored.offset + start[0] * row
    if row > len(scratch):
        for i in range(target.shape[0]):
            inner = StoredTensor(stored.dtype, stored.shape[1:], begin + i * row)
            read_block(file, inner, start[1:], target[i], scratch)
        return
    columns = tuple(slice(s, s + n) for s, n in zip(start[1:], target.shape[1:], strict=True))
    step = len(scratch) // row
    for first in range(0, target.shape[0], step):
        rows = min(step, target.shape[0] - first)
        flat = _read(file, stored, begin + first * row, rows * row // size, scratch)
        target[first : first + rows].copy_(flat.view(rows, *stored.shape[1:])[:, *columns])


def _read(
    file: Any, stored: StoredTensor, offset: int, numel: int, scratch: bytearray
) -> torch.Tensor:
    """Read elements into the room for them."""
    view = memoryview(scratch)[: numel * stored.dtype.itemsize]
    file.seek(offset)
    while view:
        read = file.readinto(view)
        if not read:
            raise EOFError(f"{len(view)} bytes are missing")
        view = view[read:]
    return torch.frombuffer(scratch, dtype=stored.dtype, count=numel)
