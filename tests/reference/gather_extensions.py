"""Tensor subclasses with FSDP2's all-gather extension."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.reference.scaled_float8 import LARGEST, ScaledFloat8, scale_of


class Extended(torch.Tensor):
    """A tensor of plain numbers, which is gathered in another form. Subclasses define the form."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> Extended:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), dtype=numbers.dtype, device=numbers.device
        )
        made.numbers = numbers
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], _context: Any, _size: Any, _stride: Any
    ) -> Extended:
        return cls(inner["numbers"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Extended, lambda each: each.numbers, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*given[0], **given[1]))


class Halves(Extended):
    """Gathers two tensors in bf16, whose sum a plain tensor with memory of its own has."""

    def fsdp_pre_all_gather(
        self, mesh: Any, size: Any, stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert tuple(size[1:]) == tuple(self.shape[1:]) and stride == (size[1], 1)
        assert isinstance(module, nn.Linear) and mesh.ndim == 1
        high = self.numbers.bfloat16()
        return (high, (self.numbers - high).bfloat16()), mp_policy.param_dtype

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        high, low = gathered
        assert metadata in (None, dtype)
        total = high.to(dtype) + low.to(dtype)
        if out is None:
            return total, (high, low, total)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(total)
        return None


class Scaled(Extended):
    """Gathers 8 bits per element, with one scale per weight that ranks find together."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        largest = self.numbers.abs().max().reshape(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = scale_of(largest)
        payload = (self.numbers / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return (payload,), scale

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        del dtype
        (payload,) = gathered
        if out is None:
            return ScaledFloat8(payload, metadata.clone()), (payload,)
        out.scale.copy_(metadata)
        return None


def extend_linears(model: nn.Module, kind: type[Extended]) -> None:
    """Convert the weights of linear layers to a subclass."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach().clone()))
