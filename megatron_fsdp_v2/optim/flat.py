"""Optimizers that step a few flat tensors instead of many sharded parameters.

Elementwise arithmetic does not depend on tensor boundaries, and the rows of a group's parameters
are neighbors in its main weight. Neighbors with the same options and the same kind of state form a
*run*: one plain tensor over the main weight, with one state, that the optimizer steps. The state of
each parameter consists of views of the run's state, so it is always up to date.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast, override

import torch
from torch import nn
from torch.optim import Optimizer

from megatron_fsdp_v2.dtensor.sharded_rows import (
    local_of,
    plain_attributes,
    raw_grad,
    rows_like,
    with_rows_of,
)
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.memory.allocator import alias_of
from megatron_fsdp_v2.params.buffer import place_in
from megatron_fsdp_v2.params.group import ParameterGroup, group_of

_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
_ELEMENTWISE = frozenset[type[Optimizer]](getattr(torch.optim, name) for name in _NAMES.split())

type _Groups = Sequence[Mapping[str, Any]]
type _States = MutableMapping[Any, Any]


class FlatOptimizer(Optimizer):
    """An optimizer that steps flat tensors; made by `flat_optimizer`.

    It behaves like the optimizer that it derives from: groups, state and state dicts contain the
    given parameters. Only during a step, `param_groups` and `state` contain runs, and the
    parameters outside of runs.

    Attributes:
        flat_of: The optimizer class it derives from.
    """

    flat_of: ClassVar[type[Optimizer]]

    _plan: _Plan | None = None

    def _step_flat(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            plan, states = self._plan, self.state
            if plan is None or not (plan.fits(self, states) and plan.take_gradients()):
                plan = self._plan = _Plan(self, states)
                plan.take_gradients()
            given = [group["params"] for group in self.param_groups]
            stepped = plan.stepped()
            self.state = found = plan.states(states)
            try:
                for group, params in zip(self.param_groups, plan.params, strict=True):
                    group["params"] = params
                result = _unhooked_step(self.flat_of)(self, **options)
            finally:
                self.state = states
                for group, params in zip(self.param_groups, given, strict=True):
                    group["params"] = params
                plan.publish(found, states)
            # Runs have their own version counters, so the step did not advance those of parameters.
            torch.autograd.graph.increment_version(stepped)
        return result if closure is None else loss

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`.

        Raises:
            ValueError: The group has `differentiable=True`.
        """
        _check_in_place(self.flat_of, [{**self.defaults, **param_group}])
        super().add_param_group(param_group)

    @override
    def __reduce__(self) -> Any:
        return _unset, (self.flat_of,), self.__getstate__()


# -- runs ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _RunMember:
    """A parameter that may be part of a run.

    Attributes:
        param: The parameter.
        local: Its local rows.
        index: Its index in its parameter group.
        start: Its first element in the group's main weight.
        run_key: Equal for parameters that may share a run: index of the optimizer's group, whether
            there is a gradient, and the kinds and scalar values of the state.
    """

    param: Any
    local: torch.Tensor
    index: int
    start: int
    run_key: tuple[Any, ...]

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.local.numel()


def _kinds(param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the kinds of a state's values by name; None if a run cannot have such a state."""
    kinds: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, bool | int | float | str | None):
                return None
            kinds[name] = (type(value), value)
            continue
        known = with_rows_of(value, param) or value
        if isinstance(known, UnevenDTensor):
            mine = cast("UnevenDTensor", param).row_shards
            if known.row_shards != mine or local_of(known).shape != local_of(param).shape:
                return None
            kinds[name] = ("rows", known.dtype, local_of(known).device)
        elif type(value) is torch.Tensor and value.ndim == 0:
            kinds[name] = (value.dtype, value.device, value.item())
        else:
            return None
    return kinds


