"""The weights of a parameter group: main weights, model weights, gathered weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_fsdp_v2.comm.interface import DONE, Axis, CommStream, Communicator, Work
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.placement import AxisPlacements, Placement
from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, ShardGrid, Span

__all__ = ["GroupWeights"]


class GroupWeights:
    """Main weights -> model weights -> gathered weights, each made from the one before.

    `main` is what the optimizer steps. `model` is what rests between uses: it shares the
    storage of `main` where neither dtype nor placement differs. `gathered` is the whole buffer
    the unit computes with: temporary where `model` is sharded, `model` itself where it is not.
    """

    def __init__(
        self,
        name: str,
        layout: BufferLayout,
        grid: ShardGrid,
        placements: Sequence[AxisPlacements],
        dtypes: GroupDtypes,
        device: torch.device,
        communicator: Communicator,
        allocator: Allocator,
    ) -> None:
        self._comm = communicator
        self._grid = grid
        main_span = grid.span([p.main_weight for p in placements])
        model_span = grid.span([p.model_weight for p in placements])
        whole = Span(0, grid.num_slices)
        self.main = DataParallelBuffer.empty(layout, main_span, dtypes.main_weight, device)
        if model_span == main_span and dtypes.model_weight == dtypes.main_weight:
            self.model = self.main
        else:
            self.model = DataParallelBuffer.empty(layout, model_span, dtypes.model_weight, device)
        self._temporary: TemporaryBuffer | None = None
        if model_span == whole:
            self.gathered = self.model
        else:
            self._temporary = allocator.buffer(
                f"{name}/model_weight",
                BufferUse.GATHERED,
                layout.numel,
                dtypes.model_weight,
                device,
            )
            self.gathered = DataParallelBuffer.over(layout, whole, self._temporary)
        self._gather_axis = self._innermost_sharded(placements) if self._temporary else None
        self._axes: Sequence[Axis] = []
        self.gather_along(grid.axes)

    def gather_along(self, axes: Sequence[Axis]) -> None:
        """Gather along these axes from now on: the same ranks, maybe in other groups."""
        self._axes = [axis.for_gathers() for axis in axes]

    @staticmethod
    def _innermost_sharded(placements: Sequence[AxisPlacements]) -> int:
        sharded = [index for index, p in enumerate(placements) if p.model_weight is Placement.SHARD]
        if sharded != [len(placements) - 1]:
            raise ValueError("model weights can be sharded along the innermost axis only")
        return sharded[0]

    @property
    def is_refreshed_locally(self) -> bool:
        """Whether `refresh` needs no communication."""
        return self.model.span == self.main.span

    @property
    def is_gathered(self) -> bool:
        """Whether the whole buffer has memory."""
        return self._temporary is None or self._temporary.is_live

    @property
    def is_temporary(self) -> bool:
        """Whether gathering takes communication and memory at all."""
        return self._temporary is not None

    @property
    def steady_nbytes(self) -> int:
        """Bytes of main and model weights, storage shared by both counted once."""
        return self.main.nbytes + (0 if self.model is self.main else self.model.nbytes)

    @property
    def gathers_for_use(self) -> bool:
        """Whether every use needs a gather (ZeRO-3)."""
        return self._gather_axis is not None

    def refresh(self, *, async_op: bool) -> Work:
        """Make the model weights equal the main weights. Collective where placements differ.

        Cast first, then gather in the model dtype: along the outer axis the cut pieces of this
        rank's inner piece, then along the inner axis the pieces of the whole.

        Args:
            async_op: Whether to return before it is done. Two gathers in a row are waited for:
                the second one could not be issued in the same order on every rank.
        """
        if self.model is self.main:
            return DONE
        if self.is_refreshed_locally:
            self.model.tensor.copy_(self.main.tensor)
            return DONE
        held = self.main.span
        self.model.piece(held).copy_(self.main.tensor)
        steps = []
        for axis, parts in zip(self._axes, self._grid.parts, strict=True):
            if parts > 1 and held.count < self.model.span.count:
                wider = self._widened(held, axis, parts)
                steps.append((axis, held, wider))
                held = wider
        work = DONE
        for axis, narrow, wide in steps:
            work = self._comm.all_gather(
                self.model.piece(wide),
                self.model.piece(narrow),
                axis,
                CommStream.GATHER,
                async_op=async_op and len(steps) == 1,
            )
        return work

    @staticmethod
    def _widened(held: Span, axis: Axis, parts: int) -> Span:
        return Span(held.first - axis.rank * held.count, held.count * parts)

    def gather(self, *, async_op: bool) -> Work:
        """Fill the gathered buffer from the model weights. Collective; idempotent."""
        if self._temporary is None or self._gather_axis is None or self._temporary.is_live:
            return DONE
        with self._comm.memory():
            gathered = self._temporary.acquire()
        return self._comm.all_gather(
            gathered,
            self.model.tensor,
            self._axes[self._gather_axis],
            CommStream.GATHER,
            async_op=async_op,
        )

    def has_room(self) -> bool:
        """Whether there is memory to gather ahead of use."""
        return self._temporary is None or self._temporary.has_room()

    def temporaries(self) -> dict[str, TemporaryBuffer]:
        """Its temporary buffers by what they hold."""
        return {} if self._temporary is None else {"model_weight": self._temporary}

    def release(self) -> None:
        """Drop the gathered buffer's memory, if it is temporary."""
        if self._temporary is not None:
            if self._temporary.is_live:
                self._comm.settle()
            self._temporary.release()

    def replace_buffers(self, replacement: Callable[[TemporaryBuffer], TemporaryBuffer]) -> None:
        """Put something in the place of temporary buffers that does the same, and tells of it."""
        if self._temporary is not None:
            self._temporary = replacement(self._temporary)
