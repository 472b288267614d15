"""What a training with Megatron's flags would hold and send, for `megatron-fsdp-v2 plan`."""
