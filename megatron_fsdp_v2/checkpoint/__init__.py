"""Save, load, compare, verify, export and convert checkpoints."""

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import export
from megatron_fsdp_v2.checkpoint.loading import Comparison, compare, load
from megatron_fsdp_v2.checkpoint.saving import save

__all__ = ["CheckpointError", "Comparison", "compare", "export", "load", "save"]
