"""Replays a step: its collectives in order, and what waits for what.

The rules of the runtime (`runtime/gather_rules.py`, `runtime/reduction_rules.py`) decide when
weights are gathered and gradients reduced; here they are applied to units that hold sizes. With a
machine the step is timed. Micro-batches in the middle are equal, so that three represent any
number.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Container, Iterator, Sequence

from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2.plan.description import TrainingDescription
from megatron_fsdp_v2.plan.exposure import Flight, Reason, why_gather
from megatron_fsdp_v2.plan.machine import Machine
from megatron_fsdp_v2.plan.replayed import ReplayedGroup, ReplayedNetwork, ReplayedReductions
from megatron_fsdp_v2.plan.sharding import PlannedGroup
from megatron_fsdp_v2.plan.step import Step
from megatron_fsdp_v2.runtime.gather_rules import GatherSchedule, buckets
from megatron_fsdp_v2.runtime.reduction_rules import (
    OrderedReductions,
    RootPass,
)

__all__ = ["parent_of", "replay"]


def replay(
    training: TrainingDescription,
    groups: Sequence[tuple[PlannedGroup, ...]],
    machine: Machine | None = None,
) -> Step:
    """Replay a step in the steady state.

    Args:
        training: The training.
        groups: Groups of every unit, as `sharding.shard` returns them.
        machine: Times collectives and computation; None for no times.
    """
    return _Replay(training, groups, machine).run()


class _Unit:
    """A unit in a replayed step.

    Attributes:
        name: See `UnitDescription`.
        own: Its groups.
        held: The groups it gathers: its own and tied groups of other units.
        owners: The owner of every tied group.
        children: Units inside it, in the order they run; a unit that runs twice is listed twice.
        keeps_gathered: Whether its weights stay gathered between forward and backward.
        forward_seconds: Time of its forward, without units inside it.
        is_unsharded: Whether its weights are gathered, or being gathered.
        is_gathered_after_step: Whether the optimizer's step gathered them, and no forward used
            them yet.
    """

    def __init__(
        self,
        replay: _Replay,
        name: str,
        own: Sequence[ReplayedGroup],
        *,
        keeps_gathered: bool,
        seconds: float,
    ) -> None:
        self._replay = replay
        self.name = name
        self.own = own
        self.held = list(own)
        self.owners: list[_Unit] = []
        self.children: list[_Unit] = []
        self.keeps_gathered = keeps_gathered
        self.forward_seconds = seconds
        self.is_unsharded = False
        self.is_gathered_after_step = False

    @functools.cached_property
    def gathered_nbytes(self) -> int:
        """Bytes of gathered weights for one use."""
        return sum(group.planned.nbytes.gathered for group in self.held)

    @property
    def has_one_form(self) -> bool:
        """Whether weights gathered for one use serve every use."""
        return all(len(group.planned.payload.uses) == 1 for group in self.held)

    @property
    def is_made_of_main(self) -> bool:
        """Whether its gathers read main weights alone, and may start once these are stepped."""
        return all(group.planned.is_made_of_main for group in self.held)

    def prefetch(self) -> None:
        """Start gathering ahead of use."""
        self._unshard(self._replay.uses, is_ahead=True)

    def unshard(self, uses: WeightUse) -> None:
        """Gather its weights and wait for them."""
        self._unshard(uses, is_ahead=False)
        for group in self.held:
            self._replay.wait_for(group)

    def _unshard(self, uses: WeightUse, *, is_ahead: bool) -> None:
        was_unsharded, self.is_unsharded = self.is_unsharded, True
        for group in self.held:
            if not was_unsharded:
                group.holders += 1
                if group.holders == 1:
                    self._replay.bring_up_to_date(group)
            self._replay.gather(group, uses, is_ahead=is_ahead)

    def reshard(self) -> None:
        """Drop its weights."""
        if not self.is_unsharded:
            return
        self.is_unsharded = self.is_gathered_after_step = False
        for group in self.held:
            group.holders -= 1
            if group.holders:
                continue
            for payload in group.planned.payload.uses:
                if payload & group.uses:
                    self._replay.network.note("reshard", group.unit, group.planned.layout.numel)
            group.uses = WeightUse(0)
            group.bringing.clear()


class _Replay:
    """Replays a step: takes the place of modules and autograd.

    Attributes:
        network: Counts and times collectives and copies.
        uses: The uses that units are gathered ahead for.
    """

    def __init__(
        self,
        training: TrainingDescription,
        groups: Sequence[tuple[PlannedGroup, ...]],
        machine: Machine | None,
    ) -> None:
        self._training = training
        self.network = ReplayedNetwork(training, machine)
        self._units = self._make_units(groups, machine)
        self._root = self._units[0]
        self._gathers: GatherSchedule[_Unit] = GatherSchedule(
            training.options.prefetch_limit, self.network.together
        )
        self._reductions = ReplayedReductions(training, self.network)
        # Ranks may run different units if no use of a unit is a collective.
        self._ranks_may_differ = all(
            not group.planned.gathers_for_use for unit in self._units for group in unit.own
        )
        self._turns = OrderedReductions(self._units, in_order=self._ranks_may_differ)
        self._arrivals = self._find_arrivals()
        self.uses = WeightUse.FORWARD
        self._num_computed = 0
        self._passes: deque[RootPass[_Unit]] = deque()
        self._refreshes = False
        self._synchronizes = False

    def _make_units(
        self, groups: Sequence[tuple[PlannedGroup, ...]], machine: Machine | None
    ) -> list[_Unit]:
        training = self._training
        units: dict[str, _Unit] = {}
        by_param: dict[tuple[str, str], tuple[_Unit, ReplayedGroup]] = {}
        for unit, planned in zip(training.units, groups, strict=True):
            seconds = 0.0
            if machine is not None:
                seconds = machine.compute_seconds(unit.flops_per_token * training.tokens)
            own = [ReplayedGroup(group, unit.name, unit.mesh) for group in planned]
            drops = training.reshard_after_forward or training.recomputes_reentrantly
            keeps_gathered = unit.keeps_gathered or not drops or not units
            made = _Unit(self, unit.name, own, keeps_gathered=keeps_gathered, seconds=seconds)
            units[unit.name] = made
            if training.has_ties:
                for group in own:
                    by_param |= {(unit.name, p.name): (made, group) for p in group.planned.params}
        for name in training.runs or list(units)[1:]:
            units[parent_of(name, units)].children.append(units[name])
        for unit in training.units:
            shared = {id(by_param[key][1]): by_param[key] for key in unit.tied}
            units[unit.name].owners = [owner for owner, _ in shared.values()]
            units[unit.name].held += [group for _, group in shared.values()]
        return list(units.values())

    def _find_arrivals(self) -> list[list[ReplayedGroup]]:
        """For every run of a unit in a backward, the groups whose first gradient arrives there.

        The gradient of a parameter that is used several times arrives after the last of the uses in
        the backward. The order of groups within a run depends on the module and is not known.
        """
        order = list(_backwards(self._root))
        last = {unit.name: position for position, unit in enumerate(order)}
        tied: dict[tuple[str, str], int] = {}
        for unit in self._training.units:
            for owner, param in unit.tied:
                latest = tied.get((owner, param), last[owner])
                tied[owner, param] = max(latest, last[unit.name])
        arrivals: list[list[ReplayedGroup]] = [[] for _ in order]
        for made in self._units:
            for group in made.own:
                if group.planned.requires_grad:
                    own, params = last[made.name], group.planned.params if tied else ()
                    found = (tied.get((made.name, param.name), own) for param in params)
                    arrivals[min(found, default=own)].append(group)
        return arrivals

    # -- the step -----------------------------------------------------------------------------

    def run(self) -> Step:
        """Replay warm-up forwards, forwards and backwards in turn, then the other backwards."""
        training, count = self._training, self._training.num_microbatches
        # The order of units in the previous step.
        self._gathers.begin_forward(self._root)
        for unit in _preorder(self._root):
            self._gathers.in_forward(unit)
        if training.options.enable_unshard_after_step:
            with self.network.before_the_step():
                self._gather_after_step()
        ahead = min(training.num_in_flight - 1, count - 1)
        for number in range(ahead):
            self._forward_pass(number)
        pairs = count - ahead
        for position in sorted({0, 1, pairs - 1} & set(range(pairs))):
            is_repeated = position == 1 and pairs > 2
            self.network.times = pairs - 2 if is_repeated else 1
            began = self.network.now
            self._forward_pass(ahead + position)
            self._backward_pass(is_last=position == count - 1)
            self.network.skip((self.network.times - 1) * (self.network.now - began))
        self.network.times = 1
        for number in range(pairs, count):
            self._backward_pass(is_last=number == count - 1)
        if training.syncs_afterwards:
            self._synchronizes = True
            self._finish()
        if training.options.enable_unshard_after_step:
            self._gather_after_step()
        self.network.step.seconds = self.network.now
        return self.network.step

    def _gather_after_step(self) -> None:
        """Gather the first units of the next forward, as the optimizer's step does.

        See `runtime/optimizer_steps.py`. The host's work between two steps takes no time.
        """
        self.uses = WeightUse.FORWARD
        is_ready = operator.attrgetter("is_made_of_main")
        for unit in self._gathers.gather_before_pass(self._root, is_ready):
            unit.is_gathered_after_step = True

    def _compare_with_main(self, unit: _Unit) -> None:
        """Compare weights that the optimizer's step gathered with the main weights of now."""
        unit.is_gathered_after_step = False
        for group in unit.held:
            if group.planned.is_streamed:
                self.network.copy(to_device=group.planned.main_weight_nbytes)

    @property
    def _syncs_every_one(self) -> bool:
        return not self._training.defers_sync and not self._training.syncs_afterwards

    def _forward_pass(self, number: int) -> None:
        self.uses = WeightUse.FORWARD
        self._gathers.begin_forward(self._root)
        self._gathers.forget_backwards()
        self._passes.append(RootPass())
        self._refreshes = number == 0 or self._syncs_every_one
        if self._ranks_may_differ and self._refreshes:
            limit = self._gathers.limit
            due = [group for unit in self._units for group in unit.own]
            for bucket in buckets(due, _model_nbytes, limit.bucket_nbytes):
                with self._gathers.together():
                    for group in bucket:
                        self._refresh(group, is_ahead=not limit.is_none)
            self._refreshes = False
        self._run_forward(self._root)
        self._gathers.drop_prefetched()
        self._refreshes = False

    def _backward_pass(self, *, is_last: bool) -> None:
        is_final = is_last and not self._training.syncs_afterwards
        self._synchronizes = self._syncs_every_one or is_final
        self._gathers.begin_backward()
        # Recomputation comes first.
        recomputes = self._training.recompute_factor > 0
        self.uses = WeightUse.BOTH if recomputes else WeightUse.BACKWARD
        self._turns.begin(self._passes.popleft())
        self._num_computed = 0
        self._run_backward(self._root)
        self._reduce(self._turns.remaining())
        self._finish()

    def _run_forward(self, unit: _Unit) -> None:
        self._gathers.before_use(unit)
        unit.unshard(WeightUse.FORWARD)
        if unit.is_gathered_after_step:
            self._compare_with_main(unit)
        self._gathers.in_forward(unit)
        self.network.note("forward", unit.name)
        # Most of the root's own computation is the output layer, which comes last; units inside
        # another unit come after its own layers.
        is_root = unit is self._root
        self.network.compute(0.0 if is_root else unit.forward_seconds)
        for child in unit.children:
            self._run_forward(child)
        self.network.compute(unit.forward_seconds if is_root else 0.0)
        self._gathers.expect_backward(unit)
        self._passes[-1].add_use(unit, *unit.owners)
        if not unit.keeps_gathered:
            unit.reshard()

    def _run_backward(self, unit: _Unit) -> None:
        self._gathers.before_use(unit)
        # The root is not recomputed.
        unit.unshard(WeightUse.BACKWARD if unit is self._root else self.uses)
        self._gathers.in_backward(unit)
        self.network.note("backward", unit.name)
        if unit is self._root:
            # Its inputs need no gradients, so that its backward ends with the whole backward.
            self._compute_gradients(2 * unit.forward_seconds)
        for child in reversed(unit.children):
            self._run_backward(child)
        if unit is not self._root:
            factor = 2 + self._training.recompute_factor
            self._compute_gradients(factor * unit.forward_seconds)
            unit.reshard()
            self._reduce(self._turns.done(unit, *unit.owners))

    # -- weights ------------------------------------------------------------------------------

    def bring_up_to_date(self, group: ReplayedGroup) -> None:
        """Refresh the weights of a group before it is gathered, if that is due."""
        if self._refreshes:
            # Synchronous: the gather that follows reads its result.
            self._refresh(group, is_ahead=False)
            self.wait_for(group)

    def wait_for(self, group: ReplayedGroup) -> None:
        """Wait for the weights of a group."""
        for flight in group.bringing:
            self.network.wait(flight, functools.partial(self._why, flight))
        group.bringing.clear()

    def _why(self, flight: Flight, seconds: float) -> Reason:
        return why_gather(flight, seconds, self._gathers.num_uses, self._gathers.limit)

    def gather(self, group: ReplayedGroup, uses: WeightUse, *, is_ahead: bool) -> None:
        """Gather the payloads of a group that these uses need and that are not gathered yet."""
        planned = group.planned
        if not planned.gathers_for_use:
            return
        numel = planned.layout.numel // planned.payload.packing
        itemsize = planned.payload.itemsize
        for payload in planned.payload.uses:
            if not payload & uses or payload & group.uses:
                continue
            group.uses |= payload
            if planned.is_streamed:
                self.network.copy(to_device=planned.main_weight_nbytes)
            self._bring(group, "unshard", -1, numel, itemsize, is_ahead=is_ahead)

    def _bring(
        self,
        group: ReplayedGroup,
        purpose: str,
        axis: int,
        numel: int,
        itemsize: int,
        *,
        is_ahead: bool,
        is_async: bool = True,
    ) -> None:
        flight = self.network.issue(
            "all_gather", purpose, group, axis, numel, itemsize, is_async=is_async
        )
        flight.is_ahead, flight.use = is_ahead, self._gathers.num_uses
        group.bringing.append(flight)

    def _refresh(self, group: ReplayedGroup, *, is_ahead: bool) -> None:
        """Gather model weights from main weights that are sharded along more axes."""
        planned = group.planned
        if planned.is_offloaded and not planned.is_streamed:
            self.network.copy(to_device=planned.main_weight_nbytes)
        numel, itemsize = planned.main_numel, planned.payload.itemsize
        packing, steps = planned.payload.packing, []
        for axis, parts in enumerate(planned.grid.parts):
            if parts > 1 and numel < planned.model_numel:
                numel *= parts
                steps += [(axis, numel // packing)] * len(planned.payload.uses)
        # Several gathers run one after the other.
        is_async = is_ahead and len(steps) == 1
        for axis, wide in steps:
            self._bring(
                group, "refresh", axis, wide, itemsize, is_ahead=is_ahead, is_async=is_async
            )

    # -- gradients ----------------------------------------------------------------------------

    def _compute_gradients(self, seconds: float) -> None:
        """Compute gradients into full buffers, after waiting for room."""
        for group in self._arrivals[self._num_computed]:
            if not group.has_buffer:
                self._reductions.reserve(group)
                self.network.note("collect", group.unit, group.planned.layout.numel)
                group.has_buffer = True
        self._num_computed += 1
        self.network.compute(seconds)

    def _reduce(self, units: Sequence[_Unit]) -> None:
        for unit in units:
            arrived = (group for group in unit.own if group.has_buffer)
            due = self._reductions.due(arrived, synchronize=self._synchronizes)
            self._reductions.reduce(due)

    def _finish(self) -> None:
        """Reduce the remaining gradients and wait for all reductions."""
        for unit in reversed(self._units):
            unit.reshard()
            self._reduce([unit])
            if self._synchronizes:
                self._reductions.reduce_partials(unit.own)
        self._gathers.drop_prefetched()
        self._reductions.drain()


def _model_nbytes(group: ReplayedGroup) -> int:
    payload = group.planned.payload
    return payload.nbytes(group.planned.model_numel) * payload.count()


def parent_of(name: str, known: Container[str]) -> str:
    """The innermost unit that contains a unit, by their names."""
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ""


def _preorder(unit: _Unit) -> Iterator[_Unit]:
    yield unit
    for child in unit.children:
        yield from _preorder(child)


def _backwards(unit: _Unit) -> Iterator[_Unit]:
    """Every run of a unit in a backward, in the order their gradients are computed."""
    is_root = not unit.name
    if is_root:
        yield unit
    for child in reversed(unit.children):
        yield from _backwards(child)
    if not is_root:
        yield unit
