"""Estimates of `plan` for simulated jobs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.sim.engines import POLICY
from benchmarks.sim.models import Decoder
from benchmarks.sim.steps import Job
from megatron_fsdp_v2.plan import (
    Machine,
    MeshDescription,
    ParameterDescription,
    Plan,
    Strategy,
    TrainingDescription,
    describe_module,
    plan_one,
)
from megatron_fsdp_v2.plan.description import ModelTraits


def planned(job: Job, machine: Machine) -> Plan:
    """Plan a job with this package, from the FLOPs of the model's matrix products."""

    def flops_of(unit: str, params: Sequence[ParameterDescription]) -> float:
        if unit == "embedding":
            # A lookup without products.
            return 0.0
        products = sum(2.0 * param.numel for param in params if len(param.shape) > 1)
        # Causal scores and values: half of all pairs, in two products.
        attention = 2.0 * job.sequence * job.shape.width if unit.startswith("layers") else 0.0
        return products + attention

    with torch.device("meta"):
        model = Decoder(job.shape)
    units = [model.embedding, *model.layers, model.output]
    described, plain_nbytes = describe_module(model, units, ModelTraits(flops_of=flops_of))
    training = TrainingDescription(
        described,
        {"dp": MeshDescription(job.num_ranks)},
        POLICY,
        tokens=job.batch * job.sequence,
        recompute_factor=1.0 if job.recomputes else 0.0,
        plain_nbytes=plain_nbytes,
    )
    outer = job.outer if job.outer > 1 else None
    return plan_one(training, Strategy("optim_grads_params", outer_size=outer), machine)
