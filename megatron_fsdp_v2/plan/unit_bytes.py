"""Bytes of parameter groups and units on one rank, as integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_fsdp_v2.comm.backends import SUM_CHUNK
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.placement import AxisPlacements, Placement
from megatron_fsdp_v2.params.formats import PayloadBytes

__all__ = ["GroupBytes", "UnitBytes"]


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes of the tensors of one parameter group on one rank.

    Main weight and model weight rest between steps; the others are temporary.

    Attributes:
        main_weight: Weight that the optimizer steps.
        model_weight: Weight that the forward computes with; 0 if it shares the main weight's
            storage, or every gather casts the main weight.
        main_grad: Gradient that the optimizer reads, from its reduction until gradients are None.
        gathered: Weights gathered for one use; 0 if the model weight is replicated.
        grad_buffer: The full gradient buffer.
        grad_comm: Its copy in the communication dtype; 0 if it has that dtype.
        partial_grad: A gradient that is reduced along the inner axis, and not along the outer one.
        outer_comm: Its copy in the communication dtype; 0 if it has that dtype.
        received: Receive buffer of an inner reduction on a CPU (NCCL needs none), and a sum that is
            copied to host memory.
        outer_received: The same for an outer reduction.
        lent: Part of the received bytes that arrives in the main gradient, if that is overwritten.
        lent_partial: Part of them that arrives in `partial_grad`.
        summed: Temporary of the local sum, if dtypes differ; of one group at a time.
        accumulates_unreduced: Whether the full gradient buffer lives between micro-batches.
        gathered_besides: Further bytes that the other use gathers, if forward and backward compute
            with different payloads.
    """

    main_weight: int
    model_weight: int
    main_grad: int = 0
    gathered: int = 0
    grad_buffer: int = 0
    grad_comm: int = 0
    partial_grad: int = 0
    outer_comm: int = 0
    received: int = 0
    outer_received: int = 0
    lent: int = 0
    lent_partial: int = 0
    summed: int = 0
    accumulates_unreduced: bool = False
    gathered_besides: int = 0

    @classmethod
    def of(
        cls,
        numel: int,
        axis_sizes: Sequence[int],
        placements: Sequence[AxisPlacements],
        dtypes: GroupDtypes,
        *,
        is_trained: bool,
        on_cpu: bool,
        reduces: bool = True,
        offloaded: bool = False,
        payload: PayloadBytes | None = None,
    ) -> GroupBytes:
        """Derive the bytes of a group from its layout, placements and dtypes.

        Args:
            numel: Elements of the whole flat buffer.
            axis_sizes: Ranks along the axes of its mesh, outermost first.
            placements: Placements along them.
            dtypes: Dtypes of weights and gradients.
            is_trained: Whether it has gradients.
            on_cpu: Whether reductions run on a CPU (gloo).
            reduces: Whether gradients are summed over ranks.
            offloaded: Whether main weights and gradients are in host memory; that is not counted.
            payload: Bytes of model weights; None for the compute dtype.
        """
        main = _held(numel, axis_sizes, [p.main_weight for p in placements])
        model = _held(numel, axis_sizes, [p.model_weight for p in placements])
        each = payload or PayloadBytes(dtypes.model_weight.itemsize)
        # A gather that reads the main weight writes it into the gathered buffer.
        shares = model == main < numel and not each.rests
        if not offloaded and payload is None and dtypes.model_weight == dtypes.main_weight:
            shares = model == main
        whole = each.nbytes(numel) if model < numel else 0
        weights = cls(
            main_weight=0 if offloaded else main * dtypes.main_weight.itemsize,
            model_weight=0 if shares else each.nbytes(model) * each.count(),
            gathered=whole * each.most_for_one_use,
            gathered_besides=whole * (each.count() - each.most_for_one_use),
        )
        if not is_trained:
            return weights
        collects = placements[-1].unreduced_grad is Placement.PARTIAL
        comm = dtypes.grad_comm
        buffer = dtypes.main_grad if collects else comm
        trained = replace(
            weights,
            main_grad=0 if offloaded else main * dtypes.main_grad.itemsize,
            grad_buffer=numel * buffer.itemsize,
            accumulates_unreduced=collects,
        )
        # A sum that is copied to host memory, beside its receive buffer.
        offloading = main * dtypes.main_grad.itemsize if offloaded else 0
        if not reduces:
            return replace(trained, received=offloading)
        inner = placements[-1].main_grad
        partial = _held(numel, axis_sizes[-1:], [inner]) if len(axis_sizes) > 1 else 0
        outer = placements[0].main_grad
        # For the last reduction, and two ranks: see `MainGradient`.
        last = _received(partial or numel, axis_sizes[0], outer, on_cpu)
        is_lent = axis_sizes[0] == 2 and comm.itemsize <= dtypes.main_grad.itemsize
        lent = last if is_lent and not offloaded else 0
        is_lent_partial = on_cpu and axis_sizes[-1] == 2 and comm == dtypes.main_grad
        is_lent_partial &= inner is Placement.SHARD
        summed = min(lent, SUM_CHUNK) if comm != dtypes.main_grad or dtypes.sums_in_fp32 else 0
        # On a device, terms of a sum in fp32 are received whole, and the sum is kept.
        exchanges = dtypes.sums_in_fp32 and not on_cpu

        def exchanged(numel: int, size: int, grad: Placement) -> int:
            is_cut = exchanges and grad is Placement.SHARD and size > 1
            return numel * comm.itemsize + numel // size * 4 if is_cut else 0

        return replace(
            trained,
            lent=lent * comm.itemsize,
            lent_partial=partial * comm.itemsize * is_lent_partial,
            summed=summed * max(dtypes.main_grad.itemsize, 4 * dtypes.sums_in_fp32),
            grad_comm=numel * comm.itemsize if buffer != comm else 0,
            partial_grad=partial * dtypes.main_grad.itemsize,
            outer_comm=partial * comm.itemsize if dtypes.main_grad != comm else 0,
            received=_received(numel, axis_sizes[-1], inner, on_cpu) * comm.itemsize
            + exchanged(numel, axis_sizes[-1], inner)
            + (0 if partial else offloading),
            outer_received=_received(partial, axis_sizes[0], outer, on_cpu) * comm.itemsize
            + exchanged(partial, axis_sizes[0], outer)
            + (offloading if partial else 0),
        )

    @property
    def resting(self) -> int:
        """Bytes between steps."""
        return self.main_weight + self.model_weight

    def in_backward(self, *, is_set: bool, is_waiting: bool) -> GroupBytes:
        """Bytes that a backward allocates.

        Args:
            is_set: Whether its main gradient exists, so that the backward adds to it.
            is_waiting: Whether gradients of earlier micro-batches wait to be synchronized, in full
                buffers or in `partial_grad`.
        """
        group = self
        if group.lent_partial and (group.accumulates_unreduced or not is_waiting):
            group = replace(group, received=group.received - group.lent_partial)
        if is_set:
            return replace(group, main_grad=0, summed=0)
        if not group.lent:
            return group
        if group.partial_grad:
            return replace(group, outer_received=group.outer_received - group.lent)
        return replace(group, received=group.received - group.lent)


