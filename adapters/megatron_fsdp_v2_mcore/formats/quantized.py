"""Transformer Engine's quantized weights as formats of `fully_shard`.

Each rank quantizes its rows of the main weights with `quantize_master_weights` of Transformer
Engine, which reduces amaxes over the ranks. The concatenated bytes of all ranks therefore equal the
bytes of the quantized whole weight. Every rank has all scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, override

import torch
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor
from transformer_engine.pytorch.tensor.utils import quantize_master_weights

from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.params.buffer import DataParallelBuffer
from megatron_fsdp_v2.params.formats import GroupWrite, WeightFormat
from megatron_fsdp_v2_mcore.formats.axes import group_over

if TYPE_CHECKING:
    from megatron_fsdp_v2.comm.interface import Axis
    from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
    from megatron_fsdp_v2.layout.placement import AxisPlacements

_OWN_ATTRIBUTES = """
_amax_columnwise _amax_rowwise _columnwise_data _columnwise_scale_inv _data _dtype _fp4_dtype
_fp8_dtype _high_precision_init_val _is_2D_scaled _is_param _nvfp4_e4m3_max _nvfp4_use_4over6
_quantizer _requires_grad _row_scaled_nvfp4 _rowwise_data _rowwise_scale_inv _scale_inv
_transpose _transpose_invalid _with_gemm_swizzled_scales clear_high_precision_init_val
get_high_precision_init_val
"""


class QuantizedFormat(WeightFormat):
    """Base of the quantized formats; see `WeightFormat`. Main weights are high-precision values.

    Attributes:
        keeps_transposes: Whether transposes of gathered weights are kept after a reshard, to be
            reused until the weights change.
        tensor_class: Transformer Engine's class of quantized tensors.
        data: Per payload, the argument of that class that takes the bytes. The attributes of a
            tensor have the names of the arguments with a leading underscore.
        scales: Per payload, the arguments that take its scales.
        derived: Arguments of tensors that modules compute from the bytes.
    """

    own_attributes: ClassVar[frozenset[str]] = frozenset(_OWN_ATTRIBUTES.split())
    communicates: ClassVar[bool] = True
    payloads: ClassVar[Mapping[str, WeightUse]] = MappingProxyType({"fp8_weight": WeightUse.BOTH})
    prepares: ClassVar[bool] = True
    payload_dtype: torch.dtype = torch.uint8
    tensor_class: ClassVar[Any]
    data: ClassVar[tuple[str, ...]] = ("rowwise_data",)
    scales: ClassVar[tuple[tuple[str, ...], ...]] = (("rowwise_scale_inv",),)
    derived: ClassVar[tuple[str, ...]] = ("columnwise_data", "columnwise_scale_inv")

    def __init__(self, dtypes: GroupDtypes) -> None:
        del dtypes
        self.keeps_transposes = False
        self._params: Sequence[Any] = []
        self._views: list[Sequence[torch.Tensor]] = []
        # Per parameter and payload: arguments of the tensor class and their tensors.
        self._payload_arguments: list[list[dict[str, torch.Tensor]]] = []

    @classmethod
    @override
    def takes(cls, param: torch.Tensor) -> bool:
        """Whether a parameter is an instance of `tensor_class`."""
        return isinstance(param, cls.tensor_class)

    @staticmethod
    @override
    def itemsize(dtypes: GroupDtypes) -> int:
        """Return the size of an element: one byte."""
        del dtypes
        return 1

    @staticmethod
    @override
    def problem(dtypes: GroupDtypes, placements: Sequence[AxisPlacements]) -> str | None:
        """Return the reason why these parameters cannot be sharded, or None."""
        del placements
        if dtypes.main_weight.itemsize < 4:
            return (
                f"a quantized weight needs main weights in fp32, not {dtypes.main_weight}: "
                "updates of the optimizer would be lost when they are quantized again; set "
                "MixedPrecisionPolicy(main_params_dtype=torch.float32) "
                "(--megatron-fsdp-main-params-dtype fp32)"
            )
        return None

    @staticmethod
    @override
    def values(param: torch.Tensor) -> torch.Tensor:
        """Return the high-precision initial values if they were kept, else dequantized values."""
        kept = getattr(param, "get_high_precision_init_val", None)
        values = None if kept is None else kept()
        if values is None:
            values = param.dequantize()
        return values.to(param.device)

    @override
    def bind(self, views: Sequence[torch.Tensor], index: int, like: Any) -> torch.Tensor:
        """Return a quantized tensor over the gathered bytes, with newly allocated scales."""
        assert index == len(self._views)
        metadata = self._metadata(like)
        payload_arguments = [
            {data: view} | {scale: metadata[scale].clone() for scale in scales}
            for data, view, scales in zip(self.data, views, self.scales, strict=True)
        ]
        self._views.append(views)
        self._payload_arguments.append(payload_arguments)
        arguments = metadata | dict.fromkeys(self.derived)
        for payload in payload_arguments:
            arguments |= payload
        quantized: torch.Tensor = self.tensor_class(
            shape=like.shape, dtype=like.dtype, device=views[0].device, **arguments
        )
        return quantized

    @override
    def adopt(self, params: Sequence[torch.Tensor]) -> None:
        """See `WeightFormat.adopt`."""
        self._params = params

    @override
    def memory(self, bound: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
        """Return the views: a quantized tensor references them and has no other memory."""
        del bound
        return self._views[index]

    @classmethod
    @override
    def write(cls, parts: Sequence[GroupWrite[Self]], axes: Sequence[Axis]) -> None:
        """Quantize this rank's rows with the scales of the whole weights."""
        rows = [row for part in parts for row in part.format._rows(part.main, part.payloads)]
        params, masters, starts, fragments = (list(column) for column in zip(*rows, strict=True))
        with torch.no_grad():
            quantize_master_weights(
                params,
                masters,
                starts,
                group_over(axes),
                fragments,
                # Modules derive transposes from gathered bytes on demand.
                manual_post_all_gather_processing=True,
            )
            for param in params:
                cls._drop_derived(param)

    def _rows(
        self, main: DataParallelBuffer, payloads: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Any, torch.Tensor | None, int | None, Any]]:
        """Yield each parameter, its local rows, their start, and the destination of the bytes."""
        written = [
            DataParallelBuffer(main.context, main.placements, payload, packing=self.packing)
            for payload in payloads
        ]
        for index, param in enumerate(self._params):
            # Modules may have removed attributes that they did not need.
            self._set_payloads(index, param, WeightUse.BOTH)
            first, last = main.rows(index)
            if first == last:
                yield param, None, None, None
                continue
            start = first * main.layout.slots[index].row_numel
            destinations = [buffer.view(index).reshape(-1) for buffer in written]
            destination = destinations if len(destinations) > 1 else destinations[0]
            yield param, main.view(index).reshape(-1), start, destination

    @override
    def prepare(self, uses: WeightUse) -> None:
        """Restore the gathered bytes and scales that modules have removed, for these uses."""
        for index, param in enumerate(self._params):
            self._set_payloads(index, param, uses)

    @override
    def forget(self) -> None:
        """Drop transposes, unless they are kept until the weights change."""
        if not self.keeps_transposes:
            for param in self._params:
                self._drop_derived(param)

    def _set_payloads(self, index: int, param: Any, uses: WeightUse) -> None:
        """Set a parameter's bytes and scales for these uses and remove those of other uses."""
        needed = [bool(uses & use) for use in self.payloads.values()]
        for payload, is_needed in zip(self._payload_arguments[index], needed, strict=True):
            for name, tensor in payload.items():
                setattr(param, f"_{name}", tensor if is_needed else None)
        # Prevents the forward from computing transposes that only the backward needs.
        param._quantizer.set_usage(rowwise=needed[0], columnwise=needed[1:] == [True])

    @classmethod
    def _drop_derived(cls, param: Any) -> None:
        """Drop the tensors that modules derived from the gathered bytes."""
        for name in cls.derived:
            setattr(param, f"_{name}", None)

    def _metadata(self, like: Any) -> dict[str, Any]:
        """Check a quantized tensor, and return the arguments that construct one like it."""
        metadata: dict[str, Any] = like.get_metadata()
        return metadata


