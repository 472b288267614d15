"""`megatron-fsdp-v2 prove`: whether a configuration trains as Megatron's own DDP does."""
