"""The entry: run steps of a sharded model on recorded streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_fsdp_v2.comm.streams import StreamCommunicator
from megatron_fsdp_v2.memory.allocator import BufferUse
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.runtime.module import named_units
from tests.stream_safety.checker import Violation, find_violations
from tests.stream_safety.recorder import (
    OperationMode,
    RecordedCollectives,
    RecordedStream,
    StreamRecorder,
)
from tests.stream_safety.schedule import Schedule

__all__ = ["Recording", "record_streams"]


class Recording:
    """Steps that run on recorded streams.

    Attributes:
        recorder: The device.
        collectives: Collectives on it.
        communicator: The scheduling code of CUDA on both.
    """

    def __init__(self) -> None:
        self.recorder = StreamRecorder()
        self.collectives = RecordedCollectives(self.recorder)
        self.communicator = StreamCommunicator(self.recorder, self.collectives)

    def new_stream(self, name: str) -> RecordedStream:
        """Make another stream for the model to compute on, as `torch.cuda.Stream()` does.

        From then on backwards are followed as well: a node runs on the stream of its forward.

        Args:
            name: For reports.
        """
        return self.recorder.new_compute_stream(name)

    def current_stream(self) -> RecordedStream:
        """The stream that operations are recorded on now, as `torch.cuda.current_stream()`."""
        return self.recorder.current_stream()

    def use(self, stream: RecordedStream) -> contextlib.AbstractContextManager[None]:
        """Record operations on a stream while the context lasts, as `torch.cuda.stream()`."""
        return self.recorder.use(stream)

    def keep_stream(self, node: Any) -> None:
        """Remember the stream of a node of the graph, by whose number it is found otherwise.

        To be called before `Node._set_sequence_nr`, after `new_stream`.

        Args:
            node: The `grad_fn` of a tensor.
        """
        self.recorder.keep_stream(node)

    @property
    def schedule(self) -> Schedule:
        """What was recorded so far."""
        return self.recorder.settled

    def violations(self) -> list[Violation]:
        """Pairs of operations on the same memory that nothing orders; `str()` explains each."""
        return find_violations(self.schedule)


@contextlib.contextmanager
def record_streams(module: nn.Module) -> Iterator[Recording]:
    """Run what is inside on recorded streams, on a CPU and with gloo. Collective.

        with record_streams(model) as recording:
            step()
        for violation in recording.violations():
            print(violation)

    The code that schedules communication on CUDA schedules it here. Numbers are those of
    ordinary training up to the rounding of sums; operations are several times slower. Operations
    of the calling thread are seen, those in backwards on a CPU included.

    Args:
        module: The root of a sharded model, at rest.

    Yields:
        The recording; its violations can be asked for inside and afterwards.

    Raises:
        ValueError: The module holds no unit, or one that is not on a CPU.
    """
    units = named_units(module)
    if not units:
        raise ValueError(
            f"{type(module).__name__} holds no unit; call fully_shard on it and its layers first"
        )
    groups = [
        (f"{path or 'root'}/{number}", group)
        for path, unit in units
        for number, group in enumerate(unit.groups)
    ]
    for name, group in groups:
        if group.main_weight.tensor.device.type != "cpu":
            raise ValueError(
                f"group {name} is on {group.main_weight.tensor.device}; record_streams needs a CPU "
                "mesh, and the schedule it finds is that of a GPU (there is torch's CUDA sanitizer "
                "for a model on a GPU)"
            )
    recording = Recording()
    with contextlib.ExitStack() as undo:
        for _, unit in units:
            undo.callback(setattr, unit.context, "communicator", unit.context.communicator)
            unit.context.communicator = recording.communicator
        observer = units[0][1].context.observer
        observer.subscribe(recording.recorder.receive)
        undo.callback(observer.unsubscribe, recording.recorder.receive)
        for name, group in groups:
            _name_buffers(name, group, recording.recorder)
            before = group.replace_communicator(recording.communicator)
            undo.callback(group.replace_communicator, before)
        with OperationMode(recording.recorder):
            yield recording
        # Storages that died by now are freed in the schedule, those that die later are not.
        recording.recorder.stop()


def _name_buffers(name: str, group: ParameterGroup, recorder: StreamRecorder) -> None:
    recorder.name(group.main_weight.tensor, f"{name} weights main")
    recorder.name(group.model_weight.tensor, f"{name} weights model")
    if group.grads is not None:
        recorder.name_main(group.grads.full.tensor, f"{name} grads main")
    if group.main_grad is not None:
        recorder.name(group.main_grad.tensor, f"{name} grads main")
    for kind, buffer in group.temporaries().items():
        what = "weights" if buffer.use is BufferUse.GATHERED else "grads"
        recorder.name(
            buffer.tensor, f"{name} {what} {_KINDS.get(kind, kind)}", has_memory=buffer.is_live
        )


_KINDS = {"model_weight": "gathered", "main_grad": "full"}
"""What else temporary buffers are called, where one that stays has their name."""
