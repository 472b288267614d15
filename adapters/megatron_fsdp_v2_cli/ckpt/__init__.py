"""`megatron-fsdp-v2 ckpt`: inspect, verify, export and convert checkpoints."""
