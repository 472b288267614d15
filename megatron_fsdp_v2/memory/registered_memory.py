"""Blocks of the traced pool that a communication library knows: registered once, then reused."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.interface import Registrar

__all__ = ["RegisteredMemory", "deregister_all"]


_ALL: weakref.WeakSet[RegisteredMemory] = weakref.WeakSet()


class RegisteredMemory:
    """Provides blocks that are registered with process groups for as long as they are in use.

    Collectives on registered memory read and write it in place, where they would copy through
    buffers of the library's own.

    Args:
        groups: The process groups, at least one.
        registrar: Allocates and registers.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], registrar: Registrar) -> None:
        self._groups, self._registrar = list(groups), registrar
        self._held: list[Callable[[], None]] = []
        _ALL.add(self)

    def provide(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
        """See `arena.PoolMemory`."""
        registrar = self._registrar
        pool = registrar.new_pool(self._groups[0], device)
        block = registrar.allocate(pool, nbytes, device)
        registered: list[dist.ProcessGroup] = []
        for group in self._groups:
            try:
                registrar.register(pool, group, device)
            except RuntimeError as error:
                # Registration is for speed; collectives work on any memory.
                warnings.warn(
                    f"{nbytes} bytes of the trace pool could not be registered with process group "
                    f"{group.group_name}: {error}",
                    stacklevel=2,
                )
            else:
                registered.append(group)
        held = self._held

        def free() -> None:
            # Kernels that are queued may still use the block, on any stream, and neither taking
            # the registration back nor NCCL's allocator waits for them.
            registrar.wait(device)
            while registered:
                # A process group that was destroyed knows of nothing any more.
                with contextlib.suppress(RuntimeError, ValueError):
                    registrar.deregister(pool, registered.pop(), device)
            if free in held:
                held.remove(free)

        held.append(free)
        return block, free

    def deregister(self) -> None:
        """Deregister every block; those in use go on as plain memory."""
        for free in list(self._held):
            free()


def deregister_all() -> None:
    """Deregister everything: to be called before process groups are destroyed."""
    for memory in list(_ALL):
        memory.deregister()
