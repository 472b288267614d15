"""Save, load, compare, verify, export and convert checkpoints; snapshots in memory."""

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import export
from megatron_fsdp_v2.checkpoint.loading import Comparison, compare, load
from megatron_fsdp_v2.checkpoint.saving import save
from megatron_fsdp_v2.checkpoint.snapshots import Snapshot, recover, replicate, restore, snapshot

__all__ = [
    "CheckpointError",
    "Comparison",
    "Snapshot",
    "compare",
    "export",
    "load",
    "recover",
    "replicate",
    "restore",
    "save",
    "snapshot",
]
