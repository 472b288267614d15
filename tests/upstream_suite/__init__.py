"""Megatron-LM's tests of Megatron-FSDP, read from a checkout and run with this package."""
