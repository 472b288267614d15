"""The Megatron-Core adapter: sharded data parallelism for Megatron's own training loop.

Importing it changes nothing. `install()` hooks it into Megatron at the points that
`megatron-fsdp-v2 patches` lists. A script that has a loop of its own on `megatron.core` calls
`enable()` instead, and wraps its model itself.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_fsdp_v2_mcore.flags.errors import FlagError
from megatron_fsdp_v2_mcore.flags.options import Options
from megatron_fsdp_v2_mcore.patches import enable, install, uninstall

__all__ = [
    "FSDPMuonChainedOptimizer",
    "FSDPZeROTensorParallelMuon",
    "FlagError",
    "FullyShardedDataParallel",
    "Options",
    "enable",
    "install",
    "uninstall",
]

_LAZY = {
    "FSDPMuonChainedOptimizer": "megatron_fsdp_v2_mcore.optim.muon_chain",
    "FSDPZeROTensorParallelMuon": "megatron_fsdp_v2_mcore.optim.muon",
    "FullyShardedDataParallel": "megatron_fsdp_v2_mcore.model.wrapper",
}


def __getattr__(name: str) -> Any:
    # Classes derived from Megatron's import it; importing the package alone must not.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
