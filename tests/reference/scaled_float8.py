"""A weight format in one file: 8 bits per element and one scale per weight.

The format is like those of an adapter, but needs no library and runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.params.buffer import DataParallelBuffer
from megatron_fsdp_v2.params.formats import DenseFormat, GroupWrite

LARGEST = 448.0
"""Largest value of `float8_e4m3fn`."""


class ScaledFloat8(torch.Tensor):
    """The quantized tensor `payload * scale`; operations run on the dequantized values.

    Args:
        payload: `float8_e4m3fn`, of the shape of the weight.
        scale: fp32, one element.
    """

    payload: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, payload: torch.Tensor, scale: torch.Tensor) -> ScaledFloat8:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, payload.shape, dtype=torch.float32, device=payload.device
        )
        made.payload, made.scale = payload, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["payload", "scale"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], _meta: Any, _size: Any, _stride: Any
    ) -> ScaledFloat8:
        return ScaledFloat8(inner["payload"], inner["scale"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledFloat8({tuple(self.shape)})"

    def numbers(self) -> torch.Tensor:
        """Return the dequantized values in fp32."""
        return self.payload.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # FSDP2 makes a parameter by `as_strided`, of the shape that the weight has.
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            return ScaledFloat8(args[0].payload, args[0].scale)
        args, kwargs = tree_map_only(ScaledFloat8, ScaledFloat8.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def quantized(weight: torch.Tensor) -> ScaledFloat8:
    """Quantize a full weight to this format."""
    scale = scale_of(weight.detach().abs().max().reshape(1))
    return ScaledFloat8((weight.detach() / scale).to(torch.float8_e4m3fn), scale)


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """Return the scales of weights with these largest absolute values."""
    return torch.where(largest > 0, largest / LARGEST, 1.0)


def quantize_linears(model: nn.Module) -> None:
    """Convert the weights of linear layers to this format."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(quantized(module.weight))


class ScaledFloat8Format(DenseFormat):
    """See `WeightFormat`. Main weights are fp32; each scale covers a full weight."""

    own_attributes: ClassVar[frozenset[str]] = frozenset({"payload", "scale"})
    communicates: ClassVar[bool] = True

    def __init__(self, dtypes: GroupDtypes) -> None:
        self.payload_dtype = torch.float8_e4m3fn
        self._scales: list[torch.Tensor] = []

    @staticmethod
    def takes(param: torch.Tensor) -> bool:
        return isinstance(param, ScaledFloat8)

    @staticmethod
    def itemsize(dtypes: GroupDtypes) -> int:
        return 1

    @staticmethod
    def values(param: torch.Tensor) -> torch.Tensor:
        return param.numbers()

    def bind(self, views: Sequence[torch.Tensor], index: int, like: torch.Tensor) -> torch.Tensor:
        assert index == len(self._scales)
        self._scales.append(like.scale.clone())
        return ScaledFloat8(views[0], self._scales[index])

    def memory(self, bound: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
        return [bound.payload]

    @classmethod
    def write(cls, parts: Sequence[GroupWrite[Self]], axes: Sequence[Axis]) -> None:
        rows, scales, written = [], [], []
        for part in parts:
            bytes_of = DataParallelBuffer(part.main.context, part.main.placements, part.payloads[0])
            for index, scale in enumerate(part.format._scales):
                rows.append(part.main.view(index))
                scales.append(scale)
                written.append(bytes_of.view(index))
        largest = torch.stack([r.abs().max() if r.numel() else r.new_zeros(()) for r in rows])
        for axis in axes:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
        for mine, scale, found, into in zip(rows, scales, scale_of(largest), written, strict=True):
            scale.copy_(found)
            into.copy_(mine / scale)
