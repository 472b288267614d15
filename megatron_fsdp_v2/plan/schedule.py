"""A step, simulated: what is communicated, and what waits for what.

The rules are those of `unit.py`, `context.py` and `reduction_queue.py` of `runtime`: some units
are gathered ahead, a bounded number of reductions is in flight, an outer axis is reduced when the
inner one is done. Time is counted where a machine says how long something takes. Micro-batches in
the middle are alike: three stand for any number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_fsdp_v2.plan.description import TrainingDescription
from megatron_fsdp_v2.plan.machine import Machine
from megatron_fsdp_v2.plan.sharding import PlannedGroup

__all__ = ["Collective", "Step", "parent_of", "play"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a step issues, once or more often.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`.
        purpose: `unshard`, `refresh`, `reduce` or `optimizer`.
        mesh: Name of the mesh.
        axis: `inner` or `outer`.
        size: Ranks that take part, at least 2: among one rank nothing is issued.
        stride: Ranks of the job from one of them to the next.
        nbytes: Of the full buffer; of an all-to-all, what this rank sends.
    """

    kind: str
    purpose: str
    mesh: str
    axis: str
    size: int
    stride: int
    nbytes: int


@dataclass(slots=True)
class Step:
    """What a step comes to.

    Attributes:
        collectives: How often each is issued.
        compute_seconds: Time of computation alone.
        seconds: Time of the step; both 0 without a machine.
    """

    collectives: Counter[Collective] = field(default_factory=Counter)
    compute_seconds: float = 0.0
    seconds: float = 0.0


def play(
    training: TrainingDescription,
    groups: Sequence[tuple[PlannedGroup, ...]],
    machine: Machine | None = None,
) -> Step:
    """Play a step in the steady state.

    Args:
        training: What is trained.
        groups: Of every unit, as `sharding.shard` gives them.
        machine: For times.
    """
    return _Simulator(training, groups, machine).play()


@dataclass(slots=True, eq=False)
class _Group:
    """A group while it is played.

    Attributes:
        planned: What it is.
        mesh: Name of its mesh.
        holders: Units that have it gathered.
        ready_at: When its weights are there.
        has_buffer: Whether gradients are in its full buffer.
        has_partial: Whether gradients wait for the outer reduction.
    """

    planned: PlannedGroup
    mesh: str
    holders: int = 0
    ready_at: float = 0.0
    has_buffer: bool = False
    has_partial: bool = False


@dataclass(slots=True, eq=False)
class _Unit:
    own: list[_Group]
    held: list[_Group]
    forward_seconds: float
    children: list[_Unit] = field(default_factory=list)
    keeps_gathered: bool = False
    is_unsharded: bool = False


