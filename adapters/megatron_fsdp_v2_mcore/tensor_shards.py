"""How Megatron's tensor parallelism cut a parameter, and which pieces a fused one is made of.

A checkpoint knows a parameter by the whole of it. Fused layers are the trouble: a tensor-parallel
rank holds a part of each of the matrices that were fused, one after the other, so that the parts
do not make up the whole in the order of ranks. Their pieces are saved one by one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import nn

from megatron_fsdp_v2.row_shards import TensorShard
from megatron_fsdp_v2.tensor_parallel import cut_of
from megatron_fsdp_v2_mcore.meshes import Meshes
from megatron_fsdp_v2_mcore.tensor_parallel_rules import MEGATRON_RULES

__all__ = ["PIECES_ATTRIBUTE", "is_expert", "tensor_shards"]

PIECES_ATTRIBUTE = "checkpoint_piece_names"
"""On parameters of several pieces: what to append to their name in a checkpoint, piece by piece."""

GATED = ("_w", "_v")
"""Gate and up projection, by the names of Megatron's own `fsdp_dtensor` checkpoints."""

# Pieces of state-space layers, by their number: fused input projection, and convolution.
STATE_SPACE = {5: (".z", ".x", ".B", ".C", ".dt"), 3: (".x", ".B", ".C")}


def is_expert(param: nn.Parameter) -> bool:
    """Whether other expert-parallel ranks hold other experts' parameters in its place."""
    return not getattr(param, "allreduce", True)


def tensor_shards(
    module: nn.Module, dense: Meshes, expert: Meshes | None
) -> dict[nn.Parameter, TensorShard]:
    """Describe the parameters of a module that were cut, or that have pieces.

    Parameters of several pieces are marked with the names of the pieces, a mark that travels to
    what they become.

    Args:
        module: A model chunk of Megatron's.
        dense: Meshes of dense parameters.
        expert: Meshes of expert parameters, where there are some.
    """
    pieces = _gated(module)
    found: dict[nn.Parameter, TensorShard] = {}
    for layer in module.modules():
        for attribute, param in layer.named_parameters(recurse=False):
            sizes = getattr(param, "partition_sizes", None)
            if sizes is not None:
                pieces[param] = (tuple(sizes), STATE_SPACE[len(sizes)])
            meshes = expert if expert is not None and is_expert(param) else dense
            lengths, names = pieces.get(param, ((), ()))
            if names:
                setattr(param, PIECES_ATTRIBUTE, names)
            if meshes.both is not None:
                cut = cut_of(layer, attribute, param, MEGATRON_RULES, meshes.both)
                found[param] = replace(cut, pieces=lengths)
            elif lengths:
                found[param] = TensorShard(None, 0, lengths)
    return found


def _gated(module: nn.Module) -> dict[nn.Parameter, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Halves of the fused first layers of gated MLPs, experts included."""
    found: dict[nn.Parameter, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for layer in module.modules():
        if not isinstance(layer, MLP | TEGroupedMLP) or not layer.config.gated_linear_unit:
            continue
        fused: Any = layer.linear_fc1
        for name, param in fused.named_parameters():
            # Transformer Engine's layer may hold the norm before it as well, which is not gated.
            if name.startswith(("weight", "bias")):
                half = param.shape[0] // 2
                found[param] = ((half, half), GATED)
    return found
