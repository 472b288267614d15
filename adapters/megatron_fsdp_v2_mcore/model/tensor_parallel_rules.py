"""Tensor-parallel sharding of the parameters of Megatron's and Transformer Engine's modules.

The tables are for `megatron_fsdp_v2.tensor_parallel`. They name classes by strings, so that this
file imports neither package.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from megatron_fsdp_v2.tensor_parallel import (
    COLUMN,
    ROW,
    FusedShard,
    PlacementPatterns,
    TensorParallelRule,
)

_UNMARKED_SHARDS = ("softmax_offset",)
"""Parameters that Megatron splits without setting attributes: the attention sinks of a rank's heads
(`--softmax-type learnable`), in its own and in Transformer Engine's attention."""


def _cuts_of_attributes(module: nn.Module) -> PlacementPatterns:
    """Return the sharding that Megatron's attributes describe; other parameters are replicated."""
    placements: dict[str, Replicate | Shard] = {}
    for name, param in module.named_parameters(recurse=False):
        placements[name] = Replicate()
        if getattr(param, "tensor_model_parallel", False):
            # `partition_dim` is a dimension of one expert's parameter, even if they are stacked.
            kind = "weight" if name.startswith("weight") else "bias"
            is_stacked = bool(getattr(module, f"single_grouped_{kind}", False))
            placements[name] = Shard(int(param.partition_dim) + is_stacked)  # type: ignore[attr-defined]
        elif name in _UNMARKED_SHARDS:
            placements[name] = Shard(0)
    return placements


MEGATRON_RULES = (TensorParallelRule(nn.Module, _cuts_of_attributes),)
"""The rule for all modules of Megatron. Megatron's layers set attributes on their parameters and on
those of Transformer Engine layers in them; the attributes reflect options that a class name does
not. The attributes do not describe fused sub-tensors, which the adapter's `tensor_shards` adds."""


def _linear_cuts(module: nn.Module) -> PlacementPatterns:
    mode = getattr(module, "parallel_mode", None)
    by_mode: PlacementPatterns = {"column": COLUMN, "row": ROW}.get(str(mode), {"*": Replicate()})
    # With `parameters_split` a module has several weights, such as query_weight and key_weight.
    split = {f"*_{pattern}": placement for pattern, placement in by_mode.items()}
    return {"layer_norm_*": Replicate(), **by_mode, **split}


def _mlp_cuts(module: nn.Module) -> PlacementPatterns:
    if not getattr(module, "set_parallel_mode", False):
        return {"*": Replicate()}
    is_gated = str(getattr(module, "activation", "")).endswith("glu")
    return {
        "layer_norm_*": Replicate(),
        "fc1_weight": FusedShard(-2, 2) if is_gated else Shard(-2),
        "fc1_bias": FusedShard(-1, 2) if is_gated else Shard(-1),
        "fc2_weight": Shard(-1),
        "fc2_bias": Replicate(),
    }


TRANSFORMER_ENGINE_RULES = (
    TensorParallelRule("transformer_engine.pytorch.Linear", _linear_cuts),
    TensorParallelRule("transformer_engine.pytorch.LayerNormLinear", _linear_cuts),
    TensorParallelRule("transformer_engine.pytorch.GroupedLinear", _linear_cuts),
    TensorParallelRule("transformer_engine.pytorch.LayerNormMLP", _mlp_cuts),
    TensorParallelRule("transformer_engine.pytorch.LayerNorm", {"*": Replicate()}),
    TensorParallelRule("transformer_engine.pytorch.RMSNorm", {"*": Replicate()}),
)
"""Rules for Transformer Engine's modules outside Megatron, for `tensor_parallel.tensor_shards`."""
