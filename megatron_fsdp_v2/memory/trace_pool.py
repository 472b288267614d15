"""The trace pool: temporary buffers at planned addresses of one block of memory.

The pool traces passes through a model. Once a pattern repeats, buffers that are never live at the
same time share bytes (`memory/address_plan.py`), and later passes acquire buffers without an
allocation. Buffers outside the traced patterns use their own memory and are part of the next plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, override

import torch

from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer
from megatron_fsdp_v2.memory.arena import (
    Arena,
    ArenaKind,
    Meter,
    PooledBuffer,
    PoolReport,
    TracedProgram,
)

if TYPE_CHECKING:
    from megatron_fsdp_v2.memory.registered_memory import RegisteredMemory

__all__ = ["PoolReport", "TracePoolAllocator", "TracedProgram"]


class TracePoolAllocator(Allocator):
    """Traces the lifetimes of temporary buffers, plans their addresses, and replays the plan.

    One plan serves all traced patterns of passes: training, the last micro-batch, evaluation,
    recomputation. A buffer has the same address in all patterns, and acquiring it allocates
    nothing. In a pass that does not fit the plan, buffers whose planned bytes are taken use their
    own memory, and the next plan includes the pass. Ranks that run the same units make the same
    plans.

    Buffers are planned per dtype, device, and use (weights or gradients). The pool keeps its memory
    between steps; `release` frees it.
    """

    def __init__(self) -> None:
        self._arenas: dict[ArenaKind, Arena] = {}
        self._meter = Meter()
        self._memory: RegisteredMemory | None = None

    @override
    def buffer(
        self,
        name: str,
        use: BufferUse,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> TemporaryBuffer:
        """See `Allocator.buffer`."""
        kind = ArenaKind(dtype, device, use is BufferUse.GATHERED)
        return PooledBuffer(self._arena(kind), name, use, numel)

    def _arena(self, kind: ArenaKind) -> Arena:
        if kind not in self._arenas:
            self._arenas[kind] = Arena(kind, self._meter, self._memory)
        return self._arenas[kind]

    def place_in(self, memory: RegisteredMemory) -> None:
        """Allocate blocks of memory from another source than torch's allocator.

        Existing plans allocate a new block at the next use of a buffer.

        Args:
            memory: Source of the blocks.
        """
        self._memory = memory
        for arena in self._arenas.values():
            arena.release()
            arena.memory = memory

    @override
    def begin_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """Begin a pass through the model, and a new trace.

        Args:
            name: Kind of the pass, for reports.
            no_pending_backward: Whether no forward waits for its backward; a new plan is made then,
                since all buffers can move.
        """
        for arena in self._arenas.values():
            arena.begin(name, no_pending_backward=no_pending_backward)

    @override
    def end_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """End a pass through the model, and make a new plan if one is due.

        Args:
            name: Name of the end, added to the name of the beginning; may be empty.
            no_pending_backward: See `begin_pass`.
        """
        for arena in self._arenas.values():
            arena.end(name, no_pending_backward=no_pending_backward)

    def merge(self, other: TracePoolAllocator) -> None:
        """Take over all buffers of another allocator.

        Raises:
            RuntimeError: A buffer is live. Nothing is changed.
        """
        for arena in other._arenas.values():
            for buffer in arena.buffers():
                if buffer.is_live:
                    raise RuntimeError(f"{buffer.name} is gathered; call reshard() on its module")
        for kind, arena in other._arenas.items():
            arena.reset()
            for buffer in arena.buffers():
                buffer.enter(self._arena(kind))
        other._arenas = {}

    def state(self) -> Iterator[object]:
        """Yield every object that `merge` changes in the merged allocator, except its buffers."""
        yield self
        yield from self._arenas.values()

    @override
    def adopt(self, buffer: TemporaryBuffer) -> TemporaryBuffer:
        """Return a pooled replacement for a buffer, with the same tensor and views.

        Raises:
            RuntimeError: The buffer is live.
        """
        if isinstance(buffer, PooledBuffer):
            return buffer
        if buffer.is_live:
            raise RuntimeError(
                f"{buffer.name} is in use, or watched, where its unit is to join a root with a "
                "trace pool; call reshard() on its module, or give it enable_trace_pool=True"
            )
        kind = ArenaKind(
            buffer.tensor.dtype, buffer.tensor.device, buffer.use is BufferUse.GATHERED
        )
        return PooledBuffer.around(self._arena(kind), buffer)

    @property
    def num_allocations(self) -> int:
        """Number of allocations so far, for single buffers and for pools."""
        return sum(arena.num_allocations for arena in self._arenas.values())

    @property
    def peak_nbytes(self) -> int:
        """Largest sum of bytes of live buffers so far, inside and outside the pool."""
        return self._meter.peak

    def blocks(self) -> list[torch.Tensor]:
        """Return the memory blocks of current plans as flat bytes, one per kind of buffer."""
        found = (arena.block for arena in self._arenas.values())
        return [block for block in found if block is not None]

    def release(self) -> int:
        """Free the memory of the pools; the next use of a buffer allocates it again.

        Memory used by gathered weights, or by a pending backward, is freed after that use.

        Returns:
            Bytes freed now.
        """
        return sum(arena.release() for arena in self._arenas.values())

    def reset(self) -> None:
        """Discard all traces and plans, free memory as `release` does, and trace again."""
        for arena in self._arenas.values():
            arena.reset()

    def reports(self) -> list[PoolReport]:
        """Return a report of traces and the plan for each kind of buffer."""
        return [arena.report() for arena in self._arenas.values()]

    def report(self) -> str:
        """Return the slots, buffers and excess over the lower bound of each plan, as text."""
        return "\n\n".join(report.text() for report in self.reports())
