"""Save a checkpoint: into a temporary folder, then renamed, so that it is complete or absent.

Entries are staged first: as they are at the call, and copied to host memory for a save in the
background.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from filelock import BaseFileLock
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_map_with_path

from megatron_fsdp_v2.checkpoint.entries import (
    EXTRA,
    OPTIMIZER_GROUPS,
    OPTIMIZER_KIND,
    groups_entry,
    kind_entry,
    model_entries,
    parameter_names,
    state_entries,
    tied_entries,
)
from megatron_fsdp_v2.checkpoint.errors import (
    CheckpointError,
    all_ranks_or_raise,
    everyones,
    naming_full_disk,
)
from megatron_fsdp_v2.checkpoint.foreign import load_object
from megatron_fsdp_v2.checkpoint.lost_ranks import lost_ranks, next_save
from megatron_fsdp_v2.checkpoint.manifest import check_name
from megatron_fsdp_v2.checkpoint.ranks import (
    background_group,
    check_names,
    check_same_path,
    drop_group,
    group_of,
    reserve_path,
)
from megatron_fsdp_v2.checkpoint.replacing import (
    NotRestoredError,
    acquire_lock,
    check_replaceable,
    put_in_place,
    release_lock,
    remove_leftovers,
    remove_own,
    temporary_name,
)
from megatron_fsdp_v2.checkpoint.writing import Planner, Writer, own_storage, pickled, write_folder
from megatron_fsdp_v2.comm.backends import wait_for_device
from megatron_fsdp_v2.comm.interface import is_connection_error
from megatron_fsdp_v2.dtensor.sharded_rows import local_of, rows_like, rows_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import ReplicatedDTensor, UnevenDTensor
from megatron_fsdp_v2.runtime.module import make_idle

_DESTROYED = (
    "the process group was destroyed while the checkpoint was written; wait for the result() of "
    "the save before destroy_process_group()"
)

_UNCHANGED = "nothing there has changed: "

_BACKGROUND = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
"""Saves run one after the other, on all ranks in the order of the calls: saves of the same ranks
share a process group. A process waits for its saves before it exits."""


@overload
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    async_save: Literal[False] = False,
    process_group: dist.ProcessGroup | None = None,
) -> None: ...


@overload
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    async_save: Literal[True],
    process_group: dist.ProcessGroup | None = None,
) -> Future[None]: ...


@overload
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    async_save: bool,
    process_group: dist.ProcessGroup | None = None,
) -> Future[None] | None: ...


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    async_save: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Future[None] | None:
    """Save a model, its optimizer and plain data. Collective over the ranks of the model's meshes.

    Models on different ranks of a job are saved independently, to different paths. A model that is
    not sharded is saved by all ranks.

    Everything is written to a temporary folder, `<path>.<token>.incomplete`, which is renamed when
    it is complete and on disk. Until then a checkpoint at `path` is unchanged, and a concurrent
    load gets either the old or the new one. Replicated values and tied parameters are written once.
    The checkpoint can be loaded at any world size and with any strategy.

    Args:
        path: The folder to create, the same on all these ranks. A checkpoint or an empty folder is
            replaced. If it is a link, its target is replaced.
        model: Sharded by `fully_shard`, or not at all.
        optimizer: Any `torch.optim` optimizer of its parameters.
        extra: Numbers, strings, tuples, lists, dictionaries and tensors, the same on all ranks; the
            first rank's is kept.
        async_save: Return when everything is copied to host memory; training can continue.
        process_group: Ranks that write one checkpoint, instead of those of the model's meshes: for
            models of several ranks with different names (pipeline stages). It must contain those.

    Returns:
        With `async_save` a future; its `result()` waits, and raises what went wrong.

    Raises:
        CheckpointError: Something cannot be saved, or writing failed on a rank.
        RuntimeError: Another save to the same path is under way, by this job or another one. On
            ranks other than the first a CheckpointError that says so.
        ValueError: `path` is not a checkpoint, or other ranks of this job save another model there;
            ranks name different paths, or have different parameters of one name (experts, stages);
            or `process_group` lacks ranks of the model. Nothing is written.
    """
    group = group_of(model, process_group)
    job = _Job(path, group, is_async=async_save)

    def own_groups() -> list[dict[str, Any]]:
        # After a forward whose backward failed or never came, modules hold gathered parameters.
        make_idle(model)
        return [] if optimizer is None else groups_entry(optimizer, parameter_names(model))

    of_stages: list[dict[str, Any]] | None = None
    with job.naming_lost_ranks():
        check_names(model, group, has_stages=process_group is not None)
        if process_group is not None:
            groups = all_ranks_or_raise(f"save to {job.target}", own_groups, group=group)
            of_stages = _merged(everyones(groups, group))

    def staged() -> _Staged:
        groups = own_groups() if of_stages is None else of_stages
        tied = tied_entries(model)
        # Tied tensors are written under their first name.
        values = {key: value for key, value in model_entries(model).items() if key not in tied}
        if optimizer is not None:
            states = state_entries(optimizer, parameter_names(model))
            values |= states | {OPTIMIZER_GROUPS: groups}
            options = [option for group in groups for option in group.values()]
            if not states or any(isinstance(option, torch.Tensor) for option in options):
                # Torch then looks for options under names of their own.
                values |= flatten_state_dict({OPTIMIZER_GROUPS: groups})[0]
            values[OPTIMIZER_KIND] = kind_entry(optimizer)
        entries = _stage(values, pack, copies=async_save)
        # Every rank checks its own value.
        content = pack(EXTRA, extra)
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            entries[EXTRA] = content
        return _Staged(entries, tied=tied)

    return job.run(staged)


def _merged(of_ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the parameter groups of several stages: those of one index and equal options."""
    found: dict[tuple[int, bytes], dict[str, Any]] = {}
    known: set[str] = set()
    for groups in of_ranks:
        for index, group in enumerate(groups):
            key = index, pickled({**group, "params": []})
            merged = found.setdefault(key, {**group, "params": []})
            merged["params"] += [name for name in group["params"] if name not in known]
            known.update(group["params"])
    return list(found.values())


