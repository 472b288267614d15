"""The trace pool: temporary buffers at planned addresses of one block of memory.

The pool traces passes through a model. Once a pattern repeats, buffers that are never live at the
same time share bytes (`memory/address_plan.py`), and later passes acquire buffers without an
allocation. Buffers outside the traced patterns use their own memory and are part of the next plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import override

import torch
from torch.utils.dlpack import from_dlpack

from megatron_fsdp_v2.memory.address_plan import MemoryPlan, Trace, keys_of, plan_memory
from megatron_fsdp_v2.memory.allocator import (
    Allocator,
    Arena,
    BufferUse,
    Memory,
    TemporaryBuffer,
)
from megatron_fsdp_v2.memory.registered_memory import RegisteredMemory

MAX_PROGRAMS = 64
"""Number of patterns after which all are dropped. Their conflicts are kept."""

MAX_EVENTS = 1 << 16
"""Maximum number of events of a trace: `unshard()` calls by themselves begin no pass."""

PATIENCE = 4
"""Passes after which a plan is made even if no pattern was seen twice."""


@dataclass(frozen=True, slots=True)
class ArenaKind:
    """Key of an arena: properties that the buffers of one block share.

    Weights and gradients have separate blocks. One block would need as much memory, since weights
    and gradients have their peaks at the same time, in the backward.

    Attributes:
        dtype: Element type.
        device: Device of the buffers.
        is_weight: Whether the buffers hold gathered weights, which autograd may have saved.
    """

    dtype: torch.dtype
    device: torch.device
    is_weight: bool

    @override
    def __str__(self) -> str:
        """Return the name of the kind for reports."""
        role = "weights" if self.is_weight else "gradients"
        return f"{str(self.dtype).removeprefix('torch.')} {role} on {self.device}"


@dataclass(slots=True)
class TracedProgram:
    """A pattern of passes: the order in which buffers acquire and release memory.

    Attributes:
        name: Kind of the pass in which it was first seen.
        trace: The pattern.
        num_runs: Number of times it was seen.
    """

    name: str
    trace: Trace
    num_runs: int


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The plan for buffers of one kind.

    Attributes:
        kind: Kind of the buffers.
        names: Names of the buffers, by key.
        plan: Address plan; None before the first one.
        programs: Traced patterns.
        outside_pool: Names of planned buffers that use memory outside the block now: they are live,
            or saved views reference that memory.
    """

    kind: ArenaKind
    names: tuple[str, ...]
    plan: MemoryPlan | None
    programs: tuple[TracedProgram, ...]
    outside_pool: tuple[str, ...]

    def text(self) -> str:
        """Return the report as human-readable text."""
        runs = ", ".join(f"{p.name} ({p.num_runs}x)" for p in self.programs)
        if self.plan is None:
            return f"{self.kind}: no plan yet; traced: {runs or 'nothing'}"
        outside = f"\noutside the pool: {', '.join(self.outside_pool)}" if self.outside_pool else ""
        return f"{self.kind}: {self.plan.text(self.names)}\ntraced: {runs}{outside}"


class _Pool:
    """Memory block of one plan. It lives as long as any buffer or view uses it."""

    def __init__(
        self, plan: MemoryPlan, device: torch.device, memory: RegisteredMemory | None
    ) -> None:
        self.plan = plan
        if memory is None:
            self.memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
        else:
            self.memory, free = memory.provide(plan.nbytes, device)
            weakref.finalize(self, free)
        self.live = 0


class _PooledMemory(Memory):
    """A buffer's bytes in a pool, as a separate storage.

    The reference count of a separate storage shows whether autograd saved views of this buffer.
    """

    def __init__(self, pool: _Pool, key: int, nbytes: int) -> None:
        start = pool.plan.place(key)
        assert start is not None
        self.pool, self.block = pool, pool.memory
        super().__init__(from_dlpack(pool.memory[start : start + nbytes]).untyped_storage(), nbytes)
        self._bit = 1 << key
        self.overlaps = pool.plan.overlaps[key]

    def occupants(self) -> int:
        """Return the set of buffers that live in these bytes now."""
        return self.pool.live & self.overlaps

    @override
    def take(self) -> None:
        """Mark the bytes as used."""
        self.pool.live |= self._bit

    @override
    def drop(self) -> None:
        """Mark the bytes as unused."""
        self.pool.live &= ~self._bit


