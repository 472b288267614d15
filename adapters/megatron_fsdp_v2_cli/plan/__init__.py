"""`megatron-fsdp-v2 plan`: plans of a training as tables, pictures and data."""
