"""Models of transformers, tiny, made from configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from tests.clients.harness import Batch

VOCABULARY = 61
LENGTH = 7
ROWS = 2


def _tokens(seed: int, length: int = LENGTH, rows: int = ROWS) -> torch.Tensor:
    # The first numbers are special tokens.
    return torch.randint(3, VOCABULARY, (rows, length), generator=_numbers(seed))


def _numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(seed: int) -> Batch:
    """A text with its labels; the last tokens of the second row are padding."""
    tokens = _tokens(seed)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def unpadded_text(seed: int) -> Batch:
    """A text with its labels."""
    tokens = _tokens(seed)
    return {"input_ids": tokens, "labels": tokens}


def translation(seed: int) -> Batch:
    """A text and another one."""
    return {"input_ids": _tokens(seed), "labels": _tokens(seed + 1, LENGTH - 2)}


def speech(seed: int) -> Batch:
    """A spectrogram and its text."""
    sound = torch.randn(ROWS, 8, 2 * 10, generator=_numbers(seed))
    return {"input_features": sound, "labels": _tokens(seed)}


def picture(seed: int) -> Batch:
    """Pictures and what they show."""
    pixels = torch.randn(ROWS, 3, 8, 8, generator=_numbers(seed))
    return {"pixel_values": pixels, "labels": torch.tensor([seed % 5, (seed + 1) % 5])}


@dataclass(frozen=True)
class Model:
    """A model and what it is fed.

    Attributes:
        config: Its configuration.
        cls: Its class.
        batch: Arguments of its forward, by seed.
        generates: Whether it has a `generate()`.
    """

    config: Callable[[], Any]
    cls: str
    batch: Callable[[int], Batch] = text
    generates: bool = True

    def build(self) -> Any:
        """The model, in training mode."""
        return getattr(transformers, self.cls)(self.config()).train()

    def prompt(self, seed: int) -> Batch:
        """What it continues when it generates."""
        batch = self.batch(seed)
        return {name: value for name, value in batch.items() if name != "labels"}


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # With the usual 0.02 a model this narrow is hardly more than its biases.
    "initializer_range": 0.2,
}
_ATTENTION: dict[str, Any] = {
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}


def _llama() -> Any:
    return transformers.LlamaConfig(**_SIZES, **_ATTENTION)


def _tied_llama() -> Any:
    return transformers.LlamaConfig(**_SIZES, **_ATTENTION, tie_word_embeddings=True)


def _qwen3() -> Any:
    return transformers.Qwen3Config(**_SIZES, **_ATTENTION)


def _gemma3() -> Any:
    return transformers.Gemma3TextConfig(
        **_SIZES,
        **_ATTENTION,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        query_pre_attn_scalar=6,
        # The usual way of saying that embeddings are tied.
        tie_word_embeddings=True,
    )


def _mixtral() -> Any:
    return transformers.MixtralConfig(
        **_SIZES,
        **_ATTENTION,
        num_local_experts=5,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )


def _qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **_SIZES,
        **_ATTENTION,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        mlp_only_layers=[0],
    )


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=12,
        n_layer=2,
        n_head=3,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _t5() -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=12,
        d_kv=5,
        d_ff=22,
        num_layers=2,
        num_heads=3,
        # Attention is not scaled down by the size of a head, and rounding grows with it.
        initializer_factor=0.5,
        feed_forward_proj="gated-gelu",
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=0,
    )


def _whisper() -> Any:
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=12,
        encoder_layers=2,
        encoder_attention_heads=3,
        decoder_layers=2,
        decoder_attention_heads=3,
        encoder_ffn_dim=22,
        decoder_ffn_dim=22,
        max_source_positions=10,
        max_target_positions=64,
        init_std=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )


def _vit() -> Any:
    return transformers.ViTConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=22,
        image_size=8,
        patch_size=4,
        num_labels=5,
        initializer_range=0.1,
    )


def _mamba2() -> Any:
    return transformers.Mamba2Config(
        **_SIZES, num_heads=6, head_dim=4, state_size=5, n_groups=2, chunk_size=4
    )


MODELS = {
    "Llama": Model(_llama, "LlamaForCausalLM"),
    "Llama tied": Model(_tied_llama, "LlamaForCausalLM"),
    "Qwen3": Model(_qwen3, "Qwen3ForCausalLM"),
    "Gemma3": Model(_gemma3, "Gemma3ForCausalLM"),
    "Mixtral": Model(_mixtral, "MixtralForCausalLM"),
    "Qwen3 MoE": Model(_qwen3_moe, "Qwen3MoeForCausalLM"),
    "GPT2": Model(_gpt2, "GPT2LMHeadModel"),
    "T5": Model(_t5, "T5ForConditionalGeneration", translation),
    "Whisper": Model(_whisper, "WhisperForConditionalGeneration", speech),
    "ViT": Model(_vit, "ViTForImageClassification", picture, generates=False),
    "Mamba2": Model(_mamba2, "Mamba2ForCausalLM", unpadded_text),
}


def units(model: Any) -> list[nn.Module]:
    """Its layers, as the library says what is not to be split, and experts; inner ones first."""
    layers = set(model._no_split_modules)
    chosen = [
        module
        for module in model.modules()
        if type(module).__name__ in layers or type(module).__name__.endswith("Experts")
    ]
    return chosen[::-1]


def units_with_halves(model: Any) -> list[nn.Module]:
    """The same and, of an encoder-decoder model, both halves: `generate()` calls each."""
    halves = [model.get_encoder(), model.get_decoder()] if model.config.is_encoder_decoder else []
    return [*units(model), *halves]
