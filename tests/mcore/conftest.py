"""Fixtures of tests with Megatron, beside those of every test."""

from tests.mcore.te_pools import megatron_te

__all__ = ["megatron_te"]
