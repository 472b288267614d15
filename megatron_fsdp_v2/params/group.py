"""ParameterGroup: parameters of one unit with equal properties, their flat buffers and DTensors."""

from __future__ import annotations

import dataclasses
import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2.comm.interface import DONE, Axis, Communicator, Work
from megatron_fsdp_v2.dtensor.row_shards import GroupInfo, RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer
from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.params.buffer import BufferContext, DataParallelBuffer, GroupSpec
from megatron_fsdp_v2.params.formats import GroupWrite, WeightFormat
from megatron_fsdp_v2.params.gathered import gathered_info
from megatron_fsdp_v2.params.gradients import GroupGrads
from megatron_fsdp_v2.params.parameters import GroupParameters, OwnedParameter


@dataclass(slots=True)
class Payload:
    """One payload of a group's weights; a format has one or several.

    Attributes:
        uses: Uses that the payload is gathered for.
        model: Model weight, kept between uses.
        gathered: Gathered weight: a temporary buffer if `model` is sharded, else `model` itself.
    """

    uses: WeightUse
    model: DataParallelBuffer
    gathered: DataParallelBuffer


class WeightSource(enum.Enum):
    """What weights are gathered from."""

    MAIN = "main weight"
    """The main weight itself: gathered, or used as it is."""
    CAST = "main weight, cast"
    """The main weight, cast into this rank's piece of the gathered weight before the gather."""
    MODEL = "model weight"
    """A model weight, written and perhaps gathered from the main weight when that changed."""