def _held(numel: int, sizes: Sequence[int], placements: Sequence[Placement]) -> int:
    cut = (placement is Placement.SHARD for placement in placements)
    return numel // math.prod(itertools.compress(sizes, cut))


def _received(numel: int, size: int, grad: Placement, on_cpu: bool) -> int:
    """Elements received from other ranks by a reduce-scatter on a CPU: an all-to-all and a sum."""
    return numel // size * (size - 1) if on_cpu and grad is Placement.SHARD else 0


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of one unit.

    Attributes:
        groups: Its parameter groups.
        parent: Index of the innermost unit that contains it; None for the root.
        tied_gathered: Gathered bytes of tied groups of other units.
        keeps_gathered: Whether its weights stay gathered between forward and backward.
        recomputes: Whether its forward runs again in the backward.
    """

    groups: tuple[GroupBytes, ...]
    parent: int | None = None
    tied_gathered: int = 0
    keeps_gathered: bool = False
    recomputes: bool = False

    @property
    def gathered(self) -> int:
        """Gathered bytes of one use."""
        return sum(group.gathered for group in self.groups) + self.tied_gathered

    @property
    def gathered_in_backward(self) -> int:
        """Gathered bytes in its backward, with those that its forward left or needs again."""
        if self.parent is not None and not self.keeps_gathered and not self.recomputes:
            return self.gathered
        return self.gathered + self.sum("gathered_besides")

    @property
    def is_trained(self) -> bool:
        """Whether it has gradients."""
        return any(group.grad_buffer for group in self.groups)

    def sum(self, name: str) -> int:
        """Sum of an attribute of its groups."""
        return sum(getattr(group, name) for group in self.groups)
