"""The result of a replayed step: its events in order, its collectives and its time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_fsdp_v2.plan.exposure import Exposure

__all__ = ["Step", "StepCollective", "StepEvent"]


@dataclass(frozen=True, slots=True)
class StepCollective:
    """A collective that a step issues, one or more times.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`.
        purpose: `unshard`, `refresh`, `reduce` or `optimizer`.
        mesh: Name of the mesh.
        axis: `inner` or `outer`.
        size: Ranks that take part, at least 2: one rank issues no collective.
        stride: Distance in global ranks between two of them.
        nbytes: Bytes of the full buffer; of an all-to-all, bytes that this rank sends.
    """

    kind: str
    purpose: str
    mesh: str
    axis: str
    size: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One event of a step.

    Attributes:
        kind: The kind of a collective that is issued (see `StepCollective`); `forward` or
            `backward` when a unit begins to compute; `reshard` when gathered weights are dropped;
            `collect` when a full gradient buffer gets memory; `wait` when the step waits for a
            reduction.
        unit: Name of the unit that computes, or that owns the weights or gradients; empty for the
            root.
        numel: Elements of the buffer; 0 when a unit computes.
        axis: Mesh axis of a collective: `inner` or `outer`.
        times: Number of micro-batches that the event represents: those in the middle are replayed
            once.
    """

    kind: str
    unit: str
    numel: int = 0
    axis: str = ""
    times: int = 1


@dataclass(slots=True)
class Step:
    """The result of a replayed step.

    Attributes:
        events: Events in order, without those of the optimizer.
        collectives: How often each collective is issued.
        compute_seconds: Time of computation alone; 0 without a machine.
        seconds: Time of the step; 0 without a machine.
        exposures: Every collective that the step waited for; empty without a machine.
        to_device_nbytes: Bytes copied from offloaded main weights and gradients, in the dtype they
            have in host memory.
        to_host_nbytes: Bytes copied to host memory.
    """

    events: list[StepEvent] = field(default_factory=list)
    collectives: Counter[StepCollective] = field(default_factory=Counter)
    compute_seconds: float = 0.0
    seconds: float = 0.0
    exposures: list[Exposure] = field(default_factory=list)
    to_device_nbytes: int = 0
    to_host_nbytes: int = 0
