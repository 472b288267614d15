"""What the formats of Transformer Engine's quantized tensors have in common.

Bytes are quantized from the rows of the main weights that a rank has, by Transformer Engine's own
`quantize_master_weights`: it reduces what scales are made of over the ranks, so that the bytes of
all ranks together are those of the whole weight, quantized. Scales are whole on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from transformer_engine.pytorch.tensor.utils import quantize_master_weights

from megatron_fsdp_v2.params.buffer import DataParallelBuffer
from megatron_fsdp_v2.params.formats import WeightUse, Written
from megatron_fsdp_v2_mcore.formats.axes import group_over

if TYPE_CHECKING:
    from megatron_fsdp_v2.comm.interface import Axis
    from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
    from megatron_fsdp_v2.layout.placement import AxisPlacements

__all__ = ["QuantizedFormat"]

_OWN_ATTRIBUTES = """
_amax_columnwise _amax_rowwise _columnwise_data _columnwise_scale_inv _data _dtype _fp4_dtype
_fp8_dtype _high_precision_init_val _is_2D_scaled _is_param _nvfp4_e4m3_max _nvfp4_use_4over6
_quantizer _requires_grad _row_scaled_nvfp4 _rowwise_data _rowwise_scale_inv _scale_inv
_transpose _transpose_invalid _with_gemm_swizzled_scales clear_high_precision_init_val
get_high_precision_init_val
"""


class QuantizedFormat(ABC):
    """See `WeightFormat`. Main weights are the high-precision values.

    Attributes:
        keeps_transposes: Whether transposes that modules make of gathered weights outlive these, to
            be used again until the weights change.
    """

    own_attributes: ClassVar[frozenset[str]] = frozenset(_OWN_ATTRIBUTES.split())
    communicates: ClassVar[bool] = True
    packing: ClassVar[int] = 1
    payloads: ClassVar[Mapping[str, WeightUse]] = MappingProxyType({"fp8_weight": WeightUse.BOTH})
    prepares: ClassVar[bool] = True
    payload_dtype: torch.dtype = torch.uint8
    tensor_class: ClassVar[Any]

    def __init__(self, dtypes: GroupDtypes) -> None:
        del dtypes
        self.keeps_transposes = False
        self._params: Sequence[Any] = []
        self._views: list[Sequence[torch.Tensor]] = []

    @classmethod
    def takes(cls, param: torch.Tensor) -> bool:
        """Whether it is of this class of quantized tensors."""
        return isinstance(param, cls.tensor_class)

    @staticmethod
    def itemsize(dtypes: GroupDtypes) -> int:
        """One byte."""
        del dtypes
        return 1

    @staticmethod
    def problem(dtypes: GroupDtypes, placements: Sequence[AxisPlacements]) -> str | None:
        """Why such parameters cannot be sharded so, or None."""
        del placements
        if dtypes.main_weight.itemsize < 4:
            return (
                f"a quantized weight needs main weights of fp32, not {dtypes.main_weight}: what "
                "the optimizer adds would be lost when they are quantized again; set "
                "MixedPrecisionPolicy(main_params_dtype=torch.float32) "
                "(--megatron-fsdp-main-params-dtype fp32)"
            )
        return None

    @staticmethod
    def values(param: torch.Tensor) -> torch.Tensor:
        """The values it was quantized from, where the module kept them; else what it stands for."""
        kept = getattr(param, "get_high_precision_init_val", None)
        values = None if kept is None else kept()
        if values is None:
            values = param.dequantize()
        return values.to(param.device)

    def bind(self, views: Sequence[torch.Tensor], index: int, like: Any) -> torch.Tensor:
        """A quantized tensor of the same class over the gathered bytes, with scales of its own."""
        assert index == len(self._views)
        self._views.append(views)
        metadata = self._over(like.get_metadata(), views, like)
        device = views[0].device
        made: torch.Tensor = self.tensor_class(
            shape=like.shape, dtype=like.dtype, device=device, **metadata
        )
        return made

    def adopt(self, params: Sequence[torch.Tensor]) -> None:
        """See `WeightFormat.adopt`."""
        self._params = params

    def memory(self, bound: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
        """The views themselves: quantized tensors hold them and have no memory of their own."""
        del bound
        return self._views[index]

    @classmethod
    def write(cls, parts: Sequence[Written[Self]], axes: Sequence[Axis]) -> None:
        """Quantize this rank's rows with the scales of whole weights."""
        rows = [row for part in parts for row in part.format._rows(part.main, part.payloads)]
        params, masters, starts, fragments = (list(column) for column in zip(*rows, strict=True))
        with torch.no_grad():
            quantize_master_weights(
                params,
                masters,
                starts,
                group_over(axes),
                fragments,
                # Modules make what they need of gathered bytes when they need it.
                manual_post_all_gather_processing=True,
            )
            for param in params:
                cls._drop_derived(param)

    def _rows(
        self, main: DataParallelBuffer, payloads: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Any, torch.Tensor | None, int | None, Any]]:
        """Of every parameter: itself, this rank's rows, where they start, and where bytes go."""
        written = [
            DataParallelBuffer(main.layout, main.span, payload, packing=self.packing)
            for payload in payloads
        ]
        for index, param in enumerate(self._params):
            # Modules may have taken out what they did not need.
            self._present(index, param, WeightUse.BOTH)
            first, last = main.rows(index)
            if first == last:
                yield param, None, None, None
                continue
            start = first * main.layout.slots[index].row_numel
            pieces = [buffer.view(index).reshape(-1) for buffer in written]
            bytes_of = pieces if len(pieces) > 1 else pieces[0]
            yield param, main.view(index).reshape(-1), start, bytes_of

    def prepare(self, uses: WeightUse) -> None:
        """Put the gathered bytes back where a module took them out, as far as they are there."""
        for index, param in enumerate(self._params):
            self._present(index, param, uses)

    def forget(self) -> None:
        """Drop transposes, unless they are to be kept until the weights change."""
        if not self.keeps_transposes:
            for param in self._params:
                self._drop_derived(param)

    # -- what differs -------------------------------------------------------------------------

    @abstractmethod
    def _over(
        self, metadata: dict[str, Any], views: Sequence[torch.Tensor], like: Any
    ) -> dict[str, Any]:
        """Arguments of a tensor's class for one over other bytes.

        Args:
            metadata: Those of `like`.
            views: The bytes.
            like: What was given to `fully_shard`.
        """

    @abstractmethod
    def _present(self, index: int, param: Any, uses: WeightUse) -> None:
        """Have a parameter's bytes and scales be there for these uses, and no others."""

    @staticmethod
    @abstractmethod
    def _drop_derived(param: Any) -> None:
        """Drop what a module made of gathered bytes."""
