"""Read blocks of tensors from a folder of torch's distributed checkpoint.

Torch's own loading reads whole state dicts and unpickles everything that is not a tensor. Here
every item is compared with its checksum before it is used, and only requested items are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import os
import resource
import stat
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_fsdp_v2.checkpoint.errors import CheckpointError, ReplacedError
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, Manifest, StoredItem
from megatron_fsdp_v2.checkpoint.metadata import METADATA, needed_bytes, read_metadata
from megatron_fsdp_v2.checkpoint.replacing import find_folder
from megatron_fsdp_v2.checkpoint.torch_files import (
    FileView,
    checksum,
    find_tensor,
    load_plain,
    read_block,
)
from megatron_fsdp_v2.checkpoint.trust import file_inside

__all__ = ["CheckpointFolder", "ReadRequest", "coverage_problems"]

SCRATCH_BYTES = 16 << 20
"""Size of the buffer that stored items are read through."""

_ATTEMPTS = 20
"""How often a folder is opened again if it is replaced while its metadata is read."""


class CheckpointFolder:
    """A folder of torch's distributed checkpoint, open for reading.

    If there is a manifest, every item is compared with its checksum before it is used.

    A save may replace the checkpoint at any time. Files are opened relative to the folder that was
    opened first, under whatever name, and stay open: everything read here belongs to one save.

    Args:
        path: The folder.
        safe_globals: Classes and functions that objects in it may be made of, besides plain data,
            as in `torch.serialization.add_safe_globals`.

    Attributes:
        path: The folder.
        metadata: What torch's checkpoint knows about it.
        manifest: The manifest of this package; None if another program saved it.

    Raises:
        CheckpointError: There is none, its save was interrupted, or its metadata cannot be read or
            is not allowed.
    """

    def __init__(self, path: str | Path, safe_globals: Sequence[Any] = ()) -> None:
        self._files: dict[str, BinaryIO] = {}
        self._most_open = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1)
        for _ in range(_ATTEMPTS):
            if self._opened(Path(path)):
                break
        else:
            raise ReplacedError(f"{path} is replaced faster than its metadata can be read")
        self._safe_globals = list(safe_globals)
        self._chunks: dict[str, _Chunks] = {}
        self._items: dict[str, dict[int, StoredItem]] = {}
        self._needed: dict[str, int] = {}
        self._scratch = bytearray()

    @property
    def identity(self) -> str:
        """A digest of metadata and manifest, different for any two saves."""
        digest = hashlib.sha256()
        for name in (METADATA, MANIFEST):
            # Opening a pipe would wait for a writer.
            if self._stat(name) is not None:
                with contextlib.suppress(FileNotFoundError), self._raw(name) as file:
                    digest.update(file.readall())
        return digest.hexdigest()

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
                than plain data and the safe globals.
        """
        content = self.read_item(MetadataIndex(key))
        return load_plain(io.BytesIO(content), f"{key} in {self.path}", self._safe_globals)

    def read_item(self, index: MetadataIndex) -> bytearray:
        """Read the bytes of a stored item, as `torch.save` wrote them.

        Args:
            index: Name of an object; or of a tensor, with the offset of one of its chunks.

        Raises:
            CheckpointError: There is no such item, its file is missing or too short, or the bytes
                are not those that were saved.
        """
        info = self._info(index)
        return self._read(self._open(info.relative_path), index.fqn, info)

    def read_tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor, in its stored dtype, on the CPU.

        Raises:
            CheckpointError: There is none of that name, or it is not all there, or damaged.
        """
        entry = self._tensor(key)
        self.check_stored(key)
        data = torch.empty(entry.size, dtype=entry.properties.dtype)
        (count,) = self.fill([ReadRequest(key, (0,) * data.dim(), data)])
        if count != data.numel():
            raise CheckpointError(
                f"{self.path} is incomplete: {count} of {data.numel()} elements of {key} are there"
            )
        return data

    @torch.no_grad()
    def fill(self, wanted: Sequence[ReadRequest]) -> list[int]:
        """Read blocks into their targets.

        Args:
            wanted: Blocks of stored tensors. The part of a target beyond the tensor is not changed.

        Returns:
            The number of elements read for each block.

        Raises:
            CheckpointError: A tensor, or a file with a part of it, is missing or damaged. Targets
                of earlier blocks are filled.
        """
        return self._go_through(wanted, is_filled=True)

    def check(self, wanted: Sequence[ReadRequest]) -> list[int]:
        """Read and verify blocks as `fill` does, without changing the targets.

        Files stay open, so that a later `fill` reads the same bytes even if they are removed.

        Args:
            wanted: As in `fill`.

        Returns:
            The number of elements stored for each block.

        Raises:
            CheckpointError: As in `fill`.
        """
        return self._go_through(wanted, is_filled=False)

    def _go_through(self, wanted: Sequence[ReadRequest], *, is_filled: bool) -> list[int]:
        counts = [0] * len(wanted)
        by_file: dict[str, dict[int, list[_Overlap]]] = {}
        for number, block in enumerate(wanted):
            for chunk in self._saved(block.key).near(block):
                piece = _overlap(block, chunk)
                if piece is None:
                    continue
                counts[number] += piece.target.numel()
                info = self._info(piece.index)
                items = by_file.setdefault(info.relative_path, {})
                items.setdefault(info.offset, []).append(piece)
        for name in sorted(by_file):
            file = self._open(name)
            for _, pieces in sorted(by_file[name].items()):
                self._read_chunk(file, pieces, is_filled=is_filled)
        return counts

    def check_file(self, name: str) -> None:
        """Compare the length of a file with metadata and manifest.

        Raises:
            CheckpointError: It is missing, or has another length.
        """
        found = self._stat(name)
        if found is None:
            self._check_replaced()
            raise CheckpointError(f"{self.path} is incomplete: {name} is missing")
        size = found.st_size
        stored = self.manifest.files.get(name) if self.manifest is not None else None
        if not self._needed:
            self._needed = needed_bytes(self.metadata)
        needed = max(self._needed.get(name, 0), stored.nbytes if stored is not None else 0)
        if size < needed:
            raise CheckpointError(f"{self.path} is truncated: {name} has {size} of {needed} bytes")
        if stored is not None and size != needed:
            raise CheckpointError(
                f"{self.path} is damaged: {name} has {size} bytes and should have {needed}"
            )

    def check_stored(self, key: str) -> None:
        """Check that all bytes of a tensor are stored, before memory is allocated for it.

        Raises:
            CheckpointError: There is no such tensor, or not all of it is stored.
        """
        entry = self._tensor(key)
        for chunk in entry.chunks:
            info = self._info(MetadataIndex(key, chunk.offsets))
            self._open(info.relative_path)
            nbytes = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            if nbytes > info.length:
                raise CheckpointError(
                    f"{self.path} is damaged: {key} has a chunk of {nbytes} bytes at "
                    f"{tuple(chunk.offsets)}, and {info.length} bytes are stored"
                )
        covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if covered < math.prod(entry.size):
            raise CheckpointError(
                f"{self.path} is incomplete: {covered} of {math.prod(entry.size)} elements of "
                f"{key} are there"
            )

    def _stat(self, name: str) -> os.stat_result | None:
        """Stat a regular file of the folder; None if there is none.

        Raises:
            CheckpointError: It is a link to a file outside of the folder.
        """
        try:
            found = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                # Links are resolved by path, so the path must still lead to this folder.
                self._check_replaced()
                file_inside(self.path, name)
                found = os.stat(name, dir_fd=self._directory)
        except FileNotFoundError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def _opened(self, path: Path) -> bool:
        """Open the folder and read metadata and manifest; False if it was replaced meanwhile."""
        self.path = find_folder(path) or path
        try:
            self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            if is_gone and find_folder(path) is not None:
                return False
            # Raises an error that says what is wrong, unless the folder has just come back.
            with contextlib.suppress(FileNotFoundError):
                read_metadata(self.path, Manifest.read(self.path))
            if is_gone:
                return False
            raise
        close = weakref.finalize(self, _close, self._directory, self._files)
        try:
            self.manifest = Manifest.read(self.path)
            self.metadata = read_metadata(self.path, self.manifest)
        except (CheckpointError, OSError):
            # Between the two renames of a save there is no folder at the path.
            if not self._is_replaced():
                raise
        if not self._is_replaced():
            return True
        close()
        return False

    def _is_replaced(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._directory))
        except OSError:
            return True

    def _check_replaced(self) -> None:
        if self._is_replaced():
            raise ReplacedError(f"{self.path} was replaced by another save while it was read")

    def _read_chunk(self, file: BinaryIO, pieces: Sequence[_Overlap], *, is_filled: bool) -> None:
        """Read and verify one stored chunk, and copy parts of it to their targets."""
        index, sizes = pieces[0].index, pieces[0].sizes
        info = self._info(index)
        if info.length <= SCRATCH_BYTES:
            source: Any = io.BytesIO(self._read(file, index.fqn, info))
        else:
            source = FileView(file, info.offset, info.length)
            self._check(index.fqn, info, checksum(source, self._room())[0])
        where = f"{self.path} is damaged: {index.fqn} in {info.relative_path} at {info.offset}"
        stored, whole = find_tensor(source), torch.empty(0)
        if stored is None:
            source.seek(0)
            whole = load_plain(source, f"{index.fqn} in {self.path}")
        shape = tuple(getattr(whole, "shape", ())) if stored is None else stored.shape
        if shape != sizes or (stored is None and not isinstance(whole, torch.Tensor)):
            raise CheckpointError(f"{where} should be a tensor of shape {sizes}, not {shape}")
        for piece in pieces if is_filled else ():
            if stored is None:
                ends = zip(piece.start, piece.target.shape, strict=True)
                piece.target.copy_(whole[tuple(slice(first, first + n) for first, n in ends)])
                continue
            try:
                read_block(source, stored, piece.start, piece.target, self._room())
            except EOFError as error:
                raise CheckpointError(f"{where} is cut short ({error})") from error

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

    def _open(self, name: str) -> BinaryIO:
        """Open a file of the folder, after checking its length."""
        if name not in self._files:
            while len(self._files) >= self._most_open:
                self._files.pop(next(iter(self._files))).close()
            self.check_file(name)
            try:
                self._files[name] = self._raw(name)
            except FileNotFoundError:
                self._check_replaced()
                raise
        return self._files[name]

    def _raw(self, name: str) -> Any:
        # Reads are large; buffering would add a copy.
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags, dir_fd=self._directory)

        return open(name, "rb", buffering=0, opener=opener)

    def _read(self, file: BinaryIO, key: str, info: Any) -> bytearray:
        content = bytearray(info.length)
        source = FileView(file, info.offset, info.length)
        read, view = 1, memoryview(content)
        while view and read:
            read = source.readinto(view)
            view = view[read:]
        self._check(key, info, zlib.crc32(content))
        return content

    def _check(self, key: str, info: Any, crc32: int) -> None:
        if self.manifest is None:
            return
        name = info.relative_path
        if name not in self._items:
            file = self.manifest.files.get(name)
            self._items[name] = {i.offset: i for i in file.items} if file is not None else {}
        item = self._items[name].get(info.offset)
        where = f"{key} in {name}, {info.length} bytes at {info.offset},"
        if item is None or item.length != info.length:
            raise CheckpointError(f"{self.path} is damaged: {where} is not in the manifest")
        if item.crc32 != crc32:
            raise CheckpointError(
                f"{self.path} is damaged: {where} has the checksum {crc32:08x} and was saved with "
                f"{item.crc32:08x}"
            )

    def _room(self) -> bytearray:
        if not self._scratch:
            self._scratch = bytearray(SCRATCH_BYTES)
        return self._scratch

    def _saved(self, key: str) -> _Chunks:
        if key not in self._chunks:
            entry = self._tensor(key)
            # Too few elements are reported by the reader, with what was requested.
            covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if covered >= math.prod(entry.size):
                for problem in coverage_problems(key, entry):
                    raise CheckpointError(f"{self.path} is damaged: {problem}")
            self._chunks[key] = _Chunks(entry)
        return self._chunks[key]


def _close(directory: int, files: dict[str, BinaryIO]) -> None:
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


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The intersection of a stored chunk and a requested block.

    Attributes:
        index: The chunk.
        sizes: Its shape.
        start: Where the intersection starts in the chunk.
        target: The part of the request's target that it fills.
    """

    index: MetadataIndex
    sizes: tuple[int, ...]
    start: tuple[int, ...]
    target: torch.Tensor


