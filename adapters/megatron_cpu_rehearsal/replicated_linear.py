"""Linear layers of Transformer Engine without a counterpart in Megatron's own layers.

One layer is replicated on all tensor-parallel ranks; the other layer has a fused input norm. Their
parameters have the names, shapes and attributes of Transformer Engine's.

Import this file only during a rehearsal, since it imports Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, override

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    _initialize_affine_weight_cpu,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import nn
from torch.nn import functional

from megatron_cpu_rehearsal.norms import normalize
from megatron_cpu_rehearsal.te_module import (
    TransformerEngineModule,
    sharded_entries,
)

__all__ = ["NormedColumnParallelLinear", "ReplicatedLinear"]


class ReplicatedLinear(TransformerEngineModule):
    """`TELinear` of mode `duplicated`, whose weight is replicated on all tensor-parallel ranks.

    Args:
        input_size: Input features.
        output_size: Output features.
        config: Megatron's transformer configuration.
        init_method: Initializes the weight.
        bias: Whether the layer has a bias.
        skip_bias_add: Whether to return the bias instead of adding it.
        tp_group: Tensor-parallel group; Megatron's group if None.
        others: Arguments that only Transformer Engine uses.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        tp_group: Any = None,
        **others: Any,
    ) -> None:
        del others
        super().__init__()
        self.config = config
        self.returns_bias = skip_bias_add and bias
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        options = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = nn.Parameter(torch.empty(output_size, input_size, **options))
        self.bias = nn.Parameter(torch.zeros(output_size, **options)) if bias else None
        if config.perform_initialization:
            self._draw(init_method)
        for param in self.parameters():
            marks: Any = param
            # Each rank has a part of the sequence; with this attribute Megatron sums the gradients.
            marks.sequence_parallel = config.sequence_parallel
            marks.tensor_model_parallel = False
            marks.allreduce = True

    def _draw(self, init_method: Callable[[torch.Tensor], Any]) -> None:
        """Initialize the weight, identical on every rank."""
        if self.config.use_cpu_initialization:
            size = self.weight.shape[0]
            _initialize_affine_weight_cpu(
                self.weight,
                *self.weight.shape,
                size,
                0,
                init_method,
                params_dtype=self.config.params_dtype,
                rank=0,
                world_size=1,
                skip_set_tensor_parallel_attributes=True,
            )
            return
        with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
            init_method(self.weight)

    @override
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer to this rank's part of the sequence.

        Returns:
            The output, and the bias if it is not added to the output.
        """
        if self.returns_bias:
            return functional.linear(x, self.weight), self.bias
        return functional.linear(x, self.weight, self.bias), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return the shards of a checkpoint: one replica of the whole weight.

        Args:
            prefix: Prefix of the keys.
            sharded_offsets: Position of this layer in the stacked dimensions.
            metadata: Metadata of the checkpoint.
        """
        return sharded_entries(self, None, prefix, sharded_offsets, metadata)


class NormedColumnParallelLinear(ColumnParallelLinear):
    """`TELayerNormColumnParallelLinear`: normalizes its input, then applies Megatron's layer.

    Args:
        input_size: Input features.
        output_size: Output features, over all tensor-parallel ranks.
        config: Megatron's transformer configuration.
        options: Options of Megatron's `ColumnParallelLinear`.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        norm: Any = WrappedTorchNorm(config, input_size, config.layernorm_epsilon)
        norm.to(device=self.weight.device, dtype=config.params_dtype)
        # An RMS norm has no bias.
        self.register_parameter("layer_norm_bias", None)
        for name, param in norm.named_parameters():
            self.register_parameter(f"layer_norm_{name}", param)

    @override
    def forward(self, input_: torch.Tensor, *others: Any, **options: Any) -> Any:
        """Normalize, then multiply; see `ColumnParallelLinear.forward`."""
        normalized = normalize(
            input_,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.config.layernorm_epsilon,
            self.config,
        )
        return super().forward(normalized, *others, **options)
