"""Per-module, FSDP2-style sharding for every ZeRO level. Needs torch and nothing else."""

from megatron_fsdp_v2.dp_buffer import DataParallelBuffer
from megatron_fsdp_v2.fsdp_module import FSDPModule, register_fsdp_forward_method
from megatron_fsdp_v2.fully_shard import fully_shard
from megatron_fsdp_v2.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.param_group import ParameterGroup
from megatron_fsdp_v2.trace_pool import TracePoolAllocator

__all__ = [
    "DataParallelBuffer",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ParameterGroup",
    "TracePoolAllocator",
    "fully_shard",
    "register_fsdp_forward_method",
]
