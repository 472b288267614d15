"""What a step comes to: what it does in which order, what it communicates, how long it takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_fsdp_v2.plan.exposure import Exposure

__all__ = ["Collective", "Event", "Step"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a step issues, once or more often.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`.
        purpose: `unshard`, `refresh`, `reduce` or `optimizer`.
        mesh: Name of the mesh.
        axis: `inner` or `outer`.
        size: Ranks that take part, at least 2: among one rank nothing is issued.
        stride: Ranks of the job from one of them to the next.
        nbytes: Of the full buffer; of an all-to-all, what this rank sends.
    """

    kind: str
    purpose: str
    mesh: str
    axis: str
    size: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a step does, in its place among all that it does.

    Attributes:
        kind: A collective that is issued (see `Collective`); `forward` and `backward`, where a unit
            begins to compute; `reshard`, where gathered weights are dropped; `collect`, where a
            full gradient buffer is given memory; `wait`, where a reduction is waited for.
        unit: Name of the unit that computes, or whose weights or gradients it is about; empty for
            the root.
        numel: Elements of the buffer; 0 where a unit computes.
        axis: Of a collective: `inner` or `outer`.
        times: Micro-batches that it stands for: those in the middle are replayed once.
    """

    kind: str
    unit: str
    numel: int = 0
    axis: str = ""
    times: int = 1


@dataclass(slots=True)
class Step:
    """What a step comes to.

    Attributes:
        events: What it does, in order, without the optimizer.
        collectives: How often each is issued.
        compute_seconds: Time of computation alone.
        seconds: Time of the step; both 0 without a machine.
        exposures: Every collective that was waited for, with a machine.
        to_device_nbytes: Bytes copied from host memory, where main weights and gradients are there;
            they are copied in the dtype they have there.
        to_host_nbytes: Bytes copied to host memory.
    """

    events: list[Event] = field(default_factory=list)
    collectives: Counter[Collective] = field(default_factory=Counter)
    compute_seconds: float = 0.0
    seconds: float = 0.0
    exposures: list[Exposure] = field(default_factory=list)
    to_device_nbytes: int = 0
    to_host_nbytes: int = 0
