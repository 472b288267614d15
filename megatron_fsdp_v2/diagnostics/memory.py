"""A memory tracker: bytes by role and unit during a step, beside the bound.

Example:
    with memory_tracker(model, optimizer) as memory:
        train_step()
    print(memory.report())
    memory.plot("step.png")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from megatron_fsdp_v2.diagnostics.memory_ledger import Ledger, Moment, Role
from megatron_fsdp_v2.diagnostics.memory_plot import plot_moments
from megatron_fsdp_v2.diagnostics.memory_text import MemoryText, render_memory
from megatron_fsdp_v2.diagnostics.memory_units import unit_bytes
from megatron_fsdp_v2.diagnostics.memory_watch import MemoryWatch
from megatron_fsdp_v2.diagnostics.walk import units_below
from megatron_fsdp_v2.plan.memory_bound import PeakBytes, peak_bytes

__all__ = ["TrackedMemory", "memory_tracker"]


class TrackedMemory:
    """The result of a memory tracker. All numbers are bytes on this rank.

    Args:
        ledger: Bytes on the device.
        host_ledger: Bytes of offloaded tensors in host memory.
    """

    def __init__(self, ledger: Ledger, host_ledger: Ledger) -> None:
        self._ledger = ledger
        self._host_ledger = host_ledger
        self._bound: PeakBytes | None = None
        self._allocated: int | None = None

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return self._ledger.peak

    @property
    def live(self) -> dict[Role, int]:
        """Bytes by role now, or when tracking ended."""
        return _by_role(self._ledger)

    @property
    def offloaded(self) -> dict[Role, int]:
        """Bytes in host memory by role now, or when tracking ended.

        These are offloaded tensors and what steps allocate for them. No other number has them.
        """
        return _by_role(self._host_ledger)

    @property
    def offloaded_peaks(self) -> dict[Role, int]:
        """The most bytes of each role in host memory, at any moment."""
        return dict(self._host_ledger.role_peaks)

    @property
    def role_peaks(self) -> dict[Role, int]:
        """The most bytes of each role, at any moment."""
        return dict(self._ledger.role_peaks)

    @property
    def unit_peaks(self) -> dict[str, int]:
        """The most bytes of each unit, at any moment; the root's name is empty."""
        return dict(self._ledger.unit_peaks)

    @property
    def intervals(self) -> list[Moment]:
        """The peak of each unit's forward and backward, in the order of time."""
        return list(self._ledger.intervals())

    @property
    def bound(self) -> PeakBytes:
        """The bound of the peak, by role. See `memory_bound.peak_bytes`.

        Activations are those measured, at their own peak.

        Raises:
            RuntimeError: Tracking has not ended.
        """
        if self._bound is None:
            raise RuntimeError("the bound is known after the with block of memory_tracker")
        return self._bound

    @property
    def max_memory_allocated(self) -> int | None:
        """The peak of torch's statistics of a CUDA device; None on a CPU."""
        return self._allocated

    def report(self) -> str:
        """Tables of bytes by role and by unit, and the peak beside the bound.

        Raises:
            RuntimeError: Tracking has not ended.
        """
        return render_memory(
            MemoryText(
                peak=self.peak,
                role_peaks=self.role_peaks,
                unit_peaks=self.unit_peaks,
                live=self.live,
                bound=self.bound,
                allocated=self.max_memory_allocated,
                offloaded=self.offloaded,
                offloaded_peaks=self.offloaded_peaks,
            )
        )

    def plot(self, path: str | Path) -> None:
        """Draw a step: bytes by role, stacked, over forwards and backwards of the units.

        Args:
            path: File to write; its suffix selects the format, such as `.png` or `.svg`.

        Raises:
            RuntimeError: matplotlib is not installed.
        """
        plot_moments(self.intervals, self.bound, Path(path))


def _by_role(ledger: Ledger) -> dict[Role, int]:
    found = dict.fromkeys(Role, 0)
    for account, nbytes in ledger.live.items():
        found[account.role] += nbytes
    return found


@contextlib.contextmanager
def memory_tracker(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[TrackedMemory]:
    """Track the memory of a sharded model on this rank, by role and unit. No communication.

    Counts storages on the model's device, and separately those of offloaded tensors: resting
    tensors, temporary buffers while they have memory, and outputs of operations. Memory that a
    library allocates itself (gloo, NCCL, cuBLAS) is not seen; on CUDA the report also has torch's
    own peak, whose statistics are reset here. Results do not change; every operation takes longer.

    Args:
        module: The root.
        optimizer: Tells its state and temporaries from activations; None to count them as
            activations.

    Raises:
        ValueError: The module is not sharded, or is no root.
    """
    units = unit_bytes(module)
    ledger, host_ledger = Ledger(), Ledger()
    tracked = TrackedMemory(ledger, host_ledger)
    watch = MemoryWatch(module, optimizer, ledger, host_ledger)
    on_cuda = watch.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(watch.device)
    try:
        with watch:
            yield tracked
    finally:
        if on_cuda:
            tracked._allocated = torch.cuda.max_memory_allocated(watch.device)
        context = units_below(module)[0][1].context
        tracked._bound = peak_bytes(
            units,
            context.options,
            optimizer_state=tracked.live[Role.OPTIMIZER],
            activations=tracked.role_peaks[Role.ACTIVATIONS] + tracked.role_peaks[Role.OTHER],
            accumulates=watch.accumulates,
            has_gradients=watch.has_gradients,
        )
