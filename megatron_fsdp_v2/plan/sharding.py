"""The flat buffers of a description under a strategy: real layouts and their sizes.

Integers only; nothing here allocates or communicates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout, Granularity
from megatron_fsdp_v2.layout.flat_buffers import flat_buffers
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes, MixedPrecisionPolicy
from megatron_fsdp_v2.layout.placement import AxisPlacements, Placement, resolve_placements
from megatron_fsdp_v2.params.buffer import ShardGrid
from megatron_fsdp_v2.params.formats import PayloadBytes
from megatron_fsdp_v2.plan.unit_bytes import GroupBytes

if TYPE_CHECKING:
    from megatron_fsdp_v2.plan.description import (
        MeshDescription,
        ParameterDescription,
        TrainingDescription,
    )

__all__ = ["PlannedGroup", "Strategy", "mesh_sizes", "shard"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """Sharding strategies of a training.

    Attributes:
        inner: Sharding strategy along the inner axis.
        outer: Sharding strategy along the outer axis.
        outer_size: Ranks along the outer axis; None for a 1-D mesh.
        others: Sharding strategies of meshes with their own, as pairs of mesh and strategy.
    """

    inner: str = "optim_grads_params"
    outer: str = "no_shard"
    outer_size: int | None = None
    others: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Name in tables."""
        if self.outer_size is None:
            return self.inner
        kind = "HSDP" if self.outer == "no_shard" else "HFSDP"
        return f"{self.inner}, {kind} x{self.outer_size}"

    def inner_of(self, mesh: str) -> str:
        """Sharding strategy along the inner axis of a mesh."""
        return dict(self.others).get(mesh, self.inner)