class TracedArena(Arena):
    """Buffers of one kind, with their traces, plan and pool.

    A buffer uses its own memory or its bytes in the pool. It does not move while its memory is
    referenced externally, as by autograd between a forward and its backward. If that memory is in
    use when the buffer is gathered ahead, the gather writes to the buffer's own memory, and the
    values are copied before their use: the pool never changes the order of collectives, in which
    ranks must agree although their plans may differ.

    Attributes:
        kind: Kind of the buffers.
        memory: Source of the memory block; None: torch's allocator.
        num_allocations: Number of allocations so far, for single buffers and for the pool.
        pool: The pool of the plan; None before its first use.
    """

    def __init__(self, kind: ArenaKind, memory: RegisteredMemory | None) -> None:
        self.kind = kind
        self.memory = memory
        self.num_allocations = 0
        self._buffers: list[weakref.ref[TemporaryBuffer]] = []
        self._sizes: list[int] = []
        # Bytes in the pool by key; made at the first use after a plan.
        self._places: dict[int, _PooledMemory] = {}
        self._live = 0
        self._start = 0
        self._events: list[int] = []
        self.pool: _Pool | None = None
        self._forget()

    def _forget(self) -> None:
        self._programs: dict[Trace, TracedProgram] = {}
        self._conflicts = [0] * len(self._sizes)
        self._used = 0
        self._peak = 0
        self._plan: MemoryPlan | None = None
        self._wants_plan = False
        self._waited = 0

    def add(self, buffer: TemporaryBuffer) -> None:
        """Add a buffer without memory."""
        buffer.arena, buffer.key = self, len(self._sizes)
        self._buffers.append(weakref.ref(buffer))
        self._sizes.append(buffer.own.nbytes)
        self._conflicts.append(0)

    def buffers(self) -> Iterator[TemporaryBuffer]:
        """Return the buffers that still exist."""
        return filter(None, (ref() for ref in self._buffers))

    # -- allocation ---------------------------------------------------------------------------

    @override
    def acquire(self, buffer: TemporaryBuffer) -> None:
        """Select the memory of a buffer, allocate it, and trace the event."""
        self._events.append(buffer.key)
        target = self._select_backing(buffer)
        if target is not buffer.backing:
            buffer.move(target)
        if target is buffer.own:
            self.num_allocations += 1
        target.take()
        self._live |= 1 << buffer.key

    def _select_backing(self, buffer: TemporaryBuffer) -> Memory:
        backing = buffer.backing
        preferred: Memory = self._place_of(buffer) or buffer.own
        if isinstance(preferred, _PooledMemory) and preferred.occupants():
            preferred = buffer.own
        if preferred is not backing and buffer.is_externally_referenced():
            if isinstance(backing, _PooledMemory) and backing.occupants():
                buffer.displaced_from = backing
                return buffer.own
            return backing
        return preferred

    def _place_of(self, buffer: TemporaryBuffer) -> _PooledMemory | None:
        """Return a buffer's bytes in the pool; the first call allocates the pool's block."""
        key = buffer.key
        if key in self._places:
            return self._places[key]
        plan = self._plan
        if plan is None or plan.place(key) is None or not self._sizes[key]:
            return None
        with torch.inference_mode(False):
            if self.pool is None:
                self.pool = _Pool(plan, self.kind.device, self.memory)
                self.num_allocations += 1
            self._places[key] = _PooledMemory(self.pool, key, self._sizes[key])
        return self._places[key]

    @override
    def check_not_displaced(self, buffer: TemporaryBuffer) -> None:
        """See `Arena.check_not_displaced`. After an error, a plan is made soon."""
        saved = buffer.displaced_from
        if not isinstance(saved, _PooledMemory):
            return
        self._waited = PATIENCE + 1
        owners = ", ".join(self._name_of(key) for key in keys_of(saved.occupants()))
        raise RuntimeError(
            f"{buffer.name} must return to the memory that saved views of it refer to, and "
            f"{owners} uses that memory now: no traced pass uses them together. Run this step "
            "again, or call reset() on the trace pool before uses change in this way"
        )

    def _name_of(self, key: int) -> str:
        buffer = self._buffers[key]()
        return f"buffer {key}" if buffer is None else buffer.name

    @override
    def release(self, buffer: TemporaryBuffer) -> None:
        """Free the memory of a buffer, and trace the event."""
        buffer.backing.drop()
        if buffer.displaced_from is not None:
            buffer.move(buffer.displaced_from)
            buffer.displaced_from = None
        self._live &= ~(1 << buffer.key)
        self._events.append(~buffer.key)
        if len(self._events) >= MAX_EVENTS:
            self.close("a part of a pass", no_pending_backward=False)

    # -- traces and plans ---------------------------------------------------------------------

    def close(self, name: str, *, no_pending_backward: bool) -> None:
        """End the trace and begin another one; make a new plan if one is due.

        Args:
            name: Name of the ended trace.
            no_pending_backward: See `TracePoolAllocator.begin_pass`.
        """
        is_steady = False
        if self._events:
            trace = Trace(self._start, tuple(self._events))
            program = self._programs.get(trace)
            if program is None:
                self._add_program(name, trace)
            else:
                program.num_runs += 1
                is_steady = no_pending_backward
            self._events.clear()
            self._waited += self._wants_plan
        self._start = self._live
        if self._wants_plan and (is_steady or self._waited > PATIENCE):
            self._make_plan()

    def _add_program(self, name: str, trace: Trace) -> None:
        if len(self._programs) == MAX_PROGRAMS:
            self._programs.clear()
        self._programs[trace] = TracedProgram(name, trace, 1)
        used, peak = trace.measure(self._sizes, self._conflicts)
        self._used |= used
        self._peak = max(self._peak, peak)
        plan = self._plan
        fits = plan is not None and all(
            plan.place(key) is not None and not self._conflicts[key] & plan.overlaps[key]
            for key in keys_of(self._used)
        )
        self._wants_plan = not fits

    def _make_plan(self) -> None:
        self.free()
        self._plan = plan_memory(self._sizes, self._conflicts, self._used, self._peak)
        self._wants_plan = False
        self._waited = 0

    def free(self) -> int:
        """Move all movable buffers out of the pool, and return the bytes freed."""
        pool, self.pool = self.pool, None
        self._places.clear()
        if pool is None:
            return 0
        is_used = False
        for buffer in self.buffers():
            backing = buffer.displaced_from or buffer.backing
            if isinstance(backing, _PooledMemory) and backing.pool is pool:
                if buffer.is_live or buffer.is_externally_referenced():
                    is_used = True
                else:
                    buffer.move(buffer.own)
        return 0 if is_used else pool.memory.nbytes

    def reset(self) -> None:
        """Discard all traces and plans."""
        self.free()
        self._events.clear()
        self._start = self._live
        self._forget()

    def report(self) -> PoolReport:
        """See `TracePoolAllocator.reports`."""
        plan = self._plan
        outside_pool = [
            buffer.name
            for buffer in self.buffers()
            if plan is not None
            and plan.place(buffer.key) is not None
            and buffer.backing is not self._places.get(buffer.key)
            and (buffer.is_live or buffer.is_externally_referenced())
        ]
        return PoolReport(
            self.kind,
            tuple(self._name_of(key) for key in range(len(self._sizes))),
            plan,
            tuple(self._programs.values()),
            tuple(outside_pool),
        )


