"""An overlap tracker: what a training waits for, collective by collective, for how long and why.

Example:
    with overlap_tracker(model) as overlap:
        train_step()
    print(overlap.report())
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, override

from torch import nn

from megatron_fsdp_v2.comm.errors import Label
from megatron_fsdp_v2.comm.interface import (
    Collective,
    CollectiveKind,
    Communicator,
    PolledWork,
    Work,
)
from megatron_fsdp_v2.diagnostics.walk import units_below
from megatron_fsdp_v2.memory.allocator import ObservedBuffer, TemporaryBuffer
from megatron_fsdp_v2.plan.exposure import (
    Exposure,
    Flight,
    OverlapReport,
    Reason,
    why_gather,
    why_reduction,
)

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.grads import GroupGrads
    from megatron_fsdp_v2.params.group import ParameterGroup
    from megatron_fsdp_v2.params.weights import GroupWeights
    from megatron_fsdp_v2.runtime.context import Context
    from megatron_fsdp_v2.runtime.unit import Unit

__all__ = ["Clock", "HostClock", "TrackedOverlap", "overlap_tracker"]


class Clock(Protocol):
    """Says when it is, for whoever computes and waits.

    Attributes:
        least: Seconds of a wait that are none.
    """

    least: float

    def now(self) -> float:
        """The moment, in seconds."""
        ...

    def link_free(self) -> float | None:
        """When everything communicated so far is done; None where that is not known."""
        ...


class HostClock:
    """The time of this process, on a CPU.

    Attributes:
        least: See `Clock`.
    """

    least = 50e-6

    def now(self) -> float:
        """See `Clock.now`."""
        return time.perf_counter()

    def link_free(self) -> None:
        """See `Clock.link_free`. What threads of a process group do is not told."""
        return


class TrackedOverlap:
    """What an overlap tracker saw. Seconds of this rank.

    Args:
        clock: Where they are from.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.now()
        self._ended: float | None = None
        self._exposures: list[Exposure] = []

    def add(self, exposure: Exposure) -> None:
        """Note what was waited for."""
        self._exposures.append(exposure)

    @property
    def began(self) -> float:
        """When tracking began."""
        return self._began

    def end(self) -> None:
        """Tracking is over."""
        self._ended = self._clock.now()

    @property
    def is_open(self) -> bool:
        """Whether tracking goes on."""
        return self._ended is None

    @property
    def result(self) -> OverlapReport:
        """Everything that was waited for until now, or until tracking ended."""
        ended = self._clock.now() if self._ended is None else self._ended
        exposures = sorted(self._exposures, key=lambda each: each.issued_at)
        return OverlapReport(tuple(exposures), ended - self._began)

    def report(self, most: int = 12) -> str:
        """Seconds by reason, and the collectives that were exposed longest.

        Args:
            most: Collectives that are shown.
        """
        return "\n".join(self.result.lines(most))


