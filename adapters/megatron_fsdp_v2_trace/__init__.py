"""Timeline of a step: what `megatron-fsdp-v2 trace` reads from torch's profiler, and draws."""
