"""`--async-save`: the core's asynchronous save in place of Megatron's worker process.

In Megatron, a worker process of each rank writes a checkpoint into its final folder. Here a thread
of each rank writes it into a temporary folder, which is renamed when all ranks are done. Megatron
still decides when a save is finalized, and performs the finalization (the file that names the
latest iteration, retention, logs).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, override

from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
)

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.saving import save_nested
from megatron_fsdp_v2_mcore.checkpoint.failed_saves import note_success, report_or_raise
from megatron_fsdp_v2_mcore.checkpoint.local import LocalSaveError

_EXECUTOR = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megatron-async-save")
"""Runs requests in the order in which they are scheduled, as Megatron's worker does."""

_saves: dict[str, Future[None]] = {}
"""The latest save of each path."""


def with_threaded_saves(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the classes and functions that Megatron's `get_async_strategy` returns."""

    def get_async_strategy(async_strategy: str = "mcore", module: str | None = None) -> Any:
        name, found = original(async_strategy)
        modules = {
            **found,
            "AsyncCallsQueue": SavesQueue,
            "AsyncRequest": AsyncRequest,
            "FileSystemWriterAsync": AsyncWriter,
            "save_state_dict_async_plan": _start_save,
            # Waits for a save on all ranks, before Megatron reports the checkpoint as complete.
            "save_state_dict_async_finalize": AsyncWriter.result,
        }
        return name, modules if module is None else modules[module]

    return get_async_strategy


class AsyncWriter:
    """The destination of a checkpoint, and its pending save.

    Args:
        path: The folder of one iteration.
        thread_count: Not used, since a rank writes one file.
        use_msc: Whether paths may be those of a multi-storage client.
        use_cpu_shm_for_gpu_tensors: Not used, since values are always copied to host memory.

    Raises:
        ValueError: The path is one of a multi-storage client.
    """

    def __init__(
        self,
        path: Any,
        thread_count: int = 1,
        use_msc: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
    ) -> None:
        del thread_count, use_cpu_shm_for_gpu_tensors
        self.path = str(path)
        if use_msc and self.path.startswith("msc://"):
            raise ValueError(
                f"--save {self.path}: asynchronous saves of sharded parameters rename a temporary "
                "folder; use a folder of a file system, or omit --async-save"
            )
        self.save: Future[None] | None = None

    def result(self) -> None:
        """Wait until all ranks have written the checkpoint and the folder is renamed.

        Raises:
            CheckpointError: A rank failed. Raised on all ranks.
        """
        assert self.save is not None
        try:
            self.save.result()
        except CheckpointError as error:
            raise SaveError(self.path, error) from error

    def get_save_function_and_args(self) -> tuple[Callable[[], None], None, list[Any]]:
        """Return the function that Megatron schedules, its preload function and its arguments."""
        return self.result, None, []


def _start_save(
    state_dict: dict[str, Any], writer: AsyncWriter, *rest: Any, **unused: Any
) -> tuple[AsyncWriter]:
    """Copy the state dict to host memory and start writing it. Collective."""
    # Megatron may save an iteration twice: at an interval, and since the batch size changes. The
    # second save replaces what the first one has written.
    if (earlier := _saves.get(writer.path)) is not None:
        wait([earlier])
    save = save_nested(writer.path, state_dict, async_save=True)
    assert save is not None
    writer.save = _saves[writer.path] = save
    return (writer,)


class ThreadCaller(AsyncCaller):
    """Runs one request in a thread, and checks whether it is done on all ranks."""

    def __init__(self) -> None:
        self._call: Future[Any] | None = None

    @override
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Start a request."""
        if async_req.async_fn is None:
            return
        arguments = list(async_req.async_fn_args)
        if async_req.preload_fn is not None:
            arguments[1] = async_req.preload_fn()
        self._call = _EXECUTOR.submit(async_req.async_fn, *arguments, **async_req.async_fn_kwargs)

    @override
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the request is done on all ranks. Collective unless `no_dist` is set.

        Raises:
            CheckpointError: The request is done and has failed.
        """
        call = self._call
        if call is not None and blocking:
            wait([call])
        is_alive = call is not None and not call.done()
        is_done = not is_alive if no_dist else bool(self.sync_all_async_calls(int(is_alive)))
        if is_done and call is not None:
            # All ranks completed the request. If the save failed on a rank, all ranks raise.
            self._call = None
            call.result()
        return is_done

    @override
    def close(self, abort: bool = False) -> None:
        """Do nothing: the thread needs no cleanup."""

    @override
    def __del__(self) -> None:
        """Do nothing: there is no process to end."""


class SavesQueue(AsyncCallsQueue):
    """Megatron's queue of saves to finalize, with threads in place of processes."""

    @override
    def _get_async_caller(self) -> ThreadCaller:
        return ThreadCaller()

    @override
    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize the saves that are done; see `failed_saves.report_or_raise` for one that failed.

        Raises:
            CheckpointError: A save has failed. Raised on all ranks.
        """
        finalized: list[int] = []
        while self.async_calls:
            pending = len(self.async_calls)
            try:
                finalized += super().maybe_finalize_async_calls(blocking, no_dist)
                if len(self.async_calls) < pending:
                    note_success()
                break
            except SaveError as error:
                # Without its callbacks, which name the checkpoint as the latest one.
                self.async_calls.popleft()
                report_or_raise(Path(error.path), error)
            except LocalSaveError as error:
                # Raised by a callback, when the call has left the queue.
                report_or_raise(None, error)
        return finalized


class SaveError(CheckpointError):
    """A save failed on all ranks.

    Args:
        path: Folder of the save.
        error: What went wrong.
    """

    def __init__(self, path: str, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.path = path
