"""Trainings with `--overlap-moe-expert-parallel-comm`, in fp32 too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.mcore import session
from tests.mcore.session import Training

__all__ = ["train_in_fp32"]


def train_in_fp32(flags: Sequence[str], probe: Any = None, freezes: Sequence[str] = ()) -> Training:
    """Train in fp32, where Megatron's check wants 16 bits and nothing of what is run does.

    Args:
        flags: Without `--bf16`.
        probe: See `session.train`.
        freezes: Likewise.
    """
    patches = session.enter_rehearsal()["Patches"]()
    from megatron.core.transformer.transformer_config import TransformerConfig

    check = TransformerConfig.__post_init__

    def check_as_bf16(config: Any) -> None:
        config.bf16 = True
        check(config)
        config.bf16 = False

    patches.set(TransformerConfig, "__post_init__", check_as_bf16)
    try:
        return session.train(flags, probe, freezes)
    finally:
        patches.undo()
