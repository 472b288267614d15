"""Rank pools: process groups that are started once and run many tests.

Starting torch takes seconds and a test takes milliseconds, so each world size has one set of worker
processes for the whole session. A test passes a module-level function; every rank calls the
function and returns a picklable result. A failure is reported with the traceback of its rank.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from typing import Any
from unittest import mock

from megatron_fsdp_v2_mcore.prove.ranks import RankError, Ranks

DEFAULT_TIMEOUT_S = 60.0

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


class RankPool(Ranks):
    """Worker processes of one world size.

    Args:
        world_size: Number of processes.
        preloaded: Further modules to import before processes are forked.
        device: `cpu`, or `cuda` for a GPU and NCCL on every rank.
    """

    def __init__(self, world_size: int, preloaded: Sequence[str] = (), device: str = "cpu") -> None:
        is_cuda = device == "cuda"
        # Imports before a fork may initialize CUDA, which a forked process cannot use.
        context = multiprocessing.get_context("spawn" if is_cuda else "forkserver")
        with forked_from(preloaded):
            super().__init__(context, world_size, is_cuda=is_cuda, binds_device=is_cuda)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a module-level function on every rank; return the results by rank.

        Raises:
            RankFailure: A rank raised an error, died or timed out.
        """
        try:
            return super().run(function, *args, timeout_s=timeout_s, **kwargs)
        except RankError as error:
            raise RankFailure(error.tracebacks) from None


class RankPools:
    """One pool per world size, started on first use and restarted after a hang."""

    def __init__(self, preloaded: Sequence[str] = ()) -> None:
        self._pools: dict[int, RankPool] = {}
        self._preloaded = preloaded

    def __call__(self, world_size: int) -> RankPool:
        pool = self._pools.get(world_size)
        if pool is not None and not pool.is_usable:
            pool.close()
            pool = None
        if pool is None:
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