def save_nested(
    path: str | os.PathLike[str], state_dict: dict[str, Any], *, async_save: bool = False
) -> Future[None] | None:
    """Save a nested state dict like `torch.distributed.checkpoint.save`. Collective over all ranks.

    Like `save`, it replaces the path atomically and writes a manifest. Values other than tensors
    are pickled unchanged; loading such values can run code, so load them from trusted files only.

    Args:
        path: As in `save`.
        state_dict: Dictionaries and lists of tensors and other values. Every rank passes its shard
            of sharded tensors; of entries that several ranks pass, any one is written.
        async_save: Return when everything is copied to host memory.

    Returns:
        As `save`.

    Raises:
        CheckpointError: Something cannot be saved, or writing failed on a rank.
        RuntimeError: Another save to the same path is under way, by this job or another one.
        ValueError: `path` is not a checkpoint.
    """

    def staged() -> _Staged:
        entries, paths = flatten_state_dict(state_dict)
        values = _stage(entries, lambda _, value: pickled(value), copies=async_save)
        return _Staged(values, paths=paths)

    return _Job(path, None, is_async=async_save).run(staged)


@dataclass(frozen=True, slots=True)
class _Staged:
    """Contents of a checkpoint, as of one moment.

    Attributes:
        entries: Entries by name.
        tied: Other names of entries, each with the name of the entry.
        paths: Paths of entries in a nested state dict; None if there was none.
    """

    entries: dict[str, Any]
    tied: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Any] | None = None


