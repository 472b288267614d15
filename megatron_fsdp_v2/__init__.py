"""Per-module, FSDP2-style sharding for every ZeRO level. Requires only torch."""

from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.buffer import DataParallelBuffer
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.runtime.api import fully_shard, group_modules
from megatron_fsdp_v2.runtime.fsdp2 import FSDPModule, register_fsdp_forward_method
from megatron_fsdp_v2.runtime.meshes import DataParallelMeshDims, ShardPlacementResult
from megatron_fsdp_v2.runtime.options import RuntimeOptions, UnitOptions

__version__ = "0.1.0"

__all__ = [
    "DataParallelBuffer",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ParameterGroup",
    "RuntimeOptions",
    "ShardPlacementResult",
    "TracePoolAllocator",
    "UnitOptions",
    "__version__",
    "fully_shard",
    "group_modules",
    "register_fsdp_forward_method",
]