class _Simulator:
    def __init__(
        self,
        training: TrainingDescription,
        groups: Sequence[tuple[PlannedGroup, ...]],
        machine: Machine | None,
    ) -> None:
        self._training = training
        self._machine = machine
        self._step = Step()
        self._clock = 0.0
        self._link_free = {False: 0.0, True: 0.0}
        self._pending: deque[tuple[list[_Group], float, bool]] = deque()
        self._outer_done_at: deque[float] = deque()
        self._weight = 1
        self._units = self._make_units(groups)
        self._root = self._units[0]
        self._forward_order = list(_preorder(self._root))
        self._backward_order = list(_postorder(self._root))[::-1]
        self._forward_position = {unit: at for at, unit in enumerate(self._forward_order)}
        self._backward_position = {unit: at for at, unit in enumerate(self._backward_order)}
        self._gathers_at_start = all(
            not group.planned.gathers_for_use for unit in self._units for group in unit.own
        )
        self._refreshes = False
        self._synchronizes = False

    def _make_units(self, groups: Sequence[tuple[PlannedGroup, ...]]) -> list[_Unit]:
        training, units = self._training, []
        by_param: dict[tuple[str, str], _Group] = {}
        for unit, planned in zip(training.units, groups, strict=True):
            own = [_Group(group, unit.mesh) for group in planned]
            for group in own:
                by_param |= {(unit.name, param.name): group for param in group.planned.params}
            seconds = 0.0
            if self._machine is not None:
                seconds = self._machine.compute_seconds(unit.flops_per_token * training.tokens)
            units.append(_Unit(own, own, seconds))
        for played, unit in zip(units, training.units, strict=True):
            tied_groups = {id(by_param[key]): by_param[key] for key in unit.borrows}
            played.held = [*played.own, *tied_groups.values()]
        by_name = {unit.name: played for played, unit in zip(units, training.units, strict=True)}
        for played, unit in zip(units, training.units, strict=True):
            played.keeps_gathered = unit.keeps_gathered or not training.reshard_after_forward
        units[0].keeps_gathered = True
        for played, unit in list(zip(units, training.units, strict=True))[1:]:
            by_name[parent_of(unit.name, by_name)].children.append(played)
        return units

    # -- the step -----------------------------------------------------------------------------

    def play(self) -> Step:
        """Play it: some forwards, forwards and backwards in turn, the backwards that are left."""
        training, count = self._training, self._training.num_microbatches
        ahead = min(training.num_in_flight - 1, count - 1)
        for number in range(ahead):
            self._forward_pass(number)
        pairs = count - ahead
        for position in sorted({0, 1, pairs - 1} & set(range(pairs))):
            is_repeated = position == 1 and pairs > 2
            self._weight = pairs - 2 if is_repeated else 1
            began = self._clock
            self._forward_pass(ahead + position)
            self._backward_pass(is_last=position == count - 1)
            skipped = (self._weight - 1) * (self._clock - began)
            self._clock += skipped
            self._link_free = {link: at + skipped for link, at in self._link_free.items()}
        self._weight = 1
        for number in range(pairs, count):
            self._backward_pass(is_last=number == count - 1)
        if training.syncs_afterwards:
            self._synchronize()
        self._step.seconds = self._clock
        return self._step

    @property
    def _syncs_every_one(self) -> bool:
        return not self._training.defers_sync and not self._training.syncs_afterwards

    def _forward_pass(self, number: int) -> None:
        refreshes = number == 0 or self._syncs_every_one
        if self._gathers_at_start and refreshes:
            for unit in self._units:
                for group in unit.own:
                    group.ready_at = self._refresh(group)
        self._refreshes = refreshes and not self._gathers_at_start
        self._run_forward(self._root)

    def _backward_pass(self, *, is_last: bool) -> None:
        is_final = is_last and not self._training.syncs_afterwards
        self._synchronizes = self._syncs_every_one or is_final
        self._run_backward(self._root)
        self._drain()

    def _run_forward(self, unit: _Unit) -> None:
        self._arrive(unit, in_forward=True)
        after = self._forward_position[unit] + 1
        self._prefetch(self._forward_order, after, in_forward=True)
        # What the root has most of is the output layer, which comes last.
        is_root = unit is self._root
        self._compute(0.0 if is_root else unit.forward_seconds)
        for child in unit.children:
            self._run_forward(child)
        self._compute(unit.forward_seconds if is_root else 0.0)
        if not unit.keeps_gathered:
            self._reshard(unit)

    def _run_backward(self, unit: _Unit) -> None:
        self._arrive(unit, in_forward=False)
        after = self._backward_position[unit] + 1
        self._prefetch(self._backward_order, after, in_forward=False)
        for group in unit.own:
            self._take_gradients(group)
        is_root = unit is self._root
        seconds = unit.forward_seconds * 2
        if not is_root:
            seconds += unit.forward_seconds * self._training.recompute_factor
        self._compute(seconds if is_root else 0.0)
        for child in reversed(unit.children):
            self._run_backward(child)
        self._compute(0.0 if is_root else seconds)
        self._reduce(unit)
        self._reshard(unit)

    def _compute(self, seconds: float) -> None:
        self._clock += seconds
        self._step.compute_seconds += self._weight * seconds

    # -- weights ------------------------------------------------------------------------------

    def _arrive(self, unit: _Unit, *, in_forward: bool) -> None:
        self._unshard(unit, in_forward=in_forward)
        self._clock = max([self._clock, *(group.ready_at for group in unit.held)])

    def _prefetch(self, order: Sequence[_Unit], after: int, *, in_forward: bool) -> None:
        for unit in order[after : after + self._training.unshard_prefetch_depth]:
            self._unshard(unit, in_forward=in_forward)

    def _unshard(self, unit: _Unit, *, in_forward: bool) -> None:
        if unit.is_unsharded:
            return
        unit.is_unsharded = True
        for group in unit.held:
            group.holders += 1
            if group.holders > 1:
                continue
            if in_forward and self._refreshes:
                # Not asynchronous: the gather that follows reads what it writes.
                self._clock = max(self._clock, self._refresh(group))
            nbytes = group.planned.nbytes.gathered
            if nbytes:
                group.ready_at = self._issue("all_gather", "unshard", group, -1, nbytes)

    def _reshard(self, unit: _Unit) -> None:
        if not unit.is_unsharded:
            return
        unit.is_unsharded = False
        for group in unit.held:
            group.holders -= 1

    def _refresh(self, group: _Group) -> float:
        """Gather model weights out of main weights cut finer; return when that is done."""
        planned, ready = group.planned, self._clock
        numel = planned.main_numel
        for axis, parts in enumerate(planned.grid.parts):
            if parts > 1 and numel < planned.model_numel:
                numel *= parts
                nbytes = numel * planned.dtypes.model_weight.itemsize
                ready = self._issue("all_gather", "refresh", group, axis, nbytes)
        return ready

    # -- gradients ----------------------------------------------------------------------------

    def _take_gradients(self, group: _Group) -> None:
        """Put gradients into the full buffer, once there is room."""
        if not group.planned.requires_grad or group.has_buffer:
            return
        self._make_room()
        group.has_buffer = True

    def _make_room(self) -> None:
        """Wait until one more unit can have its gradients reduced."""
        while len(self._pending) >= self._training.max_live_grad_buffers:
            self._drain_one()

    def _reduce(self, unit: _Unit) -> None:
        issued: list[_Group] = []
        done_at = self._clock
        for group in unit.own:
            planned = group.planned
            if not group.has_buffer or (planned.accumulates_unreduced and not self._synchronizes):
                continue
            if not issued:
                self._make_room()
            group.has_partial = planned.has_outer_axis
            kind = "reduce_scatter" if planned.grid.parts[-1] > 1 else "all_reduce"
            nbytes = planned.layout.numel * planned.dtypes.grad_comm.itemsize
            done_at = self._issue(kind, "reduce", group, -1, nbytes)
            issued.append(group)
        if issued:
            self._pending.append((issued, done_at, self._synchronizes))
        if not self._training.enable_async_reduce_grad:
            self._drain()

    def _drain_one(self) -> None:
        groups, done_at, synchronizes = self._pending.popleft()
        self._clock = max(self._clock, done_at)
        following = []
        for group in groups:
            group.has_buffer = False
            if group.has_partial and synchronizes:
                following.append(group)
        self._reduce_outer(following)

    def _reduce_outer(self, groups: Sequence[_Group]) -> None:
        if not groups:
            return
        while len(self._outer_done_at) >= self._training.max_live_grad_buffers:
            self._clock = max(self._clock, self._outer_done_at.popleft())
        done_at = self._clock
        for group in groups:
            planned = group.planned
            group.has_partial = False
            nbytes = planned.partial_numel * planned.dtypes.grad_comm.itemsize
            kind = "reduce_scatter" if planned.grid.parts[0] > 1 else "all_reduce"
            done_at = self._issue(kind, "reduce", group, 0, nbytes)
        self._outer_done_at.append(done_at)

    def _drain(self) -> None:
        while self._pending:
            self._drain_one()
        self._clock = max([self._clock, *self._outer_done_at])
        self._outer_done_at.clear()

    def _synchronize(self) -> None:
        """Bring what earlier backwards left unreduced into the main gradients."""
        self._synchronizes = True
        for unit in reversed(self._units):
            self._reduce(unit)
            for group in unit.own:
                if group.has_partial and not group.has_buffer:
                    self._reduce_outer([group])
        self._drain()

    # -- counting -----------------------------------------------------------------------------

    def _issue(self, kind: str, purpose: str, group: _Group, axis: int, nbytes: int) -> float:
        """Count a collective; return when it is done."""
        sizes = group.planned.sizes
        size = sizes[axis]
        if size == 1 or not nbytes:
            return self._clock
        mesh = self._training.meshes[group.mesh]
        is_inner = axis in (-1, len(sizes) - 1)
        stride = mesh.stride if is_inner else mesh.stride * sizes[-1]
        name = "inner" if is_inner else "outer"
        collective = Collective(kind, purpose, group.mesh, name, size, stride, nbytes)
        self._step.collectives[collective] += self._weight
        if self._machine is None:
            return self._clock
        # Collectives of all communication streams share the links; those of a node and the network
        # work side by side.
        link = self._machine.crosses_nodes(size, stride)
        seconds = self._machine.collective_seconds(kind, nbytes, size, stride)
        self._link_free[link] = max(self._link_free[link], self._clock) + seconds
        return self._link_free[link]


def parent_of(name: str, known: Container[str]) -> str:
    """The unit that a unit lies inside of, by their names."""
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ""


def _preorder(unit: _Unit) -> Iterator[_Unit]:
    yield unit
    for child in unit.children:
        yield from _preorder(child)


def _postorder(unit: _Unit) -> Iterator[_Unit]:
    for child in unit.children:
        yield from _postorder(child)
    yield unit
