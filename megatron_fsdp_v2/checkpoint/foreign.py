"""Read pickles that are not trusted: the metadata of other programs, and objects.

The unpickler of `.metadata` creates records instead of torch's objects: each keeps the arguments
and the state that the pickle has for an object. Nothing that a pickle names is imported, called or
changed. The records are then checked and turned into the entries of an index.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, override

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.serialization import get_safe_globals, safe_globals

from megatron_fsdp_v2._text import shortened
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, NotPlainError
from megatron_fsdp_v2.checkpoint.manifest import (
    METADATA,
    Entry,
    StoredChunk,
    check_file_name,
    check_name,
    check_path,
    integer,
    integers,
)
from megatron_fsdp_v2.checkpoint.pickle_bounds import check_call, check_expansion, check_opcodes

_PICKLE = "data.pkl"
"""Name of the pickle in an archive of `torch.save`."""


class _Record:
    """An object in a pickle: the arguments it is created with, and its state."""

    __slots__ = ("arguments", "state")

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Record:
        check_call(cls.__name__, arguments)
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the items of a subclass of dict."""


class _Unpickler(pickle.Unpickler):
    """Creates records. The class of each record is made for this unpickler."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._classes: dict[str, type[_Record]] = {}

    @override
    def find_class(self, module_name: str, global_name: str, /) -> type[_Record]:
        name = f"{module_name}.{global_name}"
        if name not in self._classes:
            self._classes[name] = type(name, (_Record,), {"__slots__": ()})
        return self._classes[name]

    @override
    def persistent_load(self, pid: Any, /) -> _Record:
        """Return a record for a storage of tensors."""
        return _Record(pid)


def read_entries(folder: Path) -> dict[str, Entry]:
    """Read `.metadata` of a folder of torch's distributed checkpoint.

    Raises:
        CheckpointError: The file cannot be read, or a number or a name in it is out of range.
    """
    file = folder / METADATA
    content = file.read_bytes()
    try:
        check_opcodes(content)
        return _entries(_Unpickler(content).load())
    # A damaged pickle raises nearly anything.
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read ({_reason(error)}): it is damaged, or not written by torch; do "
            "not use this checkpoint unless you know where it is from"
        ) from error


def _entries(metadata: Any) -> dict[str, Entry]:
    """Check records and turn them into entries.

    Raises:
        ValueError: A value is of another type, or out of range.
    """
    fields, places = _fields(metadata, Metadata), dict[Any, tuple[str, int, int]]()
    paths = fields.get("planner_data")
    for index, info in _checked(fields.get("storage_data") or {}, dict).items():
        key, place = _fields(index, MetadataIndex), _fields(info, _StorageInfo)
        if place.get("transform_descriptors"):
            raise ValueError("items were transformed; load it with torch and save it without")
        offsets = key.get("offset")
        places[key["fqn"], None if offsets is None else _size(offsets)] = (
            check_file_name(place["relative_path"], "a part of it"),
            integer(place["offset"]),
            integer(place["length"]),
        )
    found: dict[str, Entry] = {}
    for name, entry in _checked(fields["state_dict_metadata"], dict).items():
        check_name(name)
        path = check_path(paths.get(name)) if type(paths) is dict else None
        if _is_record_of(entry, BytesStorageMetadata):
            chunks = [StoredChunk((), (), *places[name, None])] if (name, None) in places else []
            found[name] = Entry(None, (), chunks, path)
            continue
        tensor = _fields(entry, TensorStorageMetadata)
        dtype = _checked(tensor["properties"].state[0], type)
        boxes = [_fields(chunk, ChunkStorageMetadata) for chunk in _checked(tensor["chunks"], list)]
        chunks = []
        for box in boxes:
            offsets = _size(box["offsets"])
            if (name, offsets) not in places:
                raise ValueError(f"{shortened(name)} has a chunk at {offsets} that is in no file")
            chunks.append(StoredChunk(offsets, _size(box["sizes"]), *places[name, offsets]))
        dtype_name = dtype.__name__.removeprefix("torch.")
        found[name] = Entry.tensor(dtype_name, _size(tensor["size"]), chunks, path)
    return found


def _size(value: Any) -> tuple[int, ...]:
    return integers(value.arguments[0] if isinstance(value, _Record) else value)


def _is_record_of(value: Any, cls: type) -> bool:
    return type(value).__name__ == f"{cls.__module__}.{cls.__qualname__}"


def _fields(record: Any, cls: type) -> dict[str, Any]:
    """Return the attributes of an object of a class."""
    if not _is_record_of(record, cls):
        raise ValueError(f"{_class_of(record)} is in the place of a {cls.__name__}")
    return _checked(record.state, dict)


def _class_of(value: Any) -> str:
    return shortened(f"a {type(value).__name__}")


def _checked[T](value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{_class_of(value)} is in the place of a {kind.__name__}")
    return value


def load_object(source: bytes | Path, what: str, *, is_trusted: bool = False) -> Any:
    """Load what `torch.save` wrote: plain data, tensors on the CPU.

    Args:
        source: The bytes; or a file, of which the elements of tensors are mapped into memory.
        what: What to call it in an error.
        is_trusted: Whether to unpickle anything, which runs code that the file names.

    Raises:
        NotPlainError: It holds something that `torch.load(weights_only=True)` refuses.
        CheckpointError: It is damaged.
    """
    try:
        if is_trusted:
            return torch.load(_opened(source), map_location="cpu", weights_only=False)
        nbytes = _check_archive(source)
        # Pickles refer to this class for empty bytes.
        with safe_globals(list({bytes} - set(get_safe_globals()))):
            is_file = isinstance(source, Path)
            found = torch.load(_opened(source), map_location="cpu", weights_only=True, mmap=is_file)
        check_expansion(found, nbytes)
        return found
    except pickle.UnpicklingError as error:
        raise NotPlainError(f"{what} cannot be loaded as plain data: {_reason(error)}") from error
    # A damaged file raises nearly anything.
    except Exception as error:
        raise CheckpointError(f"{what} cannot be loaded as plain data: {_reason(error)}") from error


def compare_checksums(source: bytes | Path) -> bool:
    """Compare the records of an archive of `torch.save` with their checksums.

    Returns:
        Whether the archive has checksums.

    Raises:
        CheckpointError: A record is damaged, or it is not such an archive.
    """
    try:
        with _archive(source) as archive:
            # With `set_crc32_options(False)` torch writes zeros.
            if not any(record.CRC for record in archive.infolist()):
                return False
            damaged = archive.testzip()
    except Exception as error:
        raise CheckpointError(_reason(error)) from error
    if damaged is not None:
        raise CheckpointError(f"the record {damaged} does not have its CRC-32")
    return True


def _opened(source: bytes | Path) -> Path | io.BytesIO:
    return source if isinstance(source, Path) else io.BytesIO(source)


def _check_archive(source: bytes | Path) -> int:
    """Check an archive of `torch.save` before torch loads it.

    Returns:
        The length of its pickle.

    Raises:
        ValueError: Torch would map compressed elements as they are, or the pickle takes more memory
            than the archive has bytes.
    """
    nbytes = 0
    with _archive(source) as archive:
        for record in archive.infolist():
            if record.filename.endswith(_PICKLE):
                content = archive.read(record)
                nbytes += len(content)
                check_opcodes(content)
                # Nothing is called. The records of calls check their arguments.
                _Unpickler(content).load()
    return nbytes


def _archive(source: bytes | Path) -> zipfile.ZipFile:
    """Open an archive of `torch.save`.

    Raises:
        zipfile.BadZipFile: It is not a zip archive; torch before 1.6 wrote other files.
        ValueError: Records are compressed, or overlap.
    """
    try:
        archive = zipfile.ZipFile(_opened(source))
    except zipfile.BadZipFile as error:
        raise zipfile.BadZipFile(
            f"it is damaged or not a zip archive ({error}); load a file of torch before 1.6 with "
            "torch and save it again"
        ) from error
    records = archive.infolist()
    nbytes = source.stat().st_size if isinstance(source, Path) else len(source)
    is_compressed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
    if is_compressed or sum(record.file_size for record in records) > nbytes:
        raise ValueError("its records are compressed, or overlap")
    return archive


def _reason(error: Exception) -> str:
    """Describe in one line why a file could not be unpickled."""
    # In torch's text, advice precedes the cause.
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    kind = "" if isinstance(error, ValueError | zipfile.BadZipFile) else f"{type(error).__name__}: "
    return shortened(kind + text.partition("\n")[0])
