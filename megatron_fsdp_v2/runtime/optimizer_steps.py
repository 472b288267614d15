"""Hooks on optimizer steps: checks before a step, and stale model weights after it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.dtensor.local_step import LocalStep
from megatron_fsdp_v2.dtensor.optimizer_kinds import (
    finds_no_empty_gradients,
    is_known,
    rejected,
    steps_local_rows,
)
from megatron_fsdp_v2.dtensor.optimizer_state import (
    hide_empty_gradients,
    restore_gradients,
    watch_state,
)
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.params.gathered import gathered_name
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.params.parameters import find_owner_slot, num_stale
from megatron_fsdp_v2.runtime.context import Context, live
from megatron_fsdp_v2.runtime.machine import events
from megatron_fsdp_v2.runtime.unit import Unit


@dataclass(slots=True)
class _OptimizerFacts:
    """Cached facts about one optimizer.

    Attributes:
        cache_key: State that the facts depend on; they are computed again when it changes.
        contexts: Contexts whose parameters it holds, in the order of sharding.
        has_sharded_state: Whether hooks on its state dict are registered.
        unchanged: During a step that only initializes state: the groups whose model weights are up
            to date.
        generators: During the step of an unknown optimizer: states of the random number generators
            before it.
        hidden: Empty gradients that the optimizer does not find during its step.
        local_step: During the step of an optimizer that steps local rows: that step.
    """

    cache_key: tuple[int, int, frozenset[int]] | None = None
    contexts: Sequence[weakref.ref[Context[Unit]]] = ()
    has_sharded_state: bool = False
    unchanged: Sequence[tuple[Context[Unit], ParameterGroup]] | None = None
    generators: Sequence[torch.Tensor] | None = None
    hidden: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    local_step: LocalStep | None = None


class OptimizerWatch:
    """Global pre-step and post-step hooks of all optimizers.

    Fused and foreach steps advance no version counter, so steps are observed by torch's hooks for
    all optimizers, which are registered when the first model is sharded. Steps of optimizers
    without parameters of a context must not count for that context: they may run on some ranks
    only, and stale weights are refreshed by a collective.
    """

    def __init__(self) -> None:
        # In the order of sharding, which is the same on all ranks.
        self._contexts: WeakKeyDictionary[Context[Unit], None] = WeakKeyDictionary()
        self._num_added = 0
        self._watched: WeakKeyDictionary[Optimizer, _OptimizerFacts] = WeakKeyDictionary()

    def add(self, context: Context[Unit]) -> None:
        """Mark a context's model weights as stale after every step on its parameters."""
        if not self._num_added:
            register_optimizer_step_pre_hook(uncompiled(self._before_step))
            register_optimizer_step_post_hook(uncompiled(self._after_step))
        self._contexts[context] = None
        self._num_added += 1
        self._search_again()

    def _search_again(self) -> None:
        """Let every root look for trained parameters without a unit in its next training pass."""
        for context in self._contexts:
            context.state.owns_all = False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        watched = self._facts_of(optimizer)
        contexts = live(watched.contexts)
        watched.unchanged = watched.generators = watched.local_step = None
        # Not with a closure, which may draw random numbers, for example for dropout.
        if contexts and not _may_draw(optimizer) and len(args) < 2 and not kwargs:
            watched.generators = _generator_states()
        for context in contexts:
            context.check_is_ready()
            if context.is_capturing:
                events.begin_capture(context.state)
            for group in context.groups():
                group.parameters.check_gradients()
            # A forward with gradients, whose backward would wait, may have no backward.
            context.wait_for_host_memory()
        if _initializes_state(optimizer, contexts):
            watched.unchanged = [
                (context, group)
                for context in contexts
                for group in context.groups()
                if not group.is_stale(context.state.weight_version)
            ]
        if contexts and finds_no_empty_gradients(type(optimizer)):
            return self._hide_empty_gradients(optimizer, args, kwargs)
        if contexts and steps_local_rows(type(optimizer)):
            watched.local_step = LocalStep(optimizer)
            return watched.local_step.arguments(args, kwargs)
        return None

    def _hide_empty_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hide empty gradients until the step ends.

        Returns:
            The arguments of the step, with a closure that hides the gradients of its backward.
        """
        watched = self._watched[optimizer]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        def hide() -> None:
            groups = optimizer.param_groups
            watched.hidden = hide_empty_gradients(p for group in groups for p in group["params"])

        def call() -> Any:
            restore_gradients(watched.hidden)
            loss = closure()
            hide()
            return loss

        hide()
        if closure is None:
            return args, kwargs
        return (args[0], call, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _facts_of(self, optimizer: Optimizer) -> _OptimizerFacts:
        """Return the facts about an optimizer; check its parameters if they changed."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        held = frozenset(map(id, params))
        cache_key = (num_stale(), self._num_added, held)
        watched = self._watched.setdefault(optimizer, _OptimizerFacts())
        if watched.cache_key == cache_key:
            return watched
        # A parameter registered after sharding is trained once an optimizer holds it.
        self._search_again()
        for param in params:
            _check_is_current(param)
        # Before its first step, an optimizer's state is the same on all ranks. An optimizer that
        # wraps another one may have neither state nor hooks.
        has_state = hasattr(optimizer, "_optimizer_state_dict_post_hooks")
        is_sharded = any(isinstance(param, UnevenDTensor) for param in params)
        if is_sharded and has_state and not watched.has_sharded_state:
            watch_state(optimizer)
            watched.has_sharded_state = True
        watched.cache_key = cache_key
        watched.contexts = [
            weakref.ref(context)
            for context in self._contexts
            if any(id(p) in held for g in context.groups() for p in g.sharded_params)
        ]
        return watched

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        # Unknown if the step began before the first model was sharded.
        watched = self._watched.get(optimizer, _OptimizerFacts())
        hidden, watched.hidden = watched.hidden, ()
        restore_gradients(hidden)
        local_step, watched.local_step = watched.local_step, None
        if local_step is not None:
            local_step.publish()
        before, watched.generators = watched.generators, None
        if before is not None and not all(map(torch.equal, before, _generator_states())):
            raise rejected(
                optimizer,
                "its step draws random numbers, which differ between ranks, so that ranks would "
                "compute different tensors",
            )
        unchanged, watched.unchanged = watched.unchanged, None
        if unchanged is not None:
            # The step advanced version counters without changing a weight.
            for context, group in unchanged:
                group.note_refreshed(context.state.weight_version)
            return
        for context in live(watched.contexts):
            events.weights_changed(context.state)


