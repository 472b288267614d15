"""Estimates of the operations and activations of Megatron's layers, by formula.

Activations follow Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (2022), section 4: in 16 bits a layer keeps 34 bytes per token and hidden unit, and
`5 a s / h` more if attention keeps its score matrix. The formulas below extend theirs to grouped
queries, gated layers and experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2.plan.description import MemoryOption, ParameterDescription


@dataclass(frozen=True)
class Costs:
    """Costs of the layers of a model chunk on one rank.

    Attributes:
        args: Megatron's arguments.
        has_output: Whether the chunk has the output layer.
        keeps_attention: Whether the attention matrix is kept for the backward. Fused attention
            never creates this matrix.
    """

    args: Any
    has_output: bool
    keeps_attention: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank; tensor-parallel ranks process the same tokens."""
        args = self.args
        return int(args.seq_length * args.micro_batch_size // args.context_parallel_size)

    def flops(self, unit: str, params: Sequence[ParameterDescription]) -> float:
        """Return the operations of a unit's forward per token: two per element of a matrix.

        A token uses only the experts to which it is routed. Half of the attention matrix is masked.

        Args:
            unit: Name of the unit.
            params: Parameters of the unit.
        """
        args = self.args
        total = 0.0
        for param in params:
            if len(param.shape) < 2:
                continue
            used = 1.0
            full = f"{unit}.{param.name}"
            if "experts" in full and "shared_experts" not in full:
                local = args.num_experts // args.expert_model_parallel_size
                used = args.moe_router_topk / local
            elif "embedding" in full:
                is_tied = not args.untie_embeddings_and_output_weights
                used = float(self.has_output and is_tied and "word" in full)
            total += 2.0 * used * param.numel
        if any("self_attention" in param.name for param in params):
            keys, values = self._head_widths
            heads = args.num_attention_heads / args.tensor_model_parallel_size
            total += args.seq_length * heads * (keys + values)
        return total

    @property
    def _head_widths(self) -> tuple[int, int]:
        """Channels of the keys and of the values of a head."""
        args = self.args
        if args.multi_latent_attention:
            return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
        return args.kv_channels, args.kv_channels

    def layer_activations(self, *, has_experts: bool = True, recomputes: bool | None = None) -> int:
        """Return the bytes that a layer keeps for the backward of a micro-batch.

        Args:
            has_experts: Whether the layer has experts, if the model has some.
            recomputes: Whether the layer keeps only its input; None for the value of the flags.
        """
        args = self.args
        recomputes = self.recomputes_all if recomputes is None else recomputes
        width, tensor = args.hidden_size, args.tensor_model_parallel_size
        parts = tensor if args.sequence_parallel else 1
        if recomputes:
            return int(self.tokens * 2 * width * self._scale / parts)
        heads, (keys, values) = args.num_attention_heads, self._head_widths
        groups = args.num_query_groups if args.group_query_attention else heads
        hidden_mask = 1 if args.hidden_dropout else 0
        # Inputs of two norms, of the queries and of the first layer of the MLP; two dropout masks.
        unsharded = (4 + 2 + 2) * width + 2 * hidden_mask * width
        if args.multi_latent_attention:
            # Latents before and after their norms, and the part of the keys that all heads share.
            latents = (args.q_lora_rank or 0) + args.kv_lora_rank
            unsharded += 2 * (2 * latents + args.qk_pos_emb_head_dim)
        # Queries, keys and values; the input of the output projection.
        sharded = 2 * (heads * keys + groups * (keys + values)) + 2 * heads * values
        sharded += self._mlp_activations(has_experts=has_experts)
        if self.keeps_attention and args.recompute_granularity is None:
            dropout = 3 if args.attention_dropout else 0
            sharded += (2 + dropout) * heads * args.seq_length
        return int(self.tokens * self._scale * (unsharded / parts + sharded / tensor))

    def _mlp_activations(self, *, has_experts: bool) -> float:
        """Return the bytes per token of the inputs of both layers of an MLP, or of its experts."""
        args = self.args
        gate = 2 if args.swiglu else 1
        if not (args.num_experts and has_experts):
            return float(2 * (gate + 1) * args.ffn_hidden_size)
        # Each copy of a token is also kept as the input of its expert.
        expert = args.moe_ffn_hidden_size or args.ffn_hidden_size
        per_expert = 2 * (args.moe_latent_size or args.hidden_size) + 2 * (gate + 1) * expert
        shared = args.moe_shared_expert_intermediate_size or 0
        return float(args.moe_router_topk * per_expert + 2 * (gate + 1) * shared)

    @property
    def _scale(self) -> float:
        """Factor of the formulas, which are for 16 bits."""
        return float(self.args.params_dtype.itemsize / 2)

    @property
    def recomputes_all(self) -> bool:
        """Whether layers are recomputed from their inputs."""
        return bool(self.args.recompute_granularity == "full")

    def root_activations(self) -> int:
        """Return the bytes outside of layers: logits in two dtypes, and the recomputed layer."""
        args, nbytes = self.args, 0.0
        if self.has_output:
            vocabulary = args.padded_vocab_size or args.vocab_size
            per_token = (4 + 2 * self._scale) * vocabulary / args.tensor_model_parallel_size
            nbytes += self.tokens * (per_token + 4 * self._scale * args.hidden_size)
        if self.recomputes_all:
            # The layer that is recomputed keeps all its activations until its backward ends.
            nbytes += max(
                self.layer_activations(has_experts=kind, recomputes=False) for kind in (False, True)
            )
        return int(nbytes)

    def alternatives(self, layers: Sequence[bool], num_in_flight: int) -> tuple[MemoryOption, ...]:
        """Return changes of the training that need fewer bytes of activations.

        Args:
            layers: For each layer of the stage, whether it has experts.
            num_in_flight: Number of micro-batches whose activations are alive at a time.
        """
        args = self.args
        found = []
        per_layer = [self.layer_activations(has_experts=kind) for kind in layers]
        current = num_in_flight * (sum(per_layer) + self.root_activations())
        if not self.recomputes_all:
            layer_input = self.layer_activations(recomputes=True)
            inputs = num_in_flight * len(layers) * layer_input
            recomputed = inputs + max(per_layer, default=0) + self.root_activations()
            flags = "--recompute-granularity full --recompute-method uniform"
            found.append(MemoryOption(f"{flags} --recompute-num-layers 1", recomputed))
        if args.micro_batch_size > 1:
            half = args.micro_batch_size // 2
            nbytes = current * half // args.micro_batch_size
            found.append(MemoryOption(f"--micro-batch-size {half}", nbytes))
        return tuple(found)
