"""What the bytes of a weight are, between the main weights and what a module computes with.

A `WeightFormat` is the only place that understands them. Everything else moves flat buffers: the
model-weight shard that rests between uses, and the gathered buffer that it is gathered into.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_fsdp_v2.dtensor.tp_params import part_of

if TYPE_CHECKING:
    from megatron_fsdp_v2.comm.interface import Axis
    from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
    from megatron_fsdp_v2.layout.placement import AxisPlacements
    from megatron_fsdp_v2.params.buffer import DataParallelBuffer

__all__ = [
    "DenseFormat",
    "PayloadBytes",
    "WeightFormat",
    "WeightUse",
    "Written",
    "format_of",
    "payload_bytes",
    "register_format",
]


class WeightUse(enum.Flag):
    """What gathered weights are to be used for."""

    FORWARD = enum.auto()
    """A forward, for the first time or as a recomputation."""
    BACKWARD = enum.auto()
    """The gradients of inputs and weights."""
    BOTH = FORWARD | BACKWARD


@dataclass(frozen=True, slots=True)
class PayloadBytes:
    """What the payloads of a format take, as far as a plan or a bound needs to know.

    Attributes:
        itemsize: Bytes of one element of a payload.
        uses: Of every payload, what it is gathered for.
        rests: Whether they are made once a step and kept, and not for every gather where main
            weights are placed alike.
        packing: Elements of a parameter that one element of a payload stands for.
    """

    itemsize: int
    uses: tuple[WeightUse, ...] = (WeightUse.BOTH,)
    rests: bool = False
    packing: int = 1

    def nbytes(self, numel: int) -> int:
        """Bytes of one payload.

        Args:
            numel: Elements of parameters and padding.
        """
        return numel // self.packing * self.itemsize

    def count(self, uses: WeightUse = WeightUse.BOTH) -> int:
        """Payloads that are gathered for these uses."""
        return sum(bool(uses & payload) for payload in self.uses)

    @property
    def most_for_one_use(self) -> int:
        """Payloads that a forward or a backward gathers, whichever are more."""
        return max(self.count(WeightUse.FORWARD), self.count(WeightUse.BACKWARD))


def payload_bytes(
    format_type: type[WeightFormat] | None, dtypes: GroupDtypes
) -> PayloadBytes | None:
    """What the payloads of a format take; None for numbers of the compute dtype.

    Args:
        format_type: The format; None where no registered one takes a parameter.
        dtypes: Dtypes of weights and gradients.
    """
    if format_type is None or format_type is DenseFormat:
        return None
    uses = tuple(format_type.payloads.values())
    rests = format_type.communicates or len(uses) > 1
    return PayloadBytes(format_type.itemsize(dtypes), uses, rests, format_type.packing)


class Written[FormatT](NamedTuple):
    """What a format writes of one group.

    Attributes:
        format: The group's.
        main: Main weights of this rank's span; `main.view(index)` is its rows of a parameter.
        payloads: Those of the same span, flat.
    """

    format: FormatT
    main: DataParallelBuffer
    payloads: Sequence[torch.Tensor]


_ONE_PAYLOAD: Mapping[str, WeightUse] = MappingProxyType({"model_weight": WeightUse.BOTH})


class WeightFormat(Protocol):
    """How the parameters of one group are stored, made from main weights, and bound to a module.

    One object for each parameter group, made with the dtypes that its precision policy decided.
    What a format keeps for each parameter besides the payload (a scale, say) it keeps itself, the
    same on every rank.

    Attributes:
        own_attributes: Names of what such a parameter keeps in its `__dict__` for itself; what
            else is there was written by others, and is handed on to what the parameter becomes.
        communicates: Whether `write` talks to other ranks. Such weights are written once a step,
            those of all groups together, and not before every use.
        payloads: The flat buffers that the weights of a group are, by name, and which use each of
            them is gathered for.
        prepares: Whether `prepare` and `forget` do anything.
        packing: How many elements of the parameter, neighbors in a row, one element of the flat
            buffers stands for. Rows have a multiple of it.
        payload_dtype: Of one element of the flat buffers.
    """

    own_attributes: ClassVar[frozenset[str]]
    communicates: ClassVar[bool]
    packing: ClassVar[int]
    payloads: ClassVar[Mapping[str, WeightUse]]
    prepares: ClassVar[bool]
    payload_dtype: torch.dtype

    def __init__(self, dtypes: GroupDtypes) -> None: ...

    @staticmethod
    def takes(param: torch.Tensor) -> bool:
        """Whether parameters like this one, given to `fully_shard`, are of this format."""
        ...

    @staticmethod
    def itemsize(dtypes: GroupDtypes) -> int:
        """Bytes of one element of a payload."""
        ...

    @staticmethod
    def problem(dtypes: GroupDtypes, placements: Sequence[AxisPlacements]) -> str | None:
        """Why such parameters cannot be sharded so, in one sentence, or None where they can.

        Args:
            dtypes: Dtypes of weights and gradients.
            placements: Placements per mesh axis, outermost first.
        """
        ...

    @staticmethod
    def values(param: torch.Tensor) -> torch.Tensor:
        """The values that a parameter's main weight begins with.

        Args:
            param: What was given to `fully_shard`.

        Returns:
            A tensor of plain numbers, of the shape that data parallelism cuts by rows.
        """
        ...

    def bind(self, views: Sequence[torch.Tensor], index: int, like: torch.Tensor) -> torch.Tensor:
        """What modules are to compute with, over its part of the gathered buffers.

        Asked once for each parameter; the memory of the buffers comes and goes afterwards.

        Args:
            views: Its payloads, of its shape; the last dimension is shorter where several elements
                are packed into one.
            index: Which parameter of the group.
            like: What was given to `fully_shard`.
        """
        ...

    def adopt(self, params: Sequence[torch.Tensor]) -> None:
        """Take note of the parameters that were made of what `bind` returned; asked once.

        Args:
            params: Those of the group, in order.
        """
        ...

    def memory(self, bound: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
        """The tensors inside what `bind` returned that have the memory of the gathered buffers."""
        ...

    def prepare(self, uses: WeightUse) -> None:
        """Have parameters ready to compute with, after a gather.

        Args:
            uses: Whatever payloads are there for.
        """
        ...

    def forget(self) -> None:
        """Drop what was made of gathered payloads, whose memory is about to be dropped."""
        ...

    @classmethod
    def write(cls, parts: Sequence[Written[Self]], axes: Sequence[Axis]) -> None:
        """Make payloads from main weights, of several groups at once. Collective if `communicates`.

        Args:
            parts: What to write, of every group.
            axes: Axes of the data-parallel mesh that cut main weights, whose ranks hold other rows;
                the innermost one where none does, whose ranks hold the same.
        """
        ...


class DenseFormat:
    """Plain numbers, cast to the compute dtype."""

    own_attributes: ClassVar[frozenset[str]] = frozenset()
    communicates: ClassVar[bool] = False
    packing: ClassVar[int] = 1
    payloads: ClassVar[Mapping[str, WeightUse]] = _ONE_PAYLOAD
    prepares: ClassVar[bool] = False

    def __init__(self, dtypes: GroupDtypes) -> None:
        self.payload_dtype = dtypes.model_weight

    @staticmethod
    def takes(param: torch.Tensor) -> bool:
        """Whether it is made of plain numbers; a DTensor counts as its local tensor."""
        local = param._local_tensor if isinstance(param, DTensor) else param
        return not (is_traceable_wrapper_subclass(local) or hasattr(local, "fsdp_pre_all_gather"))

    @staticmethod
    def itemsize(dtypes: GroupDtypes) -> int:
        """See `WeightFormat.itemsize`."""
        return dtypes.model_weight.itemsize

    @staticmethod
    def problem(dtypes: GroupDtypes, placements: Sequence[AxisPlacements]) -> str | None:
        """None: a cast works everywhere."""
        del dtypes, placements
        return None

    @staticmethod
    def values(param: torch.Tensor) -> torch.Tensor:
        """The parameter itself, or its local tensor."""
        return part_of(param)

    def bind(self, views: Sequence[torch.Tensor], index: int, like: torch.Tensor) -> torch.Tensor:
        """A view of the buffer is what modules compute with."""
        del index, like
        return views[0]

    def adopt(self, params: Sequence[torch.Tensor]) -> None:
        """Nothing is to be noted."""

    def memory(self, bound: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
        """See `bind`."""
        del index
        return [bound]

    def prepare(self, uses: WeightUse) -> None:
        """Nothing: a view is ready when its memory is filled."""

    def forget(self) -> None:
        """Nothing is made of views."""

    @classmethod
    def write(cls, parts: Sequence[Written[Self]], axes: Sequence[Axis]) -> None:
        """Cast."""
        del axes
        for part in parts:
            part.payloads[0].copy_(part.main.tensor, non_blocking=True)


_REGISTERED: list[type[WeightFormat]] = []


def register_format(format_type: type[WeightFormat]) -> None:
    """Have `fully_shard` take parameters of another format, from now on. Idempotent."""
    if format_type not in _REGISTERED:
        _REGISTERED.append(format_type)


def format_of(param: torch.Tensor) -> type[WeightFormat] | None:
    """The format of a parameter; None where no registered one takes it."""
    formats: Sequence[type[WeightFormat]] = (*_REGISTERED, DenseFormat)
    return next((known for known in formats if known.takes(param)), None)
