"""What a replayed step is made of: a network that counts and times, groups, their reductions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import override

from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2.plan.description import TrainingDescription
from megatron_fsdp_v2.plan.exposure import Flight, Reason, why_reduction
from megatron_fsdp_v2.plan.machine import Machine
from megatron_fsdp_v2.plan.sharding import PlannedGroup
from megatron_fsdp_v2.plan.step import Collective, Event, Step
from megatron_fsdp_v2.runtime.reduction_rules import Reduction, ReductionSchedule

__all__ = ["Network", "ReplayedGroup", "ReplayedReductions"]


class Network:
    """Issues collectives: counts them and, where a machine says how long they take, times them.

    Attributes:
        step: What was counted.
        now: Seconds since the step began.
        times: Micro-batches that the one under way stands for.
    """

    def __init__(self, training: TrainingDescription, machine: Machine | None) -> None:
        self.step = Step()
        self.now = 0.0
        self.times = 1
        self._meshes = training.meshes
        self._machine = machine
        self._link_free = {False: 0.0, True: 0.0}
        # What is to be one collective with what; None outside of `together`.
        self._alike: dict[Collective, list[Flight]] | None = None

    @contextlib.contextmanager
    def before_the_step(self) -> Iterator[None]:
        """Do what the step before this one ended with, which that one counts."""
        step, self.step = self.step, Step()
        yield
        self.step = step

    def note(self, kind: str, unit: str, numel: int = 0, axis: str = "") -> None:
        """Note what is done now; see `Event`."""
        self.step.events.append(Event(kind, unit, numel, axis, self.times))

    def copy(self, *, to_device: int = 0, to_host: int = 0) -> None:
        """Count bytes that are copied from and to host memory. They take no time here."""
        self.step.to_device_nbytes += self.times * to_device
        self.step.to_host_nbytes += self.times * to_host

    def compute(self, seconds: float) -> None:
        """Let time pass in computation."""
        self.now += seconds
        self.step.compute_seconds += self.times * seconds

    def wait(self, flight: Flight, reason: Callable[[float], Reason]) -> None:
        """Let time pass until a collective is done.

        Args:
            flight: The collective.
            reason: Why it is waited for, from the seconds that takes.
        """
        began = self.now
        self.now = max(began, flight.done_at)
        if self._machine is not None and flight.nbytes:
            seconds = self.now - began
            exposure = flight.landed(began, seconds, reason(seconds), self.times)
            self.step.exposures.append(exposure)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Issue what is alike in one collective, at the end. See `Communicator.together`."""
        self._alike = {}
        yield
        self._issue_alike()
        self._alike = None

    def _issue_alike(self) -> None:
        alike, self._alike = self._alike or {}, {}
        for collective, flights in alike.items():
            nbytes = sum(flight.nbytes for flight in flights)
            self._issue(replace(collective, nbytes=nbytes), flights)

    def skip(self, seconds: float) -> None:
        """Let time pass in micro-batches that are not replayed."""
        self.now += seconds
        self._link_free = {link: at + seconds for link, at in self._link_free.items()}

    def issue(
        self,
        kind: str,
        purpose: str,
        group: ReplayedGroup,
        axis: int,
        numel: int,
        itemsize: int,
        *,
        is_async: bool = True,
    ) -> Flight:
        """Issue a collective.

        Args:
            kind: See `Collective`.
            purpose: Likewise.
            group: Whose weights or gradients.
            axis: Index of the mesh axis.
            numel: Elements of the full buffer.
            itemsize: Bytes of each.
            is_async: Whether it can be put off, to be one with others.
        """
        sizes = group.planned.sizes
        size = sizes[axis]
        if size == 1 or not numel:
            return Flight(group.unit, kind, purpose, "", 0, self.now, done_at=self.now)
        mesh = self._meshes[group.mesh]
        is_inner = axis in (-1, len(sizes) - 1)
        stride = mesh.stride if is_inner else mesh.stride * sizes[-1]
        name = "inner" if is_inner else "outer"
        nbytes = numel * itemsize
        collective = Collective(kind, purpose, group.mesh, name, size, stride, nbytes)
        self.note(kind, group.unit, numel, name)
        flight = Flight(group.unit, kind, purpose, name, nbytes, self.now, done_at=self.now)
        if self._alike is not None and is_async:
            self._alike.setdefault(replace(collective, nbytes=itemsize), []).append(flight)
            return flight
        if self._alike is not None:
            self._issue_alike()
        self._issue(collective, [flight])
        return flight

    def _issue(self, collective: Collective, flights: Sequence[Flight]) -> None:
        self.step.collectives[collective] += self.times
        if self._machine is None:
            return
        # Collectives of all communication streams share the links; those of a node and the network
        # work side by side.
        size, stride = collective.size, collective.stride
        link = self._machine.crosses_nodes(size, stride)
        seconds = self._machine.collective_seconds(collective.kind, collective.nbytes, size, stride)
        idle = max(0.0, self.now - self._link_free[link])
        self._link_free[link] = max(self._link_free[link], self.now) + seconds
        for flight in flights:
            flight.idle, flight.done_at = idle, self._link_free[link]


