"""The Megatron-Core adapter: sharded data parallelism for Megatron's own training loop.

Importing the package changes nothing. `install()` applies the patches to Megatron that
`megatron-fsdp-v2 patches` lists. A script with its own training loop on `megatron.core` calls
`enable()` instead and wraps its model itself.
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
    "FSDPMuonChainedOptimizer": "megatron_fsdp_v2_mcore.optim.optimizer",
    "FSDPZeROTensorParallelMuon": "megatron_fsdp_v2_mcore.optim.muon",
    "FullyShardedDataParallel": "megatron_fsdp_v2_mcore.model.wrapper",
}


def __getattr__(name: str) -> Any:
    # These classes derive from Megatron's classes. Importing the package must not import Megatron.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
