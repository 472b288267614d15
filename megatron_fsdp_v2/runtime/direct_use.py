"""Uses of sharded parameters themselves, outside the forwards of their units.

A loss may contain `head.weight.full_tensor()`, or another operation on a sharded parameter,
together with data of this rank. Its gradient then differs between ranks, and is reduced with the
gradients of the parameter's unit: a direct use is one more use of the unit in its pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_fsdp_v2.dtensor.row_shards import CollectGradient
from megatron_fsdp_v2.params.group import ParameterGroup, find_sharded
from megatron_fsdp_v2.runtime.machine import events
from megatron_fsdp_v2.runtime.unit_groups import UnitGroups


class DirectUse:
    """One direct use of a parameter, held by the graph of its result.

    Args:
        unit: The unit that owns the parameter.
        group: Group of the parameter.
        index: Index of the parameter in the group.
    """

    def __init__(self, unit: UnitGroups, group: ParameterGroup, index: int) -> None:
        self._unit, self._group, self._index = unit, group, index
        self._passed, self._number, self._is_counted = events.begin_direct_use(unit.state)

    def collect(self, grad: torch.Tensor, rows: tuple[int, int] | None) -> None:
        """Collect the gradient of the use; see `CollectGradient`."""
        unit, grads = self._unit.state, self._group.grads
        events.direct_gradient(unit, grads, self._passed, self._number)
        grads.add_direct(self._index, grad, rows)
        if self._is_counted:
            events.end_direct_use(unit, self._number)

    def __del__(self) -> None:
        if self._is_counted:
            self._passed.drop_use(self._unit.state)


def begin_direct_use(
    unit_ref: Callable[[], UnitGroups | None], param: torch.Tensor
) -> CollectGradient | None:
    """Begin a direct use of a tensor, unless it is not a parameter of the unit.

    Returns:
        A function that collects its gradient; it holds the use.
    """
    unit, found = unit_ref(), find_sharded(param)
    return None if unit is None or found is None else DirectUse(unit, *found).collect
