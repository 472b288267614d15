"""One flat buffer of weights: what rests of it on this rank, and the whole of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, FlatSpec
from megatron_fsdp_v2.params.formats import WeightUse

if TYPE_CHECKING:
    import torch

__all__ = ["Payload"]


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
        dtype: torch.dtype,
        allocator: Allocator,
        *,
        packing: int = 1,
    ) -> None:
        """Describe it; `model` is given.

        Args:
            name: What the form is called.
            uses: What it is gathered for.
            model: What rests between uses.
            flat: Of the group.
            dtype: Of one element.
            allocator: Makes the temporary buffer, if there is one.
            packing: Elements of parameters that one element stands for.
        """
        self.name = name
        self.uses = uses
        self.model = model
        self.gathered = model
        self.temporary: TemporaryBuffer | None = None
        if model.span != flat.whole:
            numel = flat.layout.numel // packing
            label = f"{flat.name}/{name}"
            self.temporary = allocator.buffer(label, BufferUse.GATHERED, numel, dtype, flat.device)
            self.gathered = DataParallelBuffer.over(
                flat.layout, flat.whole, self.temporary, packing=packing
            )

    @property
    def is_whole(self) -> bool:
        """Whether the whole buffer has memory."""
        return self.temporary is None or self.temporary.is_live

    def has_room(self) -> bool:
        """Whether there is memory to gather it ahead of use, or it is gathered."""
        temporary = self.temporary
        return temporary is None or temporary.is_live or temporary.has_room()