class _Job:
    """One save: its ranks, its contents, its temporary folder and its lock.

    The process group is recorded at the call, since it may be destroyed during the save.

    Args:
        path: Path of the checkpoint.
        group: Process group of its ranks; None for all ranks.
        is_async: Whether it is written in the background, over another process group.

    Attributes:
        target: The resolved path of the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str], group: Any, *, is_async: bool) -> None:
        self.target = Path(os.path.realpath(path))
        self._name = next_save(self.target)
        self._folder = temporary_name(self.target, uuid.uuid4().hex)
        self._staged, self._is_async = _Staged({}), is_async
        self._lock: BaseFileLock | None = None
        self._is_alone = not dist.is_initialized()
        self._rank = 0 if self._is_alone else dist.get_rank(group)
        self._world: Any = None if self._is_alone else dist.group.WORLD
        self._group = group

    def run(self, staged: Callable[[], _Staged]) -> Future[None] | None:
        """Save what `staged` returns. Collective over its ranks; returns a future if async."""
        group = self._group
        with self.naming_lost_ranks():
            check_same_path(self.target, group)
            if self._is_async and not self._is_alone:
                self._group = background_group(group)
            all_ranks_or_raise(
                f"save to {self.target}", lambda: self.begin(staged), undo=self.end, group=group
            )
        if self._is_async:
            return _in_background(self.write)
        self.write()
        return None

    @contextlib.contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Name save and ended ranks in errors of collectives before anything is written.

        Raises:
            CheckpointError: A collective failed, since a process ended.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_connection_error(error):
                raise
            outcome = _UNCHANGED + self._reason(error)
            self.end()
            raise CheckpointError(f"saving to {self.target} failed, and {outcome}") from error

    def _reason(self, error: BaseException) -> str:
        """Describe an error of the save; that of a collective with the ranks that ended."""
        if self._is_lost:
            return _DESTROYED
        lost = lost_ranks(self._name, self._group) if is_connection_error(error) else ""
        return lost + failure_reason(error)

    def _of_first[T](self, value: T) -> T:
        """Broadcast a value of the first rank. Collective."""
        if self._is_alone:
            return value
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self._group)
        return values[0]

    def _leave(self) -> None:
        """Drop a broken process group, so that ranks that wait for this one get an error."""
        drop_group(self._group)
        self._group = self._world = None

    @property
    def _is_lost(self) -> bool:
        """Whether the process group was destroyed; torch then saves as if alone."""
        return not self._is_alone and dist.group.WORLD is not self._world

    def begin(self, staged: Callable[[], _Staged]) -> None:
        """Stage the entries, acquire the lock and create the temporary folder."""
        check_replaceable(self.target)
        self._staged = staged()
        for name in (*self._staged.entries, *self._staged.tied):
            check_name(name)
        if self._rank != 0:
            return
        reserve_path(self.target, self._group)
        try:
            with naming_full_disk(self.target):
                self.target.parent.mkdir(parents=True, exist_ok=True)
                self._lock = acquire_lock(self.target)
                remove_leftovers(self.target)
                self._folder.mkdir()
        except OSError as error:
            raise CheckpointError(f"cannot save to {self.target}: {error}") from error

    def write(self) -> None:
        """Write the checkpoint and rename it. Collective over the ranks of the save."""
        outcome = None
        try:
            try:
                self._write_files()
                if self._is_lost:
                    raise RuntimeError(_DESTROYED)
            except (Exception, CheckpointException) as error:
                outcome = _UNCHANGED + self._reason(error)
                # A CheckpointException is raised on all ranks, any other error on this rank only.
                if self._is_lost or not isinstance(error, CheckpointException):
                    self._leave()
            if outcome is None:
                self._staged = _Staged({})
                outcome = self._published()
        finally:
            self.end()
        # Raised without the cause: its frames refer to a process group, and as long as that is
        # alive, other ranks would wait for this one.
        if outcome is not None:
            raise CheckpointError(f"saving to {self.target} failed, and {outcome}")

    def _write_files(self) -> None:
        staged = self._staged
        if self._is_alone:
            write_folder(self._folder, staged.entries, tied=staged.tied, paths=staged.paths)
            return
        save_state_dict(
            staged.entries,
            storage_writer=Writer(self._of_first(self._folder), staged.tied),
            planner=Planner(staged.paths),
            process_group=self._group,
        )

    def _published(self) -> str | None:
        """Rename the checkpoint on the first rank; returns the outcome if that failed."""
        outcome = None
        if self._rank == 0:
            try:
                put_in_place(self._folder, self.target)
            except NotRestoredError as error:
                outcome = (
                    f"the previous checkpoint is now {error.previous}, where a load of "
                    f"{self.target.name} finds it: {failure_reason(error)}; rename it back"
                )
            except Exception as error:
                outcome = _UNCHANGED + failure_reason(error)
        try:
            return self._of_first(outcome)
        except Exception as error:
            lost = self._reason(error)
            self._leave()
            if self._rank == 0:
                return outcome
        raise CheckpointError(
            f"the checkpoint is written, but the first rank failed ({lost}) before it reported "
            f"whether {self.target} was replaced; that folder is a complete checkpoint either way"
        )

    def end(self) -> None:
        """Release the lock and remove what was not published. Idempotent."""
        self._staged = _Staged({})
        if self._lock is not None:
            # The unfinished folder still exists if the save failed before the folder was renamed.
            with contextlib.suppress(OSError):
                remove_own(self._folder)
            release_lock(self._lock)
            self._lock = None


def _stage(
    entries: Mapping[str, Any], to_bytes: Callable[[str, Any], bytes], *, copies: bool
) -> dict[str, Any]:
    """Stage entries, by name.

    Args:
        entries: Tensors and objects by name.
        to_bytes: Serializes an object, given its name.
        copies: Whether to copy tensors to host memory, so that they may change afterwards.

    Raises:
        CheckpointError: An entry is neither a tensor nor plain data.
    """
    taken = _copied if copies else torch.Tensor.detach

    def staged(name: str, value: Any) -> Any:
        if isinstance(value, UnevenDTensor):
            return rows_like(taken(local_of(value)), value)
        if isinstance(value, ReplicatedDTensor):
            # State of optimizers of whole tensors, such as Adafactor's means of rows.
            value = local_of(value)
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{name} is a DTensor that fully_shard of megatron_fsdp_v2 did not make; use "
                "torch's own torch.distributed.checkpoint.save for such a model"
            )
        return taken(value) if isinstance(value, torch.Tensor) else to_bytes(name, value)

    found = {name: staged(name, value) for name, value in entries.items()}
    tensors = [value for value in entries.values() if isinstance(value, torch.Tensor)]
    for device in {rows_of(tensor).device for tensor in tensors} if copies else ():
        wait_for_device(device)
    return found


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory, pinned for CUDA; complete after `wait_for_device`."""
    # Torch allocates pinned memory for a copy that does not block the host.
    return tensor.detach().to("cpu", non_blocking=True, copy=True)


