"""Named ranges around the phases of units, for profilers."""

from __future__ import annotations

from torch import nn
from torch.profiler import record_function

from megatron_fsdp_v2.diagnostics.walk import ROOT, units_below
from megatron_fsdp_v2.memory.observer import Event, Observer, PhaseBegan, PhaseEnded


def profile_ranges(module: nn.Module, enabled: bool = True) -> None:
    """Show the phases of every unit to profilers, under names such as `fsdp::unshard layers.3`.

    The phases are unshard, wait_for_unshard, reshard, pre_forward, post_forward, pre_backward,
    post_backward, reduce_grad and finish_reduction. `torch.profiler` records the ranges;
    `torch.autograd.profiler.emit_nvtx` makes NVTX ranges of them. A range is the host's time in
    the phase. Ranges are off by default. Turn them on after `fully_shard` was called on the root.

    Args:
        module: A sharded module, or one that contains some; names are relative to it.
        enabled: Whether to turn ranges on or off.

    Raises:
        ValueError: Nothing in the module is sharded.
    """
    for name, unit in units_below(module):
        ranges = _ranges_of(unit.context.observer)
        for owner in (unit.fqn, *(group.name for group in unit.groups)):
            if enabled:
                ranges.names[owner] = name or ROOT
            else:
                ranges.names.pop(owner, None)
        if not ranges.names:
            unit.context.observer.unsubscribe(ranges)


def _ranges_of(observer: Observer) -> _Ranges:
    """Return the ranges that subscribe to an observer, or new ranges."""
    for subscriber in observer.subscribers:
        if isinstance(subscriber, _Ranges):
            return subscriber
    ranges = _Ranges()
    observer.subscribe(ranges)
    return ranges


class _Ranges:
    """Makes a profiler range of every phase.

    Attributes:
        names: Names of units and parameter groups in ranges; others have no ranges.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._open: list[record_function] = []

    def __call__(self, event: Event) -> None:
        """Receive an event."""
        match event:
            case PhaseBegan(owner, phase) if owner in self.names:
                self._open.append(record_function(f"fsdp::{phase} {self.names[owner]}"))
                self._open[-1].__enter__()  # type: ignore[no-untyped-call]
            case PhaseEnded(owner, _) if owner in self.names and self._open:
                self._open.pop().__exit__(None, None, None)
