"""The model of the benchmarks and its inputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.cases import Case, Setting

__all__ = ["Layer", "Model", "batches", "loss_of"]

HEAD = 32
"""Width of an attention head."""


class Experts(nn.Module):
    """A router and experts; every token uses one expert."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, number, bias=False)
        self.experts = nn.ModuleList(_mlp(width, 2 * width) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the chosen expert to every token of `(batch, length, width)`."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        # Experts without a token are also called, so that all parameters have a gradient.
        where = [(chosen == number).nonzero().squeeze(1) for number in range(len(self.experts))]
        found = [expert(tokens[rows]) for expert, rows in zip(self.experts, where, strict=True)]
        order = torch.cat(where).argsort()
        return (torch.cat(found)[order] * weights.unsqueeze(1)).view_as(x)


class Layer(nn.Module):
    """An MLP or experts with a residual; in a transformer, after attention and with norms."""

    def __init__(self, case: Case, *, recomputes: bool = False) -> None:
        super().__init__()
        width = case.width
        self.recomputes = recomputes
        self.is_transformer = case.vocabulary > 0
        if self.is_transformer:
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
        """Apply the layer without recomputation."""
        if not self.is_transformer:
            return x + self.mlp(x)
        heads = x.shape[-1] // min(HEAD, x.shape[-1])
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Layers; in a transformer, between an embedding and an output layer."""

    def __init__(self, case: Case, *, recomputes: bool = False) -> None:
        super().__init__()
        self.is_transformer = case.vocabulary > 0
        if self.is_transformer:
            self.embedding = nn.Embedding(case.vocabulary, case.width)
        self.layers = nn.ModuleList(Layer(case, recomputes=recomputes) for _ in range(case.layers))
        if self.is_transformer:
            self.output = nn.Linear(case.width, case.vocabulary)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length)` tokens to logits, or `(batch, length, width)` inputs to outputs."""
        x = self.embedding(inputs) if self.is_transformer else inputs
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.output(x) if self.is_transformer else x)


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


def loss_of(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the loss for targets that depend on the inputs, so that training can decrease it."""
    if inputs.is_floating_point():
        return functional.mse_loss(outputs.float(), inputs.flip(-1).float())
    labels = (7 * inputs + 3) % outputs.shape[-1]
    return functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def batches(setting: Setting, rank: int, step: int, device: str = "cpu") -> list[torch.Tensor]:
    """Return the micro-batches of a step on a rank.

    A micro-batch is `(batch, length)` tokens, or `(batch, length, width)` in the compute dtype.
    """
    case = setting.shape
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    shape = (setting.micro_batches, case.batch, case.length)
    if case.vocabulary:
        inputs = torch.randint(case.vocabulary, shape, generator=generator)
    else:
        inputs = torch.randn(*shape, case.width, generator=generator)
        inputs = inputs.to(torch.bfloat16 if setting.in_bf16 else torch.float32)
    return list(inputs.to(device).unbind())
