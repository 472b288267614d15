"""ParameterGroup: parameters of one unit that are alike, their flat buffers and DTensors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.comm.errors import Label
from megatron_fsdp_v2.dtensor.row_shards import Holders
from megatron_fsdp_v2.dtensor.tp_params import part_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of, plain_attributes
from megatron_fsdp_v2.layout.buffer_layout import Granularity
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.params.attributes import propagate_attributes
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, ShardGrid
from megatron_fsdp_v2.params.external_changes import ExternalChanges
from megatron_fsdp_v2.params.gathered_parameter import GatheredParameter, mark_gathered
from megatron_fsdp_v2.params.grads import GroupGrads
from megatron_fsdp_v2.params.parameter_hooks import keep_hooks, move_hooks, tensor_hook_rejection
from megatron_fsdp_v2.params.registration import OwnedParameter, Registrations, mark_stale
from megatron_fsdp_v2.params.sharded_grads import ShardedGrads
from megatron_fsdp_v2.params.weights import GroupWeights

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from megatron_fsdp_v2.comm.interface import Axis, Communicator, Work
    from megatron_fsdp_v2.layout.buffer_layout import BufferLayout
    from megatron_fsdp_v2.layout.placement import AxisPlacements
    from megatron_fsdp_v2.memory.allocator import Allocator

__all__ = ["GroupSpec", "ParameterGroup"]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Everything that parameters of one group have in common.

    Attributes:
        dtypes: Dtypes of weights and gradients.
        requires_grad: Whether they are trained.
        placements: Placements per mesh axis, outermost first.
        granularity: What a shard boundary must not cut.
        scale: Factor of a gradient's sum over data-parallel ranks.
        errors_on_missing_grad: Whether a parameter without gradient is an error or zero.
        reduces: Whether gradients are summed over data-parallel ranks.
    """

    dtypes: GroupDtypes
    requires_grad: bool
    placements: tuple[AxisPlacements, ...]
    granularity: Granularity
    scale: float
    errors_on_missing_grad: bool
    reduces: bool = True


class GradientWatcher(Protocol):
    """The unit that owns a group, as far as the group's gradients concern it."""

    def before_gradient(self, group: ParameterGroup) -> None:
        """Called for every gradient that arrives, before it is collected."""
        ...

    def reserve(self, group: ParameterGroup) -> None:
        """Called before the full gradient buffer is given memory."""
        ...


