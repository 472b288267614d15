"""Transformer Engine's quantized weights as formats of `fully_shard`."""

from megatron_fsdp_v2_mcore.formats.registering import register_formats

__all__ = ["register_formats"]
