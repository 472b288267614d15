"""Which tensors an optimizer steps in the place of its parameters, kept from step to step."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron_fsdp_v2.dtensor.attributes import grad_at_once
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of, plain_attributes
from megatron_fsdp_v2.optim.flat_runs import Member, Run, described, runs_of
from megatron_fsdp_v2.params.flat_rows import FlatRows, group_of

__all__ = ["Plan"]

type Groups = Sequence[Mapping[str, Any]]
type Grads = tuple[list[torch.Tensor | None], torch.Tensor | None]

_local: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")


class _Home:
    """The runs of one parameter group."""

    def __init__(self, rows: FlatRows) -> None:
        self.rows = rows
        self.runs: list[Run] = []


class Plan:
    """Runs of neighbors, and parameters that are stepped as they are.

    Attributes:
        params: By group of the optimizer, what is stepped in the place of its parameters.
        state: State of that, for the optimizer to read and write; and of anything else that state
            was given for.
        joined: Parameters that are in runs.
    """

    def __init__(
        self,
        groups: Groups,
        states: Mapping[Any, Any],
        spans_gaps: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        """Join what can be.

        Args:
            groups: Of the optimizer.
            states: By parameter. Those that are stepped as they are keep theirs, as the same
                object; of others values are taken.
            spans_gaps: Whether elements that are no parameter's stay zeros in steps of a group.
        """
        self._spans_gaps = spans_gaps
        self._options = [spans_gaps(group) for group in groups]
        self._given = [list(group["params"]) for group in groups]
        self._homes: list[_Home] = []
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self._find_runs(states)
        members = [each for home in self._homes for run in home.runs for each in run.members]
        self.joined = [member.param for member in members]
        self._locals = [member.local for member in members]
        self._joined_ids = {id(param) for param in self.joined}
        for key, state in states.items():
            if id(key) not in self._joined_ids:
                self.state[key] = state
        self._list_params()

    def _find_runs(self, states: Mapping[Any, Any]) -> None:
        counts = Counter(id(param) for params in self._given for param in params)
        rows_of: dict[int, FlatRows] = {}
        found: dict[int, dict[int, Member]] = {}
        for number, params in enumerate(self._given):
            for param in params:
                # What is listed twice is stepped twice.
                group = group_of(param) if counts[id(param)] == 1 else None
                if group is None:
                    continue
                rows = rows_of.get(id(group))
                if rows is None:
                    rows = rows_of[id(group)] = FlatRows(group)
                index = rows.index_of(param)
                if index is None:
                    continue
                with plain_attributes():
                    has_grad = grad_at_once(param) is not None
                start, state = rows.places[index][0], states.get(param, {})
                member = Member(param, index, number, start, local_of(param), has_grad, state)
                if described(member):
                    found.setdefault(id(group), {})[index] = member
        for key, members in found.items():
            self._add_home(rows_of[key], members)

    def _add_home(self, rows: FlatRows, members: Mapping[int, Member]) -> None:
        home = _Home(rows)
        neighbors = set(pairwise(rows.order))
        for run in runs_of(
            rows,
            [members[index] for index in rows.order if index in members],
            spans_gaps=self._options,
            is_next=lambda before, after: (before.index, after.index) in neighbors,
        ):
            # State of one element could not be told from that of the whole.
            if run.flat.numel() > 1:
                home.runs.append(run)
                self.state[run.flat] = run.take_states()
        if home.runs:
            self._homes.append(home)

    def _list_params(self) -> None:
        self.params: list[list[torch.Tensor]] = [
            [param for param in params if id(param) not in self._joined_ids]
            for params in self._given
        ]
        for home in self._homes:
            for run in home.runs:
                self.params[run.number].append(run.flat)

    def fits(self, groups: Groups) -> bool:
        """Whether it is still right for an optimizer's groups, whose gradients may differ."""
        if len(groups) != len(self._given):
            return False
        for group, options, given in zip(groups, self._options, self._given, strict=True):
            params = group["params"]
            if len(params) != len(given) or not all(map(operator.is_, params, given)):
                return False
            if self._spans_gaps(group) is not options:
                return False
        return all(home.rows.is_current for home in self._homes) and all(
            map(operator.is_, map(_local, self.joined), self._locals)
        )

    def take_gradients(self) -> list[Any]:
        """Give every run its gradient of this step; runs of which some have none are split.

        Returns:
            Parameters that are stepped as parts of runs.
        """
        stepped: list[Any] = []
        is_split = False
        for home in self._homes:
            grads, flat = home.rows.gradients()
            for run in list(home.runs):
                parts = [run]
                if not run.take_gradient(grads, flat):
                    is_split, parts = True, self._split(home, run, (grads, flat))
                for part in parts:
                    if part.flat.grad is not None:
                        stepped += part.params
        if is_split:
            self._list_params()
        return stepped

    def _split(self, home: _Home, run: Run, grads: Grads) -> list[Run]:
        """Put runs that have all of their gradients, or none, in the place of one."""
        place = home.runs.index(run)
        parts = run.split(grads[0], self.state.pop(run.flat, {}))
        home.runs[place : place + 1] = [part for part, _ in parts]
        for part, state in parts:
            self.state[part.flat] = state
            part.take_gradient(*grads)
        return home.runs[place : place + len(parts)]

    def drop_gradients(self) -> None:
        """Hold no gradient between steps."""
        for home in self._homes:
            for run in home.runs:
                run.drop_gradient()

    def show(self, shown: MutableMapping[Any, Any]) -> None:
        """Have states by parameter say what those of runs do."""
        for home in self._homes:
            for run in home.runs:
                state = self.state.get(run.flat)
                if not state:
                    continue
                for member in run.members:
                    if member.param not in shown:
                        shown[member.param] = {}
                    run.show(member, state, shown[member.param])
        flats = {id(run.flat) for home in self._homes for run in home.runs}
        for key, state in self.state.items():
            if id(key) not in flats:
                shown[key] = state