class ParameterGroup:
    """Parameters of one unit that share dtypes, `requires_grad` and mesh.

    At rest, modules hold `sharded_params`: DTensors over main weights. Between unshard and
    reshard they hold `unsharded_params`: plain parameters that are views of the gathered buffer
    and stay the same objects for the group's whole life, so that autograd finds what it saved.
    Units that share a tied parameter hold one group together: it is gathered from the first
    `unshard` to the last `reshard`.

    Attributes:
        name: For reports, such as `decoder.layers.3/0`.
        names: Parameter names relative to the unit.
        spec: What the parameters have in common.
        mesh: The data-parallel mesh.
        axes: Its axes as this rank sees them, outermost first.
        device: Where the buffers are.
        holders: Which ranks hold something of the model; set by the root.
        empty_ranks: Mesh coordinates of ranks that hold no row of this group.
        layout: Where they are in the flat buffer.
        weights: Main, model and gathered weights.
        grads: Gradient buffers; `None` for frozen parameters.
        param_grads: Their `param.grad`s; likewise.
        sharded_params: DTensor parameters, in the order of `names`.
        unsharded_params: What modules compute with, likewise: plain parameters, or DTensors over
            the tensor-parallel mesh where they were DTensors before.
        registrations: Where the parameters are registered.
        watcher: The unit that owns the group, weakly; set when it is made.
    """

    def __init__(
        self,
        name: str,
        owned: Sequence[OwnedParameter],
        spec: GroupSpec,
        layout: BufferLayout,
        mesh: DeviceMesh,
        axes: Sequence[Axis],
        device: torch.device,
        communicator: Communicator,
        allocator: Allocator,
    ) -> None:
        self.name = name
        self.watcher: Callable[[], GradientWatcher | None] = _nobody
        self._label = Label(name)
        communicator = communicator.labeled(self._label)
        self.names = [p.name for p in owned]
        self.spec = spec
        grid = ShardGrid.of(axes, [p.main_weight for p in spec.placements])
        self.layout = layout
        common = (name, self.layout, grid, spec.placements, spec.dtypes, device)
        self.weights = GroupWeights(*common, communicator, allocator)
        self.grads: GroupGrads | None = None
        self.param_grads: ShardedGrads | None = None
        self.mesh = mesh
        self.axes = tuple(axes)
        self.device = device
        self.holders = Holders(weakref.ref(self))
        self._row_shards = [
            grid.row_shards(self.layout, i, p.tensor, self.holders) for i, p in enumerate(owned)
        ]
        self._dtensors = [p.dtensor for p in owned]
        self.empty_ranks = grid.coordinates_of(self.layout.empty_shards())
        self.registrations = Registrations(owned)
        self.sharded_params = [self._shard(index, p) for index, p in enumerate(owned)]

        params, row_shards = self.sharded_params, self._row_shards

        # Not a method: a bound one would be a reference cycle, and outlive the model.
        def make_grads(spec: GroupSpec) -> tuple[GroupGrads, ShardedGrads]:
            grads = GroupGrads(*common, spec.scale, communicator, allocator, reduces=spec.reduces)
            return grads, ShardedGrads(params, grads, row_shards)

        self._make_grads = make_grads
        if spec.requires_grad:
            self.grads, self.param_grads = make_grads(spec)
        self.unsharded_params = [self._unsharded(index) for index in range(len(owned))]
        self._changes = ExternalChanges(
            self,
            self.sharded_params,
            self.unsharded_params,
            [self.weights.main.view(index) for index in range(len(owned))],
            self._row_shards,
            self.registrations,
        )
        self._trained = [param.requires_grad for param in self.unsharded_params]
        self._ref_count = 0
        self._gathering: Work | None = None
        self._refreshing: Work | None = None
        self._outer_work: Work | None = None
        self._refreshed_at: tuple[int, tuple[int, ...]] | None = None

    def take_over(self, owned: Sequence[OwnedParameter], undo: ExitStack) -> None:
        """Register the sharded parameters in place of the originals, which go out of use.

        Nothing that existed before the group is changed until then.

        Args:
            owned: What the group was made of.
            undo: Has the originals be as they were. Modules are the caller's to restore.
        """
        for index, parameter in enumerate(owned):
            for original in (parameter.param, parameter.stood_in):
                if original is None:
                    continue
                with plain_attributes():
                    keep_hooks(original, undo)
                    move_hooks(original, self.sharded_params[index])
                mark_stale(original, self, index, "before fully_shard", undo)
        self.registrations.install(self.sharded_params)

    def rename(self, name: str) -> None:
        """Take another name, also for the buffers and where a collective fails."""
        self.name = self._label.name = name
        grads = {} if self.grads is None else self.grads.temporaries()
        for kind, buffer in {**self.weights.temporaries(), **grads}.items():
            buffer.name = f"{name}/{kind}"

    def gather_in(self, group: dist.ProcessGroup | None) -> None:
        """Gather along the innermost axis in another group of its ranks; None for its own."""
        self.axes = (*self.axes[:-1], dataclasses.replace(self.axes[-1], gather_group=group))
        self.weights.gather_along(self.axes)

    def name_of(self, param: nn.Parameter) -> str:
        """What to call a parameter in a message: its name, and the group's."""
        for index, known in enumerate(self.sharded_params):
            if known is param:
                return self.label(index)
        return f"a parameter of {self.name}"

    def label(self, index: int) -> str:
        """What to call one of the parameters in a message."""
        return f"{self.names[index]} of {self.name}"

    def set_scale(self, scale: float) -> None:
        """Change the factor of the gradient sum from now on."""
        self.spec = dataclasses.replace(self.spec, scale=scale)
        if self.grads is not None:
            self.grads.scale = scale

    @property
    def main_weight(self) -> DataParallelBuffer:
        """What the optimizer steps."""
        return self.weights.main

    @property
    def model_weight(self) -> DataParallelBuffer:
        """What rests between uses, in the compute dtype."""
        return self.weights.model

    @property
    def main_grad(self) -> DataParallelBuffer | None:
        """The reduced gradient; `None` for frozen parameters."""
        return None if self.grads is None else self.grads.main

    def _shard(self, index: int, owned: OwnedParameter) -> nn.Parameter:
        """Copy this rank's rows of a parameter into the main weights and describe them."""
        local = self.weights.main.view(index)
        start, end = self.weights.main.rows(index)
        with torch.no_grad():
            local.copy_(part_of(owned.param)[start:end])
        shards = self._row_shards[index]
        mesh = self.mesh if owned.tensor is None else owned.tensor.mesh or self.mesh
        shape = shards.global_shape(owned.shape)
        dtensor = UnevenDTensor.from_rows(local, mesh, shards, shape)
        sharded = nn.Parameter(dtensor, requires_grad=self.spec.requires_grad)
        if self.spec.requires_grad:
            self._expect_gradient(sharded)
        propagate_attributes(owned.param, sharded)
        return sharded

    def _expect_gradient(self, sharded: nn.Parameter) -> None:
        """Let `grad` have the dtype of the main gradient, which torch rejects otherwise."""
        dtypes = self.spec.dtypes
        if dtypes.main_grad != dtypes.main_weight:
            sharded.grad_dtype = dtypes.main_grad

    def _unsharded(self, index: int) -> nn.Parameter:
        view, dtensor = self.weights.gathered.view(index), self._dtensors[index]
        if dtensor is None:
            param: nn.Parameter = GatheredParameter.of(view, self.spec.requires_grad, self, index)
        else:
            param = nn.Parameter(dtensor.whole(view), requires_grad=self.spec.requires_grad)
            mark_gathered(param, self, index)
        # A DTensor has no memory but its part's.
        self.weights.gathered.follow(param if dtensor is None else local_of(param))
        propagate_attributes(self.sharded_params[index], param)
        if self.grads is not None:
            self._collect_from(param, index)
        return param

    def _collect_from(self, param: nn.Parameter, index: int) -> None:
        # Weak, or parameter -> hook -> group -> parameter would outlive the model.
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            functools.partial(uncompiled(_collect), weakref.ref(self), index)
        )

    def unfreeze_if_trained(self) -> None:
        """Be ready for gradients, if parameters that were frozen at first are trained now."""
        if self.grads is not None or not any(param.requires_grad for param in self.sharded_params):
            return
        self.grads, self.param_grads = self._make_grads(self.spec)
        self.rename(self.name)
        for index, param in enumerate(self.unsharded_params):
            was_trained = param.requires_grad
            param.requires_grad_(True)  # else torch takes no hook
            self._collect_from(param, index)
            param.requires_grad_(was_trained)
            self._expect_gradient(self.sharded_params[index])

    # -- weights ------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether a unit has gathered weights installed, or on their way."""
        return self._ref_count > 0

    @property
    def is_gathered(self) -> bool:
        """Whether there are weights to compute with, here and now."""
        return not self.weights.is_temporary or (self.is_held and self._gathering is None)

    def gathered_name_at(self, tensor: torch.Tensor) -> str | None:
        """What to call the parameter that a tensor on the gathered buffer's storage begins in.

        Args:
            tensor: Any tensor; None is returned where it has another storage.
        """
        flat = self.weights.gathered.tensor
        if tensor.untyped_storage()._cdata != flat.untyped_storage()._cdata:
            return None
        first = tensor.storage_offset() * tensor.element_size() // flat.element_size()
        first -= int(flat.storage_offset())
        for index, slot in enumerate(self.layout.slots):
            if slot.offset <= first < slot.offset + slot.numel:
                return self.label(index)
        return f"a parameter of {self.name}"

    def unshard(self, weight_version: int, *, in_forward: bool, async_op: bool) -> None:
        """Start gathering for one more holder. Collective for the first one.

        Args:
            weight_version: Of the weights; see `is_stale`.
            in_forward: Whether to bring the weights up to date first. In a backward they have to
                be those of the forward.
            async_op: Whether to return before it is done.
        """
        if not self._ref_count:
            if in_forward:
                self.sync_external_changes()
                self.refresh(weight_version, async_op=False)
            self._gathering = self.weights.gather(async_op=async_op)
        self._ref_count += 1

    def wait_for_unshard(self) -> None:
        """Have gathered weights in place and registered, trained or frozen as is said now."""
        self.wait_for_refresh()
        if self._gathering is None:
            return
        self._gathering.wait()
        self._gathering = None
        with plain_attributes():
            self.unfreeze_if_trained()
            self._trained = [param.requires_grad for param in self.sharded_params]
            for trained, unsharded in zip(self._trained, self.unsharded_params, strict=True):
                if unsharded.requires_grad != trained:
                    unsharded.requires_grad_(trained)
        self.registrations.install(self.unsharded_params)

    def reshard(self) -> None:
        """Give up one hold; the last one drops the gathered weights."""
        self._ref_count -= 1
        if self._ref_count:
            return
        self.wait_for_refresh()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        elif self.is_refrozen():
            for sharded, unsharded in zip(self.sharded_params, self.unsharded_params, strict=True):
                sharded.requires_grad_(unsharded.requires_grad)
        self.registrations.install(self.sharded_params)
        if self.grads is not None:
            # What wrote gradients beside the compute stream may still be reading weights.
            self.grads.wait_for_writers()
        self.weights.release()

    def is_refrozen(self) -> bool:
        """Whether gathered parameters were frozen or unfrozen while they were registered.

        Between a forward and its backward `module.requires_grad_()` finds these.
        """
        return self._trained != [param.requires_grad for param in self.unsharded_params]

    def is_stale(self, weight_version: int) -> bool:
        """Whether main weights may have changed since the model weights were made from them.

        Version counters see in-place operations, also through `to_local()`; the weight version
        stands for what they do not see: fused and foreach optimizer steps.
        """
        return self._refreshed_at != (weight_version, self._versions())

    def refresh(self, weight_version: int, *, async_op: bool) -> None:
        """Bring the model weights up to date. Collective where it has to be.

        A cast of one's own shard is cheap and done every time. A gather is done when stale.
        """
        if not self.weights.is_refreshed_locally and not self.is_stale(weight_version):
            return
        self.wait_for_refresh()
        self._refreshing = self.weights.refresh(async_op=async_op)
        self._refreshed_at = (weight_version, self._versions())

    def wait_for_refresh(self) -> None:
        """Order what follows after a refresh under way."""
        if self._refreshing is not None:
            self._refreshing.wait()
            self._refreshing = None

    def _versions(self) -> tuple[int, ...]:
        with plain_attributes():
            return tuple(
                itertools.chain.from_iterable(
                    (param._version, local_of(param)._version) for param in self.sharded_params
                )
            )

    # -- parameters that were changed from outside ---------------------------------------------

    def sync_external_changes(self) -> None:
        """Take in what was done to parameters since they were sharded.

        Raises:
            ValueError: Shape, dtype or identity changed in a way that has no meaning here.
        """
        self._changes.sync()

    def is_replaced(self) -> bool:
        """Whether something else stands where one of the parameters belongs."""
        return self._changes.is_replaced()

    def show_sharded(self) -> None:
        """Register the sharded parameters, also while weights are gathered."""
        if self.is_held:
            self.registrations.install(self.sharded_params)

    def show_unsharded(self) -> None:
        """Register the gathered parameters again, if weights are gathered."""
        if self.is_held and self._gathering is None:
            self.registrations.install(self.unsharded_params)

    def check_hooks(self) -> None:
        """See that no parameter has a hook that would never be called.

        Raises:
            RuntimeError: One has.
        """
        with plain_attributes():
            for index, param in enumerate(self.sharded_params):
                if param._backward_hooks:
                    refusal = tensor_hook_rejection(self.label(index), param)
                    if refusal:
                        raise RuntimeError(refusal)

    # -- gradients ----------------------------------------------------------------------------

    def collect(self, index: int, param: nn.Parameter) -> None:
        """Move one parameter's fresh gradient into the flat buffer."""
        assert self.grads is not None
        grad = param.grad
        if grad is None:
            return
        param.grad = None
        dtensor = self._dtensors[index]
        if dtensor is not None:
            grad = dtensor.part_of_gradient(grad)
        elif isinstance(param, GatheredParameter) and param.grad_added_to_main_grad:
            # A kernel has written it already; what autograd brings is a placeholder, unless that
            # is zeros, added to what other uses of a tied parameter bring.
            param.grad_added_to_main_grad = False
            if not getattr(param, "zero_out_wgrad", False):
                return
        self._watch_gradient()
        # Of a backward that is differentiated again it has a history of its own.
        self.grads.add(index, grad.detach())

    def take_assigned(self) -> None:
        """Collect gradients that were assigned to gathered weights outside of autograd."""
        for index, param in enumerate(self.unsharded_params):
            if param.grad is not None:
                self.collect(index, param)

    def check_no_late_gradient(self) -> None:
        """See that no gradient came by another way than autograd, which nothing would reduce.

        Raises:
            RuntimeError: One was assigned to a gathered weight.
        """
        for index, param in enumerate(self.unsharded_params):
            if param.grad is not None:
                raise RuntimeError(
                    f"a gradient was assigned to the gathered weight of {self.label(index)} "
                    "outside of autograd, where it is neither reduced nor stepped; modules that "
                    "make weight gradients later (Transformer Engine's delay_wgrad_compute) need a "
                    "schedule that says when all are there (ScheduledUnits); without one, turn "
                    "that off"
                )

    def kernel_grad(self, index: int) -> torch.Tensor:
        """The gradient buffer's view of one parameter, for a kernel that adds to it by itself."""
        assert self.grads is not None
        self._watch_gradient()
        return self.grads.kernel_view(index)

    def _watch_gradient(self) -> None:
        watcher = self.watcher()
        if watcher is not None:
            watcher.before_gradient(self)
        self.before_first_grad()

    def before_first_grad(self) -> None:
        """Give the full gradient buffer memory, once an earlier reduction is done with it."""
        assert self.grads is not None
        if self.grads.is_being_reduced or not self.grads.is_live:
            watcher = self.watcher()
            if watcher is not None:
                watcher.reserve(self)
            self.grads.acquire()

    def reduce_inner(self, *, async_op: bool, is_final: bool) -> Work:
        """Issue the reduction along the inner axis. Collective.

        Args:
            async_op: Whether to return before it is done.
            is_final: Whether it ends in the main gradient, with no outer axis to follow.

        Raises:
            RuntimeError: A gradient is missing where that is an error.
        """
        assert self.grads is not None and self.param_grads is not None
        missing = self.missing_names() if self.grads.has_gradient else []
        if missing and self.spec.errors_on_missing_grad:
            raise RuntimeError(
                f"no gradient arrived for {', '.join(missing)} of unit {self.name}; freeze what "
                "is not trained, or wrap with on_missing_grad='zero'"
            )
        self.before_first_grad()
        self.grads.wait_for_writers()
        self.grads.fill_missing()
        if self._outer_work is not None:
            # An earlier reduction of this backward may still be reading the partial shard.
            self._outer_work.wait()
            self._outer_work = None
        accumulate = self.param_grads.settle() if is_final else False
        work = self.grads.reduce_inner(accumulate=accumulate, async_op=async_op)
        if is_final:
            self.param_grads.install(accumulated=accumulate)
        return work

    def reduce_outer(self, *, async_op: bool) -> Work:
        """Issue the reduction along the outer axis. Collective."""
        assert self.grads is not None and self.param_grads is not None
        accumulate = self.param_grads.settle()
        self._outer_work = self.grads.reduce_outer(accumulate=accumulate, async_op=async_op)
        self.param_grads.install(accumulated=accumulate)
        return self._outer_work

    @property
    def is_trained(self) -> bool:
        """Whether a parameter requires a gradient as things are now."""
        return self.grads is not None and any(p.requires_grad for p in self.sharded_params)

    def missing_names(self) -> list[str]:
        """Names of trained parameters that no gradient arrived for since the last reduction."""
        assert self.grads is not None
        return [
            name
            for name, filled, param in zip(
                self.names, self.grads.filled, self.sharded_params, strict=True
            )
            if not filled and param.requires_grad
        ]


def _nobody() -> None:
    """Who watches a group that no unit owns yet."""


def _collect(group_ref: weakref.ref[ParameterGroup], index: int, param: nn.Parameter) -> None:
    group = group_ref()
    if group is not None:
        group.collect(index, param)
