"""Units of a model whose modules are run part by part, by a schedule of its own.

A pipeline schedule may call the attention of a layer, then its experts, and between them parts of
the backward of another micro-batch. No module's forward runs as a whole then, so nothing tells
where a unit is used. The schedule says so itself:

    units = ScheduledUnits(model, model.layers)
    units.begin()                        # a micro-batch
    for layer in model.layers:
        units.begin_forward(layer)
        ...                              # parts of the layer, one by one
        units.end_forward(layer)
    for layer in reversed(model.layers):
        units.begin_backward(layer)
        ...                              # backwards of those parts
        units.end_backward(layer)        # its gradients are reduced
    units.end()
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2.runtime.end_of_backward import end_scheduled, reduce_in_order, repair
from megatron_fsdp_v2.runtime.fsdp_module import named_units, unit_of
from megatron_fsdp_v2.runtime.unit_checks import (
    check_has_values,
    check_unchanged,
    compare_after_step,
)

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.unit import Unit

__all__ = ["ScheduledUnits"]


class ScheduledUnits:
    """Gathers and reduces the units under a root where a schedule says that they are used.

    Any number of micro-batches may be under way, and uses may overlap: a unit is gathered from the
    first to the last. Gradients of a unit count up to `end_backward`, also those that a module
    makes by a call of its own after its backward and assigns to `weight.grad` (Transformer
    Engine's `delay_wgrad_compute`). Every data-parallel rank has to follow the same schedule. From
    the first `begin` to the last `end` modules gather nothing by themselves; before and after, the
    model can be called as any other. What an exception leaves behind is cleared away by `abandon`,
    by the next forward of the root, or where parameters are saved.

    Args:
        root: The root that `fully_shard` was called on last.
        parts: Sharded modules below it whose uses the schedule tells, each by itself. All other
            units, the root's own among them, are gathered while any micro-batch is under way.

    Raises:
        ValueError: One of them is not sharded, is no part of the root, or the root is none.
    """

    def __init__(self, root: nn.Module, parts: Sequence[nn.Module]) -> None:
        self._root = weakref.ref(unit_of(root))
        if not unit_of(root).is_root:
            raise ValueError(f"{unit_of(root).name} is inside another unit; give the outermost one")
        units = [unit for _, unit in named_units(root)]
        told = [unit_of(part) for part in parts]
        for unit in told:
            if unit not in units or unit.is_root:
                raise ValueError(f"{unit.name} is no unit below {unit_of(root).name}")
        self._others = [weakref.ref(unit) for unit in units if unit not in told]

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch is under way."""
        return self._unit.context.is_scheduled

    def begin(self) -> None:
        """The forward of a micro-batch begins. Collective.

        Raises:
            RuntimeError: Gradients are switched off.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "a schedule of forwards and backwards was begun with gradients switched off; call "
                "the model to evaluate it"
            )
        root = self._unit
        if not root.context.is_scheduled:
            root.begin_schedule()
        root.context.num_scheduled += 1
        for unit in self._held:
            self._use(unit)

    def end(self) -> None:
        """The backward of a micro-batch is over. Collective.

        All that is left of its gradients is reduced.

        Raises:
            RuntimeError: None is under way.
        """
        self._check_is_open("end")
        context = self._unit.context
        held = self._held
        for unit in reversed(held):
            self._reduce(unit)
        is_last = context.num_scheduled == 1
        for unit in held:
            self._release(unit, drops=is_last and unit.reshard_after_backward)
        end_scheduled(context)

    def expect_gradients(self) -> None:
        """A backward begins that may bring gradients of any unit but the parts.

        Their buffers are given memory here and now. It is to be called where some of them arrive
        on another stream than the one that the model runs on, to which all memory belongs.

        Raises:
            RuntimeError: No micro-batch is under way.
        """
        self._check_is_open("expect_gradients")
        for unit in self._held:
            for group in unit.groups:
                if group.grads is not None and group.is_trained:
                    group.grads.begin(unit.context.reductions)

    def begin_forward(self, part: nn.Module) -> None:
        """Parameters of a part are used from here on, by a forward. Collective.

        Raises:
            RuntimeError: No micro-batch is under way.
        """
        self._begin(part, "begin_forward")

    def end_forward(self, part: nn.Module) -> None:
        """That forward uses them no more."""
        self._check_is_open("end_forward")
        unit = unit_of(part)
        self._release(unit, drops=unit.reshard_after_forward)

    def begin_backward(self, part: nn.Module) -> None:
        """Parameters of a part are used from here on, by a backward. Collective.

        Raises:
            RuntimeError: No micro-batch is under way.
        """
        self._begin(part, "begin_backward")

    def end_backward(self, part: nn.Module) -> None:
        """That backward uses them no more, and all gradients of them are there. Collective.

        Raises:
            RuntimeError: No micro-batch is under way.
        """
        self._check_is_open("end_backward")
        unit = unit_of(part)
        self._reduce(unit)
        self._release(unit, drops=unit.reshard_after_backward)

    def abandon(self) -> None:
        """Forget micro-batches that an exception ended, and gradients not reduced, if any."""
        if self.is_open:
            repair(self._unit.context)

    @property
    def _unit(self) -> Unit:
        unit = self._root()
        assert unit is not None
        return unit

    @property
    def _held(self) -> list[Unit]:
        return [unit for ref in self._others if (unit := ref()) is not None]

    def _check_is_open(self, method: str) -> None:
        if not self.is_open:
            raise RuntimeError(
                f"{method} was called with no micro-batch under way; call begin() at its start"
            )

    def _begin(self, part: nn.Module, method: str) -> None:
        self._check_is_open(method)
        self._use(unit_of(part))

    def _use(self, unit: Unit) -> None:
        if unit.unset:
            check_has_values(unit)
        context = unit.context
        unit.num_users += 1
        context.gathers.before_use(unit)
        unit.unshard(WeightUse.BOTH, async_op=False)
        unit.wait_for_unshard()
        if unit.is_gathered_after_step:
            compare_after_step(context, unit)
            check_unchanged(context)
        # A prefetch is for the use that came next in the last step, forward or backward.
        context.gathers.in_schedule(unit)

    def _release(self, unit: Unit, *, drops: bool) -> None:
        if not unit.num_users:
            raise RuntimeError(f"{unit.name} is not in use; tell the beginning of a use first")
        unit.num_users -= 1
        if drops and not unit.num_users:
            unit.reshard()

    def _reduce(self, unit: Unit) -> None:
        for group in unit.groups:
            group.take_assigned()
        # Also without a gradient here: another rank may have one.
        reduce_in_order(unit.context, [unit])
