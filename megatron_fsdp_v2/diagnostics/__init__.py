"""Inspect a sharded model: norms, memory, NaNs, overlapping shards, hangs, corruption."""

from megatron_fsdp_v2.diagnostics.corruption import Auditor, Corruption, audit, compare_gradients
from megatron_fsdp_v2.diagnostics.finite import Nonfinite, check_finite, find_nonfinite
from megatron_fsdp_v2.diagnostics.hangs import watch_collectives
from megatron_fsdp_v2.diagnostics.memory import TrackedMemory, memory_tracker
from megatron_fsdp_v2.diagnostics.memory_ledger import Account, Moment, Role
from megatron_fsdp_v2.diagnostics.norms import ParameterNorm, parameter_norms
from megatron_fsdp_v2.diagnostics.ranges import profile_ranges
from megatron_fsdp_v2.diagnostics.shard_overlap import check_no_overlap
from megatron_fsdp_v2.diagnostics.summary import GroupRow, GroupSummary, group_summary

__all__ = [
    "Account",
    "Auditor",
    "Corruption",
    "GroupRow",
    "GroupSummary",
    "Moment",
    "Nonfinite",
    "ParameterNorm",
    "Role",
    "TrackedMemory",
    "audit",
    "check_finite",
    "check_no_overlap",
    "compare_gradients",
    "find_nonfinite",
    "group_summary",
    "memory_tracker",
    "parameter_norms",
    "profile_ranges",
    "watch_collectives",
]
