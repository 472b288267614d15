"""Imports of the rank processes of these tests before they are forked."""

import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.mamba2.modeling_mamba2
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe
import transformers.models.t5.modeling_t5
import transformers.models.vit.modeling_vit
import transformers.models.whisper.modeling_whisper  # noqa: F401
