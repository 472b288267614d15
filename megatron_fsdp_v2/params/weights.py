"""The weights of a parameter group: main weights, model weights, gathered weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from megatron_fsdp_v2.comm.interface import (
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Communicator,
    Work,
)
from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer
from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, FlatSpec, Span
from megatron_fsdp_v2.params.formats import WeightFormat, WeightUse, Written

__all__ = ["GroupWeights"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their bytes."""


class Payload:
    """The weights of a group in one of the forms that their format has.

    Attributes:
        name: What the form is called.
        uses: What it is gathered for.
        model: What rests between uses.
        gathered: The whole buffer: temporary where `model` is sharded, `model` itself elsewhere.
        temporary: The memory of `gathered` where that is temporary.
    """

    __slots__ = ("gathered", "model", "name", "temporary", "uses")

    def __init__(
        self,
        name: str,
        uses: WeightUse,
        model: DataParallelBuffer,
        flat: FlatSpec,
        weight_format: WeightFormat,
        allocator: Allocator,
    ) -> None:
        """Describe it; `model` is given.

        Args:
            name: What the form is called.
            uses: What it is gathered for.
            model: What rests between uses.
            flat: Of the group.
            weight_format: Likewise.
            allocator: Makes the temporary buffer, if there is one.
        """
        self.name = name
        self.uses = uses
        self.model = self.gathered = model
        self.temporary: TemporaryBuffer | None = None
        if model.span != flat.whole:
            dtype, packing = weight_format.payload_dtype, weight_format.packing
            numel, label = flat.layout.numel // packing, f"{flat.name}/{name}"
            memory = allocator.buffer(label, BufferUse.GATHERED, numel, dtype, flat.device)
            self.temporary = memory
            self.gathered = DataParallelBuffer(
                flat.layout, flat.whole, memory.tensor, memory, packing=packing
            )

    @property
    def is_whole(self) -> bool:
        """Whether the whole buffer has memory."""
        return self.temporary is None or self.temporary.is_live

    def has_room(self) -> bool:
        """Whether there is memory to gather it ahead of use, or it is gathered."""
        temporary = self.temporary
        return temporary is None or temporary.is_live or temporary.has_room()


