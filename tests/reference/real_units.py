"""Shapes of units of real models, and the ranks that they are laid out over.

Of Megatron's modules where a tensor-parallel size is named, else those of the published weights.
"""

from __future__ import annotations

from tests.reference.layout_bounds import UNITS

Shape = tuple[int, ...]


def _root(vocabulary: int, hidden: int) -> list[Shape]:
    """Embedding, last norm, output layer."""
    return [(vocabulary, hidden), (hidden,), (vocabulary, hidden)]


def _llama_tp2() -> list[Shape]:
    """A layer of Llama-3 8B as each of two tensor-parallel ranks has it."""
    return [(4096,), (3072, 4096), (4096, 2048), (4096,), (14336, 4096), (4096, 7168)]


def _qwen2() -> list[Shape]:
    """A layer of Qwen2-7B, with biases of q, k and v."""
    hidden, kv, ffn = 3584, 512, 18944
    attention = [(hidden, hidden), (hidden,), (kv, hidden), (kv,), (kv, hidden), (kv,)]
    mlp = [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    return [*attention, (hidden, hidden), *mlp, (hidden,), (hidden,)]


def _qwen3_moe() -> list[Shape]:
    """A layer of Qwen3-30B-A3B: norms of q and k, 128 experts."""
    hidden, ffn, experts = 2048, 768, 128
    attention = [(4096, hidden), (512, hidden), (512, hidden), (hidden, 4096), (128,), (128,)]
    mlp = [(ffn, hidden), (ffn, hidden), (hidden, ffn)] * experts
    return [*attention, (experts, hidden), *mlp, (hidden,), (hidden,)]


def _gpt2() -> list[Shape]:
    """A layer of GPT-2: everything has a bias."""
    linears = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    return [*linears, *[(shape[0],) for shape in linears], *[(768,)] * 4]


REAL_UNITS: dict[str, tuple[list[Shape], tuple[int, ...]]] = {
    "Llama-3 8B, TP 2, layer": (_llama_tp2(), (4,)),
    "Llama-3 8B, TP 2, root": (_root(64128, 4096), (4,)),
    "Llama-3 8B, layer": (UNITS["Llama-3 8B"], (4, 64, 1024)),
    "Llama-3 8B, root": (_root(128256, 4096), (4, 64)),
    "Llama-3 70B, layer": (UNITS["Llama-3 70B"], (8, 1024)),
    "Llama-3 70B, root": (_root(128256, 8192), (8, 1024)),
    "Llama-3 405B, layer": (UNITS["Llama-3 405B"], (8, 1024)),
    "Llama-3 405B, root": (_root(128256, 16384), (8, 1024)),
    "Qwen2-7B, layer": (_qwen2(), (2,)),
    "Qwen2-7B, root": (_root(152064, 3584), (2,)),
    "Qwen3-30B-A3B, layer": (_qwen3_moe(), (2,)),
    "Qwen3-30B-A3B, root": (_root(151936, 2048), (2,)),
    "DeepSeek-V3, dense layer": (UNITS["DeepSeek-V3, dense"], (8, 1024)),
    "DeepSeek-V3, 256 experts": (UNITS["DeepSeek-V3, 256 experts"], (8,)),
    "GPT-2, layer": (_gpt2(), (2, 3, 4, 8, 64, 1024)),
    "GPT-2, root": ([(50257, 768), (1024, 768), (768,), (768,)], (2, 3, 4, 8, 64, 1024)),
}
"""Shapes and numbers of ranks."""
