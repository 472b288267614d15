"""A step of an engine at any number of ranks: time, exposed communication, memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.sim.costs import RooflineCosts
from benchmarks.sim.engines import ENGINES, cpu_streams
from benchmarks.sim.models import Decoder, Shape
from benchmarks.sim.operations import Operations
from megatron_fsdp_v2.plan import Machine
from megatron_fsdp_v2.plan.simulation import VirtualStreams, simulated_ranks
from megatron_fsdp_v2.plan.simulation.devices import COMPUTE

MEMORY_BANDWIDTH = {"h100": 3.35e12, "h200": 4.8e12, "b200": 8.0e12}
"""Bytes per second of a GPU's memory, from the vendor's data sheet."""


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        shape: Shape of the model.
        num_ranks: Data-parallel ranks.
        batch: Sequences of a step on a rank.
        sequence: Tokens of each sequence.
        recomputes: Whether layers are recomputed in the backward.
        outer: Ranks of an outer, replicating axis; 1 for none.
        products_only: Whether only matrix products take time, as in `plan`.
    """

    shape: Shape
    num_ranks: int
    batch: int = 1
    sequence: int = 8192
    recomputes: bool = False
    outer: int = 1
    products_only: bool = False

    def costs(self, machine: Machine) -> RooflineCosts:
        """Cost model of operations."""
        bandwidth = float("inf") if self.products_only else MEMORY_BANDWIDTH[machine.name]
        return RooflineCosts(machine, bandwidth)

    def tokens(self) -> torch.Tensor:
        """Inputs of a step."""
        return torch.zeros(self.batch, self.sequence, dtype=torch.int64)


@dataclass(frozen=True)
class Measured:
    """A step in the steady state; seconds and bytes.

    Attributes:
        step: From the first operation of the step to the last operation of the optimizer.
        model: The model's own forward and backward, without sharding.
        optimizer: The optimizer's operations.
        computing: Busy time of the compute stream, including copies for communication.
        communicating: Sum over all collectives.
        peak: Maximum live bytes.
        resting: Live bytes between steps.
    """

    step: float
    model: float
    optimizer: float
    computing: float
    communicating: float
    peak: int
    resting: int

    @property
    def waits(self) -> float:
        """Seconds in which the compute stream waits for communication."""
        return self.step - self.computing

    @property
    def copies(self) -> float:
        """Seconds of the compute stream for sharding: copies, casts, sums."""
        return self.computing - self.model - self.optimizer

    @property
    def exposed(self) -> float:
        """Seconds that sharding adds to the step: waits and copies."""
        return self.waits + self.copies


def measure(engine: str, job: Job, machine: Machine) -> Measured:
    """Run steps of an engine in virtual time; return the results of the second step."""
    model_seconds = compute_seconds(job, machine)
    streams = VirtualStreams()
    operations = Operations(streams, job.costs(machine))
    with (
        simulated_ranks(job.num_ranks, streams, machine),
        cpu_streams(streams),
    ):
        with torch.device("meta"):
            model = Decoder(job.shape, recomputes=job.recomputes)
        shape = (job.outer, job.num_ranks // job.outer) if job.outer > 1 else (job.num_ranks,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
        with operations:
            ENGINES[engine](model, mesh, streams)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            tokens = job.tokens()
            _step(model, tokens, optimizer)
            operations.live.begin()
            operations.seconds_of.clear()
            resting = operations.live.now
            before = _moments(streams)
            _step(model, tokens, optimizer)
    end, busy, communicated = (
        now - then for now, then in zip(_moments(streams), before, strict=True)
    )
    optimizing = operations.seconds_of.get("aten._fused_adamw_", 0.0)
    peak = operations.live.peak
    return Measured(end, model_seconds, optimizing, busy, communicated, peak, resting)


@functools.cache
def compute_seconds(job: Job, machine: Machine) -> float:
    """Time of the model's forward and backward on one GPU with enough memory."""
    streams = VirtualStreams()
    with torch.device("meta"):
        model = Decoder(job.shape, recomputes=job.recomputes).bfloat16()
    with Operations(streams, job.costs(machine)) as operations:
        model.to_empty(device="cpu")
        operations.seconds_of.clear()
        _step(model, job.tokens())
    return sum(operations.seconds_of.values())


def _step(model: Decoder, tokens: torch.Tensor, optimizer: Any = None) -> None:
    model(tokens).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def _moments(streams: VirtualStreams) -> tuple[float, float, float]:
    """Return the end time of all work, and busy seconds of the compute stream and collectives."""
    queues = streams.timeline.queues
    communicators = (q.busy for name, q in queues.items() if name.startswith("communicator"))
    end = max(queue.ready for queue in queues.values())
    return end, queues[COMPUTE].busy, sum(communicators)