class _Run:
    """Neighboring parameters in a group's main weight, stepped as one tensor.

    Attributes:
        members: The parameters, in order.
        number: Index of their group in the optimizer.
        flat: The stepped tensor: rows of the members, and alignment gaps between them.
        state: The optimizer's state of `flat`. A tensor with as many elements as the run holds
            values per element; other values, such as a step count, belong to the whole run.
    """

    def __init__(self, main: torch.Tensor, members: Sequence[_RunMember], states: _States) -> None:
        self.members = members
        self.number = members[0].run_key[0]
        self._start = members[0].start
        self._numel = members[-1].stop - self._start
        # An alias with its own version counter, like a parameter.
        alias = alias_of(main, self._start, (self._numel,))
        # Integer tensors cannot require gradients, and are never stepped.
        self.flat = nn.Parameter(alias, alias.is_floating_point() or alias.is_complex())
        self.state: dict[str, Any] = {}
        own = [states.get(member.param, {}) for member in members]
        for name, value in own[0].items():
            if not isinstance(value, torch.Tensor):
                self.state[name] = value
            elif hasattr(value, "_local_tensor"):
                self.state[name] = self._joined([state[name] for state in own])
            else:
                self.state[name] = value.clone()
        # The members' states as last published.
        self._published: list[dict[str, Any]] = [{} for _ in members]
        self._viewed: list[Any] = []
        self._copies: dict[str, list[torch.Tensor]] = {}
        self._versions: list[int] = []
        if self.state:
            self.publish(states)

    def _rows(self, flat: torch.Tensor, member: _RunMember) -> torch.Tensor:
        local = member.local
        return flat.narrow(0, member.start - self._start, local.numel()).view(local.shape)

    def _joined(self, values: Sequence[Any]) -> torch.Tensor:
        """Return the members' local tensors as one flat tensor: a view if possible, else a copy."""
        first = local_of(values[0])
        storage, base = first.untyped_storage(), int(first.storage_offset())
        end = (base + self._numel) * first.element_size()
        if end <= storage.nbytes() and all(
            local_of(value).is_contiguous()
            and local_of(value).untyped_storage()._cdata == storage._cdata
            and local_of(value).storage_offset() - base == member.start - self._start
            for member, value in zip(self.members, values, strict=True)
        ):
            return first.detach().as_strided((self._numel,), (1,), base)
        flat = first.new_zeros(self._numel)
        for member, value in zip(self.members, values, strict=True):
            self._rows(flat, member).copy_(local_of(value))
        return flat

    def take_gradient(self, grads: Sequence[Any], flat: torch.Tensor | None) -> bool:
        """Set the run's gradient of this step; None if no member has a gradient.

        Args:
            grads: Gradients of all parameters of the group.
            flat: The flat main gradient, if all gradients are views of it.

        Returns:
            False if only some members have a gradient, so that the run must be split.
        """
        mine = [grads[member.index] for member in self.members]
        num_missing = sum([grad is None for grad in mine])
        if num_missing:
            return num_missing == len(mine)
        if flat is None:
            flat = local_of(mine[0]).new_zeros(self._numel)
            for member, grad in zip(self.members, mine, strict=True):
                self._rows(flat, member).copy_(local_of(grad))
        elif flat.numel() != self._numel:
            flat = flat.narrow(0, self._start, self._numel)
        if flat.dtype not in (self.flat.dtype, self.flat.grad_dtype):
            self.flat.grad_dtype = flat.dtype
        self.flat.grad = flat
        return True

    def publish(self, states: _States) -> None:
        """Update the members' states from the run's state.

        Tensors of rows are views, made once; values of the whole run are copied.
        """
        if not self.state:
            return
        is_known = len(self._viewed) == len(self.state)
        if not (is_known and all(map(operator.is_, self.state.values(), self._viewed))):
            self._publish_anew(states)
        for name, copies in self._copies.items():
            torch._foreach_copy_(copies, [self.state[name]] * len(copies))
        self._versions = self._counters()

    def _publish_anew(self, states: _States) -> None:
        self._copies, self._viewed = {}, list(self.state.values())
        for member, published in zip(self.members, self._published, strict=True):
            state = states.setdefault(member.param, {})
            # Keeps the order of the member's state, since ranks may gather its values in this
            # order.
            names = [name for name in {**state, **self.state} if name in self.state]
            state.clear()
            for name in names:
                value = self.state[name]
                if not isinstance(value, torch.Tensor):
                    state[name] = value
                elif value.shape == (self._numel,):
                    state[name] = rows_like(self._rows(value, member), member.param)
                else:
                    state[name] = torch.empty_like(value)
                    self._copies.setdefault(name, []).append(state[name])
            published.clear()
            published.update(state)

    def _counters(self) -> list[int]:
        """Return the version counters of the members' copies."""
        return [copy._version for copies in self._copies.values() for copy in copies]

    def is_as_published(self, states: _States) -> bool:
        """Return whether the members' states and copies are unchanged since they were published."""
        for member, published in zip(self.members, self._published, strict=True):
            state = states.get(member.param, {})
            if state.keys() != published.keys():
                return False
            if not all(map(operator.is_, map(state.__getitem__, published), published.values())):
                return False
        return self._versions == self._counters()


