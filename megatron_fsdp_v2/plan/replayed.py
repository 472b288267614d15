"""Parts of a replayed step: a network that counts and times collectives, groups, reductions."""

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
from megatron_fsdp_v2.plan.step import Step, StepCollective, StepEvent
from megatron_fsdp_v2.runtime.reduction_rules import Reduction, ReductionSchedule

__all__ = ["ReplayedGroup", "ReplayedNetwork", "ReplayedReductions"]


class ReplayedNetwork:
    """Counts collectives and, with a machine, times them.

    Attributes:
        step: The result so far.
        now: Seconds since the step began.
        times: Number of micro-batches that the current one represents.
    """

    def __init__(self, training: TrainingDescription, machine: Machine | None) -> None:
        self.step = Step()
        self.now = 0.0
        self.times = 1
        self._meshes = training.meshes
        self._machine = machine
        self._link_free = {False: 0.0, True: 0.0}
        # Collectives to be merged, with those they merge; None outside of `together`.
        self._alike: dict[StepCollective, list[Flight]] | None = None

    @contextlib.contextmanager
    def before_the_step(self) -> Iterator[None]:
        """Discard what is counted inside: the end of the previous step, which counts it."""
        step, self.step = self.step, Step()
        yield
        self.step = step

    def note(self, kind: str, unit: str, numel: int = 0, axis: str = "") -> None:
        """Append an event; see `StepEvent`."""
        self.step.events.append(StepEvent(kind, unit, numel, axis, self.times))

    def copy(self, *, to_device: int = 0, to_host: int = 0) -> None:
        """Count bytes that are copied from and to host memory; the copies take no time."""
        self.step.to_device_nbytes += self.times * to_device
        self.step.to_host_nbytes += self.times * to_host

    def compute(self, seconds: float) -> None:
        """Advance the time by computation."""
        self.now += seconds
        self.step.compute_seconds += self.times * seconds

    def wait(self, flight: Flight, reason: Callable[[float], Reason]) -> None:
        """Advance the time until a collective is done.

        Args:
            flight: The collective.
            reason: Returns the reason of the wait, given its seconds.
        """
        began = self.now
        self.now = max(began, flight.done_at)
        if self._machine is not None and flight.nbytes:
            seconds = self.now - began
            exposure = flight.landed(began, seconds, reason(seconds), self.times)
            self.step.exposures.append(exposure)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Merge collectives of one kind at the end. See `Communicator.together`."""
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
        """Advance the time by micro-batches that are not replayed."""
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
            kind: See `StepCollective`.
            purpose: See `StepCollective`.
            group: Owner of the weights or gradients.
            axis: Index of the mesh axis.
            numel: Elements of the full buffer.
            itemsize: Bytes of an element.
            is_async: Whether it may be merged with others in `together`.
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
        collective = StepCollective(kind, purpose, group.mesh, name, size, stride, nbytes)
        self.note(kind, group.unit, numel, name)
        flight = Flight(group.unit, kind, purpose, name, nbytes, self.now, done_at=self.now)
        if self._alike is not None and is_async:
            self._alike.setdefault(replace(collective, nbytes=itemsize), []).append(flight)
            return flight
        if self._alike is not None:
            self._issue_alike()
        self._issue(collective, [flight])
        return flight

    def _issue(self, collective: StepCollective, flights: Sequence[Flight]) -> None:
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
    """A parameter group in a replayed step.

    Attributes:
        planned: Its sizes.
        unit: Name of the unit that owns it.
        mesh: Name of its mesh.
        holders: Number of units that have it gathered.
        uses: The uses that it is gathered for.
        bringing: Gathers and refreshes of its weights that nobody waited for yet.
        has_buffer: Whether its full buffer has gradients that are not being reduced yet.
        has_partial: Whether gradients wait for the outer reduction.
        has_main: Whether the main gradient has a sum, to which the next one is added.
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
    """The queue of reductions in a replayed step."""

    def __init__(self, training: TrainingDescription, network: ReplayedNetwork) -> None:
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
        """Count the copies of an offloaded main gradient; sums are computed on the device."""
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
