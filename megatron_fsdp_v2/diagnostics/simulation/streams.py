"""Sharded modules on the streams of a simulated GPU."""

from __future__ import annotations

from torch import nn

from megatron_fsdp_v2.comm.backends import NcclCollectives
from megatron_fsdp_v2.comm.streams import StreamCommunicator
from megatron_fsdp_v2.diagnostics.simulation.devices import VirtualStreams
from megatron_fsdp_v2.runtime.fsdp_module import named_units

__all__ = ["run_on_streams"]


def run_on_streams(module: nn.Module, streams: VirtualStreams) -> None:
    """Make a sharded module on a CPU mesh communicate by the code for CUDA, permanently.

    Args:
        module: The root, while no unit is in use.
        streams: The streams of the simulated GPU.

    Raises:
        ValueError: The module holds no unit.
    """
    units = named_units(module)
    if not units:
        raise ValueError(
            f"{type(module).__name__} holds no unit; call fully_shard on it and its layers first"
        )
    communicator = StreamCommunicator(streams, NcclCollectives())
    for _, unit in units:
        unit.context.communicator = communicator
        for group in unit.groups:
            group.weights.replace_communicator(communicator)
            if group.grads is not None:
                group.grads.replace_communicator(communicator)
