"""Optimizers of sharded parameters: on whole matrices, and on a few flat tensors."""

from megatron_fsdp_v2.optim.engine import MatrixEngine, MatrixFunction
from megatron_fsdp_v2.optim.flat import FlatOptimizer, flat_optimizer, step_flat
from megatron_fsdp_v2.optim.muon import Muon
from megatron_fsdp_v2.optim.newton_schulz import newton_schulz, newton_schulz_flops

__all__ = [
    "FlatOptimizer",
    "MatrixEngine",
    "MatrixFunction",
    "Muon",
    "flat_optimizer",
    "newton_schulz",
    "newton_schulz_flops",
    "step_flat",
]