def _candidates(
    group: ParameterGroup, numbers: Mapping[int, int], states: _States
) -> Iterator[_RunMember | None]:
    """Yield parameters in the order of the main weight; None for one that no run can contain.

    Parameters without rows on this rank are at both ends, and so may be part of a run.

    Args:
        group: The group.
        numbers: Index of the optimizer's group, by `id()` of a parameter.
        states: State by parameter.
    """
    span = group.main_weight.span
    places = [place_in(group.layout, span, index) for index in range(len(group.names))]
    ranges = [(start, start + math.prod(shape)) for start, shape in places]
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        param = group.sharded_params[index]
        local = local_of(param)
        # User code may have assigned another local tensor, which the next forward syncs.
        is_own = id(param) in numbers and local is group.parameters.views[index]
        kinds = _kinds(param, states.get(param, {})) if is_own else None
        if kinds is None:
            yield None
            continue
        with plain_attributes():
            has_grad = raw_grad(param) is not None
        run_key = numbers[id(param)], has_grad, kinds
        yield _RunMember(param, local, index, ranges[index][0], run_key)


class _Plan:
    """Runs, and parameters outside of runs, which are stepped individually. Reused in every step.

    Attributes:
        params: Tensors to step instead of the parameters, per group of the optimizer.
    """

    def __init__(self, optimizer: FlatOptimizer, states: _States) -> None:
        """Join parameters into runs where possible.

        Args:
            optimizer: The optimizer.
            states: State by parameter. Parameters outside of runs keep the same state object.
        """
        groups: _Groups = optimizer.param_groups
        self._options = [_spans_gaps(optimizer.flat_of, group) for group in groups]
        self._original_params = [list(group["params"]) for group in groups]
        self._runs: list[tuple[weakref.ref[ParameterGroup], list[_Run]]] = []
        given = [param for params in self._original_params for param in params]
        counts = Counter(map(id, given))
        # A parameter that is listed twice is stepped twice, so it cannot be in a run.
        numbers = {
            id(param): number
            for number, params in enumerate(self._original_params)
            for param in params
            if counts[id(param)] == 1
        }
        owners = dict.fromkeys(group_of(param) for param in given)
        for group in filter(None, owners):
            runs = [
                _Run(group.main_weight.tensor, joined, states)
                for joined in self._joined(_candidates(group, numbers, states))
                # With one element, state per element could not be distinguished from state of the
                # run.
                if joined[-1].stop - joined[0].start > 1
            ]
            if runs:
                self._runs.append((weakref.ref(group), runs))
        runs = [run for _, some in self._runs for run in some]
        self._stepped_flat = [member.param for run in runs for member in run.members]
        self._locals = [member.local for run in runs for member in run.members]
        self._joined_ids = set(map(id, self._stepped_flat))
        self.params: list[list[torch.Tensor]] = [
            [param for param in params if id(param) not in self._joined_ids]
            for params in self._original_params
        ]
        for run in runs:
            self.params[run.number].append(run.flat)

    def _joined(self, candidates: Iterator[_RunMember | None]) -> Iterator[list[_RunMember]]:
        """Yield lists of neighbors that form a run."""
        pending: list[_RunMember] = []
        for member in itertools.chain(candidates, [None]):
            if pending:
                before = pending[-1]
                is_one = member is not None and before.run_key == member.run_key
                spans_gaps = self._options[before.run_key[0]]
                if not (is_one and member and (spans_gaps or before.stop == member.start)):
                    yield pending
                    pending = []
            if member is not None:
                pending.append(member)

    def fits(self, optimizer: FlatOptimizer, states: _States) -> bool:
        """Return whether the plan is still valid for an optimizer, apart from its gradients."""
        groups: _Groups = optimizer.param_groups
        if len(groups) != len(self._original_params):
            return False
        for group, options, given in zip(groups, self._options, self._original_params, strict=True):
            params = group["params"]
            is_same = len(params) == len(given) and all(map(operator.is_, params, given))
            if not is_same or _spans_gaps(optimizer.flat_of, group) is not options:
                return False
        return all(map(operator.is_, map(local_of, self._stepped_flat), self._locals)) and all(
            ref() is not None and all(run.is_as_published(states) for run in runs)
            for ref, runs in self._runs
        )

    def take_gradients(self) -> bool:
        """Set the gradient of every run for this step.

        Returns:
            False if only some members of a run have a gradient, so that a new plan is needed.
        """
        for ref, runs in self._runs:
            group = ref()
            if group is None:
                continue
            grads, flat, others = group.grads.param_grads_and_main()
            if not all([run.take_gradient(grads, None if others else flat) for run in runs]):
                return False
        return True

    def states(self, given: _States) -> defaultdict[Any, Any]:
        """Return the state to step with: runs' states, and all other entries of `given`.

        Args:
            given: State by parameter. Parameters outside of runs keep the same state object.
        """
        found: defaultdict[Any, Any] = defaultdict(dict)
        found.update((key, s) for key, s in given.items() if id(key) not in self._joined_ids)
        found.update((run.flat, run.state) for _, runs in self._runs for run in runs)
        return found

    def stepped(self) -> list[Any]:
        """Return the parameters that the current step updates as parts of runs."""
        runs = (run for _, some in self._runs for run in some if run.flat.grad is not None)
        return [member.param for run in runs for member in run.members]

    def publish(self, found: Mapping[Any, Any], states: _States) -> None:
        """Drop gradients and update states by parameter, after a step.

        Args:
            found: Result of `states`, after the step.
            states: State by parameter, changed in place.
        """
        num_before = len(states)
        flats = set()
        for run in (run for _, runs in self._runs for run in runs):
            flats.add(id(run.flat))
            if run.flat.grad is not None:
                # A reference here would keep the main gradient allocated.
                run.flat.grad = None
                run.publish(states)
        states.update((key, state) for key, state in found.items() if id(key) not in flats)
        if len(states) != num_before:
            # In the order of parameters, as torch's optimizers create states.
            ordered = {
                p: states.pop(p) for given in self._original_params for p in given if p in states
            }
            others = dict(states)
            states.clear()
            states.update({**ordered, **others})