@contextlib.contextmanager
def overlap_tracker(module: nn.Module, clock: Clock | None = None) -> Iterator[TrackedOverlap]:
    """Track what a sharded model waits for on this rank. No communication, no other result.

    On a CPU the host is seen to wait: for a collective of gloo, and, with it, for the sum that a
    reduction makes of what arrived. In a simulation, virtual time is read (`SimulatedClock`).

    Args:
        module: The root.
        clock: Where times are from; default: this process.

    Raises:
        ValueError: Nothing in the module is sharded; or it is on a device where streams wait and
            not the host, and no clock says what they do.
    """
    units = units_below(module)
    for name, unit in units:
        for group in unit.groups:
            if clock is None and group.device.type != "cpu":
                raise ValueError(
                    f"{name or 'the root'} is on {group.device}, where streams wait and the host "
                    "does not; see what is exposed with `megatron-fsdp-v2 plan --overlap` or in a "
                    "simulation, or in a trace of torch's profiler"
                )
    clock = clock or HostClock()
    tracked = TrackedOverlap(clock)
    with contextlib.ExitStack() as undo:
        watch = _Watch(units[0][1].context, clock, tracked)
        for name, unit in units:
            watch.add_unit(name, unit, undo)
        try:
            yield tracked
        finally:
            tracked.end()


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A collective that was not waited for.

    Attributes:
        flight: What it is.
        work: Tells whether it is done, where that can be told.
        pending_at: When it was seen under way for the last time.
    """

    flight: Flight
    work: Work
    pending_at: float


class _Watch:
    """Sees the collectives of a root's units.

    Args:
        context: Of the root.
        clock: Tells the time.
        tracked: Where waits are noted.
    """

    def __init__(self, context: Context, clock: Clock, tracked: TrackedOverlap) -> None:
        self.context = context
        self.clock = clock
        self.tracked = tracked
        # Groups whose prefetch was put off since they were last gathered.
        self._put_off: set[str] = set()
        self._dropping = 0
        self._under_way: list[_UnderWay] = []
        self._link_free = tracked.began

    def add_unit(self, name: str, unit: Unit, undo: contextlib.ExitStack) -> None:
        """Watch a unit until `undo` is closed."""
        undo.callback(setattr, unit, "ranges", unit.ranges)
        unit.ranges = functools.partial(self._range, unit.ranges)
        for group in unit.groups:
            for holder in (group.weights, group.grads):
                if holder is not None:
                    self._watch_holder(_Timed(self, name, group), holder, undo)
            group.weights.replace_buffers(functools.partial(_Asked, self, name))
            undo.callback(group.weights.replace_buffers, _unasked)

    def _watch_holder(
        self, timed: _Timed, holder: GroupWeights | GroupGrads, undo: contextlib.ExitStack
    ) -> None:
        timed.inner = holder.replace_communicator(timed)
        undo.callback(holder.replace_communicator, timed.inner)

    @contextlib.contextmanager
    def _range(
        self,
        others: Callable[[str], contextlib.AbstractContextManager[Any]] | None,
        phase: str,
    ) -> Iterator[None]:
        is_dropping = phase == "reshard"
        self._dropping += is_dropping
        try:
            with contextlib.nullcontext() if others is None else others(phase):
                yield
        finally:
            self._dropping -= is_dropping

    def put_off(self, name: str) -> None:
        """A unit's gather found no room."""
        self._put_off.add(name)

    # -- what is under way ----------------------------------------------------------------------

    def took_off(self, flight: Flight) -> None:
        """A collective is about to be issued: see how long its link has had nothing to do."""
        now = self.clock.now()
        flight.issued_at = now - self.tracked.began
        flight.use = self.context.gathers.num_uses
        free = self.clock.link_free()
        if free is None:
            self._poll(now)
            free = now if self._under_way else self._link_free
        flight.idle = max(0.0, now - free)

    def flies(self, flight: Flight, work: Work) -> None:
        """It was issued, and not waited for yet."""
        self._under_way.append(_UnderWay(flight, work, self.clock.now()))

    def _poll(self, now: float) -> None:
        """Take out what is done by now; it was so since some time after it was last seen."""
        left = []
        for each in self._under_way:
            if isinstance(each.work, PolledWork) and each.work.is_done():
                self._link_free = max(self._link_free, (each.pending_at + now) / 2)
            else:
                each.pending_at = now
                left.append(each)
        self._under_way = left

    def landed(self, flight: Flight, began: float) -> None:
        """A collective was waited for.

        Args:
            flight: Which.
            began: When waiting began.
        """
        now = self.clock.now()
        seconds = now - began
        for each in self._under_way:
            if each.flight is flight:
                # If nobody had to wait, it was done at some time before.
                was_done = seconds <= self.clock.least
                done_at = (each.pending_at + began) / 2 if was_done else now
                self._link_free = max(self._link_free, done_at)
                self._under_way.remove(each)
                break
        else:
            if not flight.is_ahead:
                self._link_free = max(self._link_free, now)
        if self.tracked.is_open:
            reason = self._reason(flight, seconds)
            waited_at = began - self.tracked.began
            self.tracked.add(flight.landed(waited_at, seconds, reason, least=self.clock.least))

    def _reason(self, flight: Flight, seconds: float) -> Reason:
        gathers, reductions = self.context.gathers, self.context.reductions
        if flight.purpose == "reduce":
            if not flight.is_ahead:
                return Reason.AT_ONCE
            return why_reduction(reductions.draining)
        had_room = flight.unit not in self._put_off
        if flight.purpose == "unshard":
            self._put_off.discard(flight.unit)
        return why_gather(
            flight,
            seconds,
            gathers.num_uses,
            gathers.limit,
            had_room=had_room,
            is_used=not self._dropping,
        )


