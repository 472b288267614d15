"""Tiny models of transformers, built from configurations without any download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

type Batch = dict[str, torch.Tensor]

VOCABULARY = 61
LENGTH = 7
ROWS = 2


def _tokens(seed: int, length: int = LENGTH) -> torch.Tensor:
    # Numbers below 3 are special tokens.
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=_numbers(seed))


def _numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(seed: int) -> Batch:
    """Return a batch of texts with labels; the last tokens of the second row are padding."""
    tokens = _tokens(seed)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def unpadded_text(seed: int) -> Batch:
    """Return a batch of texts with labels."""
    tokens = _tokens(seed)
    return {"input_ids": tokens, "labels": tokens}


def translation(seed: int) -> Batch:
    """Return a batch of texts, and texts of another length as labels."""
    return {"input_ids": _tokens(seed), "labels": _tokens(seed + 1, LENGTH - 2)}


def speech(seed: int) -> Batch:
    """Return a batch of spectrograms, with texts as labels."""
    sound = torch.randn(ROWS, 8, 2 * 10, generator=_numbers(seed))
    return {"input_features": sound, "labels": _tokens(seed)}


def picture(seed: int) -> Batch:
    """Return a batch of pictures with their classes."""
    pixels = torch.randn(ROWS, 3, 8, 8, generator=_numbers(seed))
    return {"pixel_values": pixels, "labels": torch.tensor([seed % 5, (seed + 1) % 5])}


@dataclass(frozen=True)
class Model:
    """A model and its inputs.

    Attributes:
        kind: Prefix of the name of the configuration class.
        head: Suffix of the name of the model class.
        options: Arguments of the configuration.
        batch: Returns the arguments of the forward for a seed.
        generates: Whether the model has a `generate()`.
    """

    kind: str
    head: str
    options: Mapping[str, Any]
    batch: Callable[[int], Batch] = text
    generates: bool = True

    @property
    def cls(self) -> Any:
        """The class of the model."""
        return getattr(transformers, self.kind.removesuffix("Text") + self.head)

    def build(self) -> Any:
        """Build the model, in training mode."""
        return self.cls(getattr(transformers, f"{self.kind}Config")(**self.options)).train()

    def prompt(self, seed: int) -> Batch:
        """Return the inputs of `generate()`."""
        batch = self.batch(seed)
        return {name: value for name, value in batch.items() if name != "labels"}


# With the default range of 0.02, biases would dominate the output of a model this narrow.
_RANGE = {"initializer_range": 0.2}
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = _TOKENS | _RANGE | {"hidden_size": 12, "num_hidden_layers": 2}
_DECODER: dict[str, Any] = _SIZES | {
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
_TIED = {"tie_word_embeddings": True}
_GEMMA3: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "query_pre_attn_scalar": 6,
}
_ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
_MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2} | _ROUTER
_QWEN3_MOE: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
_GPT2 = {"n_positions": 64, "n_embd": 12, "n_layer": 2, "n_head": 3}
_T5: dict[str, Any] = {"d_model": 12, "d_kv": 5, "d_ff": 22, "num_layers": 2, "num_heads": 3}
# T5 does not divide attention scores by the square root of the head size: rounding errors grow.
_T5 |= {"initializer_factor": 0.5, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
_WHISPER: dict[str, Any] = {"num_mel_bins": 8, "d_model": 12, "init_std": 0.1}
_WHISPER |= {"max_source_positions": 10, "max_target_positions": 64}
_WHISPER |= {"decoder_start_token_id": 1, "begin_suppress_tokens": None}
for _half in ("encoder", "decoder"):
    _WHISPER |= {f"{_half}_layers": 2, f"{_half}_attention_heads": 3, f"{_half}_ffn_dim": 22}
_VIT = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 22,
}
_VIT |= {"image_size": 8, "patch_size": 4, "num_labels": 5, "initializer_range": 0.1}
_MAMBA2 = {"num_heads": 6, "head_dim": 4, "state_size": 5, "n_groups": 2, "chunk_size": 4}
_LM, _SEQ = "ForCausalLM", "ForConditionalGeneration"

MODELS = {
    "Llama": Model("Llama", _LM, _DECODER),
    "Llama tied": Model("Llama", _LM, _DECODER | _TIED),
    "Qwen3": Model("Qwen3", _LM, _DECODER),
    # Gemma3 ties its embeddings by default.
    "Gemma3": Model("Gemma3Text", _LM, _DECODER | _GEMMA3 | _TIED),
    "Mixtral": Model("Mixtral", _LM, _DECODER | _MIXTRAL),
    "Qwen3 MoE": Model("Qwen3Moe", _LM, _DECODER | _QWEN3_MOE | {"mlp_only_layers": [0]}),
    "GPT2": Model("GPT2", "LMHeadModel", _TOKENS | _RANGE | _GPT2),
    "T5": Model("T5", _SEQ, _TOKENS | _T5, translation),
    "Whisper": Model("Whisper", _SEQ, _TOKENS | _WHISPER, speech),
    "ViT": Model("ViT", "ForImageClassification", _VIT, picture, generates=False),
    "Mamba2": Model("Mamba2", _LM, _SIZES | _MAMBA2, unpadded_text),
}


def units(model: Any) -> list[nn.Module]:
    """Return the layers of `_no_split_modules` and the experts; inner modules come first."""
    layers = set(model._no_split_modules)
    chosen = [
        module
        for module in model.modules()
        if type(module).__name__ in layers or type(module).__name__.endswith("Experts")
    ]
    return chosen[::-1]


def units_with_halves(model: Any) -> list[nn.Module]:
    """Return `units()`, and the encoder and the decoder: `generate()` calls each of them."""
    halves = [model.get_encoder(), model.get_decoder()] if model.config.is_encoder_decoder else []
    return [*units(model), *halves]
