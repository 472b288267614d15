"""Optimizers that step a few flat tensors where their users see sharded parameters."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, ClassVar, cast, override

import torch
from torch.optim import Optimizer

from megatron_fsdp_v2.dtensor.optimizer_kinds import ELEMENTWISE, NOT_ELEMENTWISE
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim.flat_plan import Plan

__all__ = ["FlatOptimizer", "flat_optimizer", "step_flat"]

_num_uses: Callable[[torch.Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]


def _counts(values: Iterable[object]) -> list[int]:
    """References to each of some values."""
    return [sys.getrefcount(value) for value in values]


_ONE = _counts({0: object()}.values())[0]
"""What that is of a value that only a dictionary has."""


class FlatOptimizer(Optimizer):
    """An optimizer whose steps see flat tensors; made by `flat_optimizer`.

    To its users it is the optimizer that it derives from: groups, state and state dicts are of the
    parameters they gave it. A step gives that class, in the place of sharded parameters, flat
    tensors over the main weights of each parameter group, with the main gradient as `grad`, and
    with flat state.

    State is flat as long as nobody looks. `state` makes states by parameter of it, sharded tensors
    that share its memory; the next step takes in what was done to them.

    Attributes:
        flat_of: The class it derives from.
    """

    flat_of: ClassVar[type[Optimizer]]
    skips_empty_shards: ClassVar[bool] = True

    _plan: Plan | None = None
    # States by parameter, for as long as they are the truth; None while they are flat.
    _shown: defaultdict[Any, Any] | None = None
    _in_step = False

    @property  # type: ignore[explicit-override]
    def state(self) -> defaultdict[Any, Any]:
        """State by parameter; in a step, that of what is stepped."""
        if self._in_step:
            assert self._plan is not None
            return self._plan.state
        if self._shown is None:
            self._shown = self._unfolded()
        return self._shown

    @state.setter
    def state(self, states: defaultdict[Any, Any]) -> None:
        self._shown, self._plan = states, None

    def _unfolded(self) -> defaultdict[Any, Any]:
        found: defaultdict[Any, Any] = defaultdict(dict)
        if self._plan is None:
            return found
        shown: dict[Any, Any] = {}
        self._plan.show(shown)
        # In the order of parameters, as torch makes it.
        for param in (param for group in self.param_groups for param in group["params"]):
            if param in shown:
                found[param] = shown.pop(param)
        found.update(shown)
        return found

    def _folded(self) -> Plan:
        """What to step, with all that users know of in it."""
        plan, shown = self._plan, self._shown
        if plan is not None and shown is None and plan.fits(self.param_groups):
            return plan
        states = self._unfolded() if shown is None else shown
        plan = Plan(self.param_groups, states, functools.partial(_spans_gaps, self.flat_of))
        self._plan = plan
        del shown, states
        if self._shown is not None and not self._is_held(plan):
            self._shown = None
        return plan

    def _is_held(self, plan: Plan) -> bool:
        """Whether somebody else has states by parameter, who may look at them after the step.

        Tensors of rows share memory with what is stepped; a count of steps does not. States of
        what is stepped as it is are the same objects before and after.
        """
        held: dict[int, Any] = {0: self._shown}
        self._shown = None
        try:
            if _counts(held.values())[0] > _ONE:
                return True
            shown = held[0]
            # Here and in what is asked about.
            states = {id(param): shown[param] for param in plan.joined if param in shown}
            if any(count > _ONE + 1 for count in _counts(states.values())):
                return True
            return any(_is_any_held(state) for state in states.values())
        finally:
            self._shown = held[0]

    def _step_flat(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            plan = self._folded()
            stepped = plan.take_gradients()
            given = [group["params"] for group in self.param_groups]
            self._in_step = True
            try:
                for group, params in zip(self.param_groups, plan.params, strict=True):
                    group["params"] = params
                result = _plain_step(self.flat_of)(self, **options)
            finally:
                self._in_step = False
                for group, params in zip(self.param_groups, given, strict=True):
                    group["params"] = params
                plan.drop_gradients()
                if self._shown is not None:
                    plan.show(self._shown)
            # What is stepped has version counters of its own.
            torch.autograd.graph.increment_version(stepped)
        return result if closure is None else loss

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`.

        Raises:
            ValueError: The group is to be stepped differentiably.
        """
        super().add_param_group(param_group)
        if self.param_groups[-1].get("differentiable"):
            self.param_groups.pop()
            raise ValueError(
                f"{type(self).__name__} steps flat tensors in place, through which no gradient "
                f"goes: leave differentiable=True out, or use {self.flat_of.__name__}"
            )

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "state" in state:
            # `Optimizer.__setstate__` writes to `__dict__`, past the property.
            self.state = state.pop("state")
        super().__setstate__(state)

    @override
    def __reduce__(self) -> Any:
        return _unset, (self.flat_of,), self.__getstate__()


