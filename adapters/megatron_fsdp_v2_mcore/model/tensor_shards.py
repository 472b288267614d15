"""How Megatron's tensor parallelism cut a parameter, and which pieces a fused one is made of.

A checkpoint knows a parameter by the whole of it. Fused layers are the trouble: a tensor-parallel
rank holds a part of each of the matrices that were fused, one after the other, so that the parts
do not make up the whole in the order of ranks. Their pieces are saved one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, override

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import nn

from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.tensor_parallel import cut_of
from megatron_fsdp_v2_mcore.model.meshes import Meshes
from megatron_fsdp_v2_mcore.model.tensor_parallel_rules import MEGATRON_RULES

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


class _Shards(Mapping[nn.Parameter, TensorShard]):
    """How parameters were cut, by the marks their modules have written when it is asked.

    Layers of Transformer Engine mark what they initialize: with a build on the meta device, when
    their unit gets memory.
    """

    def __init__(self, module: nn.Module, dense: Meshes, expert: Meshes | None) -> None:
        self._dense, self._expert = dense, expert
        self._pieces = _gated(module)
        self._sites: dict[nn.Parameter, tuple[nn.Module, str]] = {}
        for layer in module.modules():
            for attribute, param in layer.named_parameters(recurse=False):
                self._sites[param] = (layer, attribute)
                sizes = getattr(param, "partition_sizes", None)
                if sizes is not None:
                    self._pieces[param] = (tuple(sizes), STATE_SPACE[len(sizes)])
                if param in self._pieces:
                    setattr(param, PIECES_ATTRIBUTE, self._pieces[param][1])

    @override
    def __getitem__(self, param: nn.Parameter) -> TensorShard:
        layer, attribute = self._sites[param]
        meshes = self._dense if self._expert is None or not is_expert(param) else self._expert
        lengths, _ = self._pieces.get(param, ((), ()))
        if meshes.both is not None:
            cut = cut_of(layer, attribute, param, MEGATRON_RULES, meshes.both)
            return replace(cut, pieces=lengths)
        if lengths:
            return TensorShard(None, 0, lengths)
        raise KeyError(attribute)

    @override
    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param for param in self._sites if self.get(param) is not None)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def tensor_shards(
    module: nn.Module, dense: Meshes, expert: Meshes | None
) -> Mapping[nn.Parameter, TensorShard]:
    """Describe the parameters of a module that were cut, or that have pieces.

    Parameters of several pieces are marked with the names of the pieces, a mark that travels to
    what they become.

    Args:
        module: A model chunk of Megatron's.
        dense: Meshes of dense parameters.
        expert: Meshes of expert parameters, where there are some.
    """
    return _Shards(module, dense, expert)


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
