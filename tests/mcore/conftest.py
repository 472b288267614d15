"""Fixtures of tests with Megatron, in addition to those of all tests."""

from tests.mcore.parsing import parser
from tests.mcore.te_pools import blackwell_te, megatron_te, recipe_te

__all__ = ["blackwell_te", "megatron_te", "parser", "recipe_te"]
