"""`--async-save`: the core's asynchronous save, where Megatron would start a process.

Megatron's own writes a checkpoint in a worker process of each rank, into the folder that it is to
be in. Here a thread of each rank writes it, into a folder beside that takes its place when all
ranks are done. When a save is finalized, and what happens then (the file that names the latest
iteration, retention, logs), stays with Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, override

from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
)

from megatron_fsdp_v2.checkpoint.host_memory import HostMemory
from megatron_fsdp_v2.checkpoint.saving import save_nested

__all__ = ["SavesQueue", "ThreadCaller", "Writer", "by_threads"]

_WAITING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megatron-async-save")
"""Requests in the order they were scheduled in, as Megatron's worker would take them."""

_MEMORY = HostMemory()
"""What one save copied values to is kept for the next one, until the queue is closed."""


def by_threads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace what Megatron's `get_async_strategy` hands out to save with."""

    def get_async_strategy(async_strategy: str = "mcore", module: str | None = None) -> Any:
        name, found = original(async_strategy)
        modules = {
            **found,
            "AsyncCallsQueue": SavesQueue,
            "AsyncRequest": AsyncRequest,
            "FileSystemWriterAsync": Writer,
            "save_state_dict_async_plan": _begin,
            "save_state_dict_async_finalize": _finish,
        }
        return name, modules if module is None else modules[module]

    return get_async_strategy


class Writer:
    """Where a checkpoint goes, and its save once it has begun.

    Args:
        path: The folder of one iteration.
        thread_count: Not used: a rank writes one file.
        use_msc: Whether paths may be those of a multi-storage client.
        use_cpu_shm_for_gpu_tensors: Not used: values are copied to host memory in any case.

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
                f"--save {self.path}: asynchronous saves of sharded parameters are put in place by "
                "renaming a folder; name a folder of a file system, or leave --async-save out"
            )
        self.save: Future[None] | None = None

    def result(self) -> None:
        """Wait until all ranks have written everything and it is in place.

        Raises:
            CheckpointError: Some rank could not; raised on all of them.
        """
        assert self.save is not None
        self.save.result()

    def get_save_function_and_args(self) -> tuple[Callable[[], None], None, list[Any]]:
        """What Megatron schedules, how it stages values first, and with what arguments."""
        return self.result, None, []


def _begin(state_dict: dict[str, Any], writer: Writer, *rest: Any, **unused: Any) -> tuple[Writer]:
    """Copy what is to be saved, and start to write it. Collective."""
    writer.save = save_nested(writer.path, state_dict, async_save=True, memory=_MEMORY)
    return (writer,)


def _finish(writer: Writer) -> None:
    """On all ranks, before Megatron says that the checkpoint is there."""
    writer.result()


class ThreadCaller(AsyncCaller):
    """Runs one request in a thread, and knows when it is done on all ranks."""

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
        self._call = _WAITING.submit(async_req.async_fn, *arguments, **async_req.async_fn_kwargs)

    @override
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether it is done on all ranks. Collective, unless told otherwise.

        Raises:
            CheckpointError: It is, and failed.
        """
        call = self._call
        if call is not None and blocking:
            wait([call])
        is_alive = call is not None and not call.done()
        is_done = not is_alive if no_dist else bool(self.sync_all_async_calls(int(is_alive)))
        if is_done and call is not None:
            # All ranks are here by now, and a save that failed on one raises on each.
            self._call = None
            call.result()
        return is_done

    @override
    def close(self, abort: bool = False) -> None:
        """Nothing is left: a thread ends with what it does."""

    @override
    def __del__(self) -> None:
        """No process has to be ended."""


class SavesQueue(AsyncCallsQueue):
    """Megatron's queue of saves that are to be finalized, with threads for processes."""

    @override
    def _get_async_caller(self) -> ThreadCaller:
        return ThreadCaller()

    @override
    def close(self, abort: bool = False) -> None:
        """Finalize all saves, and free the memory that they were copied to."""
        super().close(abort)
        _MEMORY.free()
