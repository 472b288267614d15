"""`megatron-fsdp-v2 hang`: which rank is at which unit, from the files of a training that hangs."""
