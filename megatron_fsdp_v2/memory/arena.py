"""Buffers of one kind that share a block of memory: their traces, their plan, their homes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, override

import torch
from torch.utils.dlpack import from_dlpack

from megatron_fsdp_v2.memory.address_plan import MemoryPlan, Trace, keys_of, plan_memory
from megatron_fsdp_v2.memory.allocator import BufferUse, OwnMemory, ResizedBuffer, view_of

__all__ = [
    "Arena",
    "Kind",
    "Meter",
    "PoolMemory",
    "PoolReport",
    "PooledBuffer",
    "TracedProgram",
]

MAX_PROGRAMS = 64
"""Patterns kept apart, for recognizing and reporting them; conflicts of all are kept."""

MAX_EVENTS = 1 << 16
"""Events after which a trace is cut: what is gathered by `unshard()` alone has no passes."""

PATIENCE = 4
"""Passes after which a plan is made although no pattern was seen twice."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What buffers that share a block have in common.

    Weights and gradients are apart. A gather ahead of use is put off where memory planned for it
    is taken, which all ranks have to decide alike; they gather alike, and need not get gradients
    alike. It costs nothing: both take most at the same time, in the backward.

    Attributes:
        dtype: Element type.
        device: Where they are.
        is_weight: Whether they are gathered weights, which a backward has to find again.
    """

    dtype: torch.dtype
    device: torch.device
    is_weight: bool

    @override
    def __str__(self) -> str:
        """For reports."""
        role = "weights" if self.is_weight else "gradients"
        return f"{str(self.dtype).removeprefix('torch.')} {role} on {self.device}"


@dataclass(slots=True)
class Meter:
    """Bytes of live buffers of all kinds.

    Attributes:
        live: Now.
        peak: The largest sum so far.
    """

    live: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """A buffer is given memory."""
        self.live += nbytes
        self.peak = max(self.peak, self.live)


@dataclass(slots=True)
class TracedProgram:
    """A pattern of passes: the order in which buffers are given memory and lose it.

    Attributes:
        name: What kind of pass it was, when it was first seen.
        trace: The pattern.
        num_runs: How often it was seen.
    """

    name: str
    trace: Trace
    num_runs: int


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The plan for buffers of one kind.

    Attributes:
        kind: Which.
        names: Of the buffers, by key.
        plan: Where they are; None before there is one.
        programs: What was traced.
        beside: Names of buffers whose memory is outside of the block now, although the plan has
            them: live there, or held there by views of theirs.
    """

    kind: Kind
    names: tuple[str, ...]
    plan: MemoryPlan | None
    programs: tuple[TracedProgram, ...]
    beside: tuple[str, ...]

    def text(self) -> str:
        """The report, human-readable."""
        runs = ", ".join(f"{p.name} ({p.num_runs}x)" for p in self.programs)
        if self.plan is None:
            return f"{self.kind}: no plan yet; traced: {runs or 'nothing'}"
        beside = f"\nbeside the pool: {', '.join(self.beside)}" if self.beside else ""
        return f"{self.kind}: {self.plan.text(self.names)}\ntraced: {runs}{beside}"


