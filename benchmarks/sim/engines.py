"""This package and FSDP2 on the streams of a simulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard as fsdp2

from benchmarks.sim.models import Decoder
from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.plan.simulation import VirtualStreams, run_on_streams
from megatron_fsdp_v2.plan.simulation.devices import VirtualEvent

POLICY = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    main_params_dtype=torch.float32,
    main_grads_dtype=torch.float32,
    grad_comm_dtype=torch.float32,
)


def shard_ours(model: Decoder, mesh: DeviceMesh, streams: VirtualStreams) -> None:
    """Shard with this package, using its code for CUDA."""
    for unit in [*model.units(), model]:
        fully_shard(unit, mesh=mesh, mp_policy=POLICY)  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    run_on_streams(model, streams)


def shard_fsdp2(model: Decoder, mesh: DeviceMesh, streams: VirtualStreams) -> None:
    """Shard with PyTorch's own `fully_shard`, which uses the streams of `cpu_streams`."""
    del streams
    policy = Fsdp2Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in [*model.units(), model]:
        fsdp2(unit, mesh=mesh, mp_policy=policy)  # type: ignore[arg-type]
    model.to_empty(device="cpu")


ENGINES = {"ours": shard_ours, "fsdp2": shard_fsdp2}


@contextlib.contextmanager
def cpu_streams(streams: VirtualStreams) -> Iterator[None]:
    """Make `torch.cpu` return streams of a simulated GPU, which FSDP2 then uses.

    FSDP2 is unmodified. Without this context, streams of `torch.cpu` do nothing.
    """

    class Event(VirtualEvent):
        def record(self, stream: Any = None) -> None:
            (stream or streams.current_stream()).record_event(self)

        def wait(self, stream: Any = None) -> None:
            (stream or streams.current_stream()).wait_event(self)

    def make(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return streams.new_stream("of torch.cpu")

    def current(device: Any = None) -> Any:
        del device
        return streams.current_stream()

    instead = {"Stream": make, "Event": Event, "current_stream": current, "stream": streams.use}
    before = {name: getattr(torch.cpu, name) for name in instead}
    try:
        for name, value in instead.items():
            setattr(torch.cpu, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.cpu, name, value)
