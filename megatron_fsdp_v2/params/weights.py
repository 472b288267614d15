"""The weights of a parameter group: main weights, model weights, gathered weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_fsdp_v2.comm.interface import (
    DONE,
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Communicator,
    Work,
)
from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, FlatSpec, Span
from megatron_fsdp_v2.params.formats import WeightFormat

if TYPE_CHECKING:
    import torch

__all__ = ["GroupWeights"]


class GroupWeights:
    """Main weights -> model weights -> gathered weights, each made from the one before.

    `main` is what the optimizer steps. `model` is what rests between uses: it shares the
    storage of `main` where neither dtype nor placement differs. `gathered` is the whole buffer
    the unit computes with: temporary where `model` is sharded, `model` itself where it is not.
    Where `main` is offloaded and placed as `model` would be, there is no `model` besides it: a
    gather begins with a copy from host memory into this rank's piece of `gathered`.
    What the bytes of `model` and `gathered` mean is known to the format alone.

    Units that share a tied parameter hold one group together: weights are gathered from the first
    `hold` to the last `let_go`.

    Attributes:
        format: Of `model` and `gathered`.
        main: Main weights of this rank's span.
        model: Model weights at rest.
        gathered: The whole buffer.
    """

    def __init__(
        self,
        flat: FlatSpec,
        weight_format: WeightFormat,
        communicator: Communicator,
        allocator: Allocator,
    ) -> None:
        self._comm = communicator
        self._grid = flat.grid
        self.format = weight_format
        dtype = weight_format.payload_dtype
        main_span = flat.span([p.main_weight for p in flat.placements])
        model_span = flat.span([p.model_weight for p in flat.placements])
        self.main = flat.main_zeros(main_span, flat.dtypes.main_weight)
        self._is_offloaded = flat.host is not None
        # Straight from host memory into the buffer that is gathered: nothing rests on the device.
        self._is_streamed = self._is_offloaded and model_span == main_span != flat.whole
        is_same = dtype == flat.dtypes.main_weight and not self._is_offloaded
        if self._is_streamed or (is_same and model_span == main_span):
            self.model = self.main
        else:
            self.model = flat.zeros(model_span, dtype)
        self._temporary: TemporaryBuffer | None = None
        if model_span == flat.whole:
            self.gathered = self.model
        else:
            self._temporary = allocator.buffer(
                f"{flat.name}/model_weight",
                BufferUse.GATHERED,
                flat.layout.numel,
                dtype,
                flat.device,
            )
            self.gathered = DataParallelBuffer.over(flat.layout, flat.whole, self._temporary)
        self._gather_axis = flat.innermost_sharded() if self._temporary else None
        self._axes: Sequence[Axis] = []
        self.gather_along(flat.grid.axes)
        self._num_holders = 0
        self._gathering: Work | None = None
        self._refreshing: Work | None = None

    def gather_along(self, axes: Sequence[Axis]) -> None:
        """Gather along these axes from now on: the same ranks, maybe in other groups."""
        self._axes = [axis.for_gathers() for axis in axes]

    # -- what they are ------------------------------------------------------------------------

    @property
    def is_refreshed_locally(self) -> bool:
        """Whether `refresh` is cheap and needs no communication."""
        if self.model is self.main:
            return True
        is_here = self.model.span == self.main.span and not self._is_offloaded
        return is_here and not self.format.communicates

    @property
    def is_temporary(self) -> bool:
        """Whether gathering takes communication and memory at all."""
        return self._temporary is not None

    @property
    def gathers_for_use(self) -> bool:
        """Whether every use needs a gather (ZeRO-3)."""
        return self._gather_axis is not None

    @property
    def steady_nbytes(self) -> int:
        """Bytes of main and model weights, storage shared by both counted once."""
        return self.main.nbytes + (0 if self.model is self.main else self.model.nbytes)

    @property
    def is_held(self) -> bool:
        """Whether a unit has gathered weights installed, or on their way."""
        return self._num_holders > 0

    @property
    def is_gathering(self) -> bool:
        """Whether they are on their way."""
        return self._gathering is not None

    @property
    def is_gathered(self) -> bool:
        """Whether the whole buffer has memory."""
        return self._temporary is None or self._temporary.is_live

    @property
    def is_ready(self) -> bool:
        """Whether there are weights to compute with, here and now."""
        return self._temporary is None or (self._num_holders > 0 and self._gathering is None)

    # -- model weights from main weights ------------------------------------------------------

    def refresh(self, *, async_op: bool) -> None:
        """Start to make the model weights equal the main weights. Collective where it has to be.

        Written first, then gathered as payload: along the outer axis the cut pieces of this
        rank's inner piece, then along the inner axis the pieces of the whole.

        Args:
            async_op: Whether to return before it is done. Two gathers in a row are waited for:
                the second one could not be issued in the same order on every rank.
        """
        self.wait_for_refresh()
        if self.model is self.main:
            return
        held = self.main.span
        self.format.write(self.main, self.model.piece(held), self._axes)
        steps = []
        for axis, parts in zip(self._axes, self._grid.parts, strict=True):
            if parts > 1 and held.count < self.model.span.count:
                wider = self._widened(held, axis, parts)
                steps.append((axis, held, wider))
                held = wider
        for axis, narrow, wide in steps:
            gather = self._gather_of(self.model.piece(wide), self.model.piece(narrow), axis)
            self._refreshing = self._comm.issue(gather, async_op=async_op and len(steps) == 1)

    @staticmethod
    def _gather_of(output: torch.Tensor, shard: torch.Tensor, axis: Axis) -> Collective:
        return Collective(CollectiveKind.ALL_GATHER, output, shard, axis, CommStream.GATHER)

    @staticmethod
    def _widened(held: Span, axis: Axis, parts: int) -> Span:
        return Span(held.first - axis.rank * held.count, held.count * parts)

    def wait_for_refresh(self) -> None:
        """Order what follows after a refresh under way."""
        if self._refreshing is not None:
            self._refreshing.wait()
            self._refreshing = None

    # -- gathered weights from model weights --------------------------------------------------

    def has_room(self) -> bool:
        """Whether there is memory to gather ahead of use."""
        return self._temporary is None or self._temporary.has_room()

    def hold(self, *, async_op: bool) -> None:
        """Gather for one more holder. Collective for the first one."""
        if not self._num_holders:
            self._gathering = self._gather(async_op=async_op)
        self._num_holders += 1

    def _gather(self, *, async_op: bool) -> Work:
        if self._temporary is None or self._gather_axis is None or self._temporary.is_live:
            return DONE
        with self._comm.memory():
            gathered = self._temporary.acquire()
        axis, shard = self._axes[self._gather_axis], self.model.tensor
        if not self._is_streamed:
            return self._comm.issue(self._gather_of(gathered, shard, axis), async_op=async_op)
        shard = self.gathered.piece(self.main.span)
        write = functools.partial(self.format.write, self.main, shard, self._axes)
        gather = self._gather_of(gathered, shard, axis)._replace(before=write)
        return self._comm.issue(gather, async_op=async_op)

    def wait(self) -> bool:
        """Have gathered weights in place; return whether they were on their way."""
        if self._refreshing is not None:
            self.wait_for_refresh()
        if self._gathering is None:
            return False
        self._gathering.wait()
        self._gathering = None
        return True

    def let_go(self) -> bool:
        """One holder less; return whether it was the last one, after which `release` is due."""
        self._num_holders -= 1
        return not self._num_holders

    def release(self) -> None:
        """Drop the gathered buffer's memory, if it is temporary."""
        if self._temporary is not None:
            if self._temporary.is_live:
                self._comm.settle()
            self._temporary.release()

    # -- what others put in its place ---------------------------------------------------------

    def temporaries(self) -> dict[str, TemporaryBuffer]:
        """Its temporary buffers by what they hold."""
        return {} if self._temporary is None else {"model_weight": self._temporary}

    def replace_buffers(self, replacement: Callable[[TemporaryBuffer], TemporaryBuffer]) -> None:
        """Put something in the place of temporary buffers that does the same, and tells of it."""
        if self._temporary is not None:
            self._temporary = replacement(self._temporary)

    def replace_communicator(self, communicator: Communicator) -> Communicator:
        """Communicate by another one from now on; return the one until now."""
        before, self._comm = self._comm, communicator
        return before
