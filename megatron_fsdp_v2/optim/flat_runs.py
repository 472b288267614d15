"""Runs: neighbors in a flat buffer that an optimizer steps as one tensor, and their state.

A run is a plain flat tensor over main weights, with a state as the optimizer makes it for any
tensor. What has as many elements as the run belongs to its elements, and every parameter has a part
of it; anything else (a count of steps) belongs to the run as a whole, and every parameter has a
copy.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2.dtensor.sharded_rows import rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of, with_rows_of
from megatron_fsdp_v2.memory.allocator import alias_of
from megatron_fsdp_v2.params.flat_rows import FlatRows, local_rows, rows_at

__all__ = ["Member", "Run", "State", "described", "runs_of"]

type State = dict[str, Any]


@dataclass(slots=True)
class Member:
    """A parameter that may be stepped as a part of a flat tensor.

    Attributes:
        param: The parameter.
        index: Its number in its parameter group.
        number: That of its group of the optimizer.
        start: Its first element in the group's main weights.
        local: Its local rows.
        has_grad: Whether it had a gradient when it was looked at.
        state: What the optimizer has of it; empty before its first step.
        kinds: What the state is made of, by name: equal where two may be one. In the member's own
            order, in which ranks may gather them.
    """

    param: Any
    index: int
    number: int
    start: int
    local: torch.Tensor
    has_grad: bool
    state: Mapping[str, Any]
    kinds: dict[str, Any] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.local.numel()


def described(member: Member) -> bool:
    """Find out what a member's state is made of.

    Returns:
        Whether that is something a run can have.
    """
    for name, value in member.state.items():
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, bool | int | float | str | None):
                return False
            member.kinds[name] = (type(value), value)
            continue
        rows = local_rows(member.param, with_rows_of(value, member.param) or value)
        if rows is not None:
            member.kinds[name] = ("rows", rows.dtype, rows.device)
        elif type(value) is torch.Tensor and value.ndim == 0:
            member.kinds[name] = (value.dtype, value.device, value.item())
        else:
            return False
    return True


def _can_join(before: Member, after: Member) -> bool:
    """Whether two neighbors have one group's options and the same past, so one state can do."""
    is_alike = before.number == after.number and before.has_grad is after.has_grad
    return is_alike and before.kinds == after.kinds