def _may_draw(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer may draw random numbers.

    A step of local rows draws them for these rows. Several ranks that hold the same rows would
    draw different numbers.
    """
    if not steps_local_rows(type(optimizer)):
        return is_known(type(optimizer))
    params = (param for group in optimizer.param_groups for param in group["params"])
    sharded = (param for param in params if isinstance(param, UnevenDTensor))
    return all(param.row_shards.is_held_once(param.device_mesh) for param in sharded)


def _generator_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def _initializes_state(optimizer: Optimizer, contexts: Sequence[Context[Unit]]) -> bool:
    """Return whether the step that begins only initializes optimizer state.

    `torch.distributed.checkpoint.state_dict` initializes the state of an optimizer by a step with a
    learning rate of 0 and zeros as gradients. A rank may make this step alone, since an optimizer
    that finds no empty gradients has no state on a rank without rows. Weights that were stale on
    that rank only would be refreshed, in a collective, on that rank only.

    Args:
        optimizer: The optimizer that is about to step.
        contexts: Contexts whose parameters it holds.
    """
    groups = optimizer.param_groups
    if not contexts or any(context.is_capturing for context in contexts):
        return False
    if not all("lr" in group and _is_zero(group["lr"]) for group in groups):
        return False
    grads: list[Any] = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    if not grads or any(grad is None for grad in grads):
        return False
    # A real step may also have a learning rate of 0 (warm-up) and zero gradients on some rank.
    units = (unit for context in contexts for unit in context.units())
    if any(known.param_grads_and_main()[1] is not None for unit in units for known in unit.grads()):
        return False
    # Local rows also of a plain DTensor, whose operations would count over all ranks.
    return not any(plain_of(grad).count_nonzero() for grad in grads)


def _is_zero(lr: Any) -> bool:
    # A tensor on a device is not read: the host would wait for it in every step. An optimizer that
    # computes its own learning rate may have None.
    is_known = lr.device.type == "cpu" if isinstance(lr, torch.Tensor) else lr is not None
    return is_known and float(lr) == 0


def _check_is_current(param: Any) -> None:
    """Raise if a parameter of an optimizer is a tensor that its model no longer uses."""
    name = gathered_name(param)
    if name is not None:
        raise RuntimeError(
            f"the optimizer holds the gathered weights of {name}, which receive no gradient; it "
            "was built while these were registered instead of the sharded ones, such as between a "
            "forward and its backward. Call reshard() on the model, then build the optimizer from "
            "model.parameters()"
        )
    slot = find_owner_slot(param)
    if slot is not None:
        raise RuntimeError(
            f"the optimizer holds {slot.label}; the model no longer uses that tensor. Build the "
            "optimizer from model.parameters() after fully_shard"
        )


OPTIMIZER_WATCH = OptimizerWatch()
