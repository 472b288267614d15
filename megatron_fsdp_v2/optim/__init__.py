"""Optimizers that need whole matrices, for parameters that are sharded by rows."""

from megatron_fsdp_v2.optim.engine import MatrixEngine, MatrixFunction
from megatron_fsdp_v2.optim.muon import Muon
from megatron_fsdp_v2.optim.newton_schulz import newton_schulz, newton_schulz_flops

__all__ = ["MatrixEngine", "MatrixFunction", "Muon", "newton_schulz", "newton_schulz_flops"]
