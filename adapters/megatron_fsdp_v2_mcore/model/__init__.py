"""From a Megatron model to sharded units."""
