"""Read blocks of tensors from a folder of torch's distributed checkpoint.

Torch's own loading reads whole state dicts and unpickles everything that is not a tensor. Here
every item is compared with its checksum before it is used, and only requested items are read.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import math
import os
import resource
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2._text import listed, shortened
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, NotFoundError, ReplacedError
from megatron_fsdp_v2.checkpoint.foreign import load_object, read_entries
from megatron_fsdp_v2.checkpoint.manifest import (
    DATA_SUFFIX,
    INCOMPLETE,
    MANIFEST,
    METADATA,
    Entry,
    Manifest,
    StoredChunk,
    file_inside,
)
from megatron_fsdp_v2.checkpoint.replacing import find_folder

_SHOWN = 4


class CheckpointFolder:
    """A folder of torch's distributed checkpoint, open for reading.

    If there is a manifest, every item is compared with its checksum before it is used.

    A save may replace the checkpoint at any time. Files stay open, and one that is opened later is
    of the same folder or an error: everything read here belongs to one save.

    Args:
        path: The folder.
        trusts_objects: Whether `object` unpickles anything, which runs code that the folder names.

    Attributes:
        path: The folder.
        entries: Tensors and objects in it, by name.
        manifest: The manifest of this package; None if another program saved it.
        lengths: Length of each file up to the end of its last item.
        identity: A digest of manifest or metadata, different for any two saves.

    Raises:
        CheckpointError: There is none, its save was interrupted, or its index cannot be read.
        ReplacedError: A save replaced it meanwhile; open it again.
    """

    def __init__(self, path: str | Path, *, trusts_objects: bool = False) -> None:
        self._trusts_objects = trusts_objects
        self._files: dict[str, BufferedReader] = {}
        self._most_open = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1)
        self._chunks: dict[str, _Chunks] = {}
        self.path = find_folder(Path(path)) or Path(path)
        try:
            # While the folder is open, no other one has its inode number.
            self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or find_folder(Path(path)) is None:
                # `_check_complete` raises, unless a concurrent save just restored the folder.
                _check_complete(self.path)
            raise ReplacedError(f"{self.path} is being replaced") from error
        weakref.finalize(self, _close, self._directory, self._files)
        try:
            _check_complete(self.path)
            with _paused_collection():
                self.manifest = Manifest.read(self.path)
                own = self.manifest
                self.entries: Mapping[str, Entry] = own.entries if own else read_entries(self.path)
            index = self.path / (MANIFEST if own else METADATA)
            self.identity = hashlib.sha256(index.read_bytes()).hexdigest()
        finally:
            # Between the two renames of a save there is no folder at the path.
            self._check_replaced()
        self.lengths: Counter[str] = Counter()
        stored = (chunk for entry in self.entries.values() for chunk in entry.chunks)
        for chunk in (*stored, *([own.metadata] if own else [])):
            self.lengths[chunk.file] = max(self.lengths[chunk.file], chunk.start + chunk.length)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if there is no tensor of that name."""
        entry = self.entries.get(key)
        return None if entry is None or entry.dtype is None else entry.shape

    def tensors(self) -> Iterator[tuple[str, Entry]]:
        """Iterate over all tensors by name, in the order of the index."""
        yield from ((key, entry) for key, entry in self.entries.items() if entry.dtype is not None)

    def object(self, key: str) -> Any:
        """Load an entry that is not a tensor.

        Raises:
            NotPlainError: It contains something other than plain data.
            CheckpointError: There is no such entry, or it is damaged.
        """
        entry = self.entries.get(key)
        if entry is None or entry.dtype is not None or not entry.chunks:
            raise CheckpointError(f"{self.path} is incomplete: it does not hold {key}")
        return load_object(
            self.read_item(key, entry.chunks[0]),
            f"{key} in {self.path}",
            is_trusted=self._trusts_objects,
        )

    def has_file(self, name: str) -> bool:
        """Whether the folder has a file of this name, beside those with its items.

        Raises:
            CheckpointError: The file is a link out of the folder.
        """
        return file_inside(self.path, name).is_file()

    def load_file(self, name: str) -> Any:
        """Load a file that `torch.save` wrote into the folder.

        Raises:
            NotPlainError: It contains something other than plain data.
            CheckpointError: It is damaged.
        """
        file = file_inside(self.path, name)
        return load_object(file, str(file), is_trusted=self._trusts_objects)

    def read_item(self, key: str, chunk: StoredChunk) -> bytes:
        """Read the bytes of a stored item, as `torch.save` wrote them, and compare the checksum.

        Args:
            key: Name of the entry.
            chunk: One of its chunks.

        Raises:
            CheckpointError: The file is missing or too short, or the bytes are not those that were
                saved.
        """
        file = self._open(chunk.file)
        file.seek(chunk.start)
        content = file.read(chunk.length)
        if chunk.crc32 is not None and (crc32 := zlib.crc32(content)) != chunk.crc32:
            raise CheckpointError(
                f"{self.path} is damaged: {key} in {chunk.file}, {chunk.length} bytes at "
                f"{chunk.start}, has the checksum {crc32:08x} and was saved with {chunk.crc32:08x}"
            )
        return content

    def read_tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor, in its stored dtype, on the CPU.

        Raises:
            CheckpointError: There is none of that name, or it is not all there, or damaged.
        """
        self.check_stored(key)
        data = torch.empty(self.entries[key].shape, dtype=self.entries[key].dtype)
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
        items: dict[StoredChunk, tuple[str, list[_Copy]]] = {}
        for number, block in enumerate(wanted):
            for chunk in self._saved(block.key).near(block):
                copy = _overlap(block, chunk)
                if copy is not None:
                    counts[number] += copy[1].numel()
                    items.setdefault(chunk, (block.key, []))[1].append(copy)
        for chunk in sorted(items, key=lambda chunk: (chunk.file, chunk.start)):
            key, copies = items[chunk]
            stored = self._read_chunk(key, chunk)
            for inside, target in () if only_check else copies:
                target.copy_(stored[inside])
            # Or its memory would be held while the next chunk is read.
            del stored
        return counts

    def check_file(self, name: str) -> None:
        """Compare the length of a file with its items.

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
        needed = self.lengths[name]
        if size < needed:
            raise CheckpointError(f"{self.path} is truncated: {name} has {size} of {needed} bytes")
        if self.manifest is not None and size != needed:
            raise CheckpointError(
                f"{self.path} is damaged: {name} has {size} bytes and should have {needed}"
            )

    def check_stored(self, key: str) -> None:
        """Check that all bytes of a tensor are stored, before memory is allocated for it.

        Raises:
            CheckpointError: There is no such tensor, or not all of it is stored.
        """
        self._saved(key)
        for chunk in self.entries[key].chunks:
            self._open(chunk.file)

    def storage_problems(self, key: str) -> Iterator[str]:
        """Yield a sentence for each part of an entry that is not stored exactly once."""
        entry, name = self.entries[key], shortened(key)
        if entry.dtype is None:
            if not entry.chunks:
                yield f"{name} is in no file"
            return
        yield from coverage_problems(key, entry)
        for chunk in entry.chunks:
            nbytes = math.prod(chunk.sizes) * entry.dtype.itemsize
            if nbytes > chunk.length:
                yield (
                    f"{name} has a chunk of {nbytes} bytes at {chunk.offsets}, and {chunk.length} "
                    "bytes are stored"
                )

    def _check_replaced(self) -> None:
        """Raise `ReplacedError` if the path no longer leads to the open folder."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._directory)):
                return
        raise ReplacedError(f"{self.path} was replaced by another save while it was read")

    def _read_chunk(self, key: str, chunk: StoredChunk) -> torch.Tensor:
        """Read and verify one stored chunk."""
        stored = load_object(self.read_item(key, chunk), f"{key} in {self.path}")
        is_plain = type(stored) in (torch.Tensor, nn.Parameter) and not stored.is_meta
        shape = tuple(stored.shape) if is_plain else ()
        if not is_plain or stored.layout is not torch.strided or shape != chunk.sizes:
            raise CheckpointError(
                f"{self.path} is damaged: {key} in {chunk.file} should be a tensor of shape "
                f"{chunk.sizes}, not {shape}"
            )
        found: torch.Tensor = stored.detach()
        return found

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
            if self.shape(key) is None:
                raise CheckpointError(f"{self.path} holds no tensor {key}")
            for problem in self.storage_problems(key):
                raise CheckpointError(f"{self.path} is damaged or incomplete: {problem}")
            self._chunks[key] = _Chunks(self.entries[key])
        return self._chunks[key]


@contextlib.contextmanager
def _paused_collection() -> Iterator[None]:
    """Pause garbage collection, which takes longer than reading a large index."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _check_complete(folder: Path) -> None:
    """Check that a folder is a checkpoint.

    Raises:
        NotFoundError: There is nothing, a folder of checkpoints, or something else.
        CheckpointError: The save was cut short.
    """
    if folder.name.endswith(INCOMPLETE):
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: the save was cut short; use an older one and "
            "remove it"
        )
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise NotFoundError(f"{folder} {kind}")
    if file_inside(folder, METADATA).is_file():
        return
    inside = sorted(p.parent.name for p in folder.glob(f"*/{METADATA}"))
    if inside:
        raise NotFoundError(
            f"{folder} is not a checkpoint, it holds some: name one of {listed(inside, _SHOWN)}"
        )
    names = sorted(p.name for p in folder.iterdir())
    only = f", only {listed(names, _SHOWN)}" if names else ""
    if any(name == MANIFEST or name.endswith(DATA_SUFFIX) for name in names):
        raise CheckpointError(
            f"{folder} is damaged, or its save was cut short: it has no {METADATA}{only}"
        )
    raise NotFoundError(f"{folder} is not a checkpoint: it has no {METADATA}{only}")


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


