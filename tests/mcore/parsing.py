"""Megatron's arguments with the flags of this package, without a training."""

from __future__ import annotations

import argparse

import pytest

from megatron_fsdp_v2_mcore.flags.arguments import add_arguments
from tests.mcore.flags import MODEL_FLAGS


@pytest.fixture(scope="session")
def parser() -> argparse.ArgumentParser:
    """Megatron's parser with the flags of this package."""
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def parsed(parser: argparse.ArgumentParser, *flags: str) -> argparse.Namespace:
    """Parse the flags of a small model and these flags, for four ranks."""
    args = parser.parse_args([*MODEL_FLAGS, *flags])
    args.world_size = 4  # Megatron adds this attribute after parsing.
    return args
