"""The parameters of a group: as they rest, and as modules compute with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_fsdp_v2.dtensor.attributes import (
    hooks_at_once,
    requires_grad_at_once,
    version_at_once,
)
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of, plain_attributes
from megatron_fsdp_v2.params.attributes import propagate_attributes
from megatron_fsdp_v2.params.gathered_parameter import gathered_parameter, mark_gathered
from megatron_fsdp_v2.params.parameter_hooks import keep_hooks, move_hooks, tensor_hook_rejection
from megatron_fsdp_v2.params.registration import OwnedParameter, Registrations, mark_stale

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from megatron_fsdp_v2.comm.errors import Label
    from megatron_fsdp_v2.dtensor.row_shards import RowShards, ShardedGroup
    from megatron_fsdp_v2.params.buffer import DataParallelBuffer
    from megatron_fsdp_v2.params.gathered_parameter import GradientOwner
    from megatron_fsdp_v2.params.weights import GroupWeights

__all__ = ["Members"]


class Members:
    """The parameters of one group, each in two forms, and where they are registered.

    Attributes:
        names: Relative to the unit.
        row_shards: Row ranges of every main weight over the mesh.
        dtensors: How modules compute with a parameter, where it was a DTensor before.
        registrations: Where the parameters are registered.
        sharded: DTensors over main weights, which modules hold at rest.
        gathered: What modules compute with: views of the gathered buffer, DTensors over the
            tensor-parallel mesh where they were before, or what their format makes of a view. The
            same objects for the group's whole life, so that autograd finds what it saved.
    """

    def __init__(
        self,
        owner: GradientOwner,
        label: Label,
        owned: Sequence[OwnedParameter],
        row_shards: Sequence[RowShards],
        weights: GroupWeights,
        mesh: DeviceMesh,
        *,
        requires_grad: bool,
        grad_dtype: torch.dtype,
    ) -> None:
        """Copy this rank's rows of the parameters into the main weights and describe them.

        Args:
            owner: The group, which gathered parameters know weakly.
            label: What the group is called.
            owned: The originals, which are left as they are.
            row_shards: Row ranges of each over the mesh.
            weights: Of the group.
            mesh: The data-parallel mesh.
            requires_grad: Whether they are trained.
            grad_dtype: Dtype of their `grad`.
        """
        self._label = label
        self._format = weights.format
        self._grad_dtype = grad_dtype
        self._trained = [requires_grad] * len(owned)
        self.names = [p.name for p in owned]
        self.row_shards = row_shards
        self.dtensors = [p.dtensor for p in owned]
        self.registrations = Registrations(owned)
        self.sharded = [self._sharded(i, p, weights.main, mesh) for i, p in enumerate(owned)]
        self.gathered = [self._gathered(i, p, weights, owner) for i, p in enumerate(owned)]
        self._format.adopt(self.gathered)

    def _sharded(
        self, index: int, owned: OwnedParameter, main: DataParallelBuffer, mesh: DeviceMesh
    ) -> nn.Parameter:
        """A DTensor over the main weights, which take the values of the original."""
        rows, (start, end) = main.view(index), main.rows(index)
        with torch.no_grad():
            values = self._format.values(owned.param) if owned.values is None else owned.values
            rows.copy_(values[start:end])
        if owned.tensor is not None:
            mesh = owned.tensor.mesh or mesh
        shards, is_trained = self.row_shards[index], self._trained[index]
        dtensor = UnevenDTensor.from_rows(rows, mesh, shards, shards.global_shape(owned.shape))
        sharded = nn.Parameter(dtensor, requires_grad=is_trained)
        if is_trained:
            self._expect_gradient(sharded)
        propagate_attributes(owned.param, sharded, self._format.own_attributes)
        return sharded

    def _expect_gradient(self, sharded: nn.Parameter) -> None:
        """Let `grad` have the dtype of the main gradient, which torch rejects otherwise."""
        if self._grad_dtype != sharded.dtype:
            sharded.grad_dtype = self._grad_dtype

    def _gathered(
        self, index: int, owned: OwnedParameter, weights: GroupWeights, owner: GradientOwner
    ) -> nn.Parameter:
        """What modules compute with, over a view of the gathered buffers."""
        is_trained, dtensor = self._trained[index], self.dtensors[index]
        views = [payload.gathered.view(index) for payload in weights.payloads]
        if dtensor is not None:
            param = nn.Parameter(dtensor.whole(views[0]), requires_grad=is_trained)
            mark_gathered(param, owner, index)
            # A DTensor has no memory but its part's.
            memory: Sequence[torch.Tensor] = [local_of(param)]
        else:
            bound = self._format.bind(views, index, owned.param)
            param = gathered_parameter(bound, is_trained, owner, index)
            memory = self._format.memory(param, index)
        for payload, part in zip(weights.payloads, memory, strict=True):
            payload.gathered.follow(part)
        propagate_attributes(self.sharded[index], param)
        return param

    def label(self, index: int) -> str:
        """What to call one of the parameters in a message."""
        return f"{self.names[index]} of {self._label.name}"

    def take_over(
        self, group: ShardedGroup, owned: Sequence[OwnedParameter], undo: ExitStack
    ) -> None:
        """Register the sharded parameters in place of the originals, which go out of use.

        Nothing that existed before the group is changed until then.

        Args:
            group: The group they are of.
            owned: The originals.
            undo: Has the originals be as they were. Modules are the caller's to restore.
        """
        for index, parameter in enumerate(owned):
            for original in (parameter.param, parameter.stood_in):
                if original is None:
                    continue
                with plain_attributes():
                    keep_hooks(original, undo)
                    move_hooks(original, self.sharded[index])
                mark_stale(original, group, index, "before fully_shard", undo)
        self.registrations.install(self.sharded)

    # -- trained or frozen --------------------------------------------------------------------

    @property
    def is_any_trained(self) -> bool:
        """Whether a parameter requires a gradient as things are now."""
        with plain_attributes():
            return any(map(requires_grad_at_once, self.sharded))

    def follow_trained(self) -> None:
        """Train or freeze gathered parameters as is said of sharded ones now."""
        with plain_attributes():
            trained = list(map(requires_grad_at_once, self.sharded))
            found = list(map(requires_grad_at_once, self.gathered))
        # Some may have been frozen while they were registered.
        if trained == self._trained == found:
            return
        self._trained = trained
        for is_trained, gathered in zip(trained, self.gathered, strict=True):
            if gathered.requires_grad != is_trained:
                gathered.requires_grad_(is_trained)

    def is_refrozen(self) -> bool:
        """Whether gathered parameters were frozen or unfrozen while they were registered.

        Between a forward and its backward `module.requires_grad_()` finds these.
        """
        with plain_attributes():
            return self._trained != list(map(requires_grad_at_once, self.gathered))

    def take_refrozen(self) -> None:
        """Train or freeze sharded parameters as was said of gathered ones."""
        for sharded, gathered in zip(self.sharded, self.gathered, strict=True):
            sharded.requires_grad_(gathered.requires_grad)

    def prepare_training(self, watch: Callable[[nn.Parameter, int], None]) -> None:
        """Be ready for gradients where none were expected at first.

        Args:
            watch: Registers what collects the gradient of a gathered parameter.
        """
        for index, param in enumerate(self.gathered):
            was_trained = param.requires_grad
            param.requires_grad_(True)  # else torch takes no hook
            watch(param, index)
            param.requires_grad_(was_trained)
            self._expect_gradient(self.sharded[index])

    # -- what was done to them from outside ---------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """Differ after any in-place operation that torch counts, also through `to_local()`."""
        with plain_attributes():
            # Local rows are looked up every time: who replaces `data` puts others there.
            rows = map(local_of, self.sharded)
            return (*map(version_at_once, self.sharded), *map(version_at_once, rows))

    def check_hooks(self) -> None:
        """See that no parameter has a hook that would never be called.

        Raises:
            RuntimeError: One has.
        """
        with plain_attributes():
            for index, param in enumerate(self.sharded):
                if hooks_at_once(param):
                    refusal = tensor_hook_rejection(self.label(index), param)
                    if refusal:
                        raise RuntimeError(refusal)

    def check_no_late_gradient(self) -> None:
        """See that no gradient came by another way than autograd, which nothing would reduce.

        Raises:
            RuntimeError: One was assigned to a gathered weight.
        """
        for index, param in enumerate(self.gathered):
            if param.grad is not None:
                raise RuntimeError(
                    f"a gradient was assigned to the gathered weight of {self.label(index)} "
                    "outside of autograd, where it is neither reduced nor stepped; modules that "
                    "make weight gradients later (Transformer Engine's delay_wgrad_compute) need a "
                    "schedule that says when all are there (ScheduledUnits); without one, turn "
                    "that off"
                )
