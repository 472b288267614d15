"""Process groups that are started once per size and run many functions, such as trainings."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_fsdp_v2_patching import environment

VARIABLE = "MEGATRON_FSDP_V2_PROVE"
"""Environment variable of the fork server: the layers, then the flags of the recipe."""
_PRELOADED = "megatron_fsdp_v2_mcore.prove.preloaded"
_START_S = 300.0
_STARTS = 3
"""Number of attempts to start ranks: another process may take their port in the meantime."""
_GRACE_S = 10.0
"""Ranks of one group usually fail together: time to wait for the others."""
_MOST_THREADS = 100
"""Every gloo group has threads, and Megatron does not destroy all groups: ranks with more threads
are replaced."""


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time.

    Attributes:
        tracebacks: Tracebacks of all ranks that failed.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        # Errors that follow from that of another rank: a check that all ranks take part in refers
        # to the rank that found something, and a collective of a failed rank is interrupted.
        follow = ("see the error of rank", "Connection closed by peer")
        rank = min(failures, key=lambda rank: (any(f in failures[rank] for f in follow), rank))
        super().__init__(f"rank {rank}: {failures[rank].strip().splitlines()[-1]}")
        self.tracebacks = "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))


class Pool(Protocol):
    """The ranks of one size."""

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        """Call a module-level function on every rank; return the results by rank."""


class Ranks:
    """The worker processes of one size.

    Args:
        context: Context of `multiprocessing`.
        world_size: Number of processes.
        is_cuda: Whether every rank has a GPU and NCCL, in addition to gloo.
        binds_device: Whether the process group is bound to that GPU.
    """

    def __init__(
        self, context: Any, world_size: int, *, is_cuda: bool, binds_device: bool = False
    ) -> None:
        for attempt in range(_STARTS):
            with contextlib.closing(socket.socket()) as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            self._connections: list[Any] = []
            self._processes: list[Any] = []
            for rank in range(world_size):
                mine, theirs = context.Pipe()
                args = (rank, world_size, port, theirs, is_cuda, binds_device)
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._connections.append(mine)
                self._processes.append(process)
            try:
                self._collect(_START_S)
                return
            except RankError:
                if attempt == _STARTS - 1:
                    raise
                self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any
    ) -> list[Any]:
        """Call a module-level function on every rank; return the results by rank.

        Raises:
            RankError: A rank raised an error, died or timed out.
        """
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((function, args, kwargs))
            except OSError:
                raise RankError({rank: "the process died"}) from None
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting: dict[Any, int] = {
            connection: rank for rank, connection in enumerate(self._connections)
        }
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready: list[Any] = wait(list(waiting), left)
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    is_done, value = connection.recv()
                except EOFError:
                    is_done, value = False, "the process died"
                if is_done:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        # The others may be waiting for a rank that failed.
        failures = failures or dict.fromkeys(waiting.values(), "no answer in time")
        if failures:
            if waiting:
                self.close()
            raise RankError(failures)
        return [results[rank] for rank in range(len(results))]

    @property
    def is_usable(self) -> bool:
        """Whether the ranks can run another function without being slowed down."""
        tasks = f"/proc/{self._processes[0].pid}/task"
        is_worn = os.path.isdir(tasks) and len(os.listdir(tasks)) > _MOST_THREADS
        return not is_worn and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Terminate the processes."""
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def pools(impl: str | None, recipe: Sequence[str]) -> Iterator[Callable[[int], Pool]]:
    """Yield a function that returns the pool of a number of ranks. Closes all pools at the end.

    Args:
        impl: Value of `--transformer-impl` in a rehearsal; None for a GPU and NCCL on every rank.
        recipe: Flags that determine the rehearsed GPU.
    """
    started: dict[int, Ranks] = {}
    # Imports before a fork may initialize CUDA, which a forked process cannot use.
    context: Any = multiprocessing.get_context("forkserver" if impl else "spawn")
    if impl:
        context.set_forkserver_preload([_PRELOADED])
    # A fork server has the module search path of `python -c`.
    found_here = os.pathsep.join(filter(None, sys.path))

    def of_size(world_size: int) -> Pool:
        if world_size in started and not started[world_size].is_usable:
            started.pop(world_size).close()
        if world_size not in started:
            with environment({VARIABLE: " ".join((impl or "", *recipe)), "PYTHONPATH": found_here}):
                started[world_size] = Ranks(context, world_size, is_cuda=impl is None)
        return started[world_size]

    try:
        yield of_size
    finally:
        for ranks in started.values():
            ranks.close()


def _serve(
    rank: int, world_size: int, port: int, connection: Any, is_cuda: bool, binds_device: bool
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    # Imported modules are never garbage: exclude them from collections.
    gc.freeze()
    torch.set_num_threads(1)
    backend, device = "gloo", None
    if is_cuda:
        torch.cuda.set_device(rank)
        # Collectives on host tensors use gloo, as in Megatron.
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", rank) if binds_device else None
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=device)
    connection.send((True, None))
    while True:
        function, args, kwargs = connection.recv()
        try:
            torch.manual_seed(0)
            connection.send((True, function(*args, **kwargs)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
