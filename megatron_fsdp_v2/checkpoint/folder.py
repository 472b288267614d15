"""Read blocks of tensors from a folder of torch's distributed checkpoint.

Torch's own loading reads whole state dicts and unpickles everything that is not a tensor. Here
every item is compared with its checksum before it is used, and only requested items are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import mmap
import os
import resource
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_fsdp_v2.checkpoint.errors import CheckpointError, ReplacedError
from megatron_fsdp_v2.checkpoint.metadata import (
    MANIFEST,
    METADATA,
    Manifest,
    length_of,
    needed_bytes,
    read_metadata,
)
from megatron_fsdp_v2.checkpoint.replacing import find_folder
from megatron_fsdp_v2.checkpoint.unpickling import PlainUnpickler, file_inside, load_plain

__all__ = ["CheckpointFolder", "ReadRequest", "coverage_problems"]


class CheckpointFolder:
    """A folder of torch's distributed checkpoint, open for reading.

    If there is a manifest, every item is compared with its checksum before it is used.

    A save may replace the checkpoint at any time. Files stay open, and one that is opened later is
    of the same folder or an error: everything read here belongs to one save.

    Args:
        path: The folder.

    Attributes:
        path: The folder.
        metadata: What torch's checkpoint knows about it.
        manifest: The manifest of this package; None if another program saved it.
        identity: A digest of metadata and manifest, different for any two saves.

    Raises:
        CheckpointError: There is none, its save was interrupted, or its metadata cannot be read or
            is not allowed.
        ReplacedError: A save replaced it meanwhile; open it again.
    """

    _unpickler = PlainUnpickler
    """Creates the entries that are not tensors."""

    def __init__(self, path: str | Path) -> None:
        self._files: dict[str, BufferedReader] = {}
        self._most_open = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1)
        self._chunks: dict[str, _Chunks] = {}
        self.path = find_folder(Path(path)) or Path(path)
        try:
            # While the folder is open, no other one has its inode number.
            self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or find_folder(Path(path)) is None:
                # Raises a specific error, unless a concurrent save has just restored the folder.
                read_metadata(self.path)
            raise ReplacedError(f"{self.path} is being replaced") from error
        weakref.finalize(self, _close, self._directory, self._files)
        try:
            self.manifest = Manifest.read(self.path)
            self.metadata = read_metadata(self.path, self.manifest)
            self._needed = needed_bytes(self.metadata)
            files = [self.path / METADATA, *([self.path / MANIFEST] if self.manifest else [])]
            self.identity = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
        finally:
            # Between the two renames of a save there is no folder at the path.
            self._check_replaced()

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if there is no tensor of that name."""
        entry = self.metadata.state_dict_metadata.get(key)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def tensors(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        """Iterate over all tensors by name, in the order of the metadata."""
        for key, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                yield key, entry

    def has(self, key: str) -> bool:
        """Whether there is an entry of that name, a tensor or not."""
        return key in self.metadata.state_dict_metadata

    def object(self, key: str) -> Any:
        """Load an entry that is not a tensor.

        Raises:
            CheckpointError: There is no such entry, it is damaged, or it contains something other
                than plain data.
        """
        content = self.read_item(MetadataIndex(key))
        return load_plain(content, f"{key} in {self.path}", self._unpickler)

    def read_item(self, index: MetadataIndex) -> mmap.mmap:
        """Read the bytes of a stored item, as `torch.save` wrote them, and compare the checksum.

        Args:
            index: Name of an object; or of a tensor, with the offset of one of its chunks.

        Raises:
            CheckpointError: There is no such item, its file is missing or too short, or the bytes
                are not those that were saved.
        """
        info = self._info(index)
        file = self._open(info.relative_path)
        if not info.length:
            raise CheckpointError(f"{self.path} is damaged: nothing is stored of {index.fqn}")
        content = mmap.mmap(-1, info.length)
        file.seek(info.offset)
        file.readinto(content)
        if self.manifest is None:
            return content
        item = self.manifest.files.get(info.relative_path, {}).get(info.offset)
        where = f"{index.fqn} in {info.relative_path}, {info.length} bytes at {info.offset},"
        if item is None or item[0] != info.length:
            raise CheckpointError(f"{self.path} is damaged: {where} is not in the manifest")
        crc32 = zlib.crc32(content)
        if item[1] != crc32:
            raise CheckpointError(
                f"{self.path} is damaged: {where} has the checksum {crc32:08x} and was saved with "
                f"{item[1]:08x}"
            )
        return content

    def read_tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor, in its stored dtype, on the CPU.

        Raises:
            CheckpointError: There is none of that name, or it is not all there, or damaged.
        """
        entry = self._tensor(key)
        self.check_stored(key)
        data = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.fill([ReadRequest(key, (0,) * data.dim(), data)])
        return data

    @torch.no_grad()
    def fill(self, wanted: Sequence[ReadRequest], *, only_check: bool = False) -> list[int]:
        """Read blocks into their targets.

        Files stay open between check and read, even if another save removes them.

        Args:
            wanted: Blocks of stored tensors. The part of a target beyond the tensor is not changed.
            only_check: Whether to read and verify the blocks without changing the targets.

        Returns:
            The number of elements read for each block.

        Raises:
            CheckpointError: A tensor, or a file with a part of it, is missing or damaged. Targets
                of earlier blocks are filled.
        """
        counts = [0] * len(wanted)
        items: dict[tuple[str, int], tuple[MetadataIndex, Sequence[int], list[_Copy]]] = {}
        for number, block in enumerate(wanted):
            for chunk in self._saved(block.key).near(block):
                copy = _overlap(block, chunk)
                if copy is None:
                    continue
                counts[number] += copy[1].numel()
                index = MetadataIndex(block.key, chunk.offsets)
                info = self._info(index)
                place = info.relative_path, info.offset
                items.setdefault(place, (index, chunk.sizes, []))[2].append(copy)
        for _, (index, sizes, copies) in sorted(items.items(), key=lambda item: item[0]):
            stored = self._read_chunk(index, sizes)
            for inside, target in () if only_check else copies:
                target.copy_(stored[inside])
            # Or its memory would be held while the next chunk is read.
            del stored
        return counts

    def check_file(self, name: str) -> None:
        """Compare the length of a file with metadata and manifest.

        Raises:
            CheckpointError: It is missing, or has another length.
        """
        try:
            path = file_inside(self.path, name)
            if not path.is_file():
                raise CheckpointError(f"{self.path} is incomplete: {name} is missing")
            size = path.stat().st_size
        finally:
            self._check_replaced()
        items = self.manifest.files.get(name) if self.manifest is not None else None
        needed = max(self._needed.get(name, 0), length_of(items or {}))
        if size < needed:
            raise CheckpointError(f"{self.path} is truncated: {name} has {size} of {needed} bytes")
        if items is not None and size != needed:
            raise CheckpointError(
                f"{self.path} is damaged: {name} has {size} bytes and should have {needed}"
            )

    def check_stored(self, key: str) -> None:
        """Check that all bytes of a tensor are stored, before memory is allocated for it.

        Raises:
            CheckpointError: There is no such tensor, or not all of it is stored.
        """
        self._saved(key)
        for chunk in self._tensor(key).chunks:
            self._open(self._info(MetadataIndex(key, chunk.offsets)).relative_path)

    def storage_problems(self, key: str) -> Iterator[str]:
        """Yield a sentence for each part of an entry that is not stored exactly once."""
        entry = self.metadata.state_dict_metadata.get(key)
        storage = self.metadata.storage_data or {}
        if not isinstance(entry, TensorStorageMetadata):
            if MetadataIndex(key) not in storage:
                yield f"{key} is in no file"
            return
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

    def _check_replaced(self) -> None:
        """Raise `ReplacedError` if the path no longer leads to the open folder."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._directory)):
                return
        raise ReplacedError(f"{self.path} was replaced by another save while it was read")

    def _read_chunk(self, index: MetadataIndex, sizes: Sequence[int]) -> torch.Tensor:
        """Read and verify one stored chunk."""
        stored = load_plain(self.read_item(index), f"{index.fqn} in {self.path}")
        shape = tuple(getattr(stored, "shape", ()))
        if not isinstance(stored, torch.Tensor) or shape != tuple(sizes):
            raise CheckpointError(
                f"{self.path} is damaged: {index.fqn} in {self._info(index).relative_path} should "
                f"be a tensor of shape {tuple(sizes)}, not {shape}"
            )
        return stored

    def _tensor(self, key: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.path} holds no tensor {key}")
        return entry

    def _info(self, index: MetadataIndex) -> Any:
        info = (self.metadata.storage_data or {}).get(index)
        if info is None:
            where = f" at {tuple(index.offset)}" if index.offset is not None else ""
            raise CheckpointError(f"{self.path} is incomplete: it does not hold {index.fqn}{where}")
        if info.transform_descriptors:
            raise CheckpointError(
                f"{self.path}: {index.fqn} was written through {info.transform_descriptors}, which "
                "is not read here; load it with torch and save it without"
            )
        return info

    def _open(self, name: str) -> BufferedReader:
        """Open a file of the folder, after checking its length."""
        if name not in self._files:
            while len(self._files) >= self._most_open:
                self._files.pop(next(iter(self._files))).close()
            self.check_file(name)
            try:
                file = (self.path / name).open("rb")
            finally:
                self._check_replaced()
            self._files[name] = file
        return self._files[name]

    def _saved(self, key: str) -> _Chunks:
        if key not in self._chunks:
            entry = self._tensor(key)
            for problem in self.storage_problems(key):
                raise CheckpointError(f"{self.path} is damaged or incomplete: {problem}")
            self._chunks[key] = _Chunks(entry)
        return self._chunks[key]


def _close(directory: int, files: dict[str, BufferedReader]) -> None:
    for file in files.values():
        file.close()
    os.close(directory)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A block of a stored tensor and the memory to read it into.

    Attributes:
        key: Name of the tensor in the checkpoint.
        offset: Where the block starts in it.
        target: Memory to fill, with as many dimensions as the stored tensor, on any device;
            elements are converted to its dtype.
    """

    key: str
    offset: tuple[int, ...]
    target: torch.Tensor


_Copy = tuple[tuple[slice, ...], torch.Tensor]
"""A part of a stored chunk, and the part of a request's target that it fills."""


def _overlap(block: ReadRequest, chunk: ChunkStorageMetadata) -> _Copy | None:
    """Intersect a block and a chunk; None if they do not overlap."""
    stored, inside = [], []
    for wanted, length, first, size in zip(
        block.offset, block.target.shape, chunk.offsets, chunk.sizes, strict=True
    ):
        low, high = max(wanted, first), min(wanted + length, first + size)
        if low >= high:
            return None
        stored.append(slice(low - first, high - first))
        inside.append(slice(low - wanted, high - wanted))
    return tuple(stored), block.target[tuple(inside)]


class _Chunks:
    """Chunks of a tensor, indexed by the leading dimensions in which each has length 1."""

    def __init__(self, entry: TensorStorageMetadata) -> None:
        self._all = entry.chunks
        self._depth = 0
        while self._depth < len(entry.size) and all(c.sizes[self._depth] == 1 for c in self._all):
            self._depth += 1
        self._by_front: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        for chunk in entry.chunks:
            front = tuple(chunk.offsets[: self._depth])
            self._by_front.setdefault(front, []).append(chunk)

    def near(self, block: ReadRequest) -> Sequence[ChunkStorageMetadata]:
        """Return the chunks that may overlap a block."""
        depth = self._depth
        if any(length != 1 for length in block.target.shape[:depth]):
            return self._all
        return self._by_front.get(tuple(block.offset[:depth]), [])


_MAX_CORNERS = 1 << 23


def coverage_problems(key: str, entry: TensorStorageMetadata) -> Iterator[str]:
    """Yield a sentence for each way in which chunks fail to tile a tensor."""
    total, covered = math.prod(entry.size), 0
    for chunk in entry.chunks:
        ends = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        if any(first + size > length for first, size, length in ends):
            yield f"{key} has a chunk at {tuple(chunk.offsets)} that reaches out of it"
        covered += math.prod(chunk.sizes)
    if covered != total:
        yield f"{key} has {total} elements, and its chunks {covered}"
    if len({tuple(chunk.offsets) for chunk in entry.chunks}) != len(entry.chunks):
        yield f"{key} has several chunks at the same place"
    elif covered == total and not _is_tiled(entry.size, entry.chunks):
        yield f"{key} has chunks that overlap, and elements that are in none"


def _is_tiled(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether boxes fill a box without overlapping.

    They do if and only if their corners, each with the sign it has in an inclusion-exclusion sum,
    add up to the corners of the whole. This takes time linear in the number of boxes.
    """
    boxes = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if len(boxes) <= 1:
        return True
    if len(boxes) << len(size) > _MAX_CORNERS:
        # Nobody shards along so many dimensions.
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    signed = [((0,) * len(size), size, -1), *((box.offsets, box.sizes, 1) for box in boxes)]
    for offsets, sizes, sign in signed:
        for sides in itertools.product((0, 1), repeat=len(size)):
            corner = (first + at * n for first, at, n in zip(offsets, sides, sizes, strict=True))
            corners[tuple(corner)] += sign * (-1) ** sum(sides)
    return not any(corners.values())
