"""Save a checkpoint: into a temporary folder, then renamed, so that it is complete or absent."""

from __future__ import annotations

import contextlib
import io
import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, override

import torch
import torch.distributed as dist
from filelock import BaseFileLock
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from megatron_fsdp_v2.checkpoint.entries import (
    EXTRA,
    MODEL,
    OPTIMIZER_GROUPS,
    OPTIMIZER_KIND,
    groups_entry,
    kind_entry,
    model_entries,
    parameter_names,
    state_entries,
    tied_entries,
)
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, all_ranks_or_raise, naming_full_disk
from megatron_fsdp_v2.checkpoint.host_memory import HostMemory
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, Manifest, StoredFile, StoredItem
from megatron_fsdp_v2.checkpoint.metadata import METADATA
from megatron_fsdp_v2.checkpoint.replacing import (
    acquire_lock,
    check_replaceable,
    make_temporary,
    put_in_place,
    release_lock,
    remove_leftovers,
    remove_own,
    sync,
    temporary_name,
)
from megatron_fsdp_v2.checkpoint.staging import Planner, Staged, stage, stage_object
from megatron_fsdp_v2.checkpoint.torch_files import FileView, checksum
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor

__all__ = ["save", "save_nested"]

_READ_BYTES = 16 << 20
_DESTROYED = (
    "the process group was destroyed while the checkpoint was written; wait for the result() of "
    "the save before destroy_process_group()"
)

