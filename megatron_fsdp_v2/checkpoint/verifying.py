"""Is a checkpoint whole and undamaged? Every byte of it is read to find out."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fsdp_v2.checkpoint.coverage import coverage_problems
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, NotFoundError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.kinds import Kind, find_kind
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, StoredFile
from megatron_fsdp_v2.checkpoint.metadata import needed_bytes
from megatron_fsdp_v2.checkpoint.plain_tensors import Progress
from megatron_fsdp_v2.checkpoint.safetensors_files import SafetensorsSource
from megatron_fsdp_v2.checkpoint.torch_files import (
    FileView,
    checksum,
    load_plain,
    open_archive,
)

__all__ = ["Report", "verify"]

_READ_BYTES = 16 << 20


@dataclass(slots=True)
class Report:
    """What was found out about a checkpoint.

    Attributes:
        path: Its folder, file or index.
        kind: What kind it is.
        problems: What is wrong, a sentence each.
        notes: What could not be found out, a sentence each.
        num_files: Files that were looked at.
        nbytes: Bytes that were compared with a checksum.
    """

    path: Path
    kind: Kind = Kind.FOLDER
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_files: int = 0
    nbytes: int = 0

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(path: str | Path, progress: Progress | None = None) -> Report:
    """Compare a checkpoint with what it says about itself, and every byte with its checksum.

    One process, no process group. Where there is no manifest, the checksums that `torch.save`
    keeps of its records are used, which leave out a few bytes around each of them. Safetensors
    files have none: names, shapes, offsets and lengths are compared.

    Args:
        path: A folder, a `.safetensors` file, index or folder, or a `.pt` file; see `find_kind`.
        progress: Told how many bytes of how many were read.

    Returns:
        What was found; a checkpoint that cannot even be opened has one problem.

    Raises:
        NotFoundError: There is nothing at the path, or a folder of checkpoints.
    """
    report = Report(Path(path))
    told = progress or (lambda done, total: None)
    try:
        report.kind, found = find_kind(path)
        if report.kind is Kind.SAFETENSORS:
            _verify_safetensors(found, report)
        elif report.kind is Kind.PT:
            _verify_pt(found, report, told)
        else:
            _verify_folder(CheckpointFolder(found), report, told)
    except NotFoundError:
        raise
    except CheckpointError as error:
        report.problems.append(str(error))
    return report


def _verify_safetensors(path: Path, report: Report) -> None:
    source = SafetensorsSource(path)
    report.num_files = len(source.files)
    report.notes.extend(source.notes)
    report.notes.append(
        "safetensors files have no checksums: names, shapes, offsets and lengths were compared, "
        "and no element"
    )


def _verify_pt(path: Path, report: Report, progress: Progress) -> None:
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist")
    # Whatever was saved, not a model alone.
    load_plain(path, str(path), mmap=True)
    report.num_files = 1
    size = path.stat().st_size
    found, has_checksums = _record_problems(path)
    if has_checksums:
        report.problems.extend(f"{path.name}: {problem}" for problem in found)
        report.nbytes = size
    else:
        report.notes.append("the file has no checksums: it was loaded, and no element compared")
    progress(size, size)


def _verify_folder(folder: CheckpointFolder, report: Report, progress: Progress) -> None:
    report.problems.extend(_structure_problems(folder))
    files = dict(folder.manifest.files) if folder.manifest is not None else {}
    names = sorted(files.keys() | needed_bytes(folder.metadata).keys())
    sizes: dict[str, int] = {}
    for name in names:
        file = folder.path / name
        try:
            folder.check_file(name)
            sizes[name] = file.stat().st_size
        except CheckpointError as error:
            report.problems.append(str(error))
            # What is there of it is still looked at.
            if name in files and file.is_file() and not file.is_symlink():
                sizes[name] = files[name].nbytes
    _Reading(folder, report, progress, sum(sizes.values())).read(sizes, files)
    report.num_files = len(names)
    if folder.manifest is not None:
        known = {*names, MANIFEST}
        others = sorted(p.name for p in folder.path.iterdir() if p.name not in known)
        if others:
            report.notes.append(f"not in the manifest, and not looked at: {', '.join(others)}")


def _structure_problems(folder: CheckpointFolder) -> Iterator[str]:
    """Whether the metadata says where every element of every tensor is, once."""
    storage = folder.metadata.storage_data or {}
    for key, entry in folder.metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if MetadataIndex(key) not in storage:
                yield f"{key} is in no file"
            continue
        yield from coverage_problems(key, entry)
        for chunk in entry.chunks:
            info = storage.get(MetadataIndex(key, chunk.offsets))
            nbytes = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            if info is None:
                yield f"{key} has a chunk at {tuple(chunk.offsets)} that is in no file"
            elif nbytes > info.length and not info.transform_descriptors:
                yield (
                    f"{key} has a chunk of {nbytes} bytes at {tuple(chunk.offsets)}, and "
                    f"{info.length} bytes are stored"
                )


class _Reading:
    """Files of a checkpoint read from start to end."""

    def __init__(
        self, folder: CheckpointFolder, report: Report, progress: Progress, total: int
    ) -> None:
        self._folder = folder
        self._report = report
        self._progress = progress
        self._total = total
        self._done = 0
        self._buffer = bytearray(_READ_BYTES)
        self._keys: dict[tuple[str, int], tuple[str, int]] = {}
        for index, info in (folder.metadata.storage_data or {}).items():
            # Of several names for one item the first is the one it was saved as.
            place = (info.relative_path, info.offset)
            self._keys.setdefault(place, (index.fqn, info.length))

    def read(self, sizes: dict[str, int], files: dict[str, StoredFile]) -> None:
        """Read files, by the items a manifest knows, or those the metadata knows."""
        without = [name for name in sizes if name not in files]
        has_none = 0
        for name in sizes:
            with (self._folder.path / name).open("rb") as file:
                if name in files:
                    self._compare(name, file, files[name])
                else:
                    has_none += self._compare_records(name, file)
        self._progress(self._total, self._total)
        if self._folder.manifest is None:
            self._report.notes.append(
                f"there is no {MANIFEST}: structure and sizes were compared, and elements with the "
                "checksums that torch.save keeps"
            )
        elif without:
            self._report.problems.append(f"not in the manifest: {', '.join(without)}")
        if has_none:
            self._report.notes.append(f"{has_none} items have no checksums at all")

    def _compare(self, name: str, file: BinaryIO, stored: StoredFile) -> None:
        position = 0
        for item in sorted(stored.items, key=lambda item: item.offset):
            key = self._keys.get((name, item.offset), (name, 0))[0]
            if item.offset != position:
                self._report.problems.append(
                    f"{name}: bytes {position} to {item.offset} have no checksum, or two"
                )
            position = item.offset + item.length
            view = FileView(file, item.offset, item.length)
            crc32, count = checksum(view, self._buffer, self._advance)
            self._report.nbytes += count
            if count == item.length and crc32 != item.crc32:
                self._report.problems.append(
                    f"{name}: {key}, {item.length} bytes at {item.offset}, has the checksum "
                    f"{crc32:08x} and was saved with {item.crc32:08x}"
                )
        if position != stored.nbytes:
            self._report.problems.append(f"{name}: bytes from {position} on have no checksum")

    def _compare_records(self, name: str, file: BinaryIO) -> int:
        """Compare what `torch.save` wrote with the checksums it keeps; count what has none."""
        has_none = 0
        items = sorted((at, *what) for (of, at), what in self._keys.items() if of == name)
        for offset, key, length in items:
            source = FileView(file, offset, length)
            found, has_checksums = _record_problems(source)
            self._advance(length)
            if not has_checksums:
                has_none += 1
                continue
            self._report.nbytes += length
            if found:
                self._report.problems.append(
                    f"{name}: {key}, {length} bytes at {offset}: {found[0]}"
                )
        return has_none

    def _advance(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)


def _record_problems(file: Any) -> tuple[list[str], bool]:
    """What is wrong with records of `torch.save`, and whether they have checksums at all."""
    try:
        with open_archive(file) as archive:
            results = [_record_problem(archive, record) for record in archive.infolist()]
    # A damaged archive raises nearly anything.
    except Exception as error:
        return [str(error) or type(error).__name__], True
    found = [problem for problem in results if problem]
    # Torch can be told to leave checksums out, and then none of them is right.
    return found, not results or len(found) < len(results)


def _record_problem(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> str:
    try:
        with archive.open(record) as opened:
            while opened.read(_READ_BYTES):
                pass
    except Exception as error:
        return str(error) or type(error).__name__
    return ""
