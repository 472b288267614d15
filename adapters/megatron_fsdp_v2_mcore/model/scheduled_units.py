"""Units of a model whose schedule runs modules part by part.

A pipeline schedule may run the attention of a layer, then parts of the backward of another
micro-batch, then the experts of the layer. No module's forward runs as a whole, so hooks cannot
detect the uses of a unit. The schedule reports them:

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

import torch
from torch import nn

from megatron_fsdp_v2.runtime.context import live
from megatron_fsdp_v2.runtime.machine import events, reductions
from megatron_fsdp_v2.runtime.module import named_units, unit_of
from megatron_fsdp_v2.runtime.unit import Unit


class ScheduledUnits:
    """Gathers and reduces the units under a root as a schedule reports their uses.

    Any number of micro-batches may be under way, and uses may overlap: a unit stays gathered from
    the first use to the last. Gradients may arrive until `end_backward`, also those that a module
    computes by a separate call after its backward and assigns to `weight.grad` (Transformer
    Engine's `delay_wgrad_compute`). All data-parallel ranks must follow the same schedule. From the
    first `begin` to the last `end`, hooks of modules gather nothing; before and after, the model
    can be called as usual. After an exception, `abandon`, the next forward of the root, or saving
    parameters resets the state.

    Args:
        root: The root that `fully_shard` was called on last.
        parts: Sharded modules below the root whose uses the schedule reports. All other units,
            including the root's own, are gathered while any micro-batch is under way.

    Raises:
        ValueError: A module is not sharded, a part is not below the root, or `root` is not a root.
    """

    def __init__(self, root: nn.Module, parts: Sequence[nn.Module]) -> None:
        self._root = weakref.ref(unit_of(root))
        if not unit_of(root).is_root:
            raise ValueError(f"{unit_of(root).name} is inside another unit; give the outermost one")
        units = [unit for _, unit in named_units(root)]
        told = [unit_of(part) for part in parts]
        for unit in told:
            if unit not in units or unit.is_root:
                raise ValueError(f"{unit.name} is not a unit below {unit_of(root).name}")
        self._others = [weakref.ref(unit) for unit in units if unit not in told]

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch is under way."""
        return self._unit.state.root.is_scheduled

    def begin(self) -> None:
        """Begin the forward of a micro-batch. Collective.

        Raises:
            RuntimeError: Gradients are disabled.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "begin() was called with gradients disabled, and a schedule runs backwards; to "
                "evaluate the model, call it"
            )
        events.begin_schedule(self._unit.state)
        for unit in self._held:
            events.begin_use(unit.state)

    def end(self) -> None:
        """End the backward of a micro-batch, and reduce its remaining gradients. Collective.

        Raises:
            RuntimeError: No micro-batch is under way.
        """
        self._check_is_open("end")
        root, held = self._unit.state.root, self._held
        for unit in reversed(held):
            self._reduce(unit)
        is_last = root.num_scheduled == 1
        for unit in held:
            reshard = is_last and unit.settings.reshard_after_backward
            events.release(unit.state, reshard=reshard)
        reductions.end_scheduled(root)

    def expect_gradients(self) -> None:
        """Allocate full gradient buffers of all units other than the parts, before a backward.

        Call it if gradients of these units arrive on another stream than the model's, since all
        buffers must be allocated on the model's stream.

        Raises:
            RuntimeError: No micro-batch is under way.
        """
        self._check_is_open("expect_gradients")
        for unit in self._held:
            for group in unit.groups:
                if group.is_trained:
                    reductions.make_room(unit.state.root)
                    group.grads.begin()

    def begin_forward(self, part: nn.Module) -> None:
        """Begin the use of a part by a forward: gather its parameters. Collective.

        Raises:
            RuntimeError: No micro-batch is under way.
        """
        self._begin(part, "begin_forward")

    def end_forward(self, part: nn.Module) -> None:
        """End the use of a part by a forward: reshard it unless another use needs it."""
        self._check_is_open("end_forward")
        unit = unit_of(part)
        events.release(unit.state, reshard=unit.settings.reshard_after_forward)

    def begin_backward(self, part: nn.Module) -> None:
        """Begin the use of a part by a backward: gather its parameters. Collective.

        Raises:
            RuntimeError: No micro-batch is under way.
        """
        self._begin(part, "begin_backward")

    def end_backward(self, part: nn.Module) -> None:
        """End the use of a part by a backward: reduce its gradients and reshard it. Collective.

        Raises:
            RuntimeError: No micro-batch is under way.
        """
        self._check_is_open("end_backward")
        unit = unit_of(part)
        self._reduce(unit)
        events.release(unit.state, reshard=unit.settings.reshard_after_backward)

    def abandon(self) -> None:
        """Discard micro-batches that an exception ended, and their unreduced gradients."""
        if self.is_open:
            reductions.repair(self._unit.state.root)

    @property
    def _unit(self) -> Unit:
        unit = self._root()
        assert unit is not None
        return unit

    @property
    def _held(self) -> list[Unit]:
        return live(self._others)

    def _check_is_open(self, method: str) -> None:
        if not self.is_open:
            raise RuntimeError(
                f"{method} was called with no micro-batch under way; call begin() at its start"
            )

    def _begin(self, part: nn.Module, method: str) -> None:
        self._check_is_open(method)
        events.begin_use(unit_of(part).state)

    def _reduce(self, unit: Unit) -> None:
        for group in unit.groups:
            for index, param in enumerate(group.unsharded_params):
                unit.collect(group, index, param)
        # Also without a gradient on this rank: another rank may have one.
        reductions.reduce(unit.state.root, [unit.state])
