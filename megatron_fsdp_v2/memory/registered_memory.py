"""Blocks of the traced pool that a communication library knows: registered once, then reused."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["RegisteredMemory", "Registrar", "deregister_all"]


class Registrar(Protocol):
    """What the registration of memory needs of a device; that of CUDA is in `comm/backends.py`."""

    def new_pool(self, group: dist.ProcessGroup, device: torch.device) -> Any:
        """A pool of memory that can be registered.

        Args:
            group: A process group whose library allocates it.
            device: Where.
        """
        ...

    def allocate(self, pool: Any, nbytes: int, device: torch.device) -> torch.Tensor:
        """A flat block of bytes from a pool."""
        ...

    def register(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Tell a process group of all memory of a pool. Not collective.

        Raises:
            RuntimeError: It cannot be registered.
        """
        ...

    def deregister(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Take that back, before the memory is given up."""
        ...


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

        def retire() -> None:
            while registered:
                # A process group that was destroyed knows of nothing any more.
                with contextlib.suppress(RuntimeError, ValueError):
                    registrar.deregister(pool, registered.pop(), device)
            if retire in held:
                held.remove(retire)

        held.append(retire)
        return block, retire

    def deregister(self) -> None:
        """Deregister every block; those in use go on as plain memory."""
        for retire in list(self._held):
            retire()


def deregister_all() -> None:
    """Deregister everything: to be called before process groups are destroyed."""
    for memory in list(_ALL):
        memory.deregister()
