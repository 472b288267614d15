"""Hybrid models with Megatron's own layers; Megatron specifies them with Transformer Engine's.

Import this file only during a rehearsal, since it imports Megatron.

The layers and their modules are transcribed from Megatron-LM's
`megatron/core/models/hybrid/hybrid_layer_specs.py`, Copyright (c) NVIDIA CORPORATION; see NOTICE.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_cpu_rehearsal.mamba_kernels import GroupedRMSNorm
from megatron_cpu_rehearsal.replicated_linear import (
    NormedColumnParallelLinear,
    ReplicatedLinear,
)
from megatron_cpu_rehearsal.te_module import sharded_entries

__all__ = ["ShardedGroupedRMSNorm", "local_stack_spec"]


class ShardedGroupedRMSNorm(GroupedRMSNorm):
    """The norm of a Mamba layer, which is split over the tensor-parallel ranks."""

    tp_group: Any

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return the shards of a checkpoint.

        Args:
            prefix: Prefix of the keys.
            sharded_offsets: Position of this layer in the stacked dimensions.
            metadata: Metadata of the checkpoint.
        """
        return sharded_entries(self, {"weight": 0}, prefix, sharded_offsets, metadata)


def local_stack_spec(spec: ModuleSpec) -> ModuleSpec:
    """Specify Megatron's stack of hybrid layers with its own norms and linear layers.

    Transformer Engine's layers contain the norm of their input; here the norm is a separate module.
    """
    del spec
    norm = WrappedTorchNorm
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=norm,
                    mixer=ModuleSpec(
                        module=MambaMixer,
                        submodules=MambaMixerSubmodules(
                            in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                        ),
                    ),
                    mamba_bda=get_bias_dropout_add,
                ),
            ),
            attention_layer=_layer(_attention()),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=norm,
                    mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=norm,
                    # As in Megatron, experts are always grouped; any `num_experts` selects an MoE.
                    mlp=get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=True),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
            gdn_layer=_layer(
                ModuleSpec(
                    module=GatedDeltaNet,
                    submodules=GatedDeltaNetSubmodules(
                        in_proj=NormedColumnParallelLinear,
                        out_norm=norm,
                        out_proj=RowParallelLinear,
                    ),
                ),
                IdentityOp,
            ),
            dsa_layer=_layer(_sparse_attention()),
            mla_layer=_layer(_latent_attention()),
            mtp_block_spec=_mtp_block(),
        ),
    )


def _layer(attention: ModuleSpec, norm: Any = WrappedTorchNorm) -> ModuleSpec:
    """Specify a layer with attention only."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
        ),
    )


def _attention() -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )


_LATENT: dict[str, Any] = {
    "linear_q_proj": ColumnParallelLinear,
    "linear_q_down_proj": ReplicatedLinear,
    "linear_q_up_proj": ColumnParallelLinear,
    "linear_kv_down_proj": ReplicatedLinear,
    "linear_kv_up_proj": ColumnParallelLinear,
    "linear_proj": RowParallelLinear,
    "q_layernorm": IdentityOp,
    "kv_layernorm": IdentityOp,
}
"""With --qk-layernorm, Megatron uses layers with a fused norm if no norm is specified."""


def _latent_attention() -> ModuleSpec:
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(core_attention=DotProductAttention, **_LATENT),
    )


def _sparse_attention() -> ModuleSpec:
    indexer = ModuleSpec(
        module=DSAIndexer,
        submodules=DSAIndexerSubmodules(
            linear_wq_b=ReplicatedLinear,
            linear_wk=ReplicatedLinear,
            k_norm=WrappedTorchNorm,
            linear_weights_proj=ReplicatedLinear,
        ),
    )
    core = ModuleSpec(module=DSAttention, submodules=DSAttentionSubmodules(indexer=indexer))
    return ModuleSpec(
        module=AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(core_attention=core, **_LATENT),
    )


def _mtp_block() -> ModuleSpec:
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=None,  # built from the layer pattern
            layer_norm=WrappedTorchNorm,
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )
