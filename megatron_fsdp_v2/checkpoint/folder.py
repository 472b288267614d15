"""Reading a folder of torch's distributed checkpoint piece by piece, in one process or in many.

Torch's own loading asks for whole state dicts, trusts what it finds, and unpickles whatever is no
tensor. Here every stored item is compared with its checksum before anything is made of it, only
what is wanted is read, and only metadata, tensors and plain data are made from a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import resource
import stat
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fsdp_v2.checkpoint.chunks import Piece, ReadRequest, SavedChunks, overlap
from megatron_fsdp_v2.checkpoint.coverage import coverage_problems
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, ReplacedError
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, Manifest, StoredItem
from megatron_fsdp_v2.checkpoint.metadata import METADATA, needed_bytes, read_metadata
from megatron_fsdp_v2.checkpoint.replacing import find_folder
from megatron_fsdp_v2.checkpoint.torch_files import (
    FileView,
    StoredTensor,
    checksum,
    find_tensor,
    load_plain,
    read_block,
)
from megatron_fsdp_v2.checkpoint.trust import file_inside

__all__ = ["CheckpointFolder", "ReadRequest"]

SCRATCH_BYTES = 16 << 20
"""Of a stored item, this much is in memory at a time."""

_ATTEMPTS = 20
"""A folder that is replaced so often while its metadata is read is not one to read."""


class CheckpointFolder:
    """A folder of torch's distributed checkpoint, open for reading.

    Where there is a manifest, every item that is read is compared with its checksum first.

    A save may put another checkpoint at the path at any time. All that is read here is of the one
    that was there at first: files are opened in that folder, whatever it is called by now, and stay
    open.

    Args:
        path: The folder.
        safe_globals: Classes and functions that objects in it may be made of, besides plain data,
            as in `torch.serialization.add_safe_globals`.

    Attributes:
        path: The folder.
        metadata: What torch's checkpoint knows about it.
        manifest: What this package knows about it; None where another program saved it.

    Raises:
        CheckpointError: There is none, its save was cut short, or its metadata cannot be read, is
            made of other things than metadata.
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
        self._chunks: dict[str, SavedChunks] = {}
        self._items: dict[str, dict[int, StoredItem]] = {}
        self._needed: dict[str, int] = {}
        self._scratch = bytearray()

    @property
    def identity(self) -> str:
        """Differs between any two saves: a digest of what describes them."""
        digest = hashlib.sha256()
        for name in (METADATA, MANIFEST):
            # A pipe would be waited for.
            if self._stat(name) is not None:
                with contextlib.suppress(FileNotFoundError), self._raw(name) as file:
                    digest.update(file.readall())
        return digest.hexdigest()

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None where there is none of that name."""
        entry = self.metadata.state_dict_metadata.get(key)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def tensors(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        """All tensors by name, in the order of the metadata."""
        for key, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                yield key, entry

    def has(self, key: str) -> bool:
        """Whether there is something of that name, a tensor or not."""
        return key in self.metadata.state_dict_metadata

    def object(self, key: str) -> Any:
        """Something that is not a tensor.

        Raises:
            CheckpointError: There is nothing of that name, it is damaged, or it is made of
                something that is neither plain data nor among the safe globals.
        """
        content = self.read_item(MetadataIndex(key))
        return load_plain(io.BytesIO(content), f"{key} in {self.path}", self._safe_globals)

    def read_item(self, index: MetadataIndex) -> bytearray:
        """The bytes of a stored item, as `torch.save` wrote them.

        Args:
            index: Name of an object; or of a tensor, with the offset of one of its chunks.

        Raises:
            CheckpointError: There is no such item, its file is missing or too short, or the bytes
                are not those that were saved.
        """
        info = self._info(index)
        return self._read(self._open(info.relative_path), index.fqn, info)

    def read_tensor(self, key: str) -> torch.Tensor:
        """A whole tensor, in its own dtype on the CPU.

        Raises:
            CheckpointError: There is none of that name, or it is not all there, or damaged.
        """
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.path} holds no tensor {key}")
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
        """Read blocks into their targets; no stored item is held in memory.

        Args:
            wanted: Blocks of tensors that are there. Where a block reaches beyond the tensor, that
                part of the target is left alone.

        Returns:
            How many elements of each were read.

        Raises:
            CheckpointError: A tensor, or a file with a part of it, is missing or damaged. Targets
                read until then are filled.
        """
        return self._go_through(wanted, is_filled=True)

    def check(self, wanted: Sequence[ReadRequest]) -> list[int]:
        """Read blocks as `fill` does, and leave the targets alone.

        What this found to be right `fill` finds as well: files stay open, even if they are removed.

        Args:
            wanted: As in `fill`.

        Returns:
            How many elements of each are there.

        Raises:
            CheckpointError: As in `fill`.
        """
        return self._go_through(wanted, is_filled=False)

    def _go_through(self, wanted: Sequence[ReadRequest], *, is_filled: bool) -> list[int]:
        counts = [0] * len(wanted)
        by_file: dict[str, dict[int, list[Piece]]] = {}
        for number, block in enumerate(wanted):
            for chunk in self._saved(block.key).near(block):
                piece = overlap(block, chunk)
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
        """Compare the length of a file with what is known about it.

        Raises:
            CheckpointError: It is missing, or not as long as it should be.
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
        """Find out whether a tensor can be as long as it is said to be, before memory is taken.

        Raises:
            CheckpointError: There is none of that name, or less is stored of it than it has.
        """
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.path} holds no tensor {key}")
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
        """What is known of a file of the folder; None where there is none.

        Raises:
            CheckpointError: It is a link out of the folder.
        """
        try:
            found = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                # A link says where it leads by path, so the path must still be that of the folder.
                self._check_replaced()
                file_inside(self.path, name)
                found = os.stat(name, dir_fd=self._directory)
        except FileNotFoundError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def _opened(self, path: Path) -> bool:
        """Open the folder and read what describes it; False where it was replaced meanwhile."""
        self.path = find_folder(path) or path
        try:
            self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            if is_gone and find_folder(path) is not None:
                return False
            # This finds words for what is wrong, unless the folder has just come back.
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
            # Between its two renames a save leaves no folder to find the files in.
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

    def _read_chunk(self, file: BinaryIO, pieces: Sequence[Piece], *, is_filled: bool) -> None:
        """Read one stored chunk, and put what is wanted of it into place if it is to be."""
        index, sizes = pieces[0].index, pieces[0].sizes
        info = self._info(index)
        if info.length <= SCRATCH_BYTES:
            source: Any = io.BytesIO(self._read(file, index.fqn, info))
        else:
            source = FileView(file, info.offset, info.length)
            self._check(index.fqn, info, checksum(source, self._room())[0])
        stored, whole = find_tensor(source), torch.empty(0)
        if stored is None:
            source.seek(0)
            whole = load_plain(source, f"{index.fqn} in {self.path}")
        where = f"{self.path} is damaged: {index.fqn} in {info.relative_path} at {info.offset}"
        shape = getattr(whole, "shape", None) if stored is None else stored.shape
        if shape is None or tuple(shape) != sizes:
            raise CheckpointError(
                f"{where} should be a tensor of shape {sizes}, not {shape and tuple(shape)}"
            )
        if stored is not None and stored.offset + stored.nbytes > info.length:
            raise CheckpointError(f"{where} is cut short")
        for piece in pieces if is_filled else ():
            if stored is not None:
                self._read_piece(source, stored, piece, info)
                continue
            ends = zip(piece.start, piece.target.shape, strict=True)
            piece.target.copy_(whole[tuple(slice(first, first + n) for first, n in ends)])

    def _read_piece(self, source: Any, stored: StoredTensor, piece: Piece, info: Any) -> None:
        try:
            read_block(source, stored, piece.start, piece.target, self._room())
        except EOFError as error:
            raise CheckpointError(
                f"{self.path} is damaged: {piece.index.fqn} in {info.relative_path} at "
                f"{info.offset} is cut short ({error})"
            ) from error

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
        """A file of the folder, checked for its length when it is opened."""
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
        # Items are read in large pieces; a buffer in between would be another copy.
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

    def _saved(self, key: str) -> SavedChunks:
        if key not in self._chunks:
            entry = self.metadata.state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{self.path} holds no tensor {key}")
            # Chunks that do not add up are noticed when what was wanted is not all there.
            covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if covered >= math.prod(entry.size):
                for problem in coverage_problems(key, entry):
                    raise CheckpointError(f"{self.path} is damaged: {problem}")
            self._chunks[key] = SavedChunks(entry)
        return self._chunks[key]


def _close(directory: int, files: dict[str, BinaryIO]) -> None:
    for file in files.values():
        file.close()
    os.close(directory)
