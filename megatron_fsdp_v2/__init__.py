"""Per-module, FSDP2-style sharding for every ZeRO level. Needs only torch."""

from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.buffer import DataParallelBuffer
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.runtime.api import fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import FSDPModule, register_fsdp_forward_method

__all__ = [
    "DataParallelBuffer",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ParameterGroup",
    "TracePoolAllocator",
    "fully_shard",
    "register_fsdp_forward_method",
]
