"""Named ranges around the phases of units, for profilers."""

from __future__ import annotations

import functools

from torch import nn
from torch.profiler import record_function

from megatron_fsdp_v2.diagnostics.walk import ROOT, units_below

__all__ = ["profile_ranges"]


def profile_ranges(module: nn.Module, enabled: bool = True) -> None:
    """Show the phases of every unit to profilers, under names such as `fsdp::unshard layers.3`.

    The phases are unshard, wait_for_unshard, reshard, pre_forward, post_forward, pre_backward,
    post_backward and reduce_grad. `torch.profiler` records the ranges;
    `torch.autograd.profiler.emit_nvtx` makes NVTX ranges of them. A range is the host's time in
    the phase. Off by default; a unit without ranges makes none and pays nothing for them.

    Args:
        module: A sharded module, or one that contains some; names are relative to it.
        enabled: Whether to turn ranges on or off.

    Raises:
        ValueError: Nothing in the module is sharded.
    """
    for name, unit in units_below(module):
        unit.ranges = functools.partial(_phase_range, name or ROOT) if enabled else None


def _phase_range(unit_name: str, phase: str) -> record_function:
    return record_function(f"fsdp::{phase} {unit_name}")