class Run:
    """Neighbors in the main weights of a group, stepped as one tensor.

    Attributes:
        rows: Where the group's parameters are.
        members: The neighbors, in order.
        number: That of their group of the optimizer.
        flat: What is stepped: their rows, and what may be between them.
    """

    def __init__(self, rows: FlatRows, members: Sequence[Member]) -> None:
        self.rows = rows
        self.members = members
        self.number = members[0].number
        self._start = members[0].start
        self._numel = members[-1].stop - self._start
        # With a version counter of its own, as parameters have.
        alias = alias_of(rows.tensor, self._start, (self._numel,))
        # Integers are in no graph, and never stepped.
        self.flat = nn.Parameter(alias, alias.is_floating_point() or alias.is_complex())
        self._is_whole = self._numel == rows.tensor.numel()
        self._indices = [member.index for member in members]
        self.params = [member.param for member in members]

    # -- gradients ----------------------------------------------------------------------------

    def take_gradient(
        self, grads: Sequence[torch.Tensor | None], flat: torch.Tensor | None
    ) -> bool:
        """Have the gradients of this step, as one tensor; none where no parameter has one.

        Args:
            grads: Of all parameters of the group.
            flat: All of them as one tensor like the main weights, if they are.

        Returns:
            Whether that is possible: not if some of the parameters have one, and some have not.
        """
        num_missing = 0
        for index in self._indices:
            num_missing += grads[index] is None
        if num_missing:
            return num_missing == len(self._indices)
        if flat is None:
            flat = self._copied([grads[index] for index in self._indices])
        elif not self._is_whole:
            flat = flat.narrow(0, self._start, self._numel)
        if flat.dtype not in (self.flat.dtype, self.flat.grad_dtype):
            self.flat.grad_dtype = flat.dtype
        self.flat.grad = flat
        return True

    def _copied(self, grads: Sequence[Any]) -> torch.Tensor:
        flat = local_of(grads[0]).new_zeros(self._numel)
        for member, grad in zip(self.members, grads, strict=True):
            rows_at(flat, member.start - self._start, member.param).copy_(local_of(grad))
        return flat

    def drop_gradient(self) -> None:
        """Hold no gradient any more: memory of gradients goes with the last who does."""
        self.flat.grad = None

    # -- state --------------------------------------------------------------------------------

    def take_states(self) -> State:
        """One state of those of the members, who know nothing of theirs afterwards.

        Memory is theirs where that is one piece already, and copied otherwise.
        """
        state: State = {}
        for name, kind in self.members[0].kinds.items():
            values = [member.state[name] for member in self.members]
            if kind[0] == "rows":
                state[name] = self._joined([local_of(value) for value in values])
            else:
                state[name] = _copied(values[0])
        for member in self.members:
            member.state = {}
        return state

    def _joined(self, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        first, storage = locals_[0], locals_[0].untyped_storage()
        base = int(first.storage_offset())
        is_one = base + self._numel <= storage.nbytes() // first.element_size() and all(
            local.is_contiguous()
            and local.untyped_storage()._cdata == storage._cdata
            and local.storage_offset() - base == member.start - self._start
            for member, local in zip(self.members, locals_, strict=True)
        )
        if is_one:
            return first.detach().as_strided((self._numel,), (1,), base)
        flat = first.new_zeros(self._numel)
        for member, local in zip(self.members, locals_, strict=True):
            rows_at(flat, member.start - self._start, member.param).copy_(local)
        return flat

    def _is_of_elements(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == (self._numel,)

    def show(
        self, member: Member, state: Mapping[str, Any], shown: MutableMapping[str, Any]
    ) -> None:
        """Have a member's own state say what the run's does.

        Args:
            member: One of the members.
            state: Of the run.
            shown: The member's, as users see it; tensors that are right stay the same objects.
        """
        for name in shown.keys() - state.keys():
            del shown[name]
        for name in {**member.kinds, **state}:
            if name not in state:
                continue
            value = state[name]
            known = shown.get(name)
            if self._is_of_elements(value):
                rows = rows_at(value, member.start - self._start, member.param)
                if not _is_same_memory(known, rows):
                    shown[name] = rows_like(rows, member.param)
            elif isinstance(known, torch.Tensor) and _is_alike(known, value):
                known.copy_(value)
            else:
                shown[name] = _copied(value)

    def split(
        self, grads: Sequence[torch.Tensor | None], state: Mapping[str, Any]
    ) -> list[tuple[Run, State]]:
        """Runs of those that have a gradient and those that have not, with their states.

        Args:
            grads: Of all parameters of the group.
            state: Of this run. Memory stays the same.
        """
        runs: list[tuple[Run, State]] = []
        by_gradient = itertools.groupby(self.members, lambda each: grads[each.index] is not None)
        for _, members in by_gradient:
            run = Run(self.rows, list(members))
            runs.append((run, self._part_of(state, run)))
        return runs

    def _part_of(self, state: Mapping[str, Any], run: Run) -> State:
        return {
            name: value.narrow(0, run._start - self._start, run._numel)
            if self._is_of_elements(value)
            else _copied(value)
            for name, value in state.items()
        }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _is_same_memory(known: Any, rows: torch.Tensor) -> bool:
    if not isinstance(known, torch.Tensor) or not hasattr(known, "_local_tensor"):
        return False
    local = local_of(known)
    return (
        local.dtype == rows.dtype
        and local.shape == rows.shape
        and local.untyped_storage()._cdata == rows.untyped_storage()._cdata
        and local.storage_offset() == rows.storage_offset()
    )


def _is_alike(known: torch.Tensor, value: Any) -> bool:
    return (
        type(known) is type(value) is torch.Tensor
        and known.shape == value.shape
        and known.dtype == value.dtype
        and known.device == value.device
    )


def runs_of(
    rows: FlatRows,
    members: Iterable[Member],
    *,
    spans_gaps: Sequence[bool],
    is_next: Callable[[Member, Member], bool],
) -> list[Run]:
    """Join neighbors wherever that may be.

    Args:
        rows: Where they are.
        members: In order.
        spans_gaps: By group of the optimizer, whether a run may have elements in it that are no
            parameter's.
        is_next: Whether no other parameter is between two of them.
    """
    runs: list[Run] = []
    pending: list[Member] = []
    for member in members:
        if pending:
            before = pending[-1]
            is_joined = _can_join(before, member) and is_next(before, member)
            if not is_joined or not (spans_gaps[member.number] or before.stop == member.start):
                runs.append(Run(rows, pending))
                pending = []
        pending.append(member)
    if pending:
        runs.append(Run(rows, pending))
    return runs