class TracePoolAllocator(Allocator):
    """Traces the lifetimes of temporary buffers, plans their addresses, and replays the plan.

    One plan serves all traced patterns of passes: training, the last micro-batch, evaluation,
    recomputation. A buffer has the same address in all patterns, and acquiring it allocates
    nothing. In a pass that does not fit the plan, buffers whose planned bytes are taken use their
    own memory, and the next plan includes the pass. Plans may differ between ranks.

    Buffers are planned per dtype, device, and use (weights or gradients). The pool keeps its memory
    between steps; `release` frees it.
    """

    def __init__(self) -> None:
        self._arenas: dict[ArenaKind, TracedArena] = {}
        self._memory: RegisteredMemory | None = None
        # Kind of the current pass.
        self._pass = ""

    @override
    def join(self, buffer: TemporaryBuffer) -> None:
        """See `Allocator.join`. A buffer of another trace pool stays there; see `merge`."""
        if isinstance(buffer.arena, TracedArena):
            return
        tensor, is_weight = buffer.tensor, buffer.use is BufferUse.GATHERED
        self._arena(ArenaKind(tensor.dtype, tensor.device, is_weight)).add(buffer)

    def check_joins(self, buffers: Iterable[TemporaryBuffer]) -> None:
        """Check that buffers may join, or their pool be merged.

        Raises:
            RuntimeError: A buffer is live.
        """
        for buffer in buffers:
            if buffer.is_live:
                raise RuntimeError(
                    f"{buffer.name} is in use, or watched, where its unit is to join a root with a "
                    "trace pool; call reshard() on its module, or give it enable_trace_pool=True"
                )

    def _arena(self, kind: ArenaKind) -> TracedArena:
        if kind not in self._arenas:
            self._arenas[kind] = TracedArena(kind, self._memory)
        return self._arenas[kind]

    def set_memory_source(self, memory: RegisteredMemory) -> None:
        """Allocate blocks of memory from another source than torch's allocator.

        Existing plans allocate a new block at the next use of a buffer.

        Args:
            memory: Source of the blocks.
        """
        self._memory = memory
        for arena in self._arenas.values():
            arena.free()
            arena.memory = memory

    @override
    def begin_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """Begin a pass through the model, and a new trace.

        Args:
            name: Kind of the pass, for reports.
            no_pending_backward: Whether no forward waits for its backward; a new plan is made then,
                since all buffers can move.
        """
        self._close(self._pass or "between passes", no_pending_backward)
        self._pass = name

    @override
    def end_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """End a pass through the model, and make a new plan if one is due.

        Args:
            name: Kind of the end, appended to the name given to `begin_pass`; may be empty.
            no_pending_backward: See `begin_pass`.
        """
        self._close(" and ".join(filter(None, (self._pass, name))), no_pending_backward)
        self._pass = ""

    def _close(self, name: str, no_pending_backward: bool) -> None:
        for arena in self._arenas.values():
            arena.close(name, no_pending_backward=no_pending_backward)

    def merge(self, other: TracePoolAllocator) -> None:
        """Take over all buffers of another allocator, none of which is live."""
        for kind, arena in other._arenas.items():
            arena.reset()
            for buffer in arena.buffers():
                self._arena(kind).add(buffer)
        other._arenas = {}

    @property
    def num_allocations(self) -> int:
        """Number of allocations so far, for single buffers and for pools."""
        return sum(arena.num_allocations for arena in self._arenas.values())

    def blocks(self) -> list[torch.Tensor]:
        """Return the memory blocks of current plans as flat bytes, one per kind of buffer."""
        pools = (arena.pool for arena in self._arenas.values())
        return [pool.memory for pool in pools if pool is not None]

    def release(self) -> int:
        """Free the memory of the pools; the next use of a buffer allocates it again.

        Memory used by gathered weights, or by a pending backward, is freed after that use.

        Returns:
            Bytes freed now.
        """
        return sum(arena.free() for arena in self._arenas.values())

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
