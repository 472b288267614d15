"""Records the events of a sharded module's step: collectives, waits and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, override

from torch import nn

from megatron_fsdp_v2.memory.allocator import BufferUse, TemporaryBuffer
from megatron_fsdp_v2.memory.observer import (
    BufferAcquired,
    BufferReleasing,
    CollectiveIssued,
    CollectiveWaited,
    CollectiveWaiting,
    Event,
    PhaseEnded,
)
from megatron_fsdp_v2.params.autograd import in_backward
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.plan.exposure import Exposure, Reason
from megatron_fsdp_v2.plan.machine import Machine
from megatron_fsdp_v2.plan.simulation import Device
from megatron_fsdp_v2.plan.simulation.devices import COMPUTE, Queue
from megatron_fsdp_v2.runtime.module import named_units


@dataclass(frozen=True, slots=True)
class StepCollective:
    """A collective that a step issues, one or more times.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`.
        purpose: `unshard`, `refresh`, `reduce` or `optimizer`.
        mesh: Name of the mesh.
        axis: `inner` or `outer`.
        size: Number of ranks, at least 2.
        stride: Distance between neighboring ranks of the axis, in global ranks.
        nbytes: Bytes of the full buffer; of an all-to-all, bytes that this rank sends.
    """

    kind: str
    purpose: str
    mesh: str
    axis: str
    size: int
    stride: int
    nbytes: int

    @property
    def ranks(self) -> range:
        """Global ranks of the collective, relative to its first rank."""
        return range(0, self.size * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One event of a step.

    Attributes:
        kind: The kind of an issued collective (see `StepCollective`); `forward` or `backward` when
            a unit begins to compute; `reshard` when gathered weights are freed; `collect` when a
            full gradient buffer is allocated; `wait` when the step waits for a reduction.
        unit: Name of the unit that computes, or that owns the weights or gradients; empty for the
            root.
        numel: Elements of the buffer; 0 when a unit computes.
        axis: Mesh axis of a collective: `inner` or `outer`.
        times: Number of micro-batches that the event represents. Micro-batches between the first
            and the last one are equal, and only one of them runs.
    """

    kind: str
    unit: str
    numel: int = 0
    axis: str = ""
    times: int = 1


class StepWork(NamedTuple):
    """Computation or a collective, in virtual time.

    Attributes:
        track: `compute`, `gather` or `reduce`.
        unit: Name of the unit; empty for the root.
        name: `forward`, `backward`, or the kind of a collective.
        start: Seconds since the beginning of the step.
        end: Likewise.
    """

    track: str
    unit: str
    name: str
    start: float
    end: float


@dataclass(slots=True)
class Step:
    """The recorded events and times of a step.

    Attributes:
        events: Events in order, without those of the optimizer.
        collectives: Number of times that each collective is issued.
        compute_seconds: Time of the computation; 0 without a machine.
        seconds: Time of the step; 0 without a machine.
        exposures: Every collective that the step waited for; empty without a machine.
        work: Computation and collectives in the order of their issue; empty without a machine. Of
            micro-batches in the middle, one is there.
        to_device_nbytes: Bytes of offloaded main weights and gradients copied to the device, in
            their dtype in host memory.
        to_host_nbytes: Bytes copied to host memory.
    """

    events: list[StepEvent] = field(default_factory=list)
    collectives: Counter[StepCollective] = field(default_factory=Counter)
    compute_seconds: float = 0.0
    seconds: float = 0.0
    exposures: list[Exposure] = field(default_factory=list)
    work: list[StepWork] = field(default_factory=list)
    to_device_nbytes: int = 0
    to_host_nbytes: int = 0


@dataclass(slots=True)
class _Issued:
    """A collective under way.

    Attributes:
        collective: The collective.
        at: Time of the issue, in seconds.
        use: Number of uses of units before the issue.
        idle: Seconds for which the link was idle before the issue.
        waited_at: Time at which the step began to wait, in seconds.
    """

    collective: StepCollective
    at: float
    use: int
    idle: float
    waited_at: float = 0.0


class StepRecorder(AbstractContextManager["StepRecorder"]):
    """Context manager that records the events of a sharded module.

    Args:
        module: The root.
        names: Names of units in events, by the units' fully qualified names. A unit without an
            entry has its fully qualified name.
        meshes: Name and stride of the mesh of a parameter group, by the group's name; `dp` and 1
            for a group without an entry.
        device: The simulated device; None records no times.
        machine: The machine that the device simulates.

    Attributes:
        step: The recorded step.
        times: Number of micro-batches that the current micro-batch represents.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[str, str] | None = None,
        meshes: Mapping[str, tuple[str, int]] | None = None,
        device: Device | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.step = Step()
        self.times = 1
        units = [unit for _, unit in named_units(module)]
        self._context = units[0].context
        self._names = {unit.fqn: (names or {}).get(unit.fqn, unit.fqn) for unit in units}
        self._groups: dict[str, tuple[str, ParameterGroup]] = {}
        # Gathered weights and full gradients.
        self._buffers: dict[TemporaryBuffer, str] = {}
        for unit in units:
            name = self._names[unit.fqn]
            for group in unit.groups:
                self._groups[group.name] = name, group
                for buffer in group.temporaries().values():
                    if buffer.use is BufferUse.GATHERED:
                        self._buffers[buffer] = name
                if group.grads.full.memory is not None:
                    self._buffers[group.grads.full.memory] = name
        self._meshes = meshes or {}
        self._device, self._machine = device, machine
        self._began = self._skipped = 0.0
        self._under_way: dict[CollectiveIssued, _Issued] = {}
        # Unit and phase that compute, and the track, unit and kind of the latest collective.
        self._computes = ("", "forward")
        self._issues = ("", "", "")

    @override
    def __enter__(self) -> StepRecorder:
        self.restart()
        if self._device is not None and self._machine is not None:
            self._device.timeline.listener = self._ran
        self._context.observer.subscribe(self._receive)
        return self

    def restart(self) -> None:
        """Start a new record. Collectives under way count as issued now."""
        self.step = Step()
        self._began = self._device.now if self._device else 0.0
        self._skipped = 0.0
        for flight in self._under_way.values():
            flight.at = flight.idle = 0.0

    @override
    def __exit__(self, *exception: object) -> None:
        self._context.observer.unsubscribe(self._receive)
        if self._device is not None:
            self._device.timeline.listener = None
        self.step.seconds = self.now

    @property
    def now(self) -> float:
        """Seconds since the beginning of the record."""
        return self._device.now - self._began + self._skipped if self._device else 0.0

    def skip(self, seconds: float) -> None:
        """Advance the time by micro-batches that do not run."""
        self._skipped += seconds

    def note(self, kind: str, unit: str, numel: int = 0, axis: str = "") -> None:
        """Append an event; see `StepEvent`."""
        self.step.events.append(StepEvent(kind, unit, numel, axis, self.times))
        if kind in ("forward", "backward"):
            self._computes = unit, kind

    def _ran(self, queues: Sequence[Queue], begin: float, end: float) -> None:
        """Record work of the simulated device."""
        assert self._device is not None
        is_computation = self._device.timeline.queues[COMPUTE] in queues
        track, unit, name = (COMPUTE, *self._computes) if is_computation else self._issues
        shift = self._skipped - self._began
        self.step.work.append(StepWork(track, unit, name, begin + shift, end + shift))

    def _receive(self, event: Event) -> None:
        match event:
            case PhaseEnded(owner, "pre_forward") if owner in self._names:
                # A recomputation belongs to the backward.
                if not in_backward():
                    self.note("forward", self._names[owner])
            case PhaseEnded(owner, "pre_backward") if owner in self._names:
                self.note("backward", self._names[owner])
            case PhaseEnded(owner, "post_forward" | "post_backward") if owner in self._names:
                # What follows is the root's, until the next unit begins.
                self._computes = "", self._computes[1]
            case BufferAcquired(buffer) if buffer in self._buffers:
                if buffer.use is BufferUse.GRADIENT:
                    self.note("collect", self._buffers[buffer], buffer.tensor.numel())
            case BufferReleasing(buffer) if buffer in self._buffers:
                if buffer.use is BufferUse.GATHERED:
                    self.note("reshard", self._buffers[buffer], buffer.tensor.numel())
            case CollectiveIssued():
                self._issued(event)
            case CollectiveWaiting(issued):
                if not _is_gather(issued):
                    unit, group = self._groups[issued.group]
                    self.note("wait", unit, issued.numel, _axis_name(issued, group))
                if issued in self._under_way:
                    self._under_way[issued].waited_at = self.now
            case CollectiveWaited(issued) if issued in self._under_way:
                self._waited(issued, self._under_way.pop(issued))

    def _issued(self, issued: CollectiveIssued) -> None:
        unit, group = self._groups[issued.group]
        collective = self._collective(issued, group)
        self.note(issued.kind, unit, issued.numel, collective.axis)
        self.step.collectives[collective] += self.times
        track = "reduce" if collective.purpose == "reduce" else "gather"
        self._issues = track, unit, issued.kind
        if self._device is not None and self._machine is not None:
            link = self._machine.link(collective.ranks)
            free = self._device.timeline.queues[link].ready - self._began + self._skipped
            idle = max(0.0, self.now - free)
            use = self._context.state.gathers.num_uses
            self._under_way[issued] = _Issued(collective, self.now, use, idle)

    def _collective(self, issued: CollectiveIssued, group: ParameterGroup) -> StepCollective:
        mesh, stride = self._meshes.get(group.name, ("dp", 1))
        sizes = [axis.size for axis in group.axes]
        axis = _axis_name(issued, group)
        purpose = "reduce"
        if _is_gather(issued):
            purpose = "unshard" if issued.is_temporary else "refresh"
        return StepCollective(
            issued.kind,
            purpose,
            mesh,
            axis,
            sizes[issued.axis],
            stride if axis == "inner" else stride * sizes[-1],
            issued.numel * issued.itemsize,
        )

    def _waited(self, issued: CollectiveIssued, flight: _Issued) -> None:
        moved, seconds = flight.collective, self.now - flight.waited_at
        self.step.exposures.append(
            Exposure(
                unit=self._groups[issued.group][0],
                kind=moved.kind,
                purpose=moved.purpose,
                axis=moved.axis,
                nbytes=moved.nbytes,
                issued_at=flight.at,
                waited_at=flight.waited_at,
                seconds=seconds,
                reason=self._why(issued, flight, seconds) if seconds > 0 else None,
                times=self.times,
            )
        )

    def _why(self, issued: CollectiveIssued, flight: _Issued, seconds: float) -> Reason:
        """Return the reason for which the step waits for a collective."""
        purpose = flight.collective.purpose
        gathers = self._context.state.gathers
        if purpose == "reduce":
            if not self._context.options.enable_async_reduce_grad:
                return Reason.AT_ONCE
            return Reason.LAST if self._context.state.is_draining else Reason.BUFFERS
        if flight.use <= 1 and gathers.num_uses <= 2:
            return Reason.FIRST
        if not issued.is_async:
            is_off = gathers.limit.units == 0 or purpose == "refresh"
            return Reason.AT_ONCE if is_off else Reason.ORDER
        # With an issue as soon as the link was free, the wait would be shorter by the idle time.
        if flight.use > 1 and 2 * flight.idle >= seconds:
            return Reason.LIMIT
        return Reason.COMPUTE


def _is_gather(issued: CollectiveIssued) -> bool:
    return issued.kind == "all_gather"


def _axis_name(issued: CollectiveIssued, group: ParameterGroup) -> str:
    return "inner" if issued.axis == len(group.axes) - 1 else "outer"
