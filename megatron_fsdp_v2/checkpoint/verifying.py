"""Verify a checkpoint: its structure, and every byte against a checksum."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_fsdp_v2._progress import Advance, unwatched
from megatron_fsdp_v2._text import shortened
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, NotFoundError
from megatron_fsdp_v2.checkpoint.exporting import CheckpointKind, find_kind
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.foreign import compare_checksums, load_object
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, METADATA, StoredChunk
from megatron_fsdp_v2.checkpoint.plain_files import open_safetensors


@dataclass(slots=True)
class Report:
    """Result of verifying a checkpoint.

    Attributes:
        path: Its folder, file or index.
        problems: What is wrong, a sentence each.
        notes: What could not be verified, a sentence each.
        num_files: Number of files.
        nbytes: Bytes that were compared with a checksum.
    """

    path: Path
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_files: int = 0
    nbytes: int = 0

    @property
    def is_good(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def verify(path: str | Path, *, advance: Advance = unwatched) -> Report:
    """Verify the structure of a checkpoint, and every byte against a checksum.

    One process, no process group. Where there is no manifest, the checksums that `torch.save`
    keeps of its records are used, which leave out a few bytes around each of them. Safetensors
    files have none: names, shapes, offsets and lengths are compared.

    Args:
        path: A folder, a `.safetensors` file, index or folder, or a `.pt` file; see `find_kind`.
        advance: Called with the bytes of a folder that were read so far, and with all of them.

    Returns:
        What was found; a checkpoint that cannot even be opened has one problem.

    Raises:
        NotFoundError: There is nothing at the path, a folder of checkpoints, or no checkpoint.
    """
    report = Report(Path(path))
    try:
        kind, found = find_kind(path)
        if kind is CheckpointKind.SAFETENSORS:
            _verify_safetensors(found, report)
        elif kind is CheckpointKind.PT:
            _verify_pt(found, report)
        else:
            _verify_folder(CheckpointFolder(found), report, advance)
    except NotFoundError:
        raise
    except CheckpointError as error:
        report.problems.append(str(error))
    return report


def _verify_safetensors(path: Path, report: Report) -> None:
    source = open_safetensors(path)
    report.num_files = len(source.files)
    report.notes.extend(source.notes)
    report.notes.append(
        "safetensors files have no checksums: names, shapes, offsets and lengths were compared, "
        "and no element"
    )


def _verify_pt(path: Path, report: Report) -> None:
    # Whatever was saved, not a model alone.
    load_object(path, str(path))
    report.num_files, report.nbytes = 1, path.stat().st_size
    try:
        if not compare_checksums(path):
            report.nbytes = 0
            report.notes.append("the file has no checksums: it was loaded, and no element compared")
    except CheckpointError as error:
        report.problems.append(f"{path.name}: {error}")


def _verify_folder(folder: CheckpointFolder, report: Report, advance: Advance) -> None:
    items: dict[str, dict[int, tuple[str, StoredChunk]]] = {}
    for key, entry in folder.entries.items():
        report.problems.extend(folder.storage_problems(key))
        for chunk in entry.chunks:
            # The first of several names of an item is the name it was saved under.
            items.setdefault(chunk.file, {}).setdefault(chunk.start, (key, chunk))
    manifest = folder.manifest
    if manifest is not None:
        # It is only written for torch, and no entry.
        items[METADATA] = {0: ("metadata", manifest.metadata)}
    report.num_files = len(items)
    num_without = num_read = 0
    total = folder.lengths.total()
    for name in sorted(items):
        try:
            folder.check_file(name)
        except CheckpointError as error:
            report.problems.append(str(error))
            continue
        position = 0
        for start, (key, chunk) in sorted(items[name].items()):
            if manifest is not None and start != position:
                report.problems.append(f"{name}: {position} to {start} is of no item, or of two")
            position = start + chunk.length
            num_read += chunk.length
            advance(num_read, total)
            try:
                content = folder.read_item(key, chunk)
                if manifest is not None or compare_checksums(content):
                    report.nbytes += len(content)
                else:
                    num_without += 1
            except CheckpointError as error:
                report.problems.append(f"{name}: {shortened(key)} at {start}: {error}")
    if manifest is not None:
        known = {*items, MANIFEST}
        if others := sorted(p.name for p in folder.path.iterdir() if p.name not in known):
            report.notes.append(f"not in the manifest, and not looked at: {', '.join(others)}")
        return
    if num_without:
        report.notes.append(f"{num_without} items have no checksums at all")
    report.notes.append(
        f"there is no {MANIFEST}: structure and sizes were compared, and elements with the "
        "checksums that torch.save keeps"
    )
