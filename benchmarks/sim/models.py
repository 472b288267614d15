"""Llama 3 with a forward: the models of `examples.plan_models`, with torch's attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from examples import plan_models
from examples.plan_models import SHAPES, Shape

__all__ = ["SHAPES", "Decoder", "Shape"]

HEAD = 128


class Layer(plan_models.Layer):
    """A transformer layer, without position encodings, which have no parameters."""

    recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `(batch, sequence, width)`."""
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Apply attention and MLP, each with a residual."""
        y = self.attention_norm(x)
        query = _heads(self.query(y))
        times = query.shape[1] // (self.key.out_features // HEAD)
        # GPU kernels share a head of keys and values; the CPU kernel needs a copy per query head.
        key, value = (_heads(w(y)).repeat_interleave(times, 1) for w in (self.key, self.value))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(found.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


class Decoder(plan_models.Decoder):
    """Embedding, layers, output layer, loss."""

    layer_type: ClassVar[type[plan_models.Layer]] = Layer

    def __init__(self, shape: Shape, *, recomputes: bool = False) -> None:
        super().__init__(shape)
        for layer in self.layers:
            layer.recomputes = recomputes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of `(batch, sequence)` tokens, with each token as its own label."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def units(self) -> list[nn.Module | list[nn.Module]]:
        """Return the units: the embedding, each layer, and the norm with the output layer."""
        return [self.embedding, *self.layers, [self.norm, self.output]]