class Float8Format(QuantizedFormat):
    """FP8 with one scale per weight, with delayed or current scaling."""

    tensor_class: ClassVar[Any] = Float8Tensor
    data = ("data",)
    # Modules do not remove the scale.
    scales = ((),)
    derived = ("data_transpose",)

    @override
    def _metadata(self, like: Any) -> dict[str, Any]:
        metadata = super()._metadata(like)
        return {**metadata, "fp8_scale_inv": metadata["fp8_scale_inv"].clone()}

    @override
    @classmethod
    def _drop_derived(cls, param: Any) -> None:
        param._transpose, param._transpose_invalid = None, True


class BlockwiseFormat(QuantizedFormat):
    """FP8 with one scale per 128 x 128 elements of a weight."""

    tensor_class: ClassVar[Any] = Float8BlockwiseQTensor

    @override
    def _metadata(self, like: Any) -> dict[str, Any]:
        if not like._is_2D_scaled:
            raise ValueError(
                "a weight quantized in blocks of 1 x 128 cannot be gathered as bytes: its "
                "transpose has different scales; use blocks of 128 x 128 for weights"
            )
        return super()._metadata(like)


class MXFP8Format(QuantizedFormat):
    """MXFP8: a power-of-two scale per 32 elements of a row, and per 32 elements of a column.

    The forward uses the row-wise bytes, the gradient of the input the column-wise bytes.
    """

    tensor_class: ClassVar[Any] = MXFP8Tensor
    payloads: ClassVar[Mapping[str, WeightUse]] = MappingProxyType(
        {"rowwise_weight": WeightUse.FORWARD, "columnwise_weight": WeightUse.BACKWARD}
    )
    data = ("rowwise_data", "columnwise_data")
    scales = (("rowwise_scale_inv",), ("columnwise_scale_inv",))
    derived = ()

    @override
    def _metadata(self, like: Any) -> dict[str, Any]:
        metadata = super()._metadata(like)
        for (name,) in self.scales:
            if metadata[name] is None:
                is_columnwise = name == "columnwise_scale_inv"
                shape = like._get_quantizer().get_scale_shape(like.shape, is_columnwise)
                metadata[name] = torch.zeros(shape, dtype=torch.uint8, device=like.device)
        return metadata


