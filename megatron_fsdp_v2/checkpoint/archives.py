"""The zip archives that `torch.save` writes, opened by somebody who does not trust them."""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["ARCHIVE_ERRORS", "DESCRIPTION", "is_archive", "open_archive", "record_of"]

DESCRIPTION = "data.pkl"
"""The record that says what the others are."""

ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    # An archive may ask for passwords and for versions of the format yet to come.
    RuntimeError,
    NotImplementedError,
)
"""What reading a damaged archive raises."""


_START, _END_START, _END = b"PK\x03\x04", b"PK\x05\x06", 22


def is_archive(file: Any) -> bool:
    """Whether a file begins as archives do, which is what torch goes by as well.

    Args:
        file: Its path, or a seekable binary file, which is left at its start.
    """
    with _opened(file) as opened:
        opened.seek(0)
        start = opened.read(len(_START))
        opened.seek(0)
    return bool(start == _START)


@contextlib.contextmanager
def open_archive(file: Any) -> Iterator[zipfile.ZipFile]:
    """Open an archive as `torch.save` writes it.

    Raises:
        ValueError: A record is compressed or encrypted, two records are called the same, records
            claim more bytes than the archive has, or there is something in front of it or behind
            it: two programs could read different things, or more than there is.
        zipfile.BadZipFile: It is not an archive. See `ARCHIVE_ERRORS` for others.
    """
    with zipfile.ZipFile(file) as archive:
        seen: set[str] = set()
        total = 0
        for record in archive.infolist():
            # Torch looks records up without regard to case.
            name = record.filename.casefold()
            if name in seen:
                raise ValueError(f"the archive has two records {record.filename!r}")
            seen.add(name)
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 0x1:
                raise ValueError(f"the record {record.filename!r} is compressed or encrypted")
            if record.compress_size != record.file_size:
                raise ValueError(f"the record {record.filename!r} has two lengths")
            total += record.file_size
        if total > archive.start_dir:
            raise ValueError("the records of the archive are longer than the archive")
        starts = [record.header_offset for record in archive.infolist()]
        if archive.comment or min(starts, default=0) != 0 or not _ends(file):
            raise ValueError("there is something in front of the archive, or behind it")
        yield archive


def _ends(file: Any) -> bool:
    """Whether a file ends with the last record of an archive without a comment."""
    with _opened(file) as opened:
        opened.seek(-_END, os.SEEK_END)
        return bool(opened.read(len(_END_START)) == _END_START)


@contextlib.contextmanager
def _opened(file: Any) -> Iterator[Any]:
    if hasattr(file, "read"):
        yield file
        return
    with Path(file).open("rb") as opened:
        yield opened


def record_of(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo | None:
    """A record by its name below the folder that all records are in; None where there is none.

    Raises:
        ValueError: Records are in several folders.
    """
    found = None
    for record in archive.infolist():
        if record.filename.partition("/")[2] == name:
            if found is not None:
                raise ValueError(f"the archive has two records {name!r}")
            found = record
    return found
