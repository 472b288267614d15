"""Megatron-LM's own functional configurations, shrunk and trained beside Megatron's DDP."""
