"""Finds corrupted memory: copies of one value that differ, and values that changed at rest.

Memory and arithmetic of large machines fail without an error now and then, and training goes on
with wrong numbers. Values that exist twice are compared: model weights with main weights, replicas
with each other, gathered weights with what their owners sent. A value that one rank holds alone is
compared with its own checksum from right after the last step, since nothing may write it until the
next one. A checksum is the sum of all elements' bits as integers, which any single changed bit
changes.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, override

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from megatron_fsdp_v2._text import listed, listed_ranks
from megatron_fsdp_v2.comm.interface import SUMS, Axis, Collective, Communicator, Work
from megatron_fsdp_v2.comm.rank_checks import bits_of, checksum, gather_objects
from megatron_fsdp_v2.diagnostics.walk import joined, units_below
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.params.buffer import Span, place_in
from megatron_fsdp_v2.params.group import (
    ParameterGroup,
    Payload,
    WeightSource,
    one_per_mesh,
)
from megatron_fsdp_v2.runtime.machine import weights
from megatron_fsdp_v2.runtime.module import make_idle
from megatron_fsdp_v2.runtime.unit import Unit

_NAMED_AT_MOST = 10
"""Findings that an error message names."""


@dataclass(frozen=True, slots=True, order=True)
class Corruption:
    """A corrupted value.

    Attributes:
        ranks: Global ranks that hold the value. If two copies differ, either may be wrong.
        kind: `main weight`, `model weight`, `gathered weight`, `gradient`, or `optimizer state` and
            the name of the state.
        name: The parameter's name.
        evidence: Clause that names the comparison that failed.
    """

    ranks: tuple[int, ...]
    kind: str
    name: str
    evidence: str

    @override
    def __str__(self) -> str:
        return f"{listed_ranks(self.ranks)}: {self.kind} of {self.name} {self.evidence}"


type _Checksums = dict[tuple[str, str], int]
"""Checksums by name of the parameter and kind of value."""


def audit(module: nn.Module, *optimizers: Optimizer, before_step: bool = False) -> list[Corruption]:
    """Compare all values that exist more than once. Collective.

    Compares model weights with their main weights, unless these may have changed since; main
    weights, model weights, gradients and states that several ranks hold; and the weights that every
    rank gathers with those of their owners. Gathers every unit once. Call it between two passes,
    such as after an evaluation, before a step, or after a load.

    Args:
        module: A sharded module, or one that contains some.
        optimizers: Optimizers whose states are compared.
        before_step: Whether a backward has just ended and no optimizer has stepped since. Model
            weights are compared then, too: otherwise a step that advanced no version counter may
            have followed.

    Returns:
        What differs, equal on all ranks of a mesh; empty if nothing does.

    Raises:
        ValueError: Nothing in the module is sharded.
    """
    units = units_below(module)
    make_idle(module)
    found: list[Corruption] = []
    with torch.no_grad():
        for prefix, unit in units:
            for group in unit.groups:
                if _is_current(group, unit, before_step):
                    found += _compare_model_weights(group, prefix)
        found += _compare_replicas(units, optimizers, before_step)
        found += _compare_gathers(units)
    return _of_all_ranks(units, found)


class Auditor:
    """Calls `audit` every few optimizer steps, and checks values that exist only once.

    The step before an audit is followed by checksums of main weights and optimizer states. The
    audit compares these checksums with those of the values then. It leaves out values that were
    written in between, according to version counters, or replaced, for example by a load.

    Args:
        module: A sharded module, or one that contains some.
        optimizers: Optimizers of its parameters, which step together.
        every: Number of steps from one audit to the next.

    Raises:
        ValueError: `every` is less than 1, there is no optimizer, or nothing is sharded.
    """

    def __init__(self, module: nn.Module, *optimizers: Optimizer, every: int) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if not optimizers:
            raise ValueError("an Auditor needs the optimizers of the module, for when they step")
        self._units = units_below(module)
        self._module, self._optimizers, self._every = module, optimizers, every
        self._num_steps = 0
        self._noted: dict[tuple[str, str], _Noted] = {}
        first, last = optimizers[0], optimizers[-1]
        self._handles = [
            first.register_step_pre_hook(lambda *_: self.before_step()),
            last.register_step_post_hook(lambda *_: self.after_step()),
        ]

    def close(self) -> None:
        """End the audits."""
        for handle in self._handles:
            handle.remove()

    def before_step(self) -> None:
        """Audit if it is due. Collective. Called by the optimizer.

        Raises:
            RuntimeError: Something differs. Raised on every rank of the mesh.
        """
        self._num_steps += 1
        if self._num_steps % self._every:
            return
        noted, self._noted = self._noted, {}
        rank, now = dist.get_rank(), self._at_rest() if noted else {}
        what = "changed since the last step, and nothing wrote it"
        changed = [
            Corruption((rank,), kind, name, what)
            for (name, kind), before in noted.items()
            if before.differs_at_rest(now.get((name, kind)))
        ]
        found = _of_all_ranks(self._units, changed)
        others = audit(self._module, *self._optimizers, before_step=True)
        found += [each for each in others if each not in found]
        if found:
            raise RuntimeError(corrupted(found))

    def after_step(self) -> None:
        """Note checksums if an audit is due before the next step. Called by the optimizer."""
        if (self._num_steps + 1) % self._every == 0:
            self._noted = self._at_rest()

    def _at_rest(self) -> dict[tuple[str, str], _Noted]:
        """Return the checksums of all values that only a step may write."""
        found: dict[tuple[str, str], torch.Tensor] = {}
        about: dict[tuple[str, str], tuple[torch.Tensor, tuple[int, ...]]] = {}
        for prefix, unit in self._units:
            for group in unit.groups:
                main, versions = group.main_weight, group.parameters.versions()
                for index, name in enumerate(group.names):
                    full = joined(prefix, name)
                    found[full, "main weight"] = main.view(index)
                    about[full, "main weight"] = main.tensor, versions
                    states = _states_of(group.sharded_params[index], self._optimizers)
                    for kind, state in states:
                        found[full, kind] = state
                        about[full, kind] = state, (state._version,)
        sums = _sums(list(found.values())).tolist()
        return {
            key: _Noted(total, versions, weakref.ref(holder))
            for (key, (holder, versions)), total in zip(about.items(), sums, strict=True)
        }


class _Noted(NamedTuple):
    """A value at one moment.

    Attributes:
        total: Its checksum.
        versions: Version counters, which advance when it is written.
        holder: The tensor that has its memory; it dies when the value is replaced.
    """

    total: int
    versions: tuple[int, ...]
    holder: weakref.ref[torch.Tensor]

    def differs_at_rest(self, now: _Noted | None) -> bool:
        """Return whether the value differs later, although nothing wrote or replaced it."""
        if now is None or self.versions != now.versions:
            return False
        return self.holder() is now.holder() is not None and self.total != now.total


def corrupted(found: Sequence[Corruption]) -> str:
    """Return the text of an error that names what an audit found."""
    return (
        f"corrupted memory: {listed(found, _NAMED_AT_MOST, separator='; ')}. Stop, check the "
        "machines of these ranks, and go on from a checkpoint of before the last audit that found "
        "nothing"
    )


def compare_gradients(module: nn.Module, closure: Callable[[], object]) -> list[Corruption]:
    """Compare the gradients that all ranks compute of one input. Collective.

    Finds arithmetic that is wrong on one rank. The gradients of every unit are compared before they
    are summed over ranks; `param.grad` is as before when the function returns.

    Args:
        module: A sharded module, or one that contains some.
        closure: Runs a forward and a backward on an input that is the same on all data-parallel
            ranks, with the same random numbers. It must compute the same bits on equal devices.

    Returns:
        What differs, equal on all ranks of a mesh.
    """
    units = units_below(module)
    groups = [(prefix, unit, group) for prefix, unit in units for group in unit.groups]
    before = [[param.grad for param in group.sharded_params] for _, _, group in groups]
    for *_, group in groups:
        for param in group.sharded_params:
            param.grad = None
    arrived: dict[str, list[torch.Tensor]] = defaultdict(list)
    noting = [_Noting(group, arrived) for *_, group in groups]
    try:
        closure()
    finally:
        for (*_, group), each, grads in zip(groups, noting, before, strict=True):
            group.replace_communicator(each.inner)
            for param, grad in zip(group.sharded_params, grads, strict=True):
                param.grad = grad
    found: list[Corruption] = []
    for prefix, _, group in groups:
        mine = {
            (joined(prefix, name), f"gradient (reduction {number})"): total
            for number, sums in enumerate(arrived[group.name], 1)
            for name, total in zip(group.names, sums.tolist(), strict=True)
        }
        for axis in group.axes:
            found += _differing(mine, axis, "differs between ranks, of one input")
    return _of_all_ranks(units, found)


class _Noting:
    """A communicator that notes checksums of a group's gradients before they are summed."""

    def __init__(self, group: ParameterGroup, arrived: dict[str, list[torch.Tensor]]) -> None:
        self._group, self._arrived = group, arrived
        self.inner = group.replace_communicator(cast("Communicator", self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """Note the input of a sum over the whole group, and issue it."""
        group = self._group
        if collective.kind in SUMS and collective.input.numel() == group.layout.numel:
            parts = [_part(group, collective.input, index) for index in range(len(group.names))]
            self._arrived[group.name].append(_sums(parts))
        return self.inner.issue(collective, async_op=async_op)


# -- comparisons -----------------------------------------------------------------------------------


def _is_current(group: ParameterGroup, unit: Unit, before_step: bool) -> bool:
    """Return whether model weights have the values of main weights, if nothing is corrupted."""
    if before_step:
        return not group.has_counted_writes()
    return not group.is_stale(unit.state.root.weight_version)


def _compare_model_weights(group: ParameterGroup, prefix: str) -> Iterator[Corruption]:
    """Compare this rank's part of model weights with its main weights, written again."""
    if group.source is not WeightSource.MODEL or group.format.communicates:
        return
    kept, span = group.to_write().payloads, group.main_weight.span
    again = [torch.empty_like(each) for each in kept]
    group.write_weights(again)
    for payload, mine, expected in zip(group.payloads, kept, again, strict=True):
        if torch.equal(bits_of(mine), bits_of(expected)):
            continue
        for index, name in enumerate(group.names):
            rows = [_part(group, flat, index, span, payload) for flat in (mine, expected)]
            if not torch.equal(*map(bits_of, rows)):
                what = "is not its main weight in the dtype of computation"
                yield Corruption((dist.get_rank(),), "model weight", joined(prefix, name), what)


def _compare_replicas(
    units: Sequence[tuple[str, Unit]], optimizers: Sequence[Optimizer], before_step: bool
) -> list[Corruption]:
    """Compare what several ranks hold: main and model weights, gradients and states."""
    by_axis: dict[Axis, dict[tuple[str, str], torch.Tensor]] = {}
    for prefix, unit in units:
        for group in unit.groups:
            is_current = _is_current(group, unit, before_step)
            for axis, placements in zip(group.axes, group.spec.placements, strict=True):
                held = by_axis.setdefault(axis, {}) if axis.size > 1 else {}
                for index, name in enumerate(group.names):
                    full = joined(prefix, name)
                    if placements.model_weight is Placement.REPLICATE and is_current:
                        for number, payload in enumerate(group.payloads):
                            kind = f"model weight (payload {number})" if number else "model weight"
                            held[full, kind] = payload.model.view(index)
                    if placements.main_weight is Placement.REPLICATE and group.spec.reduces:
                        held[full, "main weight"] = group.main_weight.view(index)
                        param = group.sharded_params[index]
                        if param.grad is not None:
                            held[full, "gradient"] = plain_of(param.grad)
                        held |= {
                            (full, kind): state for kind, state in _states_of(param, optimizers)
                        }
    found: list[Corruption] = []
    for axis, held in by_axis.items():
        sums = dict(zip(held, _sums(list(held.values())).tolist(), strict=True))
        found += _differing(sums, axis, "differs from the copies of other ranks")
    return found


def _differing(mine: _Checksums, axis: Axis, evidence: str) -> Iterator[Corruption]:
    """Yield the values whose checksums differ between ranks of an axis. Collective."""
    everyone: list[_Checksums] = gather_objects(mine, [axis])
    ranks = dist.get_process_group_ranks(axis.group)
    for name, kind in dict.fromkeys(key for each in everyone for key in each):
        pairs = zip(ranks, everyone, strict=True)
        totals = {rank: each[name, kind] for rank, each in pairs if (name, kind) in each}
        (common, most), *others = Counter(totals.values()).most_common()
        if others:
            # Without a majority, any of the ranks may be wrong.
            is_tie = others[0][1] == most
            wrong = [rank for rank, total in totals.items() if is_tie or total != common]
            yield Corruption(tuple(wrong), kind, name, evidence)


def _compare_gathers(units: Sequence[tuple[str, Unit]]) -> list[Corruption]:
    """Gather weights, and compare what ranks received with the weights of their owners."""
    found: list[Corruption] = []
    for prefix, unit in units:
        if not any(group.gathers_for_use for group in unit.groups):
            continue
        weights.gather_for(unit.state, WeightUse.BOTH)
        for group in unit.groups:
            if group.gathers_for_use:
                found += _compare_gather(group, prefix)
        weights.free(unit.state)
    return found


def _compare_gather(group: ParameterGroup, prefix: str) -> Iterator[Corruption]:
    """Compare gathered weights with those of their owners. Collective."""
    num_slices, device = group.spec.grid.num_slices, group.device
    for payload, (span, own) in zip(group.payloads, _sent(group), strict=True):
        received = bits_of(payload.gathered.tensor).view(num_slices, -1).sum(1, dtype=torch.int64)
        sent = bits_of(own).view(span.count, -1).sum(1, dtype=torch.int64).to(device)
        is_mine = torch.equal(sent, received[span.first : span.first + span.count])
        low, high = (torch.cat([received, received.new_tensor([flag])]) for flag in (is_mine, 1))
        for axis in group.axes:
            if axis.size > 1:
                dist.all_reduce(low, op=dist.ReduceOp.MIN, group=axis.group)
                dist.all_reduce(high, op=dist.ReduceOp.MAX, group=axis.group)
        if torch.equal(low, high):
            continue
        # Rare: every parameter of every slice is compared, to name it.
        whole = {
            (index, place): _sum_in(group, payload, payload.gathered.tensor, index, place, 0)
            for place in range(num_slices)
            for index in range(len(group.names))
        }
        owned = {
            (index, place): _sum_in(group, payload, own, index, place, span.first)
            for place in range(span.first, span.first + span.count)
            for index in range(len(group.names))
        }
        everyone = gather_objects((dist.get_rank(), whole, owned), group.axes)
        owners = {key: rank for rank, _, own in everyone for key in own}
        expected = {key: total for _, _, own in everyone for key, total in own.items()}
        for rank, got, _ in everyone:
            for (index, place), total in got.items():
                if total != expected[index, place]:
                    what = f"is not what rank {owners[index, place]} sent"
                    name = joined(prefix, group.names[index])
                    yield Corruption((rank,), "gathered weight", name, what)


def _sent(group: ParameterGroup) -> Iterator[tuple[Span, torch.Tensor]]:
    """Yield the slices that this rank sends to a gather of each payload, and their contents."""
    for payload in group.payloads:
        if group.source is WeightSource.CAST:
            own = torch.empty_like(group.main_weight.tensor, dtype=payload.gathered.tensor.dtype)
            group.write_weights([own])
            yield group.main_weight.span, own
        else:
            yield payload.model.span, payload.model.tensor


# -- values and their checksums --------------------------------------------------------------------


def _part(
    group: ParameterGroup,
    flat: torch.Tensor,
    index: int,
    span: Span | None = None,
    payload: Payload | None = None,
) -> torch.Tensor:
    """Return a parameter's elements in a flat tensor that holds some slices, or all."""
    packing = 1 if payload is None else payload.model.packing
    span = span or Span(0, group.spec.grid.num_slices)
    offset, shape = place_in(group.layout, span, index)
    return flat.narrow(0, offset // packing, math.prod(shape) // packing)


def _sum_in(
    group: ParameterGroup, payload: Payload, flat: torch.Tensor, index: int, place: int, first: int
) -> int:
    """Return the checksum of a parameter's elements in one slice of a flat tensor."""
    numel = group.layout.shard_numel // payload.model.packing
    piece = flat.narrow(0, (place - first) * numel, numel)
    return checksum(_part(group, piece, index, Span(place, 1), payload))


def _states_of(
    param: torch.Tensor, optimizers: Iterable[Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    for optimizer in optimizers:
        for key, value in optimizer.state.get(param, {}).items():
            local = plain_of(value) if isinstance(value, torch.Tensor) else None
            if local is not None and type(local) is torch.Tensor:
                yield f"optimizer state {key}", local


def _sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the checksums of tensors in host memory, after one wait for each device."""
    sums = [bits_of(each.contiguous()).sum(dtype=torch.int64) for each in tensors]
    if not sums:
        return torch.empty(0, dtype=torch.int64)
    by_device: dict[torch.device, list[int]] = {}
    for place, total in enumerate(sums):
        by_device.setdefault(total.device, []).append(place)
    result = torch.empty(len(sums), dtype=torch.int64)
    for places in by_device.values():
        result[places] = torch.stack([sums[place] for place in places]).cpu()
    return result


def _of_all_ranks(
    units: Sequence[tuple[str, Unit]], found: Iterable[Corruption]
) -> list[Corruption]:
    """Return the findings of all ranks of all meshes, sorted. Collective."""
    everyone = list(found)
    for group in one_per_mesh(group for _, unit in units for group in unit.groups):
        everyone = [each for part in gather_objects(everyone, group.axes) for each in part]
        everyone = sorted(set(everyone))
    return everyone
