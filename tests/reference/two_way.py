"""A weight format with two payloads: one for the forward, one for the backward.

Forward: bf16. Backward: fp16. Both are communicated as 16-bit integers, so they cannot be confused,
and a module that uses a payload that was not gathered computes with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.params.formats import DenseFormat, GroupWrite

FORMS = (torch.bfloat16, torch.float16)


class TwoWay(torch.Tensor):
    """A weight in two payloads of 16-bit integers; None for an absent payload."""

    forms: list[torch.Tensor | None]

    @staticmethod
    def __new__(cls, forms: Sequence[torch.Tensor | None], shape: Sequence[int]) -> TwoWay:
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32)  # type: ignore[attr-defined]
        made.forms = list(forms)
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        raise NotImplementedError

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TwoWay({tuple(self.shape)})"

    def numbers(self, way: int) -> torch.Tensor:
        """Return the values of the forward (0) or backward (1) payload in fp32."""
        form = self.forms[way]
        assert form is not None, f"the form for use {way} is not there"
        return form.view(FORMS[way]).float()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default, f"{func} of a weight in two forms"
        return TwoWay(args[0].forms, args[0].shape)


def in_two_ways(weight: torch.Tensor) -> TwoWay:
    """Convert a full weight to this format."""
    return TwoWay([weight.detach().to(form).view(torch.int16) for form in FORMS], weight.shape)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: TwoWay) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.numbers(0).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight.numbers(1), grad.flatten(0, -2).t() @ x.flatten(0, -2)


class TwoWayLinear(nn.Module):
    """A linear layer with a weight in this format, without bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(in_two_ways(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `_Product`."""
        return _Product.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


class TwoWayFormat(DenseFormat):
    """See `WeightFormat`."""

    own_attributes: ClassVar[frozenset[str]] = frozenset({"forms"})
    payloads: ClassVar[Mapping[str, WeightUse]] = {
        "for_forward": WeightUse.FORWARD,
        "for_backward": WeightUse.BACKWARD,
    }
    prepares: ClassVar[bool] = True

    def __init__(self, dtypes: GroupDtypes) -> None:
        self.payload_dtype = torch.int16
        self._views: list[Sequence[torch.Tensor]] = []
        self._params: Sequence[Any] = []

    @staticmethod
    def takes(param: torch.Tensor) -> bool:
        return isinstance(param, TwoWay)

    @staticmethod
    def itemsize(dtypes: GroupDtypes) -> int:
        return 2

    @staticmethod
    def values(param: torch.Tensor) -> torch.Tensor:
        return param.numbers(0)

    def bind(self, views: Sequence[torch.Tensor], index: int, like: torch.Tensor) -> torch.Tensor:
        assert index == len(self._views)
        self._views.append(views)
        return TwoWay(views, like.shape)

    def adopt(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params

    def memory(self, bound: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
        return self._views[index]

    def prepare(self, uses: WeightUse) -> None:
        wanted = [bool(uses & use) for use in self.payloads.values()]
        for param, views in zip(self._params, self._views, strict=True):
            for way, view in enumerate(views):
                param.forms[way] = view if wanted[way] else None

    def forget(self) -> None:
        for param in self._params:
            param.forms[:] = [None, None]

    @classmethod
    def write(cls, parts: Sequence[GroupWrite[Self]], axes: Sequence[Axis]) -> None:
        for _, main, payloads in parts:
            for payload, form in zip(payloads, FORMS, strict=True):
                payload.copy_(main.tensor.to(form).view(torch.int16))
