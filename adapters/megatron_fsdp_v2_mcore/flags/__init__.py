"""Flags of Megatron's command line: supported, rejected, and those of this package."""
