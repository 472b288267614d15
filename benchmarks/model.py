"""The model of the benchmarks, and what it is trained on."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.cases import Case, Setting

__all__ = ["Language", "Layer", "batches", "loss_of"]

HEAD = 32
"""Width of an attention head."""


class Experts(nn.Module):
    """MLPs of which every token goes through one."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, number, bias=False)
        self.experts = nn.ModuleList(_mlp(width, 2 * width) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the chosen expert to every token of `(batch, length, width)`."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        # Also experts without a token are called, so that all parameters have a gradient.
        where = [(chosen == number).nonzero().squeeze(1) for number in range(len(self.experts))]
        found = [expert(tokens[rows]) for expert, rows in zip(self.experts, where, strict=True)]
        order = torch.cat(where).argsort()
        return (torch.cat(found)[order] * weights.unsqueeze(1)).view_as(x)


class Layer(nn.Module):
    """Attention and an MLP or experts, each after a norm and with a residual."""

    def __init__(self, case: Case, *, recomputes: bool = False) -> None:
        super().__init__()
        width = case.width
        self.recomputes = recomputes
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Experts(width, case.experts) if case.experts else _mlp(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `(batch, length, width)`."""
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """What may be recomputed."""
        heads = x.shape[-1] // min(HEAD, x.shape[-1])
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Language(nn.Module):
    """Transformer layers between an embedding and an output layer, which belong to the root."""

    def __init__(self, case: Case, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.width)
        self.layers = nn.ModuleList(Layer(case, recomputes=recomputes) for _ in range(case.layers))
        self.output = nn.Linear(case.width, case.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of `(batch, length)` tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.output(x))


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy against a label that follows from the token, so that there is much to learn."""
    vocabulary = logits.shape[-1]
    labels = (7 * tokens + 3) % vocabulary
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batches(setting: Setting, rank: int, step: int, device: str = "cpu") -> list[torch.Tensor]:
    """The micro-batches of a step on a rank: tokens of shape `(batch, length)`."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    shape = (setting.micro_batches, setting.shape.batch, setting.shape.length)
    tokens = torch.randint(setting.shape.vocabulary, shape, generator=generator)
    return list(tokens.to(device).unbind())
