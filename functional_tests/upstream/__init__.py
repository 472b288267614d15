"""Megatron-LM's own functional configurations, shrunk and compared with Megatron's DDP."""
