"""Entry point: runs steps of a sharded model on recorded streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from megatron_fsdp_v2.comm.streams import StreamCommunicator, new_comm_streams
from megatron_fsdp_v2.memory.allocator import BufferUse
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.runtime.module import named_units
from tests.stream_safety.checker import Violation, find_violations
from tests.stream_safety.recorder import OperationMode, RecordedCollectives, StreamRecorder


class Recording(StreamRecorder):
    """Steps that run on recorded streams.

    Attributes:
        collectives: Collectives on recorded streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = RecordedCollectives(self)
        self._comm_streams = new_comm_streams(self)

    def communicator(self) -> StreamCommunicator:
        """Return CUDA's scheduling code for one root, with recorded streams and collectives."""
        return StreamCommunicator(self, self.collectives, self._comm_streams)

    def violations(self) -> list[Violation]:
        """Return the pairs of operations on the same memory that no wait orders."""
        return find_violations(self.current_schedule)


@contextlib.contextmanager
def record_streams(*modules: nn.Module) -> Iterator[Recording]:
    """Run the body of the context on recorded streams, on a CPU with gloo. Collective.

        with record_streams(model) as recording:
            step()
        for violation in recording.violations():
            print(violation)

    The code that schedules communication on CUDA schedules it here. Results equal those of
    ordinary training up to rounding of sums; operations are several times slower. Only operations
    of the calling thread are recorded, including backwards on a CPU.

    Args:
        modules: Roots of sharded models, between two steps.

    Yields:
        The recording. Call `violations()` inside the context or afterwards.
    """
    recording = Recording()
    with contextlib.ExitStack() as undo:
        for index, module in enumerate(modules):
            _record(module, f"model {index}, " if index else "", recording, undo)
        with OperationMode(recording):
            yield recording
        recording.stop()


def _record(
    module: nn.Module, prefix: str, recording: Recording, undo: contextlib.ExitStack
) -> None:
    units = named_units(module)
    context, communicator = units[0][1].context, recording.communicator()
    undo.callback(setattr, context, "communicator", context.communicator)
    context.communicator = communicator
    context.observer.subscribe(recording.receive)
    undo.callback(context.observer.unsubscribe, recording.receive)
    for path, unit in units:
        for number, group in enumerate(unit.groups):
            _name_buffers(f"{prefix}{path or 'root'}/{number}", group, recording)
            before = group.replace_communicator(communicator)
            undo.callback(group.replace_communicator, before)


def _name_buffers(name: str, group: ParameterGroup, recorder: StreamRecorder) -> None:
    recorder.name(group.main_weight.tensor, f"{name} weights main")
    recorder.name(group.model_weight.tensor, f"{name} weights model")
    recorder.name_main(group.grads.full.tensor, f"{name} grads main")
    if group.main_grad is not None:
        recorder.name(group.main_grad.tensor, f"{name} grads main")
    for kind, buffer in group.temporaries().items():
        if buffer.is_live:
            buffer.stream = recorder.current_stream()
        what = "weights" if buffer.use is BufferUse.GATHERED else "grads"
        recorder.name(
            buffer.tensor, f"{name} {what} {_KINDS.get(kind, kind)}", has_memory=buffer.is_live
        )


_KINDS = {"model_weight": "gathered", "full_grad": "full"}
"""Names of temporary buffers whose kind is also the name of a persistent buffer."""
