"""ParameterGroup: parameters of one unit that are alike, their flat buffers and DTensors."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.comm.errors import Label
from megatron_fsdp_v2.dtensor.row_shards import Holders
from megatron_fsdp_v2.layout.buffer_layout import Granularity
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, FlatSpec, Offload, ShardGrid
from megatron_fsdp_v2.params.external_changes import ExternalChanges
from megatron_fsdp_v2.params.formats import DenseFormat, WeightFormat, WeightUse
from megatron_fsdp_v2.params.grads import GroupGrads
from megatron_fsdp_v2.params.members import Members
from megatron_fsdp_v2.params.registration import OwnedParameter
from megatron_fsdp_v2.params.weights import GroupWeights

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from megatron_fsdp_v2.comm.interface import Axis, Communicator
    from megatron_fsdp_v2.layout.buffer_layout import BufferLayout
    from megatron_fsdp_v2.layout.placement import AxisPlacements
    from megatron_fsdp_v2.memory.allocator import Allocator
    from megatron_fsdp_v2.memory.observer import Observer
    from megatron_fsdp_v2.params.grads import Reductions

__all__ = ["GroupSpec", "ParameterGroup", "write_stale"]


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
        format_type: What bytes their model weights are.
        offload: Where main weights and gradients are instead of on the device; None for there.
    """

    dtypes: GroupDtypes
    requires_grad: bool
    placements: tuple[AxisPlacements, ...]
    granularity: Granularity
    scale: float
    errors_on_missing_grad: bool
    reduces: bool = True
    format_type: type[WeightFormat] = DenseFormat
    offload: Offload | None = None

    @property
    def smallest_itemsize(self) -> float:
        """Bytes of the smallest element; what is aligned in these elements is so in all."""
        packed = self.format_type.itemsize(self.dtypes) / self.format_type.packing
        return min(self.dtypes.smallest_itemsize, packed)


class GradientWatcher(Protocol):
    """The unit that owns a group, as far as the group's gradients concern it."""

    def before_gradient(self, group: ParameterGroup) -> Reductions:
        """Called for every gradient that arrives, before it is collected.

        Returns:
            The queue of its reductions.
        """
        ...


