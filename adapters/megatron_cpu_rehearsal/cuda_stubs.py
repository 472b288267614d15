"""Stubs for the parts of `torch.cuda` that Megatron calls.

There is one device, whose work is complete when a call returns: streams and events have no effect,
memory statistics are zero, and the device's random state is that of the CPU generator.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from megatron_cpu_rehearsal.tensor_types import tensor_type
from megatron_fsdp_v2_patching import Patches


class StreamStub:
    """Stub for a stream, whose work is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self.cuda_stream = 0
        self.device = torch.device("cpu")

    def __enter__(self) -> StreamStub:
        return self

    def __exit__(self, *args: object) -> None:
        del args

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: all work is complete."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: all work is complete."""

    def synchronize(self) -> None:
        """Do nothing: all work is complete."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event now."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Return True: all work is complete."""
        return True


class Event:
    """Stub for an event, which records the time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        del stream
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: all work is complete."""

    def synchronize(self) -> None:
        """Do nothing: all work is complete."""

    def query(self) -> bool:
        """Return True: the event has occurred."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds until another event."""
        return (end._time - self._time) * 1e3


_STREAM = StreamStub()


# Megatron chooses communication settings by architecture; 9 (Hopper) selects the defaults.
_HOPPER = (9, 0)


def _properties(capability: tuple[int, int]) -> SimpleNamespace:
    major, minor = capability
    return SimpleNamespace(
        name="CPU rehearsal",
        major=major,
        minor=minor,
        total_memory=1 << 34,
        multi_processor_count=1,
    )


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    del device
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    del device
    torch.set_rng_state(state)


@contextlib.contextmanager
def _device(device: Any = None) -> Iterator[None]:
    del device
    yield


def _returns(value: Any) -> Any:
    """Return a new function that returns `value`.

    Each call creates a new function, since torch's compiler indexes torch's functions by object and
    rejects an object with two names.
    """

    def stub(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return value

    return stub


def _statistics(device: Any = None) -> dict[str, int]:
    del device
    return defaultdict(int)


STUBS: dict[str, Any] = {
    "is_available": _returns(True),
    "is_initialized": _returns(True),
    "init": _returns(None),
    "_lazy_init": _returns(None),
    "_lazy_call": lambda call, **kwargs: call(),
    "device_count": _returns(1),
    "current_device": _returns(0),
    "set_device": _returns(None),
    "device": _device,
    "synchronize": _returns(None),
    "empty_cache": _returns(None),
    "Stream": StreamStub,
    "ExternalStream": StreamStub,
    "Event": Event,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "set_stream": _returns(None),
    "stream": lambda stream=None: contextlib.nullcontext(),
    "is_current_stream_capturing": _returns(False),
    "get_device_properties": lambda device=None: _properties(_HOPPER),
    "get_device_capability": lambda device=None: _HOPPER,
    "get_device_name": lambda device=None: "CPU rehearsal",
    "memory_stats": _statistics,
    "memory_allocated": _returns(0),
    "max_memory_allocated": _returns(0),
    "memory_reserved": _returns(0),
    "max_memory_reserved": _returns(0),
    "device_memory_used": _returns(0),
    "mem_get_info": lambda device=None: (1 << 34, 1 << 34),
    "reset_peak_memory_stats": _returns(None),
    "default_generators": (torch.default_generator,),
    "manual_seed": _manual_seed,
    "manual_seed_all": lambda seed: _manual_seed(seed),
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "FloatTensor": tensor_type("FloatTensor", torch.float32),
    "HalfTensor": tensor_type("HalfTensor", torch.float16),
    "BFloat16Tensor": tensor_type("BFloat16Tensor", torch.bfloat16),
    "LongTensor": tensor_type("LongTensor", torch.int64),
    "IntTensor": tensor_type("IntTensor", torch.int32),
    "ByteTensor": tensor_type("ByteTensor", torch.uint8),
}


def install_stubs(patches: Patches, capability: tuple[int, int] = _HOPPER) -> None:
    """Install the stubs.

    Args:
        patches: Registry that restores the originals.
        capability: Compute capability that the device reports.
    """
    for name, value in STUBS.items():
        patches.set(torch.cuda, name, value)
    if capability != _HOPPER:
        patches.set(
            torch.cuda, "get_device_properties", lambda device=None: _properties(capability)
        )
        patches.set(torch.cuda, "get_device_capability", lambda device=None: capability)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        patches.set(torch.cuda.random, name, STUBS[name])
    for name in ("range_push", "range_pop", "mark"):
        patches.set(torch.cuda.nvtx, name, _returns(None))
    # Since CUDA is reported as available, torch would query a driver that does not exist.
    patches.set(torch.accelerator, "is_available", lambda: False)
    patches.set(torch.accelerator, "current_accelerator", lambda check_available=False: None)
