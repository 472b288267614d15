"""Models to plan: `megatron-fsdp-v2 plan --model examples.plan_models:llama_405b --ranks 16384`.

Outlines of Llama 3: parameters of the right shapes, built on the meta device and never run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

__all__ = ["llama_8b", "llama_70b", "llama_405b"]

VOCABULARY = 128_256


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        width: Width of the residual stream.
        hidden: Width of the gated MLP.
        num_layers: Number of layers.
        key_width: Width of keys and values, summed over heads.
        vocabulary: Rows of embedding and output layer.
    """

    width: int
    hidden: int
    num_layers: int
    key_width: int = 1024
    vocabulary: int = VOCABULARY


SHAPES = {
    "8b": Shape(4096, 14336, 32),
    "70b": Shape(8192, 28672, 80),
    "405b": Shape(16384, 53248, 126),
}


class Layer(nn.Module):
    """A transformer layer.

    Args:
        shape: Sizes.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden, keys = shape.width, shape.hidden, shape.key_width
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, keys, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)


class Decoder(nn.Module):
    """Embedding, layers, output layer.

    Args:
        shape: Sizes.
    """

    layer_type: ClassVar[type[Layer]] = Layer

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(self.layer_type(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)


def llama_8b() -> nn.Module:
    """Llama-3 8B."""
    return Decoder(SHAPES["8b"])


def llama_70b() -> nn.Module:
    """Llama-3 70B."""
    return Decoder(SHAPES["70b"])


def llama_405b() -> nn.Module:
    """Llama-3 405B."""
    return Decoder(SHAPES["405b"])