class _Timed:
    """A communicator that notes when its collectives are issued and waited for.

    Attributes:
        inner: What does it all.
    """

    inner: Communicator

    def __init__(self, watch: _Watch, unit: str, group: ParameterGroup) -> None:
        self._watch = watch
        self._unit = unit
        self._outer_group = group.axes[0].group if len(group.axes) > 1 else None
        self._gathers_for_use = group.weights.gathers_for_use
        self._numel = group.layout.numel

    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """See `Communicator.issue`."""
        if collective.axis.size == 1:
            return self.inner.issue(collective, async_op=async_op)
        flight = self._flight(collective, is_ahead=async_op)
        self._watch.took_off(flight)
        began = self._watch.clock.now()
        work = self.inner.issue(collective, async_op=async_op)
        if not async_op:
            self._watch.landed(flight, began)
            return work
        self._watch.flies(flight, work)
        return _TimedWork(work, flight, self._watch)

    def _flight(self, collective: Collective, *, is_ahead: bool) -> Flight:
        full, purpose = collective.full, "reduce"
        if collective.kind is CollectiveKind.ALL_GATHER:
            is_whole = self._gathers_for_use and full.numel() == self._numel
            purpose = "unshard" if is_whole else "refresh"
        is_outer = collective.axis.group is self._outer_group
        return Flight(
            self._unit,
            collective.kind.value,
            purpose,
            "outer" if is_outer else "inner",
            full.numel() * full.element_size(),
            0.0,
            is_ahead=is_ahead,
        )

    def labeled(self, label: Label) -> Communicator:
        """See `Communicator.labeled`."""
        return self.inner.labeled(label)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """See `Communicator.together`."""
        return self.inner.together()

    def begin_pass(self) -> None:
        """See `Communicator.begin_pass`."""
        self.inner.begin_pass()

    @property
    def has_streams(self) -> bool:
        """See `Communicator`."""
        return self.inner.has_streams

    def side_stream(self) -> Any | None:
        """See `Communicator.side_stream`."""
        return self.inner.side_stream()

    def wait_for(self, streams: Iterable[Any], *, and_compute: bool) -> None:
        """See `Communicator.wait_for`."""
        self.inner.wait_for(streams, and_compute=and_compute)

    def memory(self) -> contextlib.AbstractContextManager[Any]:
        """See `Communicator.memory`."""
        return self.inner.memory()

    def synchronize(self) -> None:
        """See `Communicator.synchronize`."""
        self.inner.synchronize()

    def settle(self) -> None:
        """See `Communicator.settle`."""
        self.inner.settle()


class _TimedWork:
    """Work whose wait is noted, once."""

    __slots__ = ("_flight", "_inner", "_watch")

    def __init__(self, inner: Work, flight: Flight, watch: _Watch) -> None:
        self._inner = inner
        self._flight: Flight | None = flight
        self._watch = watch

    def wait(self) -> None:
        """See `Work.wait`."""
        flight, self._flight = self._flight, None
        began = self._watch.clock.now()
        self._inner.wait()
        if flight is not None:
            self._watch.landed(flight, began)


class _Asked(ObservedBuffer):
    """A buffer of gathered weights that tells when there was no room for it."""

    def __init__(self, watch: _Watch, unit: str, inner: TemporaryBuffer) -> None:
        super().__init__(inner)
        self._watch = watch
        self._unit = unit

    @override
    def has_room(self) -> bool:
        found = self.inner.has_room()
        if not found:
            self._watch.put_off(self._unit)
        return found


def _unasked(buffer: TemporaryBuffer) -> TemporaryBuffer:
    return buffer.inner if isinstance(buffer, _Asked) else buffer
