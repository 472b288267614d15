"""What ranks do with the state of delayed scaling, with and without Megatron's training loop."""

from __future__ import annotations

from typing import Any

from tests.mcore.checkpoint_values import _digest as digest

__all__ = ["digest", "state_digests"]


def state_digests(model: list[Any], optimizer: Any) -> dict[str, str]:
    """A digest of every tensor of that state that this rank has. A probe for `train`."""
    from megatron_fsdp_v2_mcore.checkpoint import fp8_state

    del optimizer
    return {tensor.name: digest(tensor.live) for tensor in fp8_state._tensors(model)}