class ParameterGroup:
    """Parameters of one unit that share dtypes, `requires_grad` and mesh.

    Modules register `sharded_params`, DTensors over main weights, except between unshard and
    reshard, when they register `unsharded_params`, views of gathered weights. Units that share a
    tied parameter share its group: weights are gathered from the first `unshard` to the last
    `reshard`.

    Transfers between buffers (see [Note: the buffers of a group] in `params/buffer.py`):

    - `refresh`: main weight -> model weight, if these are two buffers;
    - `unshard`: model weight -> gathered weight, or main weight -> gathered weight if main and
      model weight would have the same placement (`WeightSource`);
    - `grads.reduce`: full gradient -> main gradient, or with two axes -> partial gradient;
    - `grads.reduce_outer`: partial gradient -> main gradient.

    A format that communicates when it writes, or that has several payloads, always keeps model
    weights.

    Attributes:
        names: Parameter names relative to the unit.
        info: Information about the group for its sharded parameters.
        layout: Positions of the parameters in the flat buffer.
        format: Writes model weights and binds them to modules.
        main_weight: Buffer that the optimizer steps.
        payloads: Model weight and gathered weight of every payload of the format.
        gathers_for_use: Whether every use needs a gather (ZeRO-3).
        source: What weights are gathered from.
        is_refreshed_locally: Whether `refresh` is cheap and needs no communication.
        grads: Gradients of the group. Those of frozen parameters have no memory.
        parameters: Sharded and gathered parameters, and the modules that register them.
        sharded_params: DTensor parameters, in the order of `names`.
        unsharded_params: Gathered parameters, in the order of `names`; see
            `GroupParameters.gathered`.
    """

    def __init__(
        self,
        name: str,
        owned: Sequence[OwnedParameter],
        spec: GroupSpec,
        format_type: type[WeightFormat],
        layout: BufferLayout,
        device: torch.device,
        communicator: Communicator,
        allocator: Allocator,
    ) -> None:
        self.layout = layout
        owner = weakref.ref(self)
        self.info = GroupInfo(name, owner, functools.partial(_before_grad_accumulation, owner))
        self._context = BufferContext(self.info, layout, spec, device, communicator, allocator)
        self.format = format_type(spec.dtypes)
        self._make_weights()
        strides = spec.grid.strides
        row_shards = [
            RowShards(layout.row_ranges(i), strides, p.tensor, info=self.info, name=p.name)
            for i, p in enumerate(owned)
        ]
        self.parameters = GroupParameters(
            self.main_weight,
            [payload.gathered for payload in self.payloads],
            self.format,
            functools.partial(_kernel_grad, owner),
            owned,
            row_shards,
        )
        self.names = self.parameters.names
        self.sharded_params = self.parameters.sharded
        self.unsharded_params = self.parameters.gathered
        self.grads = GroupGrads(self.parameters, self._context)
        self._reference_count = 0
        # Gathers to wait for; None if no gather is under way.
        self._gathering: list[Work] | None = None
        self._refreshing = DONE
        self._refreshed_at: tuple[int, tuple[int, ...]] | None = None
        self._written_at: tuple[int, tuple[int, ...]] | None = None
        # Version counters of the values that gathered weights have.
        self._values = self.parameters.versions()

    def _make_weights(self) -> None:
        """Make the buffers of weights, and choose what they are gathered from."""
        context, weight_format = self._context, self.format
        spec, dtype = context.spec, weight_format.payload_dtype
        main = [p.main_weight for p in spec.placements]
        model = [p.model_weight for p in spec.placements]
        grid, main_dtype = spec.grid, spec.dtypes.main_weight
        self.gathers_for_use = grid.span(model).count < grid.num_slices
        self.single_payload = len(weight_format.payloads) == 1
        is_written_locally = grid.span(model) == grid.span(main) and not weight_format.communicates
        self.is_refreshed_locally = is_written_locally
        self.source = WeightSource.MODEL
        if is_written_locally:
            if spec.offload is None and dtype == main_dtype:
                self.source = WeightSource.MAIN
            elif self.single_payload and self.gathers_for_use:
                self.source = WeightSource.CAST
            else:
                self.is_refreshed_locally = spec.offload is None
        memory = context.main_memory(grid.span(main), main_dtype)
        self.main_weight = DataParallelBuffer(context, main, memory)
        self.payloads: list[Payload] = []
        replicated = [Placement.REPLICATE] * len(model)
        packing = weight_format.packing
        for kind, uses in weight_format.payloads.items():
            kept = self.main_weight
            if self.source is WeightSource.MODEL:
                numel = grid.span(model).count * context.layout.shard_numel // packing
                tensor = torch.zeros(numel, dtype=dtype, device=context.device)
                kept = DataParallelBuffer(context, model, tensor, packing=packing)
            gathered = kept
            if self.gathers_for_use:
                gathered = context.temporary(
                    kind, BufferUse.GATHERED, replicated, dtype, packing=packing
                )
            self.payloads.append(Payload(uses, kept, gathered))

    # -- properties ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the group for reports, such as `decoder.layers.3/0`."""
        return self.info.name

    @property
    def spec(self) -> GroupSpec:
        """Properties that all parameters share."""
        return self._context.spec

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes of the mesh as this rank sees them, outermost first."""
        return self.spec.grid.axes

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self._context.device

    @property
    def sharded_axes(self) -> Sequence[Axis]:
        """Axes along which a format communicates: the axes that shard main weights."""
        grid = self.spec.grid
        axes = [axis.for_gathers() for axis in grid.axes]
        cut = [axis for axis, parts in zip(axes, grid.parts, strict=True) if parts > 1]
        return cut or axes[-1:]

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks hold the same rows of main weights."""
        grid = self.spec.grid
        return any(parts < axis.size for axis, parts in zip(grid.axes, grid.parts, strict=True))

    @property
    def model_weight(self) -> DataParallelBuffer:
        """Model weight of the first payload."""
        return self.payloads[0].model

    @property
    def gathered_weight(self) -> DataParallelBuffer:
        """Gathered weight of the first payload."""
        return self.payloads[0].gathered

    @property
    def main_grad(self) -> DataParallelBuffer | None:
        """The reduced gradient; None if no parameter has a gradient, so that it has no memory."""
        return self.grads.main

    @property
    def gathered_nbytes(self) -> int:
        """Bytes that one use gathers: the larger of a forward's and a backward's."""
        if not self.gathers_for_use:
            return 0
        return max(
            sum(payload.gathered.nbytes for payload in self.payloads if payload.uses & use)
            for use in (WeightUse.FORWARD, WeightUse.BACKWARD)
        )

    def temporaries(self) -> dict[str, TemporaryBuffer]:
        """Return the temporary memory of its buffers, by kind."""
        buffers = (*(payload.gathered for payload in self.payloads), *self.grads.buffers())
        memories = (buffer.memory for buffer in buffers)
        return {m.name.rpartition("/")[2]: m for m in memories if m is not None}

    def join(
        self, name: str, communicator: Communicator, allocator: Allocator, observer: Observer
    ) -> None:
        """Join a root: use its communicator, allocator and observer, under a new name.

        Args:
            name: New name of the group, for its buffers and for errors of collectives.
            communicator: Issues collectives from now on.
            allocator: Allocator of temporary buffers; it takes over the existing ones.
            observer: Receives the events of the group's buffers.
        """
        self.info.name = name
        self.replace_communicator(communicator)
        self._context.allocator, self._context.observer = allocator, observer
        for kind, memory in self.temporaries().items():
            memory.name = f"{name}/{kind}"
            allocator.join(memory)

    def replace_communicator(self, communicator: Communicator) -> Communicator:
        """Replace the communicator, and return the previous one."""
        before, self._context.comm = self._context.comm, communicator
        return before

    def set_gather_group(self, group: dist.ProcessGroup | None) -> None:
        """Set the process group of gathers along the innermost axis; None for the axis's own."""
        axes = (*self.axes[:-1], dataclasses.replace(self.axes[-1], gather_group=group))
        self.change_spec(grid=dataclasses.replace(self.spec.grid, axes=axes))

    def change_spec(self, **changes: Any) -> None:
        """Change properties of the group, from its next gather or reduction on."""
        self._context.spec = dataclasses.replace(self.spec, **changes)
        self._context.transfers.clear()

    def gathered_name_at(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the parameter that a view of the gathered buffer begins in.

        Args:
            tensor: Any tensor. A tensor on another storage returns None.
        """
        flat = self.gathered_weight.tensor
        if tensor.untyped_storage()._cdata != flat.untyped_storage()._cdata:
            return None
        first = tensor.storage_offset() * tensor.element_size() // flat.element_size()
        place = (first - int(flat.storage_offset())) * self.gathered_weight.packing
        index = self.layout.index_at(place)
        return f"a parameter of {self.name}" if index is None else self.parameters.label(index)

    # -- gathered weights ---------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether a unit has the group unsharded, or a gather for it is under way."""
        return self._reference_count > 0

    @property
    def has_copy(self) -> bool:
        """Whether modules compute with a copy of main weights, not with main weights themselves."""
        return self.gathers_for_use or self.source is not WeightSource.MAIN

    @property
    def is_ready(self) -> bool:
        """Whether full weights are available for computation now."""
        return not self.gathers_for_use or (self._reference_count > 0 and self._gathering is None)

    def lacks(self, uses: WeightUse) -> bool:
        """Return whether a payload for these uses is not gathered."""
        return any(p.uses & uses and not p.gathered.is_live for p in self.payloads)

    def unshard(
        self, uses: WeightUse, weight_version: int, *, refreshes: bool, async_op: bool
    ) -> None:
        """Add a reference, and start gathering. Collective for the first reference.

        Args:
            uses: Uses to gather for.
            weight_version: Current weight version; see `is_stale`.
            refreshes: Whether to refresh stale weights first.
            async_op: Whether to return before the gather is done.
        """
        if not self._reference_count:
            if refreshes:
                self.parameters.sync()
                # The gathers of `gather` follow in the same stream; without streams they would not.
                is_queued = async_op and self._context.comm.has_streams
                self.refresh(weight_version, async_op=is_queued)
            elif self.source is not WeightSource.MODEL:
                self.note_values(self.parameters.versions())
            self._gathering = []
        try:
            self.gather(uses, async_op=async_op)
        except Exception:
            if not self._reference_count:
                # A later gather skips buffers that have memory.
                self._wait()
                self._drop_gathered()
            raise
        self._reference_count += 1

    def note_values(self, versions: tuple[int, ...]) -> None:
        """Advance the version counters of gathered weights if their values change.

        As in an unsharded model, a backward then raises an error if a weight that autograd saved
        was loaded or written since its forward.

        Args:
            versions: Version counters of the main weights with these values.
        """
        if versions != self._values:
            self._values = versions
            self.parameters.advance_versions()

    def gather(self, uses: WeightUse, *, async_op: bool) -> None:
        """Start gathers of the payloads that these uses need and lack. Collective."""
        if not self.gathers_for_use:
            return
        for payload in self.payloads:
            gathered = payload.gathered
            # `single_payload` first: operators of `enum.Flag` are slow Python code.
            if gathered.is_live or not (self.single_payload or payload.uses & uses):
                continue
            source, write = payload.model, None
            if self.source is WeightSource.CAST:
                gathered.take()
                source = gathered.part(self.main_weight.placements)
                write = functools.partial(self.write_weights, [source.tensor])
            work = source.redistribute(gathered, async_op=async_op, before=write)
            if self._gathering is None:
                self._gathering = []
            self._gathering.append(work)

    def write_weights(self, payloads: Sequence[torch.Tensor]) -> None:
        """Write payloads from main weights. Collective if the format communicates.

        Args:
            payloads: One flat tensor per payload of the format, for the slices that this rank holds
                of main weights.
        """
        part = GroupWrite(self.format, self.main_weight, payloads)
        self.format.write([part], self.sharded_axes)

    def wait_for_unshard(self) -> None:
        """Wait for gathers and register the gathered parameters, with current `requires_grad`."""
        if not self._wait():
            return
        parameters = self.parameters
        if self.gathers_for_use:
            try:
                for payload in self.payloads:
                    payload.gathered.return_to_saved_views()
            except RuntimeError:
                # For `reshard`: the gathered parameters are not registered.
                self._gathering = []
                raise
            parameters.mark_live()
        parameters.copy_requires_grad_to_gathered()
        if self.format.prepares:
            uses = WeightUse(0)
            for payload in self.payloads:
                if payload.gathered.is_live:
                    uses |= payload.uses
            self.format.prepare(uses)
            parameters.note_written()
        parameters.swap(parameters.sharded, parameters.gathered)

    def _wait(self) -> bool:
        """Wait for refreshes and gathers; return whether there were gathers to wait for."""
        if self._refreshing is not DONE:
            self.wait_for_refresh()
        if self._gathering is None:
            return False
        for work in self._gathering:
            work.wait()
        self._gathering = None
        return True

    def reshard(self) -> str:
        """Drop a reference; free the gathered weights with the last one.

        Returns:
            The name of a gathered weight that was changed in place, which is lost now, or "".
        """
        self._reference_count -= 1
        if self._reference_count:
            return ""
        parameters = self.parameters
        if written := parameters.find_written():
            parameters.note_written()
        if not self._wait() and parameters.has_changed_requires_grad():
            parameters.copy_requires_grad_to_sharded()
        parameters.swap(parameters.gathered, parameters.sharded)
        # Side streams that wrote gradients may still be reading weights.
        self.grads.wait_for_writers()
        if self.gathers_for_use and self.format.prepares:
            self.format.forget()
        self._drop_gathered()
        return written

    def _drop_gathered(self) -> None:
        if self.gathers_for_use:
            self.parameters.mark_freed()
            for payload in self.payloads:
                payload.gathered.drop()

    def abandon(self) -> None:
        """Drop gathers and reductions under way, and gradients. Waits for them, ignoring errors.

        The process groups were aborted or have failed. The values of main weights are kept.
        """
        for work in (self._refreshing, *self.grads.under_way):
            with suppress(RuntimeError):
                work.wait()
        self._refreshing = DONE
        self.settle()
        self.grads.abandon()
        for param in self.sharded_params:
            param.grad = None

    def settle(self) -> None:
        """Free gathered weights after an exception in a gather or a free.

        Python may raise KeyboardInterrupt between any two operations.
        """
        for work in self._gathering or ():
            with suppress(RuntimeError):
                work.wait()
        self._gathering, self._reference_count = None, 0
        self.parameters.swap(self.parameters.gathered, self.parameters.sharded)
        if self.gathers_for_use and self.format.prepares:
            self.format.forget()
        self._drop_gathered()

    # -- model weights ------------------------------------------------------------------------

    def is_stale(self, weight_version: int) -> bool:
        """Return whether main weights may have changed since the last refresh.

        Version counters detect in-place operations, also through `to_local()`; the weight version
        covers changes that no counter detects: fused and foreach optimizer steps.
        """
        return self._refreshed_at != (weight_version, self.parameters.versions())

    def has_counted_writes(self) -> bool:
        """Return whether version counters show that main weights changed since the last refresh."""
        return self._refreshed_at is None or self._refreshed_at[1] != self.parameters.versions()

    def refresh(self, weight_version: int, *, async_op: bool) -> None:
        """Refresh the model weights from main weights. Collective unless `is_refreshed_locally`.

        A cast of this rank's shard is cheap and done on every call. A gather is issued only if the
        weights are stale.

        Args:
            weight_version: Current weight version; see `is_stale`.
            async_op: Whether to return before the gather is done. Ignored with several payloads.
        """
        if not (self.is_refreshed_locally or self.is_stale(weight_version)):
            return
        versions = weight_version, self.parameters.versions()
        if self.source is WeightSource.MODEL:
            self.wait_for_refresh()
            if self._written_at != versions:
                self.format.write([self.to_write()], self.sharded_axes)
            for payload in self.payloads:
                own = payload.model.part(self.main_weight.placements)
                if own.span != payload.model.span:
                    is_async = async_op and self.single_payload
                    self._refreshing = own.redistribute(payload.model, async_op=is_async)
        self._refreshed_at = versions
        self.note_values(versions[1])

    def note_refreshed(self, weight_version: int) -> None:
        """Mark the model weights as equal to the current main weights."""
        self._refreshed_at = (weight_version, self.parameters.versions())

    def wait_for_refresh(self) -> None:
        """Wait for a refresh under way."""
        self._refreshing.wait()
        self._refreshing = DONE

    def to_write(self) -> GroupWrite[WeightFormat]:
        """Return the main weights and payloads for `WeightFormat.write`."""
        main = self.main_weight
        pieces = [payload.model.piece(main.span) for payload in self.payloads]
        return GroupWrite(self.format, main, pieces)

    def note_written(self, weight_version: int) -> None:
        """Mark the current main weights as written by the format, and not gathered yet."""
        self._written_at = (weight_version, self.parameters.versions())

    # -- registered parameters ----------------------------------------------------------------

    def show_sharded(self, module: nn.Module) -> bool:
        """Register the sharded parameters on a module where it registers gathered ones.

        Returns:
            Whether it did.
        """
        params = self.parameters
        return self.is_held and params.swap(params.gathered, params.sharded, module)

    def show_gathered(self, module: nn.Module) -> None:
        """Register the gathered parameters on a module again, if weights are gathered."""
        if self.is_held and self._gathering is None:
            self.parameters.swap(self.sharded_params, self.unsharded_params, module)

    # -- ties -----------------------------------------------------------------------------------

    def check_tie(self, tie: str, spec: GroupSpec, format_type: type[WeightFormat]) -> None:
        """Check that a parameter of another unit may be tied to one of this group.

        Args:
            tie: Clause that names both parameters, for the error message.
            spec: Properties of the other unit's parameter.
            format_type: Format of its weights.

        Raises:
            ValueError: The parameters are sharded differently.
        """
        if self.spec != spec or type(self.format) is not format_type:
            raise ValueError(
                f"{tie}, which was sharded with another mesh, strategy, granularity, scaling or "
                "precision; use the same for both"
            )

    # -- gradients ----------------------------------------------------------------------------

    @property
    def is_trained(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return self.grads.is_trained

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients arrived whose reduction into the main gradient is not under way."""
        return self.grads.has_partial or self.grads.has_gradient


def one_per_mesh(groups: Iterable[ParameterGroup]) -> list[ParameterGroup]:
    """Return the first group on each mesh, in the order of the groups."""
    found: dict[DeviceMesh, ParameterGroup] = {}
    for group in groups:
        found.setdefault(group.spec.mesh, group)
    return list(found.values())


def group_of(param: torch.Tensor | None) -> ParameterGroup | None:
    """Return the group of a sharded parameter; None for other tensors, or if it was deleted."""
    if not isinstance(param, UnevenDTensor):
        return None
    return cast("ParameterGroup | None", param.row_shards.info.owner())


def find_sharded(param: torch.Tensor | None) -> tuple[ParameterGroup, int] | None:
    """Return the group of a sharded parameter, and its index there; None for anything else."""
    group = group_of(param)
    if group is None:
        return None
    return next(
        ((group, i) for i, known in enumerate(group.sharded_params) if known is param), None
    )


def groups_of(module: nn.Module) -> list[ParameterGroup]:
    """Return the groups of the sharded and gathered parameters that a module registers."""
    infos = [
        param.row_shards.info if isinstance(param, UnevenDTensor) else gathered_info(param)
        for param in module._parameters.values()
        if param is not None
    ]
    owners = dict.fromkeys(info.owner() for info in infos if info is not None)
    return [cast("ParameterGroup", owner) for owner in owners if owner is not None]


def write_stale_weights(groups: Iterable[ParameterGroup], weight_version: int) -> None:
    """Write the stale weights of formats that communicate, in one call per format and mesh.

    One call takes one collective; a call per group would make the compute stream wait for one
    collective per group. Collective.

    Args:
        groups: All groups of a root.
        weight_version: Current weight version; see `ParameterGroup.is_stale`.
    """
    alike: dict[tuple[object, ...], list[ParameterGroup]] = {}
    for group in groups:
        if not group.format.communicates or group.is_held:
            continue
        group.parameters.sync()
        if group.is_stale(weight_version):
            key = type(group.format), *(axis.group for axis in group.sharded_axes)
            alike.setdefault(key, []).append(group)
    for several in alike.values():
        first = several[0]
        first.format.write([group.to_write() for group in several], first.sharded_axes)
        for group in several:
            group.note_written(weight_version)


def _before_grad_accumulation(owner: Callable[[], ParameterGroup | None]) -> None:
    """Make autograd's accumulation into `grad` of a sharded parameter wait for reductions."""
    group = owner()
    if group is not None:
        group.grads.before_grad_accumulation()


def _kernel_grad(owner: Callable[[], ParameterGroup | None], index: int) -> torch.Tensor | None:
    """Return the full gradient of a parameter for a fused kernel; None if the group was deleted."""
    group = owner()
    return None if group is None else group.grads.kernel_grad(index)
