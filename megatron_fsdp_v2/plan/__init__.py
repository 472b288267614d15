"""Plans a training before it runs: memory, communication and time, without GPUs or processes."""

from megatron_fsdp_v2.plan.description import (
    MemoryOption,
    MeshDescription,
    ParameterDescription,
    Strategy,
    TrainingDescription,
    UnitDescription,
    describe_module,
)
from megatron_fsdp_v2.plan.machine import PRESETS, Machine, find_machine
from megatron_fsdp_v2.plan.planner import Plan, advice, best_plan, plan_one, strategies

__all__ = [
    "PRESETS",
    "Machine",
    "MemoryOption",
    "MeshDescription",
    "ParameterDescription",
    "Plan",
    "Strategy",
    "TrainingDescription",
    "UnitDescription",
    "advice",
    "best_plan",
    "describe_module",
    "find_machine",
    "plan_one",
    "strategies",
]