_background_group: dict[str, Any] = {}
_MEMORY: weakref.WeakKeyDictionary[nn.Module, HostMemory] = weakref.WeakKeyDictionary()
"""Host memory that models were copied to by their last asynchronous save."""
_BACKGROUND = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
"""Saves run one after the other, on all ranks in the order of the calls: they share a process
group. A process waits for its saves before it exits."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    async_save: bool = False,
) -> Future[None] | None:
    """Save a model, its optimizer and plain data. Collective over all ranks.

    Everything is written to a temporary folder, `<path>.<token>.incomplete`, which is renamed when
    it is complete and on disk. Until then a checkpoint at `path` is unchanged, and a concurrent
    load gets either the old or the new one. Replicated values and tied parameters are written once.
    The checkpoint can be loaded at any world size and with any strategy.

    Args:
        path: The folder to create. A checkpoint or an empty folder is replaced. If it is a link,
            its target is replaced.
        model: Sharded by `fully_shard`, or not at all.
        optimizer: Any `torch.optim` optimizer of its parameters.
        extra: Numbers, strings, tuples, lists, dictionaries and tensors, the same on all ranks; the
            first rank's is kept.
        async_save: Return when everything is copied to host memory; training can continue.

    Returns:
        With `async_save` a future; its `result()` waits, and raises what went wrong.

    Raises:
        CheckpointError: Something cannot be saved, or writing failed on a rank.
        RuntimeError: Another save to the same path is under way, by this job or another one. On
            ranks other than the first a CheckpointError that says so.
        ValueError: `path` is not a checkpoint.
    """
    job = _Job(path, _Ranks.of_now(is_beside=async_save))
    is_first = job.ranks.rank == 0
    return _run(
        job, lambda: _model_content(model, optimizer, extra, async_save, is_first), async_save
    )


def save_nested(
    path: str | os.PathLike[str],
    state_dict: dict[str, Any],
    *,
    async_save: bool = False,
    memory: HostMemory | None = None,
) -> Future[None] | None:
    """Save a nested state dict like `torch.distributed.checkpoint.save`. Collective over all ranks.

    Like `save`, it replaces the path atomically and writes a manifest. Values other than tensors
    are pickled unchanged: who loads them has to trust the file.

    Args:
        path: As in `save`. The files of an interrupted save of torch's are replaced as well.
        state_dict: Dictionaries and lists of tensors and other values. Every rank passes its shard
            of sharded tensors; of entries that several ranks pass, any one is written.
        async_save: Return when everything is copied to host memory.
        memory: Host memory for the copies, reused by later saves; None allocates new memory.

    Returns:
        As `save`.

    Raises:
        CheckpointError: Something cannot be saved, or writing failed on a rank.
        RuntimeError: Another save to the same path is under way, by this job or another one.
        ValueError: `path` is not a checkpoint.
    """
    job = _Job(path, _Ranks.of_now(is_beside=async_save), over_unfinished=True)

    def content() -> _Content:
        entries, paths = flatten_state_dict(state_dict)
        staged = stage(
            entries, memory=(memory or HostMemory()) if async_save else None, to_bytes=_pickled
        )
        weights = {k.removeprefix(MODEL): v for k, v in entries.items() if k.startswith(MODEL)}
        return _Content(staged, units=_units(weights.items()), paths=paths)

    return _run(job, content, async_save)


def _run(job: _Job, content: Callable[[], _Content], async_save: bool) -> Future[None] | None:
    all_ranks_or_raise(f"save to {job.target}", lambda: job.begin(content), undo=job.end)
    if async_save:
        return _in_background(job.write)
    job.write()
    return None


@dataclass(frozen=True)
class _Content:
    """Contents of a checkpoint, as of the call of `save`.

    Attributes:
        staged: Entries by name, and the memory they are in.
        tied: Entries that are written under another name, with that name.
        units: How parameters are sharded, human-readable.
        paths: Paths of entries in a nested state dict; None if there was none.
    """

    staged: Staged
    tied: Mapping[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    paths: Mapping[str, Any] | None = None

    def give_back(self) -> None:
        """Return the host memory for the next save."""
        if self.staged.copies is not None:
            self.staged.copies.give_back()


_NOTHING = _Content(Staged({}))


def _model_content(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    copies: bool,
    is_first: bool,
) -> _Content:
    tied = tied_entries(model)
    memory = _MEMORY.setdefault(model, HostMemory()) if copies else None
    staged = stage(_entries(model, optimizer, tied), memory=memory)
    staged.entries[EXTRA] = stage_object(EXTRA, extra, is_written=is_first)
    return _Content(staged, tied, _units(model.named_parameters()))


def _pickled(name: str, value: Any) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as error:
        raise CheckpointError(f"{name} cannot be pickled ({error})") from error
    return file.getvalue()


@dataclass
class _Ranks:
    """The ranks of a save, recorded at the call: the process group may be destroyed during it.

    Attributes:
        group: The process group of its collectives; None for the default one, or one process.
        rank: This rank.
        is_alone: Whether there was no process group.
        world: The default process group.
    """

    group: Any
    rank: int
    is_alone: bool
    world: Any = None

    @classmethod
    def of_now(cls, *, is_beside: bool) -> _Ranks:
        """All ranks; an asynchronous save gets a dedicated process group."""
        if not dist.is_initialized():
            return cls(None, 0, is_alone=True)
        group = _dedicated_group(dist.group.WORLD) if is_beside else None
        return cls(group, dist.get_rank(), is_alone=False, world=dist.group.WORLD)

    def of_first[T](self, value: T) -> T:
        """Broadcast a value of the first rank. Collective."""
        if self.is_alone:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def leave(self) -> None:
        """Drop a broken process group, so that ranks that wait for this one get an error."""
        if _background_group.get("group") is self.group:
            _background_group.clear()
        self.group = self.world = None

    @property
    def is_lost(self) -> bool:
        """Whether the process group was destroyed; torch then saves as if alone."""
        return not self.is_alone and dist.group.WORLD is not self.world

    def reason(self, error: BaseException) -> str:
        """Describe an error; errors that follow from a destroyed process group are not helpful."""
        return _DESTROYED if self.is_lost else _reason(error)


class _Job:
    """One save: its contents, its temporary folder and its lock.

    Args:
        path: Path of the checkpoint.
        ranks: The ranks that save.
        over_unfinished: Whether to replace the files of an interrupted save of torch's.

    Attributes:
        target: The resolved path of the checkpoint.
        ranks: The ranks that save.
    """

    def __init__(
        self, path: str | os.PathLike[str], ranks: _Ranks, *, over_unfinished: bool = False
    ) -> None:
        self.target, self.ranks = Path(os.path.realpath(path)), ranks
        self._folder = temporary_name(self.target, uuid.uuid4().hex)
        self._over_unfinished = over_unfinished
        self._content = _NOTHING
        self._lock: BaseFileLock | None = None

    def begin(self, content: Callable[[], _Content]) -> None:
        """Stage the contents, acquire the lock and create the temporary folder."""
        check_replaceable(self.target, or_unfinished=self._over_unfinished)
        try:
            self._content = content()
            if self.ranks.rank == 0:
                self._prepare()
        except BaseException:
            self.end()
            raise

    def _prepare(self) -> None:
        try:
            with naming_full_disk(self.target):
                self.target.parent.mkdir(parents=True, exist_ok=True)
                self._lock = acquire_lock(self.target)
                remove_leftovers(self.target)
                make_temporary(self._folder)
        except OSError as error:
            raise CheckpointError(f"cannot save to {self.target}: {error}") from error

    def write(self) -> None:
        """Write the checkpoint and rename it. Collective over the ranks of the save."""
        reason = None
        try:
            try:
                folder = self.ranks.of_first(self._folder)
                save_state_dict(
                    self._content.staged.entries,
                    storage_writer=_Writer(folder, self._content.units, self._content.tied),
                    planner=Planner(self._content.paths),
                    process_group=self.ranks.group,
                    no_dist=self.ranks.is_alone,
                )
                if self.ranks.is_lost:
                    raise RuntimeError(_DESTROYED)
            except (Exception, CheckpointException) as error:
                reason = self.ranks.reason(error)
                # All ranks get a CheckpointException; of other errors only this one knows.
                if self.ranks.is_lost or not isinstance(error, CheckpointException):
                    self.ranks.leave()
            if reason is None:
                self._content.give_back()
                reason = self._published()
        finally:
            self.end()
        # Raised without the cause: its frames refer to a process group, and as long as that is
        # alive, other ranks would wait for this one.
        if reason is not None:
            raise CheckpointError(
                f"saving to {self.target} failed, and nothing there has changed: {reason}"
            )

    def _published(self) -> str | None:
        """Rename the checkpoint on the first rank; returns the reason if that failed."""
        reason = None
        if self.ranks.rank == 0:
            try:
                put_in_place(self._folder, self.target, or_unfinished=self._over_unfinished)
            except Exception as error:
                reason = _reason(error)
        try:
            return self.ranks.of_first(reason)
        except Exception as error:
            lost = self.ranks.reason(error)
            self.ranks.leave()
            if self.ranks.rank == 0:
                return reason
        raise CheckpointError(
            f"the checkpoint is written, and the first rank was lost ({lost}) before it said "
            f"whether it is at {self.target} now; what is there is whole in any case"
        )

    def end(self) -> None:
        """Release the lock and remove what was not published. Idempotent."""
        self._content = _NOTHING
        if self._lock is not None:
            # The folder exists only if it was not put in place.
            with contextlib.suppress(OSError):
                remove_own(self._folder)
            release_lock(self._lock)
            self._lock = None


def _entries(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, tied: Mapping[str, str]
) -> dict[str, Any]:
    # Tied tensors are written under their first name.
    entries = {key: value for key, value in model_entries(model).items() if key not in tied}
    if optimizer is not None:
        names = parameter_names(model)
        entries |= state_entries(optimizer, names)
        entries[OPTIMIZER_GROUPS] = groups_entry(optimizer, names)
        entries[OPTIMIZER_KIND] = kind_entry(optimizer)
    return entries


def _units(parameters: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Describe how parameters are sharded, for readers of the manifest."""
    return {
        name: f"{tuple(param.shape)} {param.dtype} over {tuple(param.device_mesh.shape)}, "
        f"{', '.join(str(placement) for placement in param.row_shards.placements)}"
        for name, param in parameters
        if isinstance(param, UnevenDTensor)
    }


