"""Llama 3 with a forward: shapes of `examples.plan_models`, attention of torch's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HEAD = 128
VOCABULARY = 128_256


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        width: Of the residual stream.
        hidden: Of the gated MLP.
        num_layers: Layers.
        key_width: Of keys and values, of all their heads.
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
    """A transformer layer, without positions, which have no parameters."""

    def __init__(self, shape: Shape, *, recomputes: bool) -> None:
        super().__init__()
        width, hidden, keys = shape.width, shape.hidden, shape.key_width
        self.recomputes = recomputes
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, keys, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `(batch, sequence, width)`."""
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each with a residual."""
        y = self.attention_norm(x)
        query = _heads(self.query(y))
        times = query.shape[1] // (self.key.out_features // HEAD)
        # Kernels on GPUs share heads of keys; that of the CPU is given each as often as it is used.
        key, value = (_heads(w(y)).repeat_interleave(times, 1) for w in (self.key, self.value))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(found.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


class Decoder(nn.Module):
    """Embedding, layers, output layer, loss."""

    def __init__(self, shape: Shape, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(
            Layer(shape, recomputes=recomputes) for _ in range(shape.num_layers)
        )
        self.norm = nn.RMSNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of `(batch, sequence)` tokens, of which each is its own label."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def units(self) -> list[nn.Module | list[nn.Module]]:
        """What is sharded together, from the inside: embedding, layers, norm and output layer."""
        return [self.embedding, *self.layers, [self.norm, self.output]]