def _overlap(block: ReadRequest, chunk: ChunkStorageMetadata) -> _Overlap | None:
    """Intersect a block and a chunk; None if they do not overlap."""
    start, inside = [], []
    for wanted, length, first, size in zip(
        block.offset, block.target.shape, chunk.offsets, chunk.sizes, strict=True
    ):
        low, high = max(wanted, first), min(wanted + length, first + size)
        if low >= high:
            return None
        start.append(low - first)
        inside.append(slice(low - wanted, high - wanted))
    return _Overlap(
        MetadataIndex(block.key, chunk.offsets),
        tuple(chunk.sizes),
        tuple(start),
        block.target[tuple(inside)],
    )


class _Chunks:
    """Chunks of a tensor, indexed by the leading dimensions in which each has length 1."""

    def __init__(self, entry: TensorStorageMetadata) -> None:
        self._all = entry.chunks
        self._depth = 0
        while self._depth < len(entry.size) and all(
            c.sizes[self._depth] == 1 for c in entry.chunks
        ):
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
    # Along other dimensions every box is as long as the whole.
    dims = [
        d
        for d, length in enumerate(size)
        if any(box.offsets[d] != 0 or box.sizes[d] != length for box in boxes)
    ]
    if len(boxes) << len(dims) > _MAX_CORNERS:
        # Nobody shards along so many dimensions.
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sides in itertools.product((0, 1), repeat=len(dims)):
        sign = -1 if sum(sides) % 2 else 1
        for box in boxes:
            corner = (box.offsets[d] + at * box.sizes[d] for d, at in zip(dims, sides, strict=True))
            corners[tuple(corner)] += sign
        whole = tuple(at * size[d] for d, at in zip(dims, sides, strict=True))
        corners[whole] -= sign
    return not any(corners.values())
