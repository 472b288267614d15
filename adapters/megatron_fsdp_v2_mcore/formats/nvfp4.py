"""NVFP4 weights: two elements to a byte; modules make the transposed form themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, override

import torch
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor

from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2_mcore.formats.base import QuantizedFormat

__all__ = ["NVFP4Format"]

_WIDTH = 64
"""Columns that a weight has a multiple of: those whose scales Transformer Engine pads to."""


class NVFP4Format(QuantizedFormat):
    """FP4 with an E4M3 scale for each 16 x 16 elements of a weight, and one in fp32 for all."""

    packing: ClassVar[int] = 2
    tensor_class: ClassVar[Any] = NVFP4Tensor

    def __init__(self, dtypes: Any) -> None:
        super().__init__(dtypes)
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []

    @override
    def _over(
        self, metadata: dict[str, Any], views: Sequence[torch.Tensor], like: Any
    ) -> dict[str, Any]:
        if not like._get_quantizer().with_2d_quantization:
            raise ValueError(
                "a weight quantized to NVFP4 in blocks of 1 x 16 cannot be gathered as bytes: its "
                "transposed form has other scales; use blocks of 16 x 16 for weights (leave "
                "NVTE_NVFP4_DISABLE_2D_QUANTIZATION unset)"
            )
        if like.dim() != 2 or like.shape[1] % _WIDTH:
            raise ValueError(
                f"a weight of shape {tuple(like.shape)} cannot be gathered as NVFP4: what casts "
                "parts of weights in Transformer Engine stores scales without the padding of "
                f"rows, which only matrices whose width is a multiple of {_WIDTH} do not have"
            )
        scales = metadata["rowwise_scale_inv"].clone(), metadata["amax_rowwise"].clone()
        self._scales.append(scales)
        return {
            **metadata,
            "rowwise_data": views[0],
            "rowwise_scale_inv": scales[0],
            "amax_rowwise": scales[1],
            "columnwise_data": None,
            "columnwise_scale_inv": None,
            "amax_columnwise": None,
        }

    @override
    def _present(self, index: int, param: Any, uses: WeightUse) -> None:
        param._rowwise_data = self._views[index][0]
        param._rowwise_scale_inv, param._amax_rowwise = self._scales[index]
        # A forward would transpose weights that only the backward needs transposed.
        param._quantizer.set_usage(rowwise=True, columnwise=False)

    @override
    @staticmethod
    def _drop_derived(param: Any) -> None:
        param._columnwise_data = param._columnwise_scale_inv = param._amax_columnwise = None
