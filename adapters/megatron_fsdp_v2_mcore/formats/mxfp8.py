"""MXFP8 weights: two forms, each with scales of its own, gathered for the use that needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, override

import torch
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor

from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2_mcore.formats.base import QuantizedFormat

__all__ = ["MXFP8Format"]

_WAYS = ("rowwise", "columnwise")


class MXFP8Format(QuantizedFormat):
    """A power of two for each 32 elements of a row, and for each 32 of a column.

    A forward multiplies by the row-wise form, gradients of inputs by the column-wise one.
    """

    tensor_class: ClassVar[Any] = MXFP8Tensor
    payloads: ClassVar[Mapping[str, WeightUse]] = MappingProxyType(
        {"rowwise_weight": WeightUse.FORWARD, "columnwise_weight": WeightUse.BACKWARD}
    )

    def __init__(self, dtypes: Any) -> None:
        super().__init__(dtypes)
        self._scales: list[list[torch.Tensor]] = []

    @override
    def _over(
        self, metadata: dict[str, Any], views: Sequence[torch.Tensor], like: Any
    ) -> dict[str, Any]:
        scales = []
        for way in _WAYS:
            scale = metadata[f"{way}_scale_inv"]
            if scale is None:
                is_columnwise = way == "columnwise"
                shape = like._get_quantizer().get_scale_shape(like.shape, is_columnwise)
                scale = torch.zeros(shape, dtype=torch.uint8, device=views[0].device)
            scales.append(scale.clone())
        self._scales.append(scales)
        made = dict(metadata)
        for way, view, scale in zip(_WAYS, views, scales, strict=True):
            made |= {f"{way}_data": view, f"{way}_scale_inv": scale}
        return made

    @override
    def _present(self, index: int, param: Any, uses: WeightUse) -> None:
        wanted = [bool(uses & use) for use in self.payloads.values()]
        for way, view, scale, is_there in zip(
            _WAYS, self._views[index], self._scales[index], wanted, strict=True
        ):
            setattr(param, f"_{way}_data", view if is_there else None)
            setattr(param, f"_{way}_scale_inv", scale if is_there else None)
        param._quantizer.set_usage(rowwise=wanted[0], columnwise=wanted[1])

    @override
    @staticmethod
    def _drop_derived(param: Any) -> None:
        """Nothing is made of either form."""