def _dedicated_group(world: Any) -> Any:
    """The process group of asynchronous saves, created once for each default process group."""
    if _background_group.get("world") is not world:
        _background_group.update(world=world, group=dist.new_group(backend="gloo"))
    return _background_group["group"]


def _in_background(write: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    # A running future cannot be canceled on one rank while the others wait.
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            write()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    _BACKGROUND.submit(work)
    return future


def _reason(error: BaseException) -> str:
    """Describe an error, and the first one of those that torch collected from ranks."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return f"{type(error).__name__}: {error}"
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"on rank {rank}, {type(cause).__name__}: {cause}"


@dataclass(frozen=True)
class _CheckedResult(WriteResult):
    """Where an item was written, and its checksum."""

    crc32: int = 0


class _Writer(FileSystemWriter):
    """Torch's writer of files, which then reads them once for checksums and adds a manifest."""

    def __init__(self, folder: Path, units: dict[str, str], tied: Mapping[str, str]) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self._folder, self._units, self._tied = folder, units, tied

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's items."""
        with naming_full_disk(self._folder):
            written = super().write_data(plan, planner)
        checked: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        checked.set_result(list(self._checked(written.value())))
        return checked

    def _checked(self, results: list[WriteResult]) -> list[WriteResult]:
        found: list[WriteResult] = []
        scratch = bytearray(_READ_BYTES)
        with contextlib.ExitStack() as stack:
            files: dict[str, Any] = {}
            for result in results:
                info = result.storage_data
                name = info.relative_path
                if name not in files:
                    files[name] = stack.enter_context((self._folder / name).open("rb"))
                crc = _crc32(files[name], info.offset, info.length, scratch)
                found.append(_CheckedResult(result.index, result.size_in_bytes, info, crc))
        return found

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest. On the first rank only."""
        with naming_full_disk(self._folder):
            super().finish(metadata, [*results, self._named_again(metadata, results)])
            self._write_manifest(results)

    def _write_manifest(self, results: list[list[WriteResult]]) -> None:
        files: dict[str, list[StoredItem]] = {}
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, _CheckedResult)
            info = result.storage_data
            item = StoredItem(info.offset, info.length, result.crc32)
            files.setdefault(info.relative_path, []).append(item)
        metadata_file = self._folder / METADATA
        with metadata_file.open("rb") as file:
            length = metadata_file.stat().st_size
            crc = _crc32(file, 0, length, bytearray(_READ_BYTES))
            files[METADATA] = [StoredItem(0, length, crc)]
        stored = {
            name: StoredFile(
                (self._folder / name).stat().st_size,
                tuple(sorted(items, key=lambda item: item.offset)),
            )
            for name, items in sorted(files.items())
        }
        Manifest(len(results), torch.__version__, self._units, stored).write(self._folder)
        sync(self._folder / MANIFEST)
        sync(self._folder)

    def _named_again(
        self, metadata: Metadata, results: list[list[WriteResult]]
    ) -> list[WriteResult]:
        """Results for tensors that were written under another of their names."""
        found: list[WriteResult] = []
        entries = metadata.state_dict_metadata
        for key, written in self._tied.items():
            entries[key] = entries[written]
            for result in (result for of_rank in results for result in of_rank):
                if result.index.fqn == written:
                    found.append(
                        replace(
                            result,
                            index=MetadataIndex(key, result.index.offset, result.index.index),
                        )
                    )
        return found


def _crc32(file: Any, offset: int, length: int, scratch: bytearray) -> int:
    crc32, count = checksum(FileView(file, offset, length), scratch)
    if count != length:
        raise OSError(f"{file.name} is shorter than what was written to it")
    return crc32
