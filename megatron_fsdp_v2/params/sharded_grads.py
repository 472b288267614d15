"""`param.grad` of sharded parameters: DTensors over the main gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.dtensor.attributes import (
    grad_at_once,
    requires_grad_at_once,
    set_grad_at_once,
)
from megatron_fsdp_v2.dtensor.sharded_rows import rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import (
    UnevenDTensor,
    local_of,
    plain_attributes,
    rows_of,
)
from megatron_fsdp_v2.params.main_gradient import any_set
from megatron_fsdp_v2.params.parameter_hooks import hooked, run_hooks

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.main_gradient import MainGradient

__all__ = ["ShardedGrads"]


class ShardedGrads:
    """Keeps `param.grad` and the main gradient of a group in step.

    `param.grad` is the truth: a user may set it to None, to zeros, or to another tensor. What it
    says is carried into the main gradient before a reduction adds to it.
    """

    def __init__(self, params: list[nn.Parameter], main: MainGradient) -> None:
        self._params = params
        self._main = main
        self._empty: dict[int, torch.Tensor] = {}
        self._may_be_unused = False
        # Whether reductions may have brought something since users' hooks were run.
        self._is_new = False
        self._is_certainly_new = False

    def settle(self) -> bool:
        """Bring the main gradient in line with `param.grad`, and give it memory.

        Returns:
            Whether a reduction adds to the main gradient (some `param.grad` is set) or
            overwrites it (none is).
        """
        grads = self.state()
        memory = self._main.begin(grads)
        if not any_set(grads):
            return False
        for index, (view, grad) in enumerate(zip(memory.views, grads, strict=True)):
            if view is None:
                continue
            if grad is None:
                view.zero_()
            elif not memory.owns(index, grad):
                view.copy_(local_of(grad))
        return True

    def install(self, *, accumulated: bool) -> None:
        """Set `param.grad` of every trained parameter with rows here; `None` for the others.

        An empty tensor in a fused multi-tensor optimizer's list can corrupt its neighbors. What
        communicates about gradients finds one all the same: see `AttributesAtOnce.empty_grad`.

        Args:
            accumulated: Whether the reduction added to what was there.
        """
        # One backward may reduce in several rounds, and none of them bring anything.
        was_unused = not accumulated or self._may_be_unused
        self._may_be_unused = was_unused and not self._main.contributed
        self._is_new = True
        self._is_certainly_new |= self._main.contributed or not accumulated
        self._main.contributed = False
        memory = self._main.memory
        assert memory is not None
        with plain_attributes():
            for index, (param, has_rows) in enumerate(
                zip(self._params, self._main.has_rows, strict=True)
            ):
                if not requires_grad_at_once(param):
                    continue
                if has_rows:
                    # It has no `empty_grad`, which would have to go.
                    shown = memory.shown_again(index)
                    if shown is None:
                        shown = self._dtensor(index, cast("torch.Tensor", memory.views[index]))
                        memory.show(index, shown)
                    set_grad_at_once(param, shown)
                elif grad_at_once(param) is None:
                    self._note_empty(index)

    def hide_empty(self) -> None:
        """Take gradients without rows back that autograd made of a loss of sharded parameters."""
        for index, has_rows in enumerate(self._main.has_rows):
            if not has_rows and self._params[index].grad is not None:
                self._params[index].grad = None
                self._note_empty(index)

    def _note_empty(self, index: int) -> None:
        """Have what communicates about gradients find one where a parameter has no rows here."""
        param = cast("UnevenDTensor", self._params[index])
        param.empty_grad = self._empty.get(index)
        if param.empty_grad is None:
            made = self._dtensor(index, self._main.no_rows(index))
            param.empty_grad = self._empty[index] = made

    def found(self) -> tuple[list[torch.Tensor | None], torch.Tensor | None, list[torch.Tensor]]:
        """What gradients there are, and on which memory those with rows here are.

        Returns:
            Every `param.grad`; the flat main gradient, where a reduction made one of them, with
            perhaps what others have left there; and those rows that somebody put in the place of
            one.
        """
        grads, memory = self.state(), self._main.memory
        flat, others = None, []
        for index, grad in enumerate(grads):
            if grad is None or not self._main.has_rows[index]:
                continue
            if memory is not None and memory.owns(index, grad):
                flat = memory.flat
            else:
                others.append(rows_of(grad))
        return grads, flat, others

    def state(self) -> list[torch.Tensor | None]:
        """Every `param.grad`, for `forget`."""
        with plain_attributes():
            grads = [grad_at_once(param) for param in self._params]
        if DTensor not in map(type, grads):
            return grads
        # Autograd may have made one, of a loss of the sharded parameter itself; it lacks its rows.
        return [
            param.grad if type(grad) is DTensor else grad
            for param, grad in zip(self._params, grads, strict=True)
        ]

    def forget(self, before: Sequence[torch.Tensor | None]) -> None:
        """Take back what a failed backward has written into gradients. Its reductions are done.

        Zeros that `zero_grad` wrote before those were done are zeros again, and what was None is.
        Tensors that others put there are left.

        Args:
            before: What `state()` was before the last of them.
        """
        self._may_be_unused = self._is_new = self._is_certainly_new = False
        memory = self._main.memory
        for index, (param, grad) in enumerate(zip(self._params, before, strict=True)):
            if memory is None:
                continue
            if grad is not None and memory.owns(index, grad):
                local_of(grad).zero_()
            elif memory.owns(index, param.grad):
                # A reduction leaves what it adds as it was.
                param.grad = grad

    def drop_unused(self) -> None:
        """Take gradients back that turned out to come from no rank. Reductions are done."""
        if self._may_be_unused and self._main.is_unused():
            self._is_new = self._is_certainly_new = False
            for param in self._params:
                param.grad = None
        self._may_be_unused = False

    def run_hooks(self, *, only_certain: bool) -> None:
        """Call users' post-accumulate hooks of parameters that have a new gradient, which is final.

        Also those of parameters without rows here, which then have an empty gradient for as long
        as hooks run: what a hook communicates has to be asked for on all ranks.

        Args:
            only_certain: Whether a gradient that was there before, and to which this rank added
                nothing, counts as an old one. Another rank may have added to it.
        """
        is_new = self._is_certainly_new if only_certain else self._is_new
        self._is_new = self._is_certainly_new = False
        if not is_new:
            return
        for index in hooked(self._params):
            param = self._params[index]
            if not param.requires_grad:
                continue
            if self._main.has_rows[index]:
                if param.grad is not None:
                    run_hooks(param)
                continue
            shown = param.grad = self._dtensor(index, self._main.no_rows(index))
            try:
                run_hooks(param)
            finally:
                is_kept = param.grad is shown
                param.grad = None
                if is_kept:
                    self._note_empty(index)

    def _dtensor(self, index: int, rows: torch.Tensor) -> UnevenDTensor:
        return rows_like(rows, cast("UnevenDTensor", self._params[index]))