@dataclass(frozen=True)
class PlannedGroup:
    """The sizes of a parameter group; equal on every rank.

    Attributes:
        params: Its parameters.
        layout: Layout of its flat buffer.
        placements: Placements per mesh axis, outermost first.
        sizes: Ranks along each mesh axis.
        dtypes: Dtypes of weights and gradients.
        requires_grad: Whether it is trained.
        on_cpu: Whether reductions run on a CPU.
        is_offloaded: Whether main weights and main gradients are in host memory.
        quantized: Bytes of model weights in another format than the compute dtype.
    """

    params: tuple[ParameterDescription, ...]
    layout: BufferLayout
    placements: tuple[AxisPlacements, ...]
    sizes: tuple[int, ...]
    dtypes: GroupDtypes
    requires_grad: bool
    on_cpu: bool = False
    is_offloaded: bool = False
    quantized: PayloadBytes | None = None

    @property
    def payload(self) -> PayloadBytes:
        """Bytes of model weights."""
        return self.quantized or PayloadBytes(self.dtypes.model_weight.itemsize)

    @property
    def smallest_itemsize(self) -> float:
        """Bytes of the smallest element, in which alignment is counted."""
        return _smallest(self.dtypes, self.quantized)

    @functools.cached_property
    def grid(self) -> ShardGrid:
        """How slices map onto the axes, for the first rank; all ranks hold as many."""
        return _grid(self.sizes, self.placements)

    def _numel(self, placements: Sequence[Placement]) -> int:
        return self.grid.span(placements).count * self.layout.shard_numel

    @functools.cached_property
    def main_numel(self) -> int:
        """Elements of the main weight, and of the main gradient, on a rank."""
        return self._numel([p.main_weight for p in self.placements])

    @functools.cached_property
    def model_numel(self) -> int:
        """Elements of the model weight between uses."""
        return self._numel([p.model_weight for p in self.placements])

    @functools.cached_property
    def partial_numel(self) -> int:
        """Elements that wait for the outer reduction."""
        pieces = [Placement.REPLICATE] * (len(self.sizes) - 1)
        return self._numel([*pieces, self.placements[-1].main_grad])

    @property
    def gathers_for_use(self) -> bool:
        """Whether every use gathers weights."""
        return self.model_numel < self.layout.numel

    @property
    def is_streamed(self) -> bool:
        """Whether every gather begins with a copy of this rank's shard from host memory."""
        return self.is_offloaded and self.main_numel == self.model_numel < self.layout.numel

    @property
    def is_made_of_main(self) -> bool:
        """Whether gathers read main weights alone, so that no model weight is kept."""
        return not self.nbytes.model_weight

    @property
    def main_weight_nbytes(self) -> int:
        """Bytes of the main weight on a rank, on the device or in host memory."""
        return self.main_numel * self.dtypes.main_weight.itemsize

    @property
    def main_grad_nbytes(self) -> int:
        """Bytes of the main gradient on a rank, on the device or in host memory."""
        return self.main_numel * self.dtypes.main_grad.itemsize if self.requires_grad else 0

    @property
    def accumulates_unreduced(self) -> bool:
        """Whether the full gradient buffer accumulates until the synchronized backward."""
        return self.placements[-1].unreduced_grad is Placement.PARTIAL

    @property
    def has_outer_axis(self) -> bool:
        """Whether gradients are also reduced along an outer axis."""
        return len(self.sizes) == 2

    @functools.cached_property
    def nbytes(self) -> GroupBytes:
        """Bytes of its tensors on a rank."""
        return GroupBytes.of(
            self.layout.numel,
            self.sizes,
            self.placements,
            self.dtypes,
            is_trained=self.requires_grad,
            on_cpu=self.on_cpu,
            offloaded=self.is_offloaded,
            payload=self.quantized,
        )

    @functools.cached_property
    def state_numels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Per slice, elements of trained matrices and of all other trained parameters."""
        starts = torch.arange(self.layout.num_shards, dtype=torch.int64) * self.layout.shard_numel
        matrices, others = torch.zeros_like(starts), torch.zeros_like(starts)
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            first = (starts - slot.offset).clamp(0, slot.numel)
            last = (starts + self.layout.shard_numel - slot.offset).clamp(0, slot.numel)
            (matrices if param.is_matrix else others).add_(last - first)
        return matrices, others


def mesh_sizes(mesh: MeshDescription, strategy: Strategy) -> tuple[int, ...]:
    """Sizes of the axes of a mesh, outermost first.

    Raises:
        ValueError: The outer axis does not divide the ranks.
    """
    if strategy.outer_size is None:
        return (mesh.num_ranks,)
    if strategy.outer_size < 1 or mesh.num_ranks % strategy.outer_size:
        raise ValueError(
            f"an outer axis of {strategy.outer_size} cannot divide {mesh.num_ranks} data-parallel "
            "ranks; choose a divisor"
        )
    return strategy.outer_size, mesh.num_ranks // strategy.outer_size


def shard(training: TrainingDescription, strategy: Strategy) -> list[tuple[PlannedGroup, ...]]:
    """The groups of every unit; equal units share the same objects.

    Raises:
        ValueError: A name is unknown, or the mesh does not fit the strategy.
    """
    granularity = Granularity.parse(training.granularity)
    found = []
    for unit in training.units:
        sizes = mesh_sizes(training.meshes[unit.mesh], strategy)
        inner = strategy.inner_of(unit.mesh)
        placements = resolve_placements(inner, strategy.outer, sizes)
        found.append(
            _groups(
                unit.params,
                sizes,
                placements,
                training.policy,
                granularity,
                training.on_cpu,
                training.cpu_offload,
            )
        )
    return found


@functools.lru_cache(maxsize=4096)
def _groups(
    params: tuple[ParameterDescription, ...],
    sizes: tuple[int, ...],
    placements: tuple[AxisPlacements, ...],
    policy: MixedPrecisionPolicy,
    granularity: Granularity,
    on_cpu: bool,
    is_offloaded: bool,
) -> tuple[PlannedGroup, ...]:
    """Groups of one unit, in the order in which `fully_shard` makes them.

    The cache's key has names of parameters, though layouts do not depend on them: equal units have
    equal names.
    """
    num_slices = _grid(sizes, placements).num_slices
    found = flat_buffers(
        params,
        lambda param: (
            policy.resolve(param.dtype),
            param.requires_grad,
            param.is_separate and param.name,
            param.payload,
        ),
        lambda param: param.shape,
        lambda key: _smallest(key[0], key[3]),
        num_slices,
        granularity,
    )
    return tuple(
        PlannedGroup(
            tuple(members),
            layout,
            placements,
            sizes,
            dtypes,
            requires_grad,
            on_cpu,
            is_offloaded,
            quantized,
        )
        for (dtypes, requires_grad, _, quantized), members, layout in found
    )


def _smallest(dtypes: GroupDtypes, quantized: PayloadBytes | None) -> float:
    smallest = dtypes.smallest_itemsize
    return min(smallest, quantized.itemsize / quantized.packing) if quantized else smallest


def _grid(sizes: Sequence[int], placements: Sequence[AxisPlacements]) -> ShardGrid:
    # The grid counts slices; it never asks for the process groups of its axes.
    axes = [Axis(cast("Any", None), size, 0) for size in sizes]
    return ShardGrid.of(axes, [p.main_weight for p in placements])
