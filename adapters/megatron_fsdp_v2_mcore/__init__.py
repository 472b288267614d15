"""The Megatron-Core adapter: sharded data parallelism for Megatron's own training loop.

Importing the package changes nothing. `install()` applies the patches to Megatron that
`megatron-fsdp-v2 patches` lists. A script with its own training loop on `megatron.core` calls
`enable()` instead and wraps its model itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "FlagError": "megatron_fsdp_v2_mcore.flags.errors",
    "FSDPMuonChainedOptimizer": "megatron_fsdp_v2_mcore.optim.optimizer",
    "FSDPZeROTensorParallelMuon": "megatron_fsdp_v2_mcore.optim.muon",
    "FullyShardedDataParallel": "megatron_fsdp_v2_mcore.model.wrapper",
    "Options": "megatron_fsdp_v2_mcore.flags.options",
    "enable": "megatron_fsdp_v2_mcore.patches",
    "install": "megatron_fsdp_v2_mcore.patches",
    "uninstall": "megatron_fsdp_v2_mcore.patches",
}


def __getattr__(name: str) -> Any:
    # Importing the package imports neither Megatron, from whose classes some of these derive, nor
    # torch: modules of the command line are in it.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