def _is_any_held(state: MutableMapping[str, Any]) -> bool:
    own = [v for v in state.values() if isinstance(v, torch.Tensor)]
    own = [value for value in own if not isinstance(value, UnevenDTensor)]
    # Here and in the state; in C++ it is one tensor.
    return any(n > _ONE + 1 for n in _counts(own)) or any(_num_uses(value) > 1 for value in own)


def _plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """A class's step without the hooks that torch puts around it: those of this one run."""
    step: Any = kind.step
    return cast("Callable[..., Any]", step.__wrapped__ if hasattr(step, "hooked") else step)


def _unset(kind: type[Optimizer]) -> FlatOptimizer:
    flat = flat_optimizer(kind, elementwise=True)
    return flat.__new__(flat)


def flat_optimizer(kind: type[Optimizer], *, elementwise: bool = False) -> type[FlatOptimizer]:
    """A class of optimizers that step like another one, on a few flat tensors.

    Host work of a step and launches on a device are then those of one tensor for each parameter
    group (a unit, as a rule), where they would be of every parameter. No bit of weights or state
    depends on it. What is not sharded by `fully_shard`, or has no rows here, is stepped as it is.

        optimizer = flat_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-3)

    Args:
        kind: A class of `torch.optim`, or another one.
        elementwise: That `kind` computes every element of a parameter from that element, its
            gradient and its state alone; to be said of any class that is not known to.

    Returns:
        A class that derives from `kind`, and is made with the same arguments.

    Raises:
        ValueError: The class is not elementwise, or not known to be.
    """
    if issubclass(kind, FlatOptimizer):
        return kind
    _check_is_elementwise(kind, is_asserted=elementwise)
    if kind not in _CLASSES:
        _CLASSES[kind] = _flat_class(kind)
    return _CLASSES[kind]


_CLASSES: dict[type[Optimizer], type[FlatOptimizer]] = {}


def _flat_class(kind: type[Optimizer]) -> type[FlatOptimizer]:
    def step(self: FlatOptimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        return self._step_flat(closure, **options)

    # Which arguments there are is looked up by `torch.amp.GradScaler`.
    step.__signature__ = inspect.signature(_plain_step(kind))  # type: ignore[attr-defined]
    step.__doc__ = kind.step.__doc__
    members = {
        "flat_of": kind,
        "step": step,
        "__module__": __name__,
        "__doc__": f"`{kind.__name__}`, which steps flat tensors; see `FlatOptimizer`.",
    }
    return cast("type[FlatOptimizer]", type(f"Flat{kind.__name__}", (FlatOptimizer, kind), members))


def step_flat(optimizer: Optimizer, *, elementwise: bool = False) -> FlatOptimizer:
    """Have an optimizer step flat tensors from now on, as `flat_optimizer` says.

    For those that somebody else makes. Before a learning-rate scheduler is made of it.

    Args:
        optimizer: Changed in place, state and all.
        elementwise: See `flat_optimizer`.

    Returns:
        The same object.

    Raises:
        ValueError: Its class is not elementwise, or not known to be.
        RuntimeError: Its `step` was replaced, as by a scheduler.
    """
    flat = flat_optimizer(type(optimizer), elementwise=elementwise)
    if isinstance(optimizer, FlatOptimizer):
        return optimizer
    if "step" in vars(optimizer):
        raise RuntimeError(
            f"step of this {type(optimizer).__name__} was replaced, by a learning-rate scheduler "
            "or by hand; call step_flat before that"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"this {type(optimizer).__name__} is differentiable, and flat tensors are stepped in "
            "place; leave differentiable=True out"
        )
    states = vars(optimizer).pop("state")
    optimizer.__class__ = flat
    found = cast("FlatOptimizer", optimizer)
    found.state = states
    found._patch_step_function()
    return found


def _check_is_elementwise(kind: type[Optimizer], *, is_asserted: bool) -> None:
    """See that a class of optimizers may be given flat tensors.

    Args:
        kind: The class.
        is_asserted: Whether the user says that it is elementwise.

    Raises:
        ValueError: It is not, or nobody says that it is.
    """
    for base in kind.__mro__:
        if base.__name__ in NOT_ELEMENTWISE:
            raise ValueError(
                f"{kind.__module__}.{kind.__name__} cannot step flat tensors: "
                f"{NOT_ELEMENTWISE[base.__name__]}; give it the parameters as they are"
            )
    if kind not in ELEMENTWISE and not is_asserted:
        known = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
        raise ValueError(
            f"{kind.__module__}.{kind.__name__} is not known to compute every element of a "
            "parameter from that element, its gradient and its state alone, as optimizers that "
            f"step flat tensors must ({known} of torch.optim do); if it does, say so with "
            "flat_optimizer(cls, elementwise=True)"
        )


def _spans_gaps(kind: type[Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether elements that are zero, with gradients of zero, stay so in every step.

    Alignment leaves such elements between parameters. Only without `eps` would zero be divided by
    zero.
    """
    eps = group.get("eps", 1.0)
    if kind not in ELEMENTWISE or not isinstance(eps, float | int):
        return False
    return eps > 0