class ParameterGroup:
    """Parameters of one unit that share dtypes, `requires_grad` and mesh.

    Puts together what does the work: `weights` know what is gathered, `grads` what becomes of a
    gradient, `members` which parameter objects modules hold. At rest, modules hold
    `sharded_params`: DTensors over main weights. Between unshard and reshard they hold
    `unsharded_params`.

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
        grads: Their gradients; `None` for frozen parameters.
        members: The parameters in both forms.
        changes: Finds what was done to parameters from outside.
        sharded_params: DTensor parameters, in the order of `names`.
        unsharded_params: What modules compute with, likewise; see `Members.gathered`.
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
        self.spec = spec
        self.mesh = mesh
        self.axes = tuple(axes)
        self.device = device
        self.layout = layout
        self._label = Label(name)
        communicator = communicator.labeled(self._label)
        grid = ShardGrid.of(axes, [p.main_weight for p in spec.placements])
        flat = FlatSpec(name, layout, grid, spec.placements, spec.dtypes, device, spec.offload)
        self.weights = GroupWeights(flat, spec.format_type(spec.dtypes), communicator, allocator)
        self.holders = Holders(weakref.ref(self))
        self.empty_ranks = grid.coordinates_of(layout.empty_shards())
        members = self.members = Members(
            self,
            self._label,
            owned,
            [grid.row_shards(layout, i, p.tensor, self.holders) for i, p in enumerate(owned)],
            self.weights,
            mesh,
            requires_grad=spec.requires_grad,
            grad_dtype=spec.dtypes.main_grad,
        )
        self._make_grads = functools.partial(
            GroupGrads,
            flat,
            members,
            communicator,
            allocator,
            reduces=spec.reduces,
            errors_on_missing=spec.errors_on_missing_grad,
        )
        self.grads = self._make_grads(spec.scale) if spec.requires_grad else None
        if self.grads is not None:
            for index, param in enumerate(members.gathered):
                self._collect_from(param, index)
        self.names, self.registrations = members.names, members.registrations
        self.sharded_params, self.unsharded_params = members.sharded, members.gathered
        self.changes = ExternalChanges(self, members)
        self._refreshed_at: tuple[int, tuple[int, ...]] | None = None
        self._written_at: tuple[int, tuple[int, ...]] | None = None

    def rename(self, name: str) -> None:
        """Take another name, also for the buffers and where a collective fails."""
        self.name = self._label.name = name
        temporaries = self.weights.temporaries()
        if self.grads is not None:
            self.grads.name = name
            temporaries = {**temporaries, **self.grads.temporaries()}
        for kind, buffer in temporaries.items():
            buffer.name = f"{name}/{kind}"

    def report_to(self, observer: Observer) -> None:
        """Have the events of its buffers go to an observer."""
        self.weights.observer = observer
        if self.grads is not None:
            self.grads.buffers.observer = observer

    def gather_in(self, group: dist.ProcessGroup | None) -> None:
        """Gather along the innermost axis in another group of its ranks; None for its own."""
        self.axes = (*self.axes[:-1], dataclasses.replace(self.axes[-1], gather_group=group))
        self.weights.gather_along(self.axes)

    def set_scale(self, scale: float) -> None:
        """Change the factor of the gradient sum from now on."""
        self.spec = dataclasses.replace(self.spec, scale=scale)
        if self.grads is not None:
            self.grads.scale = scale

    def name_of(self, param: torch.Tensor) -> str:
        """What to call a sharded parameter in a message: its name, and the group's."""
        known = (i for i, own in enumerate(self.sharded_params) if own is param)
        index = next(known, None)
        return f"a parameter of {self.name}" if index is None else self.label(index)

    def holds(self, param: torch.Tensor) -> bool:
        """Whether it is one of the sharded parameters."""
        return any(param is known for known in self.sharded_params)

    def before_direct_gradient(self) -> None:
        """Autograd is about to add to the `grad` of a sharded parameter, which may be in use."""
        if self.grads is not None:
            self.grads.before_direct_gradient()

    def label(self, index: int) -> str:
        """What to call one of the parameters in a message."""
        return self.members.label(index)

    def gathered_name_at(self, tensor: torch.Tensor) -> str | None:
        """What to call the parameter that a tensor on the gathered buffer's storage begins in.

        Args:
            tensor: Any tensor; None is returned where it has another storage.
        """
        flat = self.weights.gathered.tensor
        if tensor.untyped_storage()._cdata != flat.untyped_storage()._cdata:
            return None
        first = tensor.storage_offset() * tensor.element_size() // flat.element_size()
        place = (first - int(flat.storage_offset())) * self.weights.gathered.packing
        index = self.layout.index_at(place)
        return f"a parameter of {self.name}" if index is None else self.label(index)

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
        """The reduced gradient; None where no parameter has one, and so none of them has memory."""
        return None if self.grads is None else self.grads.main

    # -- weights ------------------------------------------------------------------------------

    def unshard(
        self, uses: WeightUse, weight_version: int, *, in_forward: bool, async_op: bool
    ) -> None:
        """Start gathering for one more holder. Collective for the first one.

        Args:
            uses: What the weights are to be used for.
            weight_version: Of the weights; see `is_stale`.
            in_forward: Whether to bring the weights up to date first. In a backward they have to
                be those of the forward.
            async_op: Whether to return before it is done.
        """
        if in_forward and not self.weights.is_held:
            self.changes.sync()
            self.refresh(weight_version, async_op=False)
        self.weights.hold(uses, async_op=async_op)

    def wait_for_unshard(self) -> None:
        """Have gathered weights in place and registered, trained or frozen as is said now."""
        if self.weights.wait():
            if self.grads is None:
                self.unfreeze_if_trained()
            self.members.follow_trained()
            if self.weights.format.prepares:
                self.weights.format.prepare(self.weights.uses)
            self.registrations.install(self.unsharded_params)

    def reshard(self) -> None:
        """Give up one hold; the last one drops the gathered weights."""
        if not self.weights.let_go():
            return
        if not self.weights.wait() and self.members.is_refrozen():
            self.members.take_refrozen()
        self.registrations.install(self.sharded_params)
        if self.grads is not None:
            # What wrote gradients beside the compute stream may still be reading weights.
            self.grads.buffers.wait_for_writers()
        if self.weights.gathers_for_use:
            if self.weights.format.prepares:
                self.weights.format.forget()
            self.weights.release()

    def is_stale(self, weight_version: int) -> bool:
        """Whether main weights may have changed since the model weights were made from them.

        Version counters see in-place operations, also through `to_local()`; the weight version
        stands for what they do not see: fused and foreach optimizer steps.
        """
        return self._refreshed_at != (weight_version, self.members.versions())

    def note_unstepped(self, weight_version: int) -> None:
        """Note that the weight version changed, and not for these weights."""
        if self._refreshed_at is not None:
            self._refreshed_at = (weight_version, self._refreshed_at[1])

    def refresh(self, weight_version: int, *, async_op: bool) -> None:
        """Bring the model weights up to date. Collective where it has to be.

        A cast of one's own shard is cheap and done every time. A gather is done when stale.
        """
        if self.weights.is_refreshed_locally or self.is_stale(weight_version):
            is_written = self._written_at == (weight_version, self.members.versions())
            self.weights.refresh(is_written=is_written, async_op=async_op)
            self.note_refreshed(weight_version)

    def note_written(self, weight_version: int) -> None:
        """The format has written the main weights as they are now, and nothing is gathered yet."""
        self._written_at = (weight_version, self.members.versions())

    def note_refreshed(self, weight_version: int) -> None:
        """The model weights are those of the main weights as they are now."""
        self._refreshed_at = (weight_version, self.members.versions())

    def show_sharded(self) -> bool:
        """Register the sharded parameters, also while weights are gathered.

        Returns:
            Whether others stood in their places.
        """
        others = next(self.registrations.unexpected(self.sharded_params), None)
        if others is None or not self.weights.is_held:
            return False
        self.registrations.install(self.sharded_params)
        return True

    def show_unsharded(self) -> None:
        """Register the gathered parameters again, if weights are gathered."""
        if self.weights.is_held and not self.weights.is_gathering:
            self.registrations.install(self.unsharded_params)

    # -- gradients ----------------------------------------------------------------------------

    @property
    def is_trained(self) -> bool:
        """Whether a parameter requires a gradient as things are now."""
        return self.grads is not None and self.members.is_any_trained

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients arrived that are not in the main gradient, and not on their way."""
        grads = self.grads
        return grads is not None and (grads.has_partial or grads.buffers.has_gradient)

    def unfreeze_if_trained(self) -> None:
        """Be ready for gradients, if parameters that were frozen at first are trained now."""
        if self.grads is None and self.members.is_any_trained:
            # An evaluation may be what finds it, and trainings write what is made here.
            with torch.inference_mode(False):
                self.grads = self._make_grads(self.spec.scale)
                self.rename(self.name)
                self.report_to(self.weights.observer)
                self.members.prepare_training(self._collect_from)

    def _collect_from(self, param: nn.Parameter, index: int) -> None:
        # Weak, or parameter -> hook -> group -> parameter would outlive the model.
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            functools.partial(uncompiled(_collect), weakref.ref(self), index)
        )

    def collect(self, index: int, param: nn.Parameter) -> None:
        """Move one gathered parameter's fresh gradient into the flat buffer."""
        grads = self.grads
        assert grads is not None
        grad = grads.fresh(index, param)
        if grad is not None:
            self._begin_gradients(grads)
            grads.buffers.add(index, grad)

    def take_assigned(self) -> None:
        """Collect gradients that were assigned to gathered weights outside of autograd."""
        for index, param in enumerate(self.unsharded_params):
            if param.grad is not None:
                self.collect(index, param)

    def kernel_grad(self, index: int) -> torch.Tensor:
        """The gradient buffer's view of one parameter, for a kernel that adds to it by itself."""
        assert self.grads is not None
        self._begin_gradients(self.grads)
        return self.grads.buffers.kernel_view(index)

    def _begin_gradients(self, grads: GroupGrads) -> None:
        unit = self.watcher()
        if unit is None:
            raise RuntimeError(f"a gradient arrived for {self.name}, whose module is gone")
        grads.begin(unit.before_gradient(self))