def _unhooked_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return a class's step without torch's hooks, which the flat class's own step already runs."""
    step: Any = kind.step
    return cast("Callable[..., Any]", step.__wrapped__ if hasattr(step, "hooked") else step)


def _unset(kind: type[Optimizer]) -> FlatOptimizer:
    return object.__new__(flat_optimizer(kind, elementwise=True))


def flat_optimizer(kind: type[Optimizer], *, elementwise: bool = False) -> type[FlatOptimizer]:
    """Return a subclass of an optimizer class that steps a few flat tensors.

    Host work and kernel launches per step are those of about one tensor per unit instead of one per
    parameter. Weights and state are bitwise identical. Parameters that `fully_shard` did not shard
    are stepped individually.

        optimizer = flat_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-3)

    Args:
        kind: A class of `torch.optim`, or another optimizer class.
        elementwise: Asserts that `kind` computes every element of a parameter only from that
            element, its gradient and its state. Required for classes that are not known to do so.

    Returns:
        A class that derives from `kind`, with the same constructor arguments.

    Raises:
        ValueError: The class is not elementwise, or not known to be elementwise.
    """
    if issubclass(kind, FlatOptimizer):
        return kind
    if kind not in _ELEMENTWISE and not elementwise:
        known = ", ".join(sorted(each.__name__ for each in _ELEMENTWISE))
        raise ValueError(
            f"{kind.__module__}.{kind.__name__} is not known to compute every element of a "
            "parameter from that element, its gradient and its state alone, as optimizers that "
            f"step flat tensors must ({known} of torch.optim do); if it does, say so with "
            "flat_optimizer(cls, elementwise=True)"
        )
    return _flat_class(cast("Any", kind))


