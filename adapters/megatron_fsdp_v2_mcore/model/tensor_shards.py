"""Tensor-parallel sharding of Megatron's parameters, and the sub-tensors of fused parameters.

A checkpoint addresses a parameter by its global shape. In a fused layer, a tensor-parallel rank
holds a shard of each fused matrix, concatenated: concatenating the shards of all ranks does not
give the global tensor. The sub-tensors of a fused parameter are therefore saved separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, override

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import nn

from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.tensor_parallel import tensor_shard_by_rules
from megatron_fsdp_v2_mcore.model.meshes import Meshes
from megatron_fsdp_v2_mcore.model.tensor_parallel_rules import MEGATRON_RULES

PIECES_ATTRIBUTE = "checkpoint_piece_names"
"""Attribute of fused parameters: the suffix of each sub-tensor's name in a checkpoint."""

GATED_SUFFIXES = ("_w", "_v")
"""Suffixes of gate and up projection, as in Megatron's own `fsdp_dtensor` checkpoints."""

# Suffixes of state-space layers by the number of sub-tensors: input projection, convolution.
STATE_SPACE_SUFFIXES = {5: (".z", ".x", ".B", ".C", ".dt"), 3: (".x", ".B", ".C")}


type _Pieces = dict[nn.Parameter, tuple[tuple[int, ...], tuple[str, ...]]]
"""Row counts and suffixes of the sub-tensors of fused parameters."""


def is_expert(param: nn.Parameter) -> bool:
    """Whether a parameter belongs to experts and so differs between expert-parallel ranks."""
    return not getattr(param, "allreduce", True)


class _MegatronShards(Mapping[nn.Parameter, TensorShard]):
    """The sharding of parameters, read from the attributes of the parameters at each lookup.

    Layers of Transformer Engine set these attributes when they initialize a parameter. A parameter
    on the meta device is initialized when its unit is materialized.
    """

    def __init__(self, module: nn.Module, dense: Meshes, expert: Meshes | None) -> None:
        self._dense, self._expert = dense, expert
        self._pieces = _gated_halves(module)
        self._locations: dict[nn.Parameter, tuple[nn.Module, str]] = {}
        for layer in module.modules():
            for attribute, param in layer.named_parameters(recurse=False):
                self._locations[param] = (layer, attribute)
                sizes = getattr(param, "partition_sizes", None)
                if sizes is not None:
                    self._pieces[param] = (tuple(sizes), STATE_SPACE_SUFFIXES[len(sizes)])
        self._pieces |= _of_adapters(module, self._pieces)
        for param, (_, suffixes) in self._pieces.items():
            setattr(param, PIECES_ATTRIBUTE, suffixes)

    @override
    def __getitem__(self, param: nn.Parameter) -> TensorShard:
        layer, attribute = self._locations[param]
        meshes = self._dense if self._expert is None or not is_expert(param) else self._expert
        lengths, _ = self._pieces.get(param, ((), ()))
        mesh = meshes.data_and_tensor
        if mesh is not None:
            shard = tensor_shard_by_rules(layer, attribute, param, MEGATRON_RULES, mesh)
            return replace(shard, pieces=lengths)
        if lengths:
            return TensorShard(None, 0, lengths)
        raise KeyError(attribute)

    @override
    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param for param in self._locations if self.get(param) is not None)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def tensor_shards(
    module: nn.Module, dense: Meshes, expert: Meshes | None
) -> Mapping[nn.Parameter, TensorShard]:
    """Describe the parameters of a module that are tensor-parallel or fused.

    The suffixes of the sub-tensors are set as an attribute of fused parameters. Sharding propagates
    the attribute to the sharded parameters.

    Args:
        module: A model chunk of Megatron.
        dense: Meshes of dense parameters.
        expert: Meshes of expert parameters, if the model has experts.
    """
    return _MegatronShards(module, dense, expert)


def _gated_halves(module: nn.Module) -> _Pieces:
    """Return row counts and suffixes of the two halves of gated MLPs' fused first layers."""
    found: _Pieces = {}
    for layer in module.modules():
        if not isinstance(layer, MLP | TEGroupedMLP) or not layer.config.gated_linear_unit:
            continue
        if isinstance(layer, TEGroupedMLP) and layer.config.moe_mlp_glu_interleave_size is not None:
            # Blocks of both matrices alternate: the shards of all ranks give the global tensor.
            continue
        fused: Any = getattr(layer.linear_fc1, "to_wrap", layer.linear_fc1)
        for name, param in fused.named_parameters():
            # Transformer Engine's layer may include the preceding norm, which is not gated.
            if name.startswith(("weight", "bias")):
                half = param.shape[0] // 2
                found[param] = ((half, half), GATED_SUFFIXES)
    return found


def _of_adapters(module: nn.Module, pieces: _Pieces) -> _Pieces:
    """Return the sub-tensors of adapters of Megatron-Bridge: those of the layers they wrap."""
    found: _Pieces = {}
    for layer in module.modules():
        base = getattr(getattr(layer, "to_wrap", None), "weight", None)
        adapter = getattr(layer, "adapter", None)
        added = getattr(adapter, "linear_out", None)
        if isinstance(added, nn.Module) and base in pieces:
            found[added.get_parameter("weight")] = pieces[base]
            # DoRA has one number per row of the layer.
            magnitude = getattr(adapter, "weight_magnitude", None)
            if magnitude is not None:
                found[magnitude] = pieces[base]
    return found
