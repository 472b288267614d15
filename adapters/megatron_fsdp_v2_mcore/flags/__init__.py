"""Megatron's command line: what is understood, what is rejected, and why."""