class GroupWeights:
    """Main weights -> model weights -> gathered weights, each made from the one before.

    `main` is what the optimizer steps. Of each payload of the format, `model` is what rests between
    uses: it shares the storage of `main` where neither dtype nor placement differs. `gathered` is
    the whole buffer the unit computes with: temporary where `model` is sharded, `model` itself
    where it is not. Where `main` is placed as `model` would be, in another dtype or offloaded,
    there is no `model` besides it: a gather begins with a cast, or a copy from host memory, into
    this rank's piece of `gathered`. A format that communicates when it writes, or writes several
    payloads at once, has one all the same. What the bytes of payloads mean is known to the format
    alone, and for which use each of them is gathered.

    Units that share a tied parameter hold one group together: weights are gathered from the first
    `hold` to the last `let_go`.

    Attributes:
        observer: Receives events of gathered buffers.
        format: Of the payloads.
        main: Main weights of this rank's span.
        payloads: Model weights and gathered weights, in every form that the format has.
        has_one_payload: Whether that is one form, for every use.
        model: Model weights at rest, in the first form.
        gathered: The whole buffer, likewise.
        model_nbytes: Bytes of model weights, in all forms.
        is_made_of_main: Whether what is gathered is made of main weights, and nothing else rests.
        is_refreshed_locally: Whether `refresh` is cheap and needs no communication.
        cut_axes: Axes that cut main weights, along which a format talks to other ranks.
        gathers_for_use: Whether every use needs a gather (ZeRO-3), along the innermost axis.
    """

    def __init__(
        self,
        flat: FlatSpec,
        weight_format: WeightFormat,
        communicator: Communicator,
        allocator: Allocator,
    ) -> None:
        self.observer = Observer()
        self._comm = communicator
        self._grid = flat.grid
        self.format = weight_format
        main_span = flat.span([p.main_weight for p in flat.placements])
        model_span = flat.span([p.model_weight for p in flat.placements])
        dtype, main_dtype = weight_format.payload_dtype, flat.dtypes.main_weight
        main_memory = flat.main_memory(main_span, main_dtype)
        self.main = DataParallelBuffer(flat.layout, main_span, main_memory)
        is_cast = flat.host is not None or dtype != main_dtype
        is_placed_alike = model_span == main_span
        self.has_one_payload = len(weight_format.payloads) == 1
        # Straight into the buffer that is gathered: nothing but main weights rests.
        is_written = self.has_one_payload and not weight_format.communicates
        self._is_streamed = is_written and is_cast and is_placed_alike and main_span != flat.whole
        self.is_made_of_main = self._is_streamed or (is_placed_alike and not is_cast)
        is_here = is_placed_alike and flat.host is None and not weight_format.communicates
        self.is_refreshed_locally = self.is_made_of_main or is_here
        self.payloads = [
            Payload(name, uses, self._resting(model_span, flat), flat, weight_format, allocator)
            for name, uses in weight_format.payloads.items()
        ]
        self.model, self.gathered = self.payloads[0].model, self.payloads[0].gathered
        self.model_nbytes = sum(payload.model.nbytes for payload in self.payloads)
        self.gathers_for_use = model_span != flat.whole
        self._axes: Sequence[Axis] = []
        self.cut_axes: Sequence[Axis] = []
        self.gather_along(flat.grid.axes)
        self._num_holders = 0
        # What is on its way; None where nothing is to be put in place.
        self._gathering: list[Work] | None = None
        self._refreshing: Work | None = None

    def _resting(self, span: Span, flat: FlatSpec) -> DataParallelBuffer:
        """What is to rest of one payload."""
        if self.is_made_of_main:
            return self.main
        dtype, packing = self.format.payload_dtype, self.format.packing
        numel = span.count * flat.layout.shard_numel // packing
        tensor = torch.zeros(numel, dtype=dtype, device=flat.device)
        return DataParallelBuffer(flat.layout, span, tensor, packing=packing)

    def gather_along(self, axes: Sequence[Axis]) -> None:
        """Gather along these axes from now on: the same ranks, maybe in other groups."""
        self._axes = [axis.for_gathers() for axis in axes]
        cut = [a for a, parts in zip(self._axes, self._grid.parts, strict=True) if parts > 1]
        self.cut_axes = cut or self._axes[-1:]

    # -- what they are ------------------------------------------------------------------------

    @property
    def gathered_nbytes(self) -> int:
        """Bytes that one use gathers, a forward or a backward, whichever are more."""
        return max(
            sum(
                p.gathered.nbytes for p in self.payloads if p.temporary is not None and p.uses & use
            )
            for use in (WeightUse.FORWARD, WeightUse.BACKWARD)
        )

    def changed(self) -> torch.Tensor | None:
        """Whether this rank's piece of what is gathered is not made of main weights as they are.

        Returns:
            A bool on the device, without waiting for it; None where nothing is gathered.
        """
        found: torch.Tensor | None = None
        for payload in self.payloads:
            if payload.temporary is None or not payload.temporary.is_live:
                continue
            expected = payload.model.tensor
            if self._is_streamed:
                expected = payload.gathered.piece(self.main.span).clone()
                self.format.write([Written(self.format, self.main, [expected])], self.cut_axes)
            gathered = payload.gathered.piece(payload.model.span)
            # As integers: a NaN is no other number than it was.
            bits = _INTEGERS[gathered.element_size()]
            differs = (gathered.view(bits) != expected.view(bits)).any()
            found = differs if found is None else found | differs
        return found

    @property
    def is_held(self) -> bool:
        """Whether a unit has gathered weights installed, or on their way."""
        return self._num_holders > 0

    @property
    def is_gathering(self) -> bool:
        """Whether they are on their way."""
        return self._gathering is not None

    @property
    def is_ready(self) -> bool:
        """Whether there are weights to compute with, here and now."""
        return not self.gathers_for_use or (self._num_holders > 0 and self._gathering is None)

    @property
    def uses(self) -> WeightUse:
        """What gathered weights are there for."""
        uses = WeightUse(0)
        for payload in self.payloads:
            if payload.is_whole:
                uses |= payload.uses
        return uses

    def lacks(self, uses: WeightUse) -> bool:
        """Whether a payload is to be gathered for these uses."""
        return any(p.uses & uses and not p.is_whole for p in self.payloads)

    # -- model weights from main weights ------------------------------------------------------

    def to_write(self) -> Written[WeightFormat]:
        """What the format writes of these weights."""
        pieces = [payload.model.piece(self.main.span) for payload in self.payloads]
        return Written(self.format, self.main, pieces)

    def refresh(self, *, is_written: bool, async_op: bool) -> None:
        """Start to make the model weights equal the main weights. Collective where it has to be.

        Written first, then gathered as payload: along the outer axis the cut pieces of this
        rank's inner piece, then along the inner axis the pieces of the whole.

        Args:
            is_written: Whether the payloads of this rank's span are written already.
            async_op: Whether to return before it is done. Several gathers are waited for: a second
                one along another axis could not be issued in the same order on every rank.
        """
        if self.is_made_of_main:
            return
        self.wait_for_refresh()
        if not is_written:
            self.format.write([self.to_write()], self.cut_axes)
        held = self.main.span
        models = [payload.model for payload in self.payloads]
        steps = []
        for axis, parts in zip(self._axes, self._grid.parts, strict=True):
            if parts > 1 and held.count < self.model.span.count:
                wider = Span(held.first - axis.rank * held.count, held.count * parts)
                steps.append((axis, held, wider))
                held = wider
        is_one = len(steps) * len(models) == 1
        for axis, narrow, wide in steps:
            for model in models:
                gather = self._gather_of(model.piece(wide), model.piece(narrow), axis)
                self._refreshing = self._comm.issue(gather, async_op=async_op and is_one)

    @staticmethod
    def _gather_of(output: torch.Tensor, shard: torch.Tensor, axis: Axis) -> Collective:
        return Collective(CollectiveKind.ALL_GATHER, output, shard, axis, CommStream.GATHER)

    def wait_for_refresh(self) -> None:
        """Order what follows after a refresh under way."""
        if self._refreshing is not None:
            self._refreshing.wait()
            self._refreshing = None

    # -- gathered weights from model weights --------------------------------------------------

    def has_room(self, uses: WeightUse) -> bool:
        """Whether there is memory to gather ahead of use, or nothing to gather."""
        is_one = self.has_one_payload
        return all([p.has_room() for p in self.payloads if is_one or p.uses & uses])

    def hold(self, uses: WeightUse, *, async_op: bool) -> None:
        """Gather for one more holder. Collective for the first one, and where something lacks."""
        if not self._num_holders:
            self._gathering = []
        self.gather(uses, async_op=async_op)
        self._num_holders += 1

    def gather(self, uses: WeightUse, *, async_op: bool) -> None:
        """Start gathering what lacks for these uses. Collective if anything does."""
        if not self.gathers_for_use:
            return
        axis = self._axes[-1]
        for payload in self.payloads:
            if payload.temporary is None or payload.temporary.is_live:
                continue
            # Arithmetic with flags is Python.
            if not (self.has_one_payload or payload.uses & uses):
                continue
            if self._comm.has_streams:
                with self._comm.memory():
                    gathered = self.observer.acquire(payload.temporary)
            else:
                gathered = self.observer.acquire(payload.temporary)
            if self._is_streamed:
                shard = payload.gathered.piece(self.main.span)
                part = Written(self.format, self.main, [shard])
                write = functools.partial(self.format.write, [part], self.cut_axes)
                gather = self._gather_of(gathered, shard, axis)._replace(before=write)
            else:
                gather = self._gather_of(gathered, payload.model.tensor, axis)
            if self._gathering is None:
                self._gathering = []
            self._gathering.append(self._comm.issue(gather, async_op=async_op))

    def wait(self) -> bool:
        """Have gathered weights in place; return whether they were on their way."""
        if self._refreshing is not None:
            self.wait_for_refresh()
        if self._gathering is None:
            return False
        for work in self._gathering:
            work.wait()
        self._gathering = None
        return True

    def let_go(self) -> bool:
        """One holder less; return whether it was the last one, after which `release` is due."""
        self._num_holders -= 1
        return not self._num_holders

    def release(self) -> None:
        """Drop the memory of gathered buffers that are temporary."""
        for payload in self.payloads:
            if payload.temporary is not None:
                if self._comm.has_streams and payload.temporary.is_live:
                    self._comm.settle()
                self.observer.release(payload.temporary)

    # -- what others put in its place ---------------------------------------------------------

    def temporaries(self) -> dict[str, TemporaryBuffer]:
        """Its temporary buffers by what they hold."""
        return {p.name: p.temporary for p in self.payloads if p.temporary is not None}

    def replace_buffers(self, replacement: Callable[[TemporaryBuffer], TemporaryBuffer]) -> None:
        """Put another temporary buffer in the place of each one."""
        for payload in self.payloads:
            if payload.temporary is not None:
                payload.temporary = replacement(payload.temporary)

    def replace_communicator(self, communicator: Communicator) -> Communicator:
        """Communicate by another one from now on; return the one until now."""
        before, self._comm = self._comm, communicator
        return before
