"""Digests of full parameters and optimizer state, by their names in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch


def digests(model: list[Any], optimizer: Any) -> dict[str, str]:
    """Return a digest of every parameter, buffer and optimizer state with a part on this rank.

    A probe for `train`. Collective.
    """
    from megatron_fsdp_v2_mcore.checkpoint.names import canonical_names, canonical_parameter_names

    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    state = {p: entry for part in parts for p, entry in part.optimizer.state.items()}
    found: dict[str, str] = {}
    for param, name in canonical_parameter_names(model).items():
        if name.is_unused:
            continue
        found[name.fqn] = digest(param)
        for option in ("exp_avg", "exp_avg_sq"):
            # A rank without rows has no state, but takes part in gathers of other ranks' state.
            value = state.get(param, {}).get(option, torch.zeros_like(param))
            found[f"{name.fqn}.{option}"] = digest(value)
        if param in state:
            found[f"{name.fqn}.step"] = str(float(state[param]["step"]))
    for chunk, names in zip(model, canonical_names(model), strict=True):
        buffers = [(names[key].fqn, b) for key, b in chunk.named_buffers() if key in names]
        found.update({fqn: digest(buffer) for fqn, buffer in buffers})
    return found


def fp8_digests(model: list[Any], optimizer: Any) -> dict[str, str]:
    """Return a digest of every scale and amax history of this rank. A probe for `train`."""
    from megatron_fsdp_v2_mcore.checkpoint import fp8_state

    del optimizer
    return {tensor.name: digest(tensor.live) for tensor in fp8_state._tensors(model)}


def digest(tensor: torch.Tensor) -> str:
    """Return the shape of a full tensor and a hash of its bytes. Collective."""
    full = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor
    data = full.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tuple(full.shape)} {hashlib.sha1(data).hexdigest()}"


def merged_digests(ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """Merge the digests of all ranks, which must agree on common names."""
    merged: dict[str, str] = {}
    for found in ranks:
        for key, digest in found.items():
            assert merged.setdefault(key, digest) == digest, f"ranks hold other values of {key}"
    return merged
