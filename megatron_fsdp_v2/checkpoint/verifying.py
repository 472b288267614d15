"""Is a checkpoint whole and undamaged? Every byte of it is read to find out."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fsdp_v2.checkpoint.archives import ARCHIVE_ERRORS, open_archive
from megatron_fsdp_v2.checkpoint.coverage import coverage_problems
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, StoredFile
from megatron_fsdp_v2.checkpoint.metadata import needed_bytes
from megatron_fsdp_v2.checkpoint.plain_tensors import Progress
from megatron_fsdp_v2.checkpoint.stored_tensor import FileView, checksum

__all__ = ["Report", "verify"]

_READ_BYTES = 16 << 20


@dataclass(slots=True)
class Report:
    """What was found out about a checkpoint.

    Attributes:
        path: Its folder.
        problems: What is wrong, a sentence each.
        notes: What could not be found out, a sentence each.
        num_files: Files that were looked at.
        nbytes: Bytes that were compared with a checksum.
    """

    path: Path
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_files: int = 0
    nbytes: int = 0

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(path: str | Path, progress: Progress | None = None) -> Report:
    """Compare a checkpoint with its manifest, and its metadata with itself.

    One process, no process group. Where there is no manifest, the checksums that `torch.save`
    keeps of its records are used, which leave out a few bytes around each of them.

    Args:
        path: The folder.
        progress: Told how many bytes of how many were read.

    Returns:
        What was found; a checkpoint that cannot even be opened has one problem.
    """
    report = Report(Path(path))
    try:
        folder = CheckpointFolder(path)
    except CheckpointError as error:
        report.problems.append(str(error))
        return report
    report.problems.extend(_structure_problems(folder))
    files = dict(folder.manifest.files) if folder.manifest is not None else {}
    names = sorted(files.keys() | needed_bytes(folder.metadata).keys())
    sizes: dict[str, int] = {}
    for name in names:
        try:
            folder.check_file(name)
            sizes[name] = (folder.path / name).stat().st_size
        except CheckpointError as error:
            report.problems.append(str(error))
            # What is there of it is still looked at.
            if folder.manifest is not None and (folder.path / name).is_file():
                sizes[name] = files[name].nbytes
    _Reading(folder, report, progress or (lambda done, total: None), sum(sizes.values())).read(
        sizes, files
    )
    report.num_files = len(names)
    if folder.manifest is not None:
        known = {*names, MANIFEST}
        others = sorted(p.name for p in folder.path.iterdir() if p.name not in known)
        if others:
            report.notes.append(f"not in the manifest, and not looked at: {', '.join(others)}")
    return report


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
            if MetadataIndex(key, chunk.offsets) not in storage:
                yield f"{key} has a chunk at {tuple(chunk.offsets)} that is in no file"


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
        self._keys: dict[tuple[str, int], tuple[str, int]] = {
            (info.relative_path, info.offset): (index.fqn, info.length)
            for index, info in (folder.metadata.storage_data or {}).items()
        }

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
            try:
                with zipfile.ZipFile(source) as archive:
                    results = [self._record_problem(archive, r) for r in archive.infolist()]
            except (zipfile.BadZipFile, OSError, ValueError) as error:
                results = [str(error), ""]
            self._advance(length)
            found = [problem for problem in results if problem]
            # Torch can be told to leave checksums out, and then none of them is right.
            if len(found) == len(results):
                has_none += 1
                continue
            self._report.nbytes += length
            if found:
                self._report.problems.append(
                    f"{name}: {key}, {length} bytes at {offset}: {found[0]}"
                )
        return has_none

    def _record_problem(self, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> str:
        try:
            with archive.open(record) as opened:
                while opened.read(_READ_BYTES):
                    pass
        except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
            return str(error)
        return ""

    def _advance(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)
