"""Rank pools: process groups that are started once and run many tests.

Starting torch takes seconds and a test takes milliseconds, so each world size has one set of worker
processes for the whole session. A test passes a module-level function; every rank calls the
function and returns a picklable result. A failure is reported with the traceback of its rank.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

DEFAULT_TIMEOUT_S = 60.0
CUDA_START_S = 300.0
"""Startup limit for eight processes that import all modules and create a communicator."""
DIED = "the process died"
STARTS = 3
"""Number of attempts to start a pool."""
MOST_THREADS = 100
"""Limit of threads of a rank between two functions; a new rank has about ten."""

# Modules imported once, before processes are forked. The last ones account for most of the import
# time of Megatron.
PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "wandb",
]


class RankFailure(AssertionError):
    """A rank raised, died or did not answer."""


def free_port() -> int:
    """Return an unused port of this machine."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(
    rank: int, world_size: int, port: int, connection: Connection, device: str = "cpu"
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    # Imported modules are never garbage: exclude them from collections.
    gc.freeze()
    if device == "cuda":
        torch.cuda.set_device(rank)
        # Collectives on host tensors use gloo, as in Megatron.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            rank=rank,
            world_size=world_size,
            device_id=torch.device("cuda", rank),
        )
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    connection.send(("ready", None))
    while True:
        task = connection.recv()
        if task is None:
            break
        function, args, kwargs = task
        try:
            torch.manual_seed(0)
            connection.send(("done", function(*args, **kwargs)))
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
    # The group is not destroyed: its teardown can outlast the tests, and the process ends.
    connection.close()
    os._exit(0)


@functools.cache
def _server(preloaded: tuple[str, ...]) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*PRELOADED, *preloaded])
    return server


@contextlib.contextmanager
def forked_from(preloaded: Sequence[str]) -> Iterator[None]:
    """Fork processes from a server that has also imported these modules, inside the context.

    Python itself has a single fork server, whose first user determines its imports.
    """
    server = _server(tuple(preloaded))
    # A fork server has the module search path of `python -c`.
    found_here = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
        mock.patch.dict(os.environ, found_here),
    ):
        yield


class RankPool:
    """Worker processes of one world size.

    Args:
        world_size: Number of processes.
        preloaded: Further modules to import before processes are forked.
        device: `cpu`, or `cuda` for a GPU and NCCL on every rank.
    """

    def __init__(self, world_size: int, preloaded: Sequence[str] = (), device: str = "cpu") -> None:
        self.world_size = world_size
        self._device = device
        self._preloaded = preloaded
        for attempt in range(STARTS):
            try:
                self._start(free_port())
                return
            except RankFailure:
                # Another process may take the port in the meantime.
                if attempt == STARTS - 1:
                    raise
                self.close()

    def _start(self, port: int) -> None:
        # Imports before a fork may initialize CUDA, which a forked process cannot use.
        context: Any = multiprocessing.get_context(
            "spawn" if self._device == "cuda" else "forkserver"
        )
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, port, theirs, self._device), daemon=True
            )
            with forked_from(self._preloaded):
                process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)
        self._collect(CUDA_START_S if self._device == "cuda" else DEFAULT_TIMEOUT_S)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a module-level function on every rank; return the results by rank.

        Raises:
            RankFailure: A rank raised an error, died or timed out. In the last two cases, the pool
                is closed.
        """
        for connection in self._connections:
            connection.send((function, args, kwargs))
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}
        waiting = set(range(self.world_size))
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                if not self._connections[rank].poll(0.002):
                    continue
                waiting.discard(rank)
                try:
                    kind, value = self._connections[rank].recv()
                except EOFError:
                    kind, value = "failed", DIED
                if kind == "failed":
                    failures[rank] = value
                    # Ranks of one group usually fail together: wait briefly for the others.
                    deadline = min(deadline, time.monotonic() + 5.0)
                else:
                    results[rank] = value
        for rank in waiting:
            failures.setdefault(rank, "no answer in time")
        if failures:
            if waiting or DIED in failures.values():
                self.close()
            text = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise RankFailure(text)
        return results

    @property
    def is_alive(self) -> bool:
        """Whether the pool can run another function."""
        return all(process.is_alive() for process in self._processes)

    @property
    def is_worn(self) -> bool:
        """Whether the processes have so many threads that they slow down all tests.

        Every gloo process group has polling threads, and Megatron does not destroy all groups.
        """
        tasks = f"/proc/{self._processes[0].pid}/task"
        return os.path.isdir(tasks) and len(os.listdir(tasks)) > MOST_THREADS

    def close(self) -> None:
        """Terminate the processes."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            with contextlib.suppress(OSError):
                connection.send(None)
            process.join(0.5)
            if process.is_alive():
                process.kill()
                # Later calls must not see the pool as alive.
                process.join()


class RankPools:
    """One pool per world size, started on first use and restarted after a hang."""

    def __init__(self, preloaded: Sequence[str] = ()) -> None:
        self._pools: dict[int, RankPool] = {}
        self._preloaded = preloaded

    def __call__(self, world_size: int) -> RankPool:
        pool = self._pools.get(world_size)
        if pool is not None and pool.is_worn:
            pool.close()
        if pool is None or not pool.is_alive:
            pool = self._pools[world_size] = RankPool(world_size, self._preloaded)
        return pool

    def close(self) -> None:
        """Close all pools."""
        for pool in self._pools.values():
            pool.close()


@contextlib.contextmanager
def rank_pools(preloaded: Sequence[str] = ()) -> Iterator[RankPools]:
    """Provide pools within a context.

    Args:
        preloaded: Further modules to import before processes are forked.
    """
    pools = RankPools(preloaded)
    try:
        yield pools
    finally:
        pools.close()
