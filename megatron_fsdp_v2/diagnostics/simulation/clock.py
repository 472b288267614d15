"""Virtual time as an overlap tracker reads it."""

from __future__ import annotations

from megatron_fsdp_v2.diagnostics.simulation.devices import HostDevice, VirtualStreams

__all__ = ["SimulatedClock"]


class SimulatedClock:
    """The time of a simulated device. See `overlap_tracker`.

        with overlap_tracker(model, SimulatedClock(streams)) as overlap:
            train_step()

    Args:
        device: A CPU, whose host waits, or streams, of which the one that computes does.

    Attributes:
        least: Seconds of a wait that are none.
    """

    least = 1e-12

    def __init__(self, device: HostDevice | VirtualStreams) -> None:
        self._device = device

    def now(self) -> float:
        """The moment at which the host is, or the stream that operations are queued on now."""
        if isinstance(self._device, HostDevice):
            return self._device.timeline.now
        return self._device.current_stream().queue.ready

    def link_free(self) -> float:
        """When everything communicated so far is done."""
        queues = self._device.timeline.queues.items()
        ready = (queue.ready for name, queue in queues if name.startswith("communicator "))
        return max(ready, default=0.0)
