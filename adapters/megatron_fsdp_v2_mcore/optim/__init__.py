"""Megatron's optimizers over sharded parameters."""
