"""The traced pool: temporary buffers at planned addresses of one block of memory.

Passes through a model are traced; when their pattern is steady, buffers that never live together
are given the same bytes (`memory/address_plan.py`), and from then on a buffer is given memory
without any allocation. What was not traced runs on memory of its own, and is planned next.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from megatron_fsdp_v2.memory.allocator import BufferUse, ResizedBuffer, TemporaryBuffer
from megatron_fsdp_v2.memory.arena import (
    Arena,
    Kind,
    Meter,
    PooledBuffer,
    PoolMemory,
    PoolReport,
    TracedProgram,
)

__all__ = ["PoolReport", "TracePoolAllocator", "TracedProgram"]


class TracePoolAllocator:
    """Traces when temporary buffers live, plans their addresses, and replays the plan.

    One plan serves every pattern of passes that was seen: training, the last micro-batch,
    evaluation, recomputation. A buffer's address is the same in all of them, and giving it memory
    allocates nothing. A pass that does not fit the plan runs all the same, with memory of their
    own for buffers whose place is taken, and the next plan has it. Ranks that run the same units
    make the same plans.

    Buffers are planned by dtype, device, and whether they are weights or gradients. The pool keeps
    its memory between steps; `release` gives it back.
    """

    def __init__(self) -> None:
        self._arenas: dict[Kind, Arena] = {}
        self._meter = Meter()
        self._memory: PoolMemory | None = None
        self._successor: TracePoolAllocator | None = None

    def buffer(
        self,
        name: str,
        use: BufferUse,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> TemporaryBuffer:
        """Make a buffer of `numel` elements that has no memory yet.

        Args:
            name: What it holds, for reports.
            use: What it is for.
            numel: Elements.
            dtype: Element type.
            device: Where it lives.
        """
        if self._successor is not None:
            return self._successor.buffer(name, use, numel, dtype, device)
        kind = Kind(dtype, device, use is BufferUse.GATHERED)
        return PooledBuffer(self._arena(kind), name, use, numel)

    def _arena(self, kind: Kind) -> Arena:
        if kind not in self._arenas:
            self._arenas[kind] = Arena(kind, self._meter, self._memory)
        return self._arenas[kind]

    def place_in(self, memory: PoolMemory) -> None:
        """Have blocks of memory come from somewhere else than torch's allocator.

        Plans that have theirs already move at the next use of a buffer.

        Args:
            memory: Where they come from.
        """
        self._memory = memory
        for arena in self._arenas.values():
            arena.release()
            arena.memory = memory

    def begin_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """Note that a pass through the model begins: a new trace.

        Args:
            name: What kind of pass, for reports.
            no_pending_backward: Whether no backward is still to come: then a new plan costs least.
        """
        for arena in self._arenas.values():
            arena.begin(name, no_pending_backward=no_pending_backward)

    def end_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """Note that a pass through the model ends. A plan is made when one is wanted.

        Args:
            name: What came to its end, added to the name of its beginning; may be empty.
            no_pending_backward: See `begin_pass`.
        """
        for arena in self._arenas.values():
            arena.end(name, no_pending_backward=no_pending_backward)

    def merge(self, other: TracePoolAllocator, undo: ExitStack | None = None) -> None:
        """Take over all buffers of another allocator, which makes new ones here from now on.

        Args:
            other: The other one.
            undo: Gives them back, with the traces and plans that there were.

        Raises:
            RuntimeError: One of them is live; nothing is changed then.
        """
        if other is self or other._successor is self:
            return
        for arena in other._arenas.values():
            for buffer in arena.buffers():
                if buffer.is_live:
                    raise RuntimeError(f"{buffer.name} is gathered; call reshard() on its module")
        if undo is not None:
            undo.callback(other._take_back, other._arenas)
            for arena in other._arenas.values():
                arena.keep(undo)
        for kind, arena in other._arenas.items():
            arena.reset()
            for buffer in arena.buffers():
                buffer.enter(self._arena(kind))
        other._arenas = {}
        other._successor = self

    def adopt(self, buffer: TemporaryBuffer) -> TemporaryBuffer:
        """What takes the place of a buffer that has no pool: the same tensor and views, pooled.

        Raises:
            RuntimeError: It is live, or watched.
        """
        if isinstance(buffer, PooledBuffer):
            return buffer
        if not isinstance(buffer, ResizedBuffer) or buffer.is_live:
            raise RuntimeError(
                f"{buffer.name} is in use, or watched, where its unit is to join a root with a "
                "trace pool; call reshard() on its module, or give it enable_trace_pool=True"
            )
        kind = Kind(buffer.tensor.dtype, buffer.tensor.device, buffer.use is BufferUse.GATHERED)
        return PooledBuffer.around(self._arena(kind), buffer)

    def _take_back(self, arenas: dict[Kind, Arena]) -> None:
        self._arenas, self._successor = arenas, None

    @property
    def num_allocations(self) -> int:
        """How often torch's allocator was asked for memory so far, for buffers and for pools."""
        return sum(arena.num_allocations for arena in self._arenas.values())

    @property
    def peak_nbytes(self) -> int:
        """Largest sum of bytes of buffers that were live together so far, wherever they were."""
        return self._meter.peak

    def blocks(self) -> list[torch.Tensor]:
        """The memory of the plans in use, flat bytes: one for each kind of buffer."""
        found = (arena.block for arena in self._arenas.values())
        return [block for block in found if block is not None]

    def release(self) -> int:
        """Give the memory of the pools back; the next use of a buffer takes it again.

        Memory that is in use, by gathered weights or for a backward that is still to come, goes
        back when that is over.

        Returns:
            Bytes given back now.
        """
        return sum(arena.release() for arena in self._arenas.values())

    def reset(self) -> None:
        """Forget all traces and plans, give back memory as `release` does, and trace again."""
        for arena in self._arenas.values():
            arena.reset()

    def reports(self) -> list[PoolReport]:
        """What was traced and planned, one report for each kind of buffer."""
        return [arena.report() for arena in self._arenas.values()]

    def report(self) -> str:
        """Slots, bytes, who shares what, and how far each plan is from its lower bound."""
        return "\n\n".join(report.text() for report in self.reports())
