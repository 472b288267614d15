"""Optimizers of sharded parameters: matrix optimizers and flat optimizers."""

from megatron_fsdp_v2.optim.engine import MatrixEngine, MatrixFunction
from megatron_fsdp_v2.optim.flat import FlatOptimizer, flat_optimizer, step_flat
from megatron_fsdp_v2.optim.matrix_step import MatrixStep
from megatron_fsdp_v2.optim.muon import Muon
from megatron_fsdp_v2.optim.newton_schulz import newton_schulz, newton_schulz_flops

__all__ = [
    "FlatOptimizer",
    "MatrixEngine",
    "MatrixFunction",
    "MatrixStep",
    "Muon",
    "flat_optimizer",
    "newton_schulz",
    "newton_schulz_flops",
    "step_flat",
]