def pack(name: str, value: Any) -> bytes:
    """Serialize plain data, and check that it can be loaded without running code.

    Args:
        name: Its name in errors.
        value: Plain data. Of a tensor that is a view, only the view is written.

    Returns:
        The bytes of `torch.save`.

    Raises:
        CheckpointError: It, or a part of it, could not be loaded again; names the part.
    """
    try:
        plain = tree_map_with_path(lambda at, leaf: _plain(name + keystr(at), leaf), value)
        content = pickled(plain)
    except RecursionError as error:
        raise CheckpointError(f"{name} is nested too deeply, or contains itself") from error
    # Keys of dictionaries, for example, are no leaves.
    load_object(content, name)
    return content


def _plain(path: str, value: Any) -> Any:
    """Check a leaf; tensors are moved to host memory."""
    if isinstance(value, torch.Tensor):
        return _plain_tensor(path, value)
    try:
        load_object(pickled(value), path)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise CheckpointError(
            f"{path} is of the type {kind}, which a checkpoint does not keep, because loading it "
            "would run code from the file; keep to numbers, strings, tuples, lists, dictionaries "
            "and tensors (of numpy, value.item() and torch.from_numpy(value))"
        ) from error
    return value


def _plain_tensor(path: str, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        raise CheckpointError(
            f"{path} is a {type(tensor).__name__}: every rank holds a part of it. Only the model "
            "and the optimizer may have such tensors; save its full_tensor() instead"
        )
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise CheckpointError(
            f"{path} is a {type(tensor).__name__}, which would be loaded as a plain tensor; put a "
            "plain tensor there"
        )
    if tensor.is_meta:
        raise CheckpointError(f"{path} is on the meta device and has no values to save")
    return own_storage(tensor.detach().cpu().resolve_conj().resolve_neg())


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


def failure_reason(error: BaseException) -> str:
    """Describe an error, and the first one of those that torch collected from ranks."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return f"{type(error).__name__}: {error}"
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"on rank {rank}, {type(cause).__name__}: {cause}"