def write_stale(groups: Iterable[ParameterGroup], weight_version: int) -> None:
    """Have formats that talk to other ranks write all that is stale, in one call for each mesh.

    Such a call takes one collective, and one for every group would wait on the compute stream for
    as many. Collective.

    Args:
        groups: Those of a root.
        weight_version: Of the weights; see `ParameterGroup.is_stale`.
    """
    alike: dict[tuple[object, ...], list[ParameterGroup]] = {}
    for group in groups:
        weights = group.weights
        if not weights.format.communicates or weights.is_held:
            continue
        group.changes.sync()
        if group.is_stale(weight_version):
            key = type(weights.format), *(axis.group for axis in weights.cut_axes)
            alike.setdefault(key, []).append(group)
    for several in alike.values():
        first = several[0].weights
        first.format.write([group.weights.to_write() for group in several], first.cut_axes)
        for group in several:
            group.note_written(weight_version)


def _nobody() -> None:
    """Who watches a group that no unit owns yet."""


def _collect(group_ref: weakref.ref[ParameterGroup], index: int, param: nn.Parameter) -> None:
    group = group_ref()
    # Megatron's and Transformer Engine's mark of a gradient that a module's own call makes after
    # the backward: what autograd brings may be memory that nobody has written yet.
    if group is not None and not getattr(param, "skip_backward_post_hook", False):
        group.collect(index, param)