def _overlap(block: ReadRequest, chunk: StoredChunk) -> _Copy | None:
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

    def __init__(self, entry: Entry) -> None:
        self._all = entry.chunks
        self._depth = 0
        while self._depth < len(entry.shape) and all(c.sizes[self._depth] == 1 for c in self._all):
            self._depth += 1
        self._by_front: dict[tuple[int, ...], list[StoredChunk]] = {}
        for chunk in entry.chunks:
            self._by_front.setdefault(chunk.offsets[: self._depth], []).append(chunk)

    def near(self, block: ReadRequest) -> Sequence[StoredChunk]:
        """Return the chunks that may overlap a block."""
        depth = self._depth
        if any(length != 1 for length in block.target.shape[:depth]):
            return self._all
        return self._by_front.get(tuple(block.offset[:depth]), [])


def coverage_problems(key: str, entry: Entry) -> Iterator[str]:
    """Yield a sentence for each way in which chunks fail to tile a tensor."""
    name = shortened(key)
    total, covered = math.prod(entry.shape), 0
    for chunk in entry.chunks:
        ends = zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        if any(first + size > length for first, size, length in ends):
            yield f"{name} has a chunk at {chunk.offsets} that reaches out of it"
        covered += math.prod(chunk.sizes)
    if covered != total:
        yield f"{name} has {total} elements, and its chunks {covered}"
    elif not _is_tiled(entry):
        yield f"{name} has chunks that overlap, and elements that are in none"


_MAX_DIMS = 8
"""Nobody shards a tensor along so many dimensions."""


def _is_tiled(entry: Entry) -> bool:
    """Whether the chunks of a tensor fill it without overlapping.

    They do if and only if their corners, each with the sign it has in an inclusion-exclusion sum,
    add up to the corners of the whole. This takes time linear in the number of chunks.
    """
    boxes = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
    shape = entry.shape
    dims = [d for d in range(len(shape)) if any(box.sizes[d] != shape[d] for box in boxes)]
    if len(boxes) <= 1:
        return True
    if len(dims) > _MAX_DIMS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    whole = StoredChunk((0,) * len(shape), shape, "", 0, 0)
    for box, sign in ((whole, -1), *((box, 1) for box in boxes)):
        for sides in itertools.product((0, 1), repeat=len(dims)):
            corner = (box.offsets[d] + at * box.sizes[d] for d, at in zip(dims, sides, strict=True))
            corners[tuple(corner)] += sign * (-1) ** sum(sides)
    return not any(corners.values())
