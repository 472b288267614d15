"""`param.grad` of sharded parameters: DTensors over the main gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from megatron_fsdp_v2.dtensor.row_shards import RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import (
    UnevenDTensor,
    local_of,
    plain_attributes,
    rows_of,
)
from megatron_fsdp_v2.params.parameter_hooks import has_hooks, run_hooks

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.grad_buffers import MainGradient

__all__ = ["ShardedGrads"]


class ShardedGrads:
    """Keeps `param.grad` and the main gradient of a group in step.

    `param.grad` is the truth: a user may set it to None, to zeros, or to another tensor. What it
    says is carried into the main gradient before a reduction adds to it.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        main: MainGradient,
        row_shards: Sequence[RowShards],
    ) -> None:
        self._params = params
        self._main = main
        self._row_shards = row_shards
        self._views: list[torch.Tensor] | None = None
        self._dtensors: list[UnevenDTensor | None] | None = None
        self._empty: dict[int, torch.Tensor] = {}
        self._may_be_unused = False
        # Whether reductions may have brought something since users' hooks were run.
        self._is_new = False
        self._is_certainly_new = False

    @property
    def views(self) -> list[torch.Tensor]:
        """This rank's rows of every main gradient."""
        if self._views is None:
            buffer = self._main.buffer
            self._views = [buffer.view(index) for index in range(len(self._params))]
        return self._views

    def settle(self) -> bool:
        """Bring the main gradient in line with `param.grad`.

        Returns:
            Whether a reduction adds to the main gradient (some `param.grad` is set) or
            overwrites it (none is).
        """
        with plain_attributes():
            grads = [param.grad for param in self._params]
        if all(grad is None for grad in grads):
            return False
        owns = self._dtensors or [None] * len(grads)
        for view, grad, own in zip(self.views, grads, owns, strict=True):
            if view.numel() == 0:
                continue
            if grad is None:
                view.zero_()
            elif grad is not own:
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
        if self._dtensors is None:
            self._dtensors = [
                self._dtensor(index) if view.numel() else None
                for index, view in enumerate(self.views)
            ]
        with plain_attributes():
            pairs = zip(self._params, self._dtensors, strict=True)
            for index, (param, dtensor) in enumerate(pairs):
                if not param.requires_grad:
                    continue
                if dtensor is not None:
                    param.grad = dtensor
                elif param.grad is None:
                    self._note_empty(index)

    def _note_empty(self, index: int) -> None:
        """Have what communicates about gradients find one where a parameter has no rows here."""
        param = cast("UnevenDTensor", self._params[index])
        param.empty_grad = self._empty.get(index)
        if param.empty_grad is None:
            param.empty_grad = self._empty[index] = self._dtensor(index)

    def memory(self) -> list[torch.Tensor]:
        """Few tensors that hold all of every `param.grad`, and perhaps what others have left.

        The flat main gradient, and whatever somebody put in the place of one.
        """
        own: Sequence[torch.Tensor | None] = self._dtensors or [None] * len(self._params)
        grads = self.state()
        found = [
            rows_of(grad)
            for grad, mine in zip(grads, own, strict=True)
            if grad is not None and grad is not mine
        ]
        if any(grad is not None and grad is mine for grad, mine in zip(grads, own, strict=True)):
            found.append(self._main.buffer.tensor)
        return found

    def state(self) -> list[torch.Tensor | None]:
        """Every `param.grad`, for `forget`."""
        with plain_attributes():
            return [param.grad for param in self._params]

    def forget(self, before: Sequence[torch.Tensor | None]) -> None:
        """Take back what a failed backward has written into gradients. Its reductions are done.

        Zeros that `zero_grad` wrote before those were done are zeros again, and what was None is.
        Tensors that others put there are left.

        Args:
            before: What `state()` was before the last of them.
        """
        self._may_be_unused = self._is_new = self._is_certainly_new = False
        own = self._dtensors or [None] * len(self._params)
        for param, dtensor, grad in zip(self._params, own, before, strict=True):
            if grad is None:
                param.grad = None
            elif dtensor is not None and grad is dtensor:
                local_of(dtensor).zero_()

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
        with plain_attributes():
            hooked = [has_hooks(param) and param.requires_grad for param in self._params]
        for index, param in itertools.compress(enumerate(self._params), hooked):
            if self.views[index].numel():
                if param.grad is not None:
                    run_hooks(param)
                continue
            shown = param.grad = self._dtensor(index)
            try:
                run_hooks(param)
            finally:
                is_kept = param.grad is shown
                param.grad = None
                if is_kept:
                    self._note_empty(index)

    def _dtensor(self, index: int) -> UnevenDTensor:
        param = cast("UnevenDTensor", self._params[index])
        view, shards = self.views[index], self._row_shards[index]
        return UnevenDTensor.from_rows(view, param.device_mesh, shards, tuple(param.shape))
