"""Blocks of the trace pool that are registered with a communication library."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.backends import NcclRegistrar

_IN_USE: list[Callable[[], None]] = []
"""A function for every registered block, which deregisters the block."""


class RegisteredMemory:
    """Provides blocks of memory that are registered with process groups while they are in use.

    Collectives read and write registered memory directly, without copies through the library's
    buffers.

    Args:
        groups: The process groups, at least one.
        registrar: Allocates and registers memory.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], registrar: NcclRegistrar) -> None:
        self._groups, self._registrar = list(groups), registrar

    def provide(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return a registered flat block, and a function to call when no buffer uses it."""
        registrar = self._registrar
        pool, block = registrar.allocate(nbytes, self._groups[0], device)
        registered: list[dist.ProcessGroup] = []
        for group in self._groups:
            try:
                registrar.register(pool, group, device)
            except RuntimeError as error:
                # Not an error: registration only improves speed.
                warnings.warn(
                    f"{nbytes} bytes of the trace pool could not be registered with process group "
                    f"{group.group_name}: {error}",
                    stacklevel=2,
                )
            else:
                registered.append(group)

        def free() -> None:
            # Queued kernels may still use the block, on any stream, and neither deregistration nor
            # NCCL's allocator waits for them.
            registrar.wait(device)
            while registered:
                # A destroyed process group has no registrations left.
                with contextlib.suppress(RuntimeError, ValueError):
                    registrar.deregister(pool, registered.pop(), device)
            if free in _IN_USE:
                _IN_USE.remove(free)

        _IN_USE.append(free)
        return block, free


def deregister_all() -> None:
    """Deregister all blocks, which stay valid. Call it before destroying process groups."""
    for free in list(_IN_USE):
        free()
