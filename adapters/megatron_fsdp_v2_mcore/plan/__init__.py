"""Descriptions of trainings from Megatron's flags, for `megatron-fsdp-v2 plan`."""
