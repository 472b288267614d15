"""Whether Megatron's functions that sharded parameters need replaced are replaced.

Apart from `patches`, which makes the replacements, since what asks is below it.
"""

from __future__ import annotations

__all__ = ["is_active", "require_active", "set_active"]


class _Activation:
    is_active = False


def is_active() -> bool:
    """Whether Megatron's optimizers and its sums of gradients are those for sharded parameters."""
    return _Activation.is_active


def set_active(*, active: bool) -> None:
    """Note that they are, or are Megatron's own again."""
    _Activation.is_active = active


def require_active() -> None:
    """Refuse to shard a model that Megatron's own optimizers would step.

    They would take shards for whole tensors, and count what ranks hold alike several times.

    Raises:
        RuntimeError: Megatron is as it is alone.
    """
    if not _Activation.is_active:
        raise RuntimeError(
            "FullyShardedDataParallel needs Megatron's optimizers and sums of gradients replaced, "
            "and they are not: call megatron_fsdp_v2_mcore.enable() once before (a script on "
            "megatron.core alone), or megatron_fsdp_v2_mcore.install() and give Megatron "
            "--use-megatron-fsdp --use-fsdp-fully-shard-api"
        )