_COLUMN_DIVISOR = 64
"""Divisor of a weight's number of columns: Transformer Engine pads scales to a multiple of it."""


class NVFP4Format(QuantizedFormat):
    """NVFP4: an E4M3 scale per 16 x 16 elements of a weight, and one fp32 scale per weight."""

    packing: ClassVar[int] = 2
    tensor_class: ClassVar[Any] = NVFP4Tensor
    scales = (("rowwise_scale_inv", "amax_rowwise"),)
    derived = ("columnwise_data", "columnwise_scale_inv", "amax_columnwise")

    @override
    def _metadata(self, like: Any) -> dict[str, Any]:
        if not like._get_quantizer().with_2d_quantization:
            raise ValueError(
                "a weight quantized to NVFP4 in blocks of 1 x 16 cannot be gathered as bytes: its "
                "transpose has different scales; use blocks of 16 x 16 for weights (leave "
                "NVTE_NVFP4_DISABLE_2D_QUANTIZATION unset)"
            )
        if like.dim() != 2 or like.shape[1] % _COLUMN_DIVISOR:
            raise ValueError(
                f"a weight of shape {tuple(like.shape)} cannot be gathered as NVFP4: Transformer "
                "Engine's cast of sharded weights supports only matrices whose number of columns "
                f"is a multiple of {_COLUMN_DIVISOR}"
            )
        return super()._metadata(like)


FORMATS: Sequence[type[QuantizedFormat]] = (Float8Format, BlockwiseFormat, MXFP8Format, NVFP4Format)