@dataclass(slots=True, eq=False)
class ReplayedGroup:
    """A group while it is replayed.

    Attributes:
        planned: What it is.
        unit: Name of the unit that owns it.
        mesh: Name of its mesh.
        holders: Units that have it gathered.
        uses: What it is gathered for.
        bringing: What brings its weights, until that is waited for.
        has_buffer: Whether gradients are in its full buffer, which no reduction has yet.
        has_partial: Whether gradients wait for the outer reduction.
        has_main: Whether there is a sum in the main gradient, which the next one is added to.
    """

    planned: PlannedGroup
    unit: str
    mesh: str
    holders: int = 0
    uses: WeightUse = WeightUse(0)  # noqa: RUF009
    bringing: list[Flight] = field(default_factory=list)
    has_buffer: bool = False
    has_partial: bool = False
    has_main: bool = False

    @property
    def accumulates_unreduced(self) -> bool:
        """See `Reducible`."""
        return self.planned.accumulates_unreduced

    @property
    def has_outer_axis(self) -> bool:
        """See `Reducible`."""
        return self.planned.has_outer_axis

    @property
    def full_nbytes(self) -> int:
        """See `Reducible`."""
        return self.planned.nbytes.grad_buffer


class ReplayedReductions(ReductionSchedule[ReplayedGroup, Flight]):
    """Reductions under way."""

    def __init__(self, training: TrainingDescription, network: Network) -> None:
        super().__init__(
            training.options.max_live_grad_buffers,
            is_async=training.options.enable_async_reduce_grad,
            bucket_nbytes=training.options.bucket_bytes or 0,
            together=network.together,
        )
        self._network = network

    @override
    def issue_inner(self, group: ReplayedGroup) -> Flight:
        group.has_buffer = False
        group.has_partial = group.has_outer_axis
        if not group.has_partial:
            self._copy_sum(group)
        return self._issue(group, -1, group.planned.layout.numel)

    @override
    def finish_inner(self, done: Sequence[Reduction[ReplayedGroup, Flight]]) -> None:
        for reduction in done:
            self._wait(reduction.group, reduction.group.planned.layout.numel, reduction.work)

    @override
    def issue_outer(self, groups: Sequence[ReplayedGroup]) -> list[Flight]:
        for group in groups:
            group.has_partial = False
            self._copy_sum(group)
        return [self._issue(group, 0, group.planned.partial_numel) for group in groups]

    @override
    def finish_outer(self, done: Sequence[Reduction[ReplayedGroup, Flight]]) -> None:
        for reduction in done:
            group = reduction.group
            self._wait(group, group.planned.partial_numel, reduction.work, axis="outer")

    def _copy_sum(self, group: ReplayedGroup) -> None:
        """Of an offloaded main gradient: sums are made on the device."""
        if group.planned.is_offloaded:
            nbytes = group.planned.main_grad_nbytes
            self._network.copy(to_device=nbytes if group.has_main else 0, to_host=nbytes)
        group.has_main = True

    def _wait(self, group: ReplayedGroup, numel: int, flight: Flight, axis: str = "inner") -> None:
        self._network.note("wait", group.unit, numel, axis)
        self._network.wait(flight, lambda seconds: why_reduction(self.draining))

    def _issue(self, group: ReplayedGroup, axis: int, numel: int) -> Flight:
        kind = "reduce_scatter" if group.planned.grid.parts[axis] > 1 else "all_reduce"
        itemsize = group.planned.dtypes.grad_comm.itemsize
        return self._network.issue(kind, "reduce", group, axis, numel, itemsize)
