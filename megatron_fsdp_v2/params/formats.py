"""Weight formats: the representation of model weights between main weights and modules.

Only a `WeightFormat` interprets the bytes of model weights. All other code moves flat buffers: the
model-weight shard kept between uses, and the gathered buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Self, override

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.placement import AxisPlacements
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.params.buffer import DataParallelBuffer


class GroupWrite[FormatT](NamedTuple):
    """Source and destination of `WeightFormat.write` for one group.

    Attributes:
        format: Format of the group.
        main: Main weights of this rank's span; `main.view(index)` has its rows of a parameter.
        payloads: Flat payloads of the same span.
    """

    format: FormatT
    main: DataParallelBuffer
    payloads: Sequence[torch.Tensor]


class WeightFormat:
    """Defines how weights of a group are stored, written from main weights and bound to modules.

    Each parameter group has its own format object, constructed with the dtypes of its precision
    policy. The object itself keeps further data of a parameter, such as a scale, identically on
    every rank. A subclass defines `takes`; the defaults of all other methods and attributes are
    those of plain numbers, cast to the compute dtype.

    Attributes:
        own_attributes: Names in a parameter's `__dict__` that belong to the format. Other
            attributes belong to user code, and are copied to the sharded and the gathered
            parameter.
        communicates: Whether `write` communicates. Such weights are written once per step for all
            groups together, not before every use.
        payloads: Names of the flat buffers that hold a group's weights, and the use that each
            buffer is gathered for.
        prepares: Whether `prepare` and `forget` are not no-ops.
        packing: Neighboring elements of a parameter's row per element of the flat buffers. The
            length of rows must be a multiple of it.
        payload_dtype: Dtype of the flat buffers.
    """

    own_attributes: ClassVar[frozenset[str]] = frozenset()
    communicates: ClassVar[bool] = False
    packing: ClassVar[int] = 1
    payloads: ClassVar[Mapping[str, WeightUse]] = {"model_weight": WeightUse.BOTH}
    prepares: ClassVar[bool] = False
    payload_dtype: torch.dtype

    def __init__(self, dtypes: GroupDtypes) -> None:
        self.payload_dtype = dtypes.model_weight

    @staticmethod
    def takes(param: torch.Tensor) -> bool:
        """Return whether this format accepts a parameter given to `fully_shard`."""
        raise NotImplementedError

    @staticmethod
    def itemsize(dtypes: GroupDtypes) -> int:
        """Return the bytes of one element of a payload."""
        return dtypes.model_weight.itemsize

    @classmethod
    def smallest_itemsize(cls, dtypes: GroupDtypes) -> float:
        """Return the bytes of the smallest element of all buffers of a group.

        Alignment in these elements holds for all its dtypes.
        """
        return min(dtypes.smallest_itemsize, cls.itemsize(dtypes) / cls.packing)

    @staticmethod
    def problem(dtypes: GroupDtypes, placements: Sequence[AxisPlacements]) -> str | None:
        """Return the reason why such parameters cannot be sharded, as one sentence, or None.

        Args:
            dtypes: Dtypes of weights and gradients.
            placements: Placements per mesh axis, outermost first.
        """
        del dtypes, placements
        return None

    @staticmethod
    def values(param: torch.Tensor) -> torch.Tensor:
        """Return the initial values of a parameter's main weight.

        Args:
            param: The parameter given to `fully_shard`.

        Returns:
            A tensor of plain numbers, whose rows data parallelism shards.
        """
        return plain_of(param).detach()

    def bind(self, views: Sequence[torch.Tensor], index: int, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor that modules compute with, over views of the gathered buffers.

        Called once per parameter; later, the buffers are repeatedly allocated and freed.

        Args:
            views: The parameter's payloads, of its shape; with packing, the last dimension is
                shorter.
            index: Index of the parameter in the group.
            like: The parameter given to `fully_shard`.
        """
        del index, like
        return views[0]

    def adopt(self, params: Sequence[torch.Tensor]) -> None:
        """Receive the gathered parameters made from the results of `bind`; called once.

        Args:
            params: Gathered parameters of the group, in order.
        """

    def memory(self, bound: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
        """Return the tensors in a result of `bind` that alias the gathered buffers."""
        del index
        return [bound]

    def prepare(self, uses: WeightUse) -> None:
        """Prepare parameters for computation after a gather.

        Args:
            uses: Uses of all gathered payloads.
        """

    def forget(self) -> None:
        """Discard tensors made from gathered payloads, before their memory is freed."""

    @classmethod
    def write(cls, parts: Sequence[GroupWrite[Self]], axes: Sequence[Axis]) -> None:
        """Write payloads of several groups from main weights. Collective if `communicates`.

        Args:
            parts: Main weights and payloads of every group.
            axes: Axes of the data-parallel mesh that shard main weights; the innermost axis if none
                does, whose ranks hold the same rows.
        """
        del axes
        for part in parts:
            part.payloads[0].copy_(part.main.tensor, non_blocking=True)


class DenseFormat(WeightFormat):
    """Plain numbers, cast to the compute dtype."""

    @staticmethod
    @override
    def takes(param: torch.Tensor) -> bool:
        """Return whether the parameter, or its local tensor, is not a wrapper of other tensors."""
        local = plain_of(param)
        return not (is_traceable_wrapper_subclass(local) or hasattr(local, "fsdp_pre_all_gather"))


_REGISTERED: list[type[WeightFormat]] = []


def register_format(format_type: type[WeightFormat]) -> None:
    """Register a weight format: `fully_shard` then accepts the parameters that the format takes.

    It has priority over the formats registered before it.
    """
    if format_type not in _REGISTERED:
        _REGISTERED.insert(0, format_type)


def format_of(param: torch.Tensor) -> type[WeightFormat] | None:
    """Return the format of a parameter; None if no registered format accepts it."""
    formats: Sequence[type[WeightFormat]] = (*_REGISTERED, DenseFormat)
    return next((known for known in formats if known.takes(param)), None)
