"""Saving: written beside, then renamed, so that a checkpoint is complete or is not there."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from megatron_fsdp_v2.checkpoint.agreement import together
from megatron_fsdp_v2.checkpoint.entries import (
    EXTRA,
    OPTIMIZER_GROUPS,
    groups_entry,
    model_entries,
    parameter_names,
    state_entries,
    tied_entries,
)
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, Manifest, StoredFile, StoredItem
from megatron_fsdp_v2.checkpoint.metadata import METADATA
from megatron_fsdp_v2.checkpoint.staging import Planner, stage
from megatron_fsdp_v2.checkpoint.stored_tensor import FileView, checksum
from megatron_fsdp_v2.uneven_dtensor import UnevenDTensor

__all__ = ["INCOMPLETE", "PREVIOUS", "save"]

INCOMPLETE = ".incomplete"
"""Suffix of a folder that is being written."""
PREVIOUS = ".previous"
"""Suffix of the checkpoint that a new one takes the place of, while it does."""

_READ_BYTES = 16 << 20

_UNDER_WAY: set[Path] = set()
_LOCK = threading.Lock()
_BACKGROUND = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
"""One save after the other, on all ranks in the order they were asked for: they share a process
group. A process that ends waits for its saves."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    async_save: bool = False,
) -> Future[None] | None:
    """Save a model, its optimizer and plain data. Collective over all ranks.

    Everything is written into `<path>.incomplete`, which is renamed when it is complete and on
    disk: whatever happens before leaves a checkpoint that was at `path` as it is. Replicated values
    and tied parameters are written once. It can be loaded at any world size and with any strategy.

    Args:
        path: The folder to make. A checkpoint that is there is replaced in the end.
        model: Sharded by `fully_shard`, or not at all.
        optimizer: Any `torch.optim` optimizer of its parameters.
        extra: Numbers, strings, lists, dictionaries and tensors, the same on all ranks; the first
            rank's is kept.
        async_save: Return once everything is copied to host memory; training may go on.

    Returns:
        With `async_save` a future; its `result()` waits, and raises what went wrong.

    Raises:
        CheckpointError: Something cannot be saved, or writing failed on a rank.
        RuntimeError: A save to the same path is under way.
        ValueError: At `path` is something that is no checkpoint.
    """
    # Two spellings of one path are one path.
    target = Path(os.path.abspath(path))
    units, group = _units(model), _group_beside(_world()) if async_save else None
    tied = tied_entries(model)
    staged = together(
        f"save to {target}",
        lambda: _begun(target, lambda: _entries(model, optimizer, extra), copies=async_save),
        undo=lambda: _end(target),
    )
    write = functools.partial(_write, target, staged, units, tied, group)
    if async_save:
        return _in_background(write)
    write()
    return None


def _begun(
    target: Path, entries: Callable[[], Mapping[str, Any]], *, copies: bool
) -> dict[str, Any]:
    """What is to be written to a path that nobody else writes to from now on."""
    _begin(target)
    try:
        return stage(entries(), copies=copies)
    except BaseException:
        _end(target)
        raise


def _begin(target: Path) -> None:
    if target.exists() and not ((target / MANIFEST).exists() or (target / METADATA).exists()):
        raise ValueError(
            f"{target} exists and is no checkpoint; name a folder that is not there, or remove it"
        )
    with _LOCK:
        if target in _UNDER_WAY:
            raise RuntimeError(
                f"a save to {target} is under way; wait for the result() of its future first"
            )
        _UNDER_WAY.add(target)


def _end(target: Path) -> None:
    with _LOCK:
        _UNDER_WAY.discard(target)


def _entries(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any
) -> dict[str, Any]:
    entries = model_entries(model)
    for key in tied_entries(model):
        # Written under its first name.
        del entries[key]
    if optimizer is not None:
        names = parameter_names(model)
        entries |= state_entries(optimizer, names)
        entries[OPTIMIZER_GROUPS] = groups_entry(optimizer, names)
    entries[EXTRA] = extra
    return entries


def _units(model: nn.Module) -> dict[str, str]:
    """How parameters were sharded, for people who read the manifest."""
    return {
        name: f"{tuple(param.shape)} {param.dtype} over {tuple(param.device_mesh.shape)}, "
        f"{', '.join(str(placement) for placement in param.row_shards.placements)}"
        for name, param in model.named_parameters()
        if isinstance(param, UnevenDTensor)
    }


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


@functools.lru_cache(maxsize=1)
def _group_beside(world: Any) -> Any:
    """Ranks talk over this while saves run beside training; made once, by all ranks."""
    return None if world is None else dist.new_group(backend="gloo")


def _in_background(write: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    # From the start, so that no rank can cancel what the others wait for.
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


def _write(
    target: Path, staged: dict[str, Any], units: dict[str, str], tied: dict[str, str], group: Any
) -> None:
    try:
        _write_beside(target, staged, units, tied, group)
    finally:
        _end(target)


def _write_beside(
    target: Path, staged: dict[str, Any], units: dict[str, str], tied: dict[str, str], group: Any
) -> None:
    is_alone = not dist.is_initialized()
    folder = target.with_name(target.name + INCOMPLETE)
    if is_alone or dist.get_rank(group) == 0:
        shutil.rmtree(folder, ignore_errors=True)
    if not is_alone:
        # Nobody writes into what the first rank is about to remove.
        dist.barrier(group)
    writer = _Writer(folder, target, units, tied)
    try:
        save_state_dict(
            staged, storage_writer=writer, planner=Planner(), process_group=group, no_dist=is_alone
        )
    except (CheckpointException, Exception) as error:
        raise CheckpointError(
            f"saving to {target} failed, and nothing there has changed: {_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """What went wrong, from torch's collection of what ranks raised."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return f"{type(error).__name__}: {error}"
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"on rank {rank}, {type(cause).__name__}: {cause}"


@dataclass(frozen=True)
class _CheckedResult(WriteResult):
    """Where an item was written, and what its bytes add up to."""

    crc32: int = 0


class _Writer(FileSystemWriter):
    """Torch's writer of files; what it wrote is read once more and summed up, then renamed."""

    def __init__(
        self, folder: Path, target: Path, units: dict[str, str], tied: dict[str, str]
    ) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self._folder, self._target, self._units = folder, target, units
        self._tied = tied

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's items."""
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
        """Complete the checkpoint and put it where it belongs. On the first rank only."""
        super().finish(metadata, [*results, self._named_again(metadata, results)])
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
        _sync(self._folder / MANIFEST)
        _sync(self._folder)
        _put_in_place(self._folder, self._target)

    def _named_again(
        self, metadata: Metadata, results: list[list[WriteResult]]
    ) -> list[WriteResult]:
        """Where tensors lie that were written under another of their names."""
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(folder: Path, target: Path) -> None:
    """Rename a complete checkpoint; an interruption between the renames leaves the old one."""
    previous = target.with_name(target.name + PREVIOUS)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    folder.rename(target)
    _sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)
