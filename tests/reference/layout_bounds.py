"""Shapes of units of real models (docs/concepts.md), and a brute-force check of layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Shape = tuple[int, ...]


def _llama(hidden: int, ffn: int) -> list[Shape]:
    """A decoder layer: q, k, v, o, gate, up, down, two norms."""
    kv = 1024
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    return [*attention, (ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]


def _deepseek_v3(experts: int) -> list[Shape]:
    """A layer with latent attention, `experts` routed experts and a shared one; dense for 0."""
    hidden, ffn = 7168, 2048 if experts else 18432
    q_a, kv_a = [(1536, hidden), (1536,)], [(576, hidden), (512,)]
    attention = [*q_a, (24576, 1536), *kv_a, (32768, 512), (hidden, 16384)]
    router = [(experts, hidden)] if experts else []
    mlp = [(ffn, hidden), (ffn, hidden), (hidden, ffn)] * (experts + 1)
    return [*attention, *router, *mlp, (hidden,), (hidden,)]


UNITS: dict[str, list[Shape]] = {
    "Llama-3 8B": _llama(4096, 14336),
    "Llama-3 70B": _llama(8192, 28672),
    "Llama-3 405B": _llama(16384, 53248),
    "DeepSeek-V3, dense": _deepseek_v3(0),
    "DeepSeek-V3, 256 experts": _deepseek_v3(256),
}
RANKS = (8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)


def _root(vocabulary: int, hidden: int) -> list[Shape]:
    """Embedding, last norm, output layer."""
    return [(vocabulary, hidden), (hidden,), (vocabulary, hidden)]


def _llama_tp2() -> list[Shape]:
    """A layer of Llama-3 8B on one of two tensor-parallel ranks."""
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
"""Shapes and numbers of ranks by unit."""


def numel_of(shapes: Sequence[Shape]) -> int:
    """Return the number of elements of all parameters."""
    return sum(math.prod(shape) for shape in shapes)


def fits(items: Sequence[tuple[int, int]], num_shards: int, size: int, line: int = 1) -> bool:
    """Return whether any order fits in slices of this size, each item at the first legal offset.

    The first legal offset is best for all later items, so the search misses no layout.

    Args:
        items: Elements of each parameter and of its granule, which must not be split.
        num_shards: Number of slices.
        size: Elements of a slice.
        line: Alignment of the starts of parameters, in elements.
    """
    for order in set(itertools.permutations(items)):
        start = 0
        for numel, granule in order:
            for offset in range(start, start + 2 * size + line):
                cuts = range(-offset % size or size, numel, size)
                if offset % math.gcd(granule, line) == 0 and all(c % granule == 0 for c in cuts):
                    break
            else:
                start = num_shards * size + 1
                break
            start = offset + numel
        if start <= num_shards * size:
            return True
    return False