class PoolMemory(Protocol):
    """Where blocks of memory come from, if not from torch's allocator."""

    def provide(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
        """A flat block of bytes, and what to call when no buffer is in it any longer."""
        ...


class _Pool:
    """The memory of one plan. It lives for as long as any buffer or view is in it."""

    def __init__(self, plan: MemoryPlan, device: torch.device, memory: PoolMemory | None) -> None:
        self.plan = plan
        if memory is None:
            self.memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
        else:
            self.memory, free = memory.provide(plan.nbytes, device)
            weakref.finalize(self, free)
        self.live = 0


class _PooledMemory:
    """A buffer's bytes in a pool, as a storage of their own.

    Its own storage tells who refers to it: views that autograd saved count as its users.
    """

    def __init__(self, pool: _Pool, key: int, nbytes: int) -> None:
        start = pool.plan.place(key, nbytes)
        assert start is not None
        self.pool = pool
        self.storage = from_dlpack(pool.memory[start : start + nbytes]).untyped_storage()
        self._bit = 1 << key
        self.overlaps = pool.plan.overlaps[key]

    def occupants(self) -> int:
        """The set of buffers that live in these bytes now."""
        return self.pool.live & self.overlaps

    def take(self) -> None:
        self.pool.live |= self._bit

    def drop(self) -> None:
        self.pool.live &= ~self._bit


class PooledBuffer:
    """A temporary buffer with two possible homes: memory of its own, and its place in the pool.

    Moving between them points the tensor, its views and parameters at another storage; their
    version counters do not move. While anyone else refers to the storage, as autograd does
    between a forward and its backward, the buffer stays.
    """

    def __init__(self, arena: Arena, name: str, use: BufferUse, numel: int) -> None:
        self.name = name
        self.use = use
        dtype, device = arena.kind.dtype, arena.kind.device
        self.own = OwnMemory(numel, dtype, device)
        self.backing: OwnMemory | _PooledMemory = self.own
        self.pooled: _PooledMemory | None = None
        self.tensor = view_of(self.own.storage, dtype, 0, (numel,))
        self.nbytes = numel * dtype.itemsize
        self._followers: list[weakref.ref[torch.Tensor]] = []
        self._live = False
        self.enter(arena)

    @classmethod
    def around(cls, arena: Arena, other: ResizedBuffer) -> PooledBuffer:
        """One in the place of a buffer without a pool: the same tensor, views and memory.

        The other one is left as it is, and can be taken back before this one is used.
        """
        made = cls(arena, other.name, other.use, other.tensor.numel())
        made.own = made.backing = other.memory
        made.tensor, made._followers = other.tensor, other.followers
        return made

    def enter(self, arena: Arena) -> None:
        """Belong to an arena."""
        self.belong(arena, arena.add(self))

    def belong(self, arena: Arena, key: int) -> None:
        """Be known to an arena by a key."""
        self.arena = arena
        self.key = key

    @property
    def is_live(self) -> bool:
        """Whether the buffer has memory now."""
        return self._live

    @property
    def pool_memory(self) -> torch.Tensor | None:
        """The block of the pool that it lies in now."""
        return self.backing.pool.memory if isinstance(self.backing, _PooledMemory) else None

    def acquire(self) -> torch.Tensor:
        """See `TemporaryBuffer.acquire`."""
        if not self._live:
            self.arena.admit(self)
            self._live = True
        return self.tensor

    def release(self) -> None:
        """Take the memory away."""
        if self._live:
            self._live = False
            self.backing.drop()
            self.arena.dismiss(self)

    def has_room(self) -> bool:
        """Whether its planned place is free; where not, the wish is traced."""
        return self._live or not self.arena.rejects(self)

    def alias(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A view that moves with the buffer."""
        view = view_of(self.backing.storage, self.tensor.dtype, offset, shape)
        self.follow(view)
        return view

    def follow(self, tensor: torch.Tensor) -> None:
        """Have a view move with the buffer."""
        self._followers.append(weakref.ref(tensor))

    def aliases(self) -> Iterator[torch.Tensor]:
        """The tensors that move with the buffer, its own first."""
        yield self.tensor
        for ref in self._followers:
            tensor = ref()
            if tensor is not None:
                yield tensor

    def is_held(self) -> bool:
        """Whether its content has to come back to where it is: autograd saved views of weights.

        Nobody reads gradients after they were reduced, though a thread of gloo may still refer to
        what it sent.
        """
        if not self.arena.kind.is_weight:
            return False
        # One more reference is the storage object itself.
        known = 1 + sum(1 for _ in self.aliases())
        return int(torch._C._storage_Use_Count(self.backing.storage._cdata)) > known

    def move(self, backing: OwnMemory | _PooledMemory) -> None:
        """Point everything made of the buffer at another backing; the content stays behind."""
        self._followers[:] = [ref for ref in self._followers if ref() is not None]
        # Tensors made in inference mode could not take the place of others.
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self.aliases():
                shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
                tensor.data = view_of(backing.storage, tensor.dtype, offset, shape)
        self.backing = backing


class Arena:
    """Buffers of one kind: their traces, their plan and their pool.

    Attributes:
        kind: What they have in common.
        memory: Where the block comes from; torch's allocator when None.
        num_allocations: How often memory was asked for, for a buffer or for the pool.
    """

    def __init__(self, kind: Kind, meter: Meter, memory: PoolMemory | None = None) -> None:
        self.kind = kind
        self.memory = memory
        self._meter = meter
        self.num_allocations = 0
        self._buffers: list[weakref.ref[PooledBuffer]] = []
        self._sizes: list[int] = []
        self._live = 0
        self._name = ""
        self._start = 0
        self._events: list[int] = []
        self._pool: _Pool | None = None
        self._forget()

    def _forget(self) -> None:
        self._programs: dict[Trace, TracedProgram] = {}
        self._conflicts = [0] * len(self._sizes)
        self._used = 0
        self._peak = 0
        self._plan: MemoryPlan | None = None
        self._wants_plan = False
        self._is_urgent = False
        self._waited = 0

    def add(self, buffer: PooledBuffer) -> int:
        """Take in a buffer without memory; return its key."""
        self._buffers.append(weakref.ref(buffer))
        self._sizes.append(buffer.nbytes)
        self._conflicts.append(0)
        return len(self._sizes) - 1

    def buffers(self) -> Iterator[PooledBuffer]:
        """Those that still exist."""
        for ref in self._buffers:
            buffer = ref()
            if buffer is not None:
                yield buffer

    # -- memory for buffers -------------------------------------------------------------------

    def admit(self, buffer: PooledBuffer) -> None:
        """Choose a backing for a buffer that needs memory, and trace that it does."""
        # Also when it fails: the next plan is to have room for it.
        self._events.append(buffer.key)
        target = self._home_for(buffer)
        if target is not buffer.backing:
            buffer.move(target)
        if target is buffer.own:
            self.num_allocations += 1
        target.take()
        self._live |= 1 << buffer.key
        self._meter.add(buffer.nbytes)

    def _home_for(self, buffer: PooledBuffer) -> OwnMemory | _PooledMemory:
        backing = buffer.backing
        preferred: OwnMemory | _PooledMemory = self._place_of(buffer) or buffer.own
        if isinstance(preferred, _PooledMemory) and preferred.occupants():
            preferred = buffer.own
        if preferred is not backing and buffer.is_held():
            if isinstance(backing, _PooledMemory) and backing.occupants():
                self._is_urgent = True
                raise RuntimeError(self._collision(buffer, backing))
            return backing
        return preferred

    def _place_of(self, buffer: PooledBuffer) -> _PooledMemory | None:
        """A buffer's place in the pool, which is given memory with the first one of them."""
        plan = self._plan
        if plan is None or plan.place(buffer.key, buffer.nbytes) is None or not buffer.nbytes:
            return None
        if self._pool is None:
            with torch.inference_mode(False):
                self._pool = _Pool(plan, self.kind.device, self.memory)
            self.num_allocations += 1
        if buffer.pooled is None or buffer.pooled.pool is not self._pool:
            with torch.inference_mode(False):
                buffer.pooled = _PooledMemory(self._pool, buffer.key, buffer.nbytes)
        return buffer.pooled

    def _collision(self, buffer: PooledBuffer, backing: _PooledMemory) -> str:
        owners = ", ".join(self._name_of(key) for key in keys_of(backing.occupants()))
        return (
            f"{buffer.name} has to come back to the memory where a forward left views of it, and "
            f"{owners} is there now: no traced pass uses them together. Run this step again, or "
            "call reset() on the trace pool before uses change in this way"
        )

    def _name_of(self, key: int) -> str:
        buffer = self._buffers[key]()
        return f"buffer {key}" if buffer is None else buffer.name

    def dismiss(self, buffer: PooledBuffer) -> None:
        """Trace that a buffer lost its memory."""
        self._live &= ~(1 << buffer.key)
        self._meter.live -= buffer.nbytes
        self._events.append(~buffer.key)
        if len(self._events) >= MAX_EVENTS:
            self._close("a part of a pass", no_pending_backward=False)

    def rejects(self, buffer: PooledBuffer) -> bool:
        """Whether a buffer's planned place is taken, so that it should come when it is needed.

        That depends on the plan and on what is live, which for weights are the same on all ranks,
        and not on where something is at the moment.
        """
        plan = self._plan
        if plan is None or buffer.key >= len(plan.overlaps):
            return False
        if not self._live & plan.overlaps[buffer.key]:
            return False
        self._events.append(buffer.key)
        return True

    # -- traces and plans ---------------------------------------------------------------------

    def begin(self, name: str, *, no_pending_backward: bool) -> None:
        """Start a new trace."""
        self._close(self._name or "between passes", no_pending_backward=no_pending_backward)
        self._name = name

    def end(self, name: str, *, no_pending_backward: bool) -> None:
        """End the trace."""
        name = " and ".join(part for part in (self._name, name) if part)
        self._close(name, no_pending_backward=no_pending_backward)
        self._name = ""

    def _close(self, name: str, *, no_pending_backward: bool) -> None:
        is_steady = False
        if self._events:
            trace = Trace(self._start, tuple(self._events))
            program = self._programs.get(trace)
            if program is None:
                self._learn(name, trace)
            else:
                program.num_runs += 1
                is_steady = no_pending_backward
            self._events.clear()
            self._waited += self._wants_plan
        self._start = self._live
        if self._wants_plan and (is_steady or self._is_urgent or self._waited > PATIENCE):
            self._make_plan()

    def _learn(self, name: str, trace: Trace) -> None:
        if len(self._programs) == MAX_PROGRAMS:
            rarest = min(self._programs.values(), key=lambda program: program.num_runs)
            del self._programs[rarest.trace]
        self._programs[trace] = TracedProgram(name, trace, 1)
        self._used |= trace.used()
        self._peak = max(self._peak, trace.peak(self._sizes))
        trace.add_conflicts(self._conflicts)
        plan = self._plan
        fits = plan is not None and all(
            plan.place(key, self._sizes[key]) is not None
            and not self._conflicts[key] & plan.overlaps[key]
            for key in keys_of(self._used)
        )
        self._wants_plan = not fits

    def _make_plan(self) -> None:
        self.release()
        self._plan = plan_memory(self._sizes, self._conflicts, self._used, self._peak)
        self._wants_plan = self._is_urgent = False
        self._waited = 0

    @property
    def block(self) -> torch.Tensor | None:
        """The memory of the plan, flat bytes; None before it is used."""
        return None if self._pool is None else self._pool.memory

    def release(self) -> int:
        """Move everything out of the pool that can be moved; return the bytes given back."""
        pool, self._pool = self._pool, None
        if pool is None:
            return 0
        left = 0
        for buffer in self.buffers():
            backing = buffer.backing
            if isinstance(backing, _PooledMemory) and backing.pool is pool:
                if buffer.is_live or buffer.is_held():
                    left += 1
                    continue
                buffer.move(buffer.own)
            buffer.pooled = None
        return 0 if left else pool.memory.nbytes

    def keep(self, undo: ExitStack) -> None:
        """Have `undo` put back traces, plan and buffers, none of which is live.

        Where they lie is not put back: the next use has each of them in its planned place.
        """
        undo.callback(self._put_back, dict(vars(self)), list(self._events))
        for buffer in self.buffers():
            undo.callback(buffer.belong, self, buffer.key)

    def _put_back(self, attributes: dict[str, Any], events: list[int]) -> None:
        vars(self).update(attributes)
        self._events = events

    def reset(self) -> None:
        """Forget what was traced and planned."""
        self.release()
        self._events.clear()
        self._start = self._live
        self._forget()

    def report(self) -> PoolReport:
        """See `TracePoolAllocator.reports`."""
        plan = self._plan
        beside = [
            buffer.name
            for buffer in self.buffers()
            if plan is not None
            and plan.place(buffer.key, buffer.nbytes) is not None
            and buffer.backing is not buffer.pooled
            and (buffer.is_live or buffer.is_held())
        ]
        return PoolReport(
            self.kind,
            tuple(self._name_of(key) for key in range(len(self._sizes))),
            plan,
            tuple(self._programs.values()),
            tuple(beside),
        )
