"""Maps CUDA devices in calls of torch to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, override

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.int64: "torch.cuda.LongTensor",
    torch.int32: "torch.cuda.IntTensor",
    torch.uint8: "torch.cuda.ByteTensor",
}


def on_cpu(device: Any) -> Any:
    """Map CUDA devices, including plain ordinals, in a device argument to the CPU."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


class CpuDevices(TorchFunctionMode):
    """Maps CUDA devices to the CPU in every torch call that takes a device.

    Only devices change; functions, values and dtypes do not.
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _TYPE_NAMES.get(args[0].dtype) or func(*args)
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)
