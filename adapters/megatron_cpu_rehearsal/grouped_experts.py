"""CPU versions of Transformer Engine's linear layers for Megatron's grouped experts.

Megatron's `TEGroupedMLP` runs unchanged with these two layers. Their parameters have the names,
shapes, initial values and attributes of Transformer Engine's.

Import this file only during a rehearsal, since it imports Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, override

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.extensions.transformer_engine import _set_expert_parameter_attributes
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_cpu_rehearsal.te_module import TransformerEngineModule

__all__ = ["ColumnParallelGroupedLinear", "RowParallelGroupedLinear", "grouped_mlp"]


def _drop_states_of_experts(
    layer: Any, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Remove all but the first expert's extra state; the layer has one for all experts."""
    del others
    for expert in range(1, layer.num_gemms):
        state_dict.pop(f"{prefix}_extra_state{expert}", None)


class _GroupedLinear(TransformerEngineModule):
    """One linear layer for each local expert, applied to the tokens sorted by expert.

    Args:
        num_gemms: Number of local experts.
        input_size: Input features, over all expert-tensor-parallel ranks.
        output_size: Output features, over all expert-tensor-parallel ranks.
        config: Megatron's transformer configuration.
        init_method: Initializes a weight.
        bias: Whether each expert has a bias.
        skip_bias_add: Whether to return the biases instead of adding them.
        is_expert: Always True.
        pg_collection: Process groups.
        others: Arguments that only Transformer Engine uses.
    """

    partition_dim: ClassVar[int]
    parallel_mode: ClassVar[str]

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        pg_collection: Any,
        **others: Any,
    ) -> None:
        del is_expert, others
        super().__init__()
        self.config, self.init_method = config, init_method
        self.num_gemms, self.use_bias = num_gemms, bias
        self.returns_bias = skip_bias_add and bias
        self.groups = pg_collection
        self.whole_shape = (output_size, input_size)
        shape = list(self.whole_shape)
        shape[self.partition_dim] //= pg_collection.expt_tp.size()
        for expert in range(num_gemms):
            self._new_parameter(f"weight{expert}", shape)
        for expert in range(num_gemms if bias else 0):
            self._new_parameter(f"bias{expert}", shape[:1])
        hooks: Any = self
        hooks.register_load_state_dict_pre_hook(_drop_states_of_experts)
        self.reset_parameters()

    def _new_parameter(self, name: str, shape: Sequence[int]) -> None:
        device = "meta" if self.config.init_model_with_meta_device else "cuda"
        values = torch.empty(*shape, device=device, dtype=self.config.params_dtype)
        self.register_parameter(name, torch.nn.Parameter(values))

    def reset_parameters(self) -> None:
        """Initialize weights in the order of experts, set biases to zero, and set attributes."""
        if self.config.perform_initialization and not self._experts("weight")[0].is_meta:
            for weight in self._experts("weight"):
                self._draw(weight)
            for bias in self._experts("bias"):
                bias.data.zero_()
        apart = (
            self.config.expert_model_parallel_size > 1
            or self.config.expert_tensor_parallel_size != self.config.tensor_model_parallel_size
        )
        _set_expert_parameter_attributes(self, self.parallel_mode, apart)

    def _draw(self, weight: torch.nn.Parameter) -> None:
        if self.config.use_cpu_initialization:
            group = self.groups.expt_tp
            _initialize_affine_weight_cpu(
                weight,
                *self.whole_shape,
                weight.shape[self.partition_dim],
                self.partition_dim,
                self.init_method,
                params_dtype=self.config.params_dtype,
                rank=group.rank(),
                world_size=group.size(),
                skip_set_tensor_parallel_attributes=True,
            )
            return
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            self.init_method(weight)

    def _experts(self, name: str) -> list[torch.nn.Parameter]:
        """Return weights or biases by expert; empty if the layer has no biases."""
        if name == "bias" and not self.use_bias:
            return []
        return [self.get_parameter(f"{name}{expert}") for expert in range(self.num_gemms)]

    @override
    def forward(self, tokens: torch.Tensor, tokens_per_expert: list[int]) -> tuple[Any, Any]:
        """Apply each expert to its tokens.

        Args:
            tokens: `(tokens, features)`, sorted by expert.
            tokens_per_expert: Number of tokens of each expert.

        Returns:
            The output, and the biases if they are not added to it.
        """
        weights, biases = self._experts("weight"), self._experts("bias")
        added = biases if biases and not self.returns_bias else [None] * self.num_gemms
        parts = torch.split(tokens, tokens_per_expert)
        outputs = [
            torch.nn.functional.linear(part, weight, bias)
            for part, weight, bias in zip(parts, weights, added, strict=True)
        ]
        return torch.cat(outputs), biases if self.returns_bias else None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Any = None,
    ) -> dict[str, Any]:
        """Return the shards of a checkpoint; experts of all ranks form one tensor, as in Megatron.

        Args:
            prefix: Prefix of the keys.
            sharded_offsets: Position of this layer in the stacked dimensions.
            metadata: Metadata of the checkpoint.
        """
        first = self.groups.ep.rank() * self.num_gemms
        total = self.groups.ep.size() * self.num_gemms
        axes = {"weight": self.partition_dim}
        if self.parallel_mode == "column":
            axes["bias"] = 0
        singleton = metadata.get("singleton_local_shards", False)
        entries: dict[str, Any] = {}
        for expert in range(self.num_gemms):
            names = ("weight", "bias") if self.use_bias else ("weight",)
            tensors: dict[str, Any] = {
                name: self.get_parameter(f"{name}{expert}") for name in names
            }
            tensors["_extra_state"] = None
            offset = (len(sharded_offsets), first + expert, total)
            parts = make_sharded_tensors_for_checkpoint(
                tensors,
                "",
                axes,
                sharded_offsets if singleton else (*sharded_offsets, offset),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(
                parts, "", f"{first + expert}.{prefix}" if singleton else prefix
            )
            for name, part in parts.items():
                part.replica_id = (*part.replica_id[:2], self.groups.expt_dp.rank())
                suffix = "" if name == "_extra_state" and expert == 0 else expert
                entries[f"{prefix}{name}{suffix}"] = part
        return entries


class ColumnParallelGroupedLinear(_GroupedLinear):
    """A layer whose outputs are split over the expert-tensor-parallel ranks."""

    partition_dim = 0
    parallel_mode = "column"


class RowParallelGroupedLinear(_GroupedLinear):
    """A layer with inputs split over expert-tensor-parallel ranks; the dispatcher sums outputs."""

    partition_dim = 1
    parallel_mode = "row"


def grouped_mlp() -> Any:
    """Return a builder of Megatron's grouped experts with these layers."""
    return partial(
        TEGroupedMLP,
        submodules=GroupedMLPSubmodules(
            linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear
        ),
    )
