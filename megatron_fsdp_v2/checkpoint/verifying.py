"""Verify a checkpoint: its structure, and every byte against a checksum."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fsdp_v2.checkpoint.errors import CheckpointError, NotFoundError
from megatron_fsdp_v2.checkpoint.exporting import Kind, find_kind
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, coverage_problems
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, StoredFile
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
    """Result of verifying a checkpoint.

    Attributes:
        path: Its folder, file or index.
        kind: What kind it is.
        problems: What is wrong, a sentence each.
        notes: What could not be verified, a sentence each.
        num_files: Number of files.
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
    """Verify the structure of a checkpoint, and every byte against a checksum.

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
    items: dict[str, dict[int, tuple[str, int]]] = {}
    for index, info in (folder.metadata.storage_data or {}).items():
        # Of several names for one item the first is the one it was saved as.
        items.setdefault(info.relative_path, {}).setdefault(info.offset, (index.fqn, info.length))
    names = sorted(files.keys() | items.keys())
    paths = {name: folder.path / name for name in names}
    total = sum(path.stat().st_size for path in paths.values() if path.is_file())
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    num_without = 0
    for name, path in paths.items():
        try:
            folder.check_file(name)
        except CheckpointError as error:
            report.problems.append(str(error))
            # A file of another length is looked at all the same.
            if name not in files or not path.is_file() or path.is_symlink():
                continue
        with path.open("rb") as file:
            if name in files:
                _compare(name, file, files[name], items.get(name, {}), report, advance)
            else:
                num_without += _compare_records(name, file, items[name], report, advance)
    progress(total, total)
    report.num_files = len(names)
    if num_without:
        report.notes.append(f"{num_without} items have no checksums at all")
    if folder.manifest is None:
        report.notes.append(
            f"there is no {MANIFEST}: structure and sizes were compared, and elements with the "
            "checksums that torch.save keeps"
        )
        return
    if unknown := sorted(items.keys() - files.keys()):
        report.problems.append(f"not in the manifest: {', '.join(unknown)}")
    known = {*names, MANIFEST}
    if others := sorted(p.name for p in folder.path.iterdir() if p.name not in known):
        report.notes.append(f"not in the manifest, and not looked at: {', '.join(others)}")


def _structure_problems(folder: CheckpointFolder) -> Iterator[str]:
    """Yield a sentence for each entry of the metadata that is not stored exactly once."""
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


def _compare(
    name: str,
    file: BinaryIO,
    stored: StoredFile,
    keys: Mapping[int, tuple[str, int]],
    report: Report,
    advance: Callable[[int], None],
) -> None:
    """Compare every byte of a file with the checksums of the manifest."""
    position, scratch = 0, bytearray(_READ_BYTES)
    for item in sorted(stored.items, key=lambda item: item.offset):
        key = keys.get(item.offset, (name, 0))[0]
        if item.offset != position:
            report.problems.append(
                f"{name}: bytes {position} to {item.offset} have no checksum, or two"
            )
        position = item.offset + item.length
        crc32, count = checksum(FileView(file, item.offset, item.length), scratch, advance)
        report.nbytes += count
        if count == item.length and crc32 != item.crc32:
            report.problems.append(
                f"{name}: {key}, {item.length} bytes at {item.offset}, has the checksum "
                f"{crc32:08x} and was saved with {item.crc32:08x}"
            )
    if position != stored.nbytes:
        report.problems.append(f"{name}: bytes from {position} on have no checksum")


def _compare_records(
    name: str,
    file: BinaryIO,
    items: Mapping[int, tuple[str, int]],
    report: Report,
    advance: Callable[[int], None],
) -> int:
    """Compare items with the checksums that `torch.save` keeps; count those without."""
    num_without = 0
    for offset, (key, length) in sorted(items.items()):
        found, has_checksums = _record_problems(FileView(file, offset, length))
        advance(length)
        report.nbytes += length * has_checksums
        num_without += not has_checksums
        if has_checksums and found:
            report.problems.append(f"{name}: {key}, {length} bytes at {offset}: {found[0]}")
    return num_without


def _record_problems(file: Any) -> tuple[list[str], bool]:
    """Compare records of `torch.save` with their checksums; also returns whether there are any."""
    results = []
    try:
        with open_archive(file) as archive:
            for record in archive.infolist():
                try:
                    with archive.open(record) as opened:
                        while opened.read(_READ_BYTES):
                            pass
                    results.append("")
                except zipfile.BadZipFile as error:
                    results.append(str(error))
    # A damaged archive raises nearly anything.
    except Exception as error:
        return [str(error) or type(error).__name__], True
    found = [problem for problem in results if problem]
    # Torch can be told to leave checksums out, and then none of them is right.
    return found, not results or len(found) < len(results)