@functools.cache
def _flat_class(kind: Any) -> type[FlatOptimizer]:
    def step(self: FlatOptimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        return self._step_flat(closure, **options)

    # `torch.amp.GradScaler` reads the signature.
    step.__signature__ = inspect.signature(_unhooked_step(kind))  # type: ignore[attr-defined]
    step.__doc__ = kind.step.__doc__
    members = {
        "flat_of": kind,
        "step": step,
        "__module__": __name__,
        "__doc__": f"`{kind.__name__}`, which steps flat tensors; see `FlatOptimizer`.",
    }
    return cast("type[FlatOptimizer]", type(f"Flat{kind.__name__}", (FlatOptimizer, kind), members))


def step_flat(optimizer: Optimizer, *, elementwise: bool = False) -> FlatOptimizer:
    """Convert an optimizer in place, so that it steps flat tensors; see `flat_optimizer`.

    For optimizers that other code constructs. Call it before constructing a learning-rate
    scheduler.

    Args:
        optimizer: Optimizer to convert. It keeps its state.
        elementwise: See `flat_optimizer`.

    Returns:
        The same object.

    Raises:
        ValueError: Its class is not elementwise, or not known to be elementwise.
        RuntimeError: Its `step` was replaced, for example by a scheduler.
    """
    flat = flat_optimizer(type(optimizer), elementwise=elementwise)
    if isinstance(optimizer, FlatOptimizer):
        return optimizer
    if "step" in vars(optimizer):
        raise RuntimeError(
            f"step() of this {type(optimizer).__name__} was wrapped or replaced, for example by a "
            "learning-rate scheduler; call step_flat first"
        )
    _check_in_place(type(optimizer), optimizer.param_groups)
    optimizer.__class__ = flat
    found = cast("FlatOptimizer", optimizer)
    found._patch_step_function()
    return found


def _check_in_place(kind: type[Optimizer], groups: _Groups) -> None:
    if any(group.get("differentiable") for group in groups):
        raise ValueError(
            f"flat tensors of {kind.__name__} are stepped in place, which is not differentiable: "
            f"leave differentiable=True out, or use {kind.__name__} itself"
        )


def _spans_gaps(kind: type[Optimizer], group: Mapping[str, Any]) -> bool:
    """Return whether zeros with zero gradients stay zero in every step, so that runs may span gaps.

    Alignment gaps between parameters contain such zeros. Without `eps`, a step would divide zero by
    zero.
    """
    eps = group.get("eps", 1.0)
    return kind in _ELEMENTWISE and isinstance(eps, float | int) and eps > 0
