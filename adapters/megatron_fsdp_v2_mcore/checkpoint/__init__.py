"""Megatron's checkpoints of sharded models."""
