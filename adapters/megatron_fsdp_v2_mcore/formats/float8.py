"""FP8 weights whose column-wise form is the transposed row-wise one: modules make it themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, override

import torch
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2_mcore.formats.base import QuantizedFormat

__all__ = ["BlockwiseFormat", "Float8Format"]


class Float8Format(QuantizedFormat):
    """FP8 with one scale for each weight, delayed or of current values."""

    tensor_class: ClassVar[Any] = Float8Tensor

    @override
    def _over(
        self, metadata: dict[str, Any], views: Sequence[torch.Tensor], like: Any
    ) -> dict[str, Any]:
        scale_inv = metadata["fp8_scale_inv"].clone()
        return {**metadata, "data": views[0], "data_transpose": None, "fp8_scale_inv": scale_inv}

    @override
    def _present(self, index: int, param: Any, uses: WeightUse) -> None:
        param._data = self._views[index][0]
        # A forward would transpose weights that only the backward needs transposed.
        param._quantizer.set_usage(rowwise=True, columnwise=False)

    @override
    @staticmethod
    def _drop_derived(param: Any) -> None:
        param._transpose, param._transpose_invalid = None, True


class BlockwiseFormat(QuantizedFormat):
    """FP8 with one scale for each 128 x 128 elements of a weight."""

    tensor_class: ClassVar[Any] = Float8BlockwiseQTensor

    def __init__(self, dtypes: Any) -> None:
        super().__init__(dtypes)
        self._scales: list[torch.Tensor] = []

    @override
    def _over(
        self, metadata: dict[str, Any], views: Sequence[torch.Tensor], like: Any
    ) -> dict[str, Any]:
        if not like._is_2D_scaled:
            raise ValueError(
                "a weight quantized in blocks of 1 x 128 cannot be gathered as bytes: its "
                "transposed form has other scales; use blocks of 128 x 128 for weights"
            )
        self._scales.append(metadata["rowwise_scale_inv"].clone())
        return {
            **metadata,
            "rowwise_data": views[0],
            "rowwise_scale_inv": self._scales[-1],
            "columnwise_data": None,
            "columnwise_scale_inv": None,
        }

    @override
    def _present(self, index: int, param: Any, uses: WeightUse) -> None:
        param._rowwise_data, param._rowwise_scale_inv = self._views[index][0], self._scales[index]
        param._quantizer.set_usage(rowwise=True, columnwise=False)

    @override
    @staticmethod
    def _drop_derived(param: Any) -> None:
        param._columnwise_data = param._columnwise_scale_inv = None
