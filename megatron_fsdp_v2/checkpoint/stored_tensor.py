"""Where the elements of a tensor lie in what `torch.save` wrote, and how to read some of them.

`torch.load` takes the memory of a whole tensor before any row can be copied to where it is wanted.
What `torch.save` writes is a zip archive with the elements in one uncompressed record: knowing
where that starts, rows are read straight into place.
"""

from __future__ import annotations

import io
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, override

import torch

from megatron_fsdp_v2.checkpoint.archives import (
    ARCHIVE_ERRORS,
    DESCRIPTION,
    open_archive,
    record_of,
)
from megatron_fsdp_v2.checkpoint.pickles import Call, Name, PersistentId, PickleError, read_pickle
from megatron_fsdp_v2.checkpoint.trust import DTYPES, MAX_DIMS, integer

__all__ = ["STORAGE_DTYPES", "FileView", "StoredTensor", "checksum", "find_tensor", "read_block"]

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
"""What a pickled tensor of these types names instead of its dtype."""

_LOCAL_HEADER = 30
_MAX_DESCRIPTION = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, row after row without gaps.

    Attributes:
        dtype: Of its elements.
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
    """CRC-32 of a part of a file, from its start.

    Args:
        view: The part.
        scratch: Room for what is read at a time.
        progress: Told how many bytes were read, each time.

    Returns:
        The checksum, and how many bytes it is of: fewer than the part has where the file ends.
    """
    view.seek(0)
    crc32, count = 0, 0
    while read := view.readinto(scratch):
        crc32 = zlib.crc32(memoryview(scratch)[:read], crc32)
        count += read
        if progress is not None:
            progress(read)
    return crc32, count


def find_tensor(file: Any) -> StoredTensor | None:
    """Find out where the elements of a tensor lie.

    Args:
        file: What `torch.save` wrote for one tensor: a seekable binary file.

    Returns:
        None where the elements are not simply there one after the other, or where something else
        was saved: `torch.load` has to make sense of it.
    """
    try:
        with open_archive(file) as archive:
            order, described = (record_of(archive, name) for name in ("byteorder", DESCRIPTION))
            if order is not None and archive.read(order).decode() != sys.byteorder:
                return None
            if described is None or described.file_size > _MAX_DESCRIPTION:
                return None
            found = _described(read_pickle(archive.read(described), _check_name)[0])
            data = None if found is None else record_of(archive, f"data/{found.record}")
    except ARCHIVE_ERRORS:
        return None
    if found is None or data is None or not found.is_contiguous:
        return None
    size = math.prod(found.shape) * found.dtype.itemsize
    first = found.first * found.dtype.itemsize
    if first + size > data.file_size:
        return None
    # Names and extra fields in front of the record may differ from those of the directory.
    file.seek(data.header_offset)
    header = file.read(_LOCAL_HEADER)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = data.header_offset + _LOCAL_HEADER + lengths
    return StoredTensor(found.dtype, found.shape, begin + first)


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


@dataclass(frozen=True, slots=True)
class _Described:
    """What the pickle of a tensor says about it."""

    dtype: torch.dtype
    record: str
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        if 0 in self.shape:
            return True
        step = 1
        for length, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length > 1 and stride != step:
                return False
            step *= length
        return True


_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_NAMES = frozenset({*_REBUILD, "collections.OrderedDict", "torch.storage.UntypedStorage"})


def _check_name(module: str, name: str) -> None:
    if f"{module}.{name}" not in _NAMES and (
        module != "torch" or name not in STORAGE_DTYPES.keys() | DTYPES.keys()
    ):
        raise PickleError(f"{module}.{name} does not describe a tensor")


def _described(found: Any) -> _Described | None:
    """What a pickle says about a dense tensor; None where it is of something else.

    Raises:
        ValueError: A number is out of range.
    """
    if type(found) is not Call or found.of.full not in _REBUILD or found.has_state:
        return None
    if len(found.args) < 4 or type(found.args[0]) is not PersistentId:
        return None
    place, first, shape, stride = found.args[0].pid, *found.args[1:4]
    if type(place) is not tuple or len(place) < 3 or type(place[1]) is not Name:
        return None
    # What has no storage type of its own says its dtype after two entries for autograd.
    named = place[1].name if place[1].module == "torch" else ""
    dtype = STORAGE_DTYPES.get(named)
    if dtype is None and len(found.args) > 6 and type(found.args[6]) is Name:
        dtype = DTYPES.get(found.args[6].name)
    if dtype is None or type(place[2]) is not str:
        return None
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        return None
    if len(shape) > MAX_DIMS:
        return None
    lengths, steps = (tuple(integer(number) for number in numbers) for numbers in (shape, stride))
    return _Described(dtype, place[2], integer(first), lengths, steps)
