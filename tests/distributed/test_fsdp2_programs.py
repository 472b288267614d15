"""Programs like those FSDP2's own tests are made of, against an unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint, replicate
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp_v2 import FSDPModule, fully_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import backward_both, batch, step_all, weight_error
from tests.reference.models import INPUT, Formula

WIDTH = INPUT

type Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def _mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(x)
    return output.square().mean()


def _error(plain: Any, model: Any, loss: Loss = _mean, before: Any = None) -> float:
    """Largest difference of any weight after Adam steps, the plain model on all ranks' data."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, eps=1e-3) for m in (plain, model)]
    for step in range(3):
        for either in (plain, model) if before is not None else ():
            before(either, step)
        backward_both(plain, model, step, lambda m, rank, step: loss(m, batch(rank, step)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    pairs = zip(full, plain.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


class Layers(nn.Module):
    """A trained and a frozen layer that run several times, with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(functional.relu(self.trained(x)))
            with torch.no_grad():
                x += functional.relu(self.trained(x))
        return x


@on_ranks(2, reshard=[True, False, None])
def test_layers_run_again_with_and_without_gradients(reshard: bool | None) -> None:
    plain = Layers()
    model: Any = copy.deepcopy(plain)
    for layer in (model.first, model.frozen, model.trained, model):
        fully_shard(layer, reshard_after_forward=reshard)
    assert _error(plain, model) < 1e-5


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))


def _freeze(m: nn.Module, flag: bool = False) -> None:
    for name, param in m.named_parameters():
        if "bias" not in name:
            param.requires_grad_(flag)


@pytest.mark.parametrize("recomputes", [False, True], ids=["", "recomputed"])
@on_ranks(2, when=["before", "after", "unfrozen"])
def test_biases_train_alone_frozen_before_or_after(when: str, recomputes: bool) -> None:
    plain = nn.Sequential(*(_mlp() for _ in range(3)))
    model: Any = copy.deepcopy(plain)
    if when == "before":
        _freeze(plain), _freeze(model)
    for mlp in model:
        if recomputes:
            checkpoint(mlp)
        fully_shard(mlp)
    fully_shard(model)
    if when != "before":
        _freeze(plain), _freeze(model)

    def unfreeze(m: nn.Module, step: int) -> None:
        if when == "unfrozen" and step == 2:
            _freeze(m, True)

    assert _error(plain, model, before=unfreeze) < 1e-5


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


@on_ranks(2)
def test_modules_without_inputs_or_parameters_run() -> None:
    plain = Formula(lambda m: m.weight @ m.weight, weight=_weight(WIDTH, WIDTH))
    model = fully_shard(copy.deepcopy(plain))
    error = _error(plain, model, lambda m, x: m().square().mean())
    x = torch.ones(3)
    empty = fully_shard(Formula(lambda m, x, more: x + more[0] + more[1]))
    assert error < 1e-5
    assert bool((empty(x, (x, x)) == 3).all())


class Chunked(nn.Module):
    """A language model whose norm and head may be run apart from the rest, by chunks."""

    def __init__(self, ties: bool) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if ties:
            self.head.weight = self.body.weight

    def forward(self, x: torch.Tensor, skip_head: bool = False) -> torch.Tensor:
        x = self.norm(self.body(x))
        return x if skip_head else self.head(x)


def _run_chunked(model: Any, x: torch.Tensor, share: float) -> None:
    """A forward and backward whose head runs both by itself, chunk by chunk.

    Args:
        model: A `Chunked`.
        x: Inputs.
        share: Of the whole batch's loss.
    """
    hidden = model(x, skip_head=True)
    cut = hidden.detach().requires_grad_()
    for part in cut.chunk(2):
        (model.head(part).square().mean() / 2 * share).backward()
    assert cut.grad is not None
    hidden.backward(cut.grad)


def _set_kept(head: Any, flag: bool) -> None:
    """Keep the head gathered from chunk to chunk, or not, as training loops do."""
    head.set_reshard_after_forward(not flag)
    head.set_reshard_after_backward(not flag)


def _fail(module: nn.Module, args: Any) -> None:
    raise KeyError("in the middle of a forward")


@on_ranks(2, mode=["chunks", "tied", "kept", "accumulated", "failed"])
def test_a_head_of_a_unit_of_several_modules_runs_by_chunks(mode: str) -> None:
    plain = Chunked(ties=mode == "tied")
    model: Any = copy.deepcopy(plain)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, eps=1e-3) for m in (plain, model)]
    for step in range(6):
        x = batch(dist.get_rank(), step)
        for rank in range(2):
            _run_chunked(plain, batch(rank, step), 1 / 2)
        if mode == "failed":
            hook = model.head.register_forward_pre_hook(_fail)
            with pytest.raises(KeyError):
                model(x)
            hook.remove()
        if mode == "kept":
            _set_kept(model.head, True)
        if mode == "accumulated":
            model.set_requires_gradient_sync(step % 2 == 1)
            model.set_is_last_backward(step % 2 == 1)
        _run_chunked(model, x, 1.0)
        if mode == "kept":
            _set_kept(model.head, False)
            model.head.reshard()
        if step % 2:
            step_all(*optimizers)
    assert weight_error(model, plain) < 1e-5


def _outer() -> Formula:
    """Parameters that DDP replicates around a sharded unit, with more of those inside it."""
    return Formula(lambda m, x: m.sharded(x) + m.addend, sharded=_mlp(), addend=_weight(WIDTH))


@on_ranks(2)
def test_ddp_has_what_it_was_not_told_to_ignore() -> None:
    plain = _outer()
    model: Any = copy.deepcopy(plain)
    ignored = set(model.sharded[2].parameters())
    fully_shard(model.sharded, ignored_params=ignored)
    names = [n for n, p in model.named_parameters() if p not in ignored and n != "addend"]
    assert names == ["sharded.0.weight", "sharded.0.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    assert _error(plain, DistributedDataParallel(model)) < 1e-5


@on_ranks(2)
def test_replicate_leaves_alone_what_is_sharded() -> None:
    plain = _outer()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.sharded)
    assert _error(plain, replicate(model)) < 1e-5


@on_ranks(2)
def test_gathering_by_hand_changes_nothing() -> None:
    plain = nn.Sequential(*(_mlp() for _ in range(4)))
    model: Any = copy.deepcopy(plain)
    for mlp in model:
        fully_shard(mlp)
    fully_shard(model)
    for index, mlp in enumerate(model):
        mlp.set_modules_to_forward_prefetch(list(model[index + 1 : index + 3]))
        mlp.set_modules_to_backward_prefetch(list(model[max(0, index - 2) : index]))

    def gather(m: Any, step: int) -> None:
        del step
        for part in (m, *m) if isinstance(m, FSDPModule) else ():
            part.unshard(async_op=True)

    assert _error(plain, model, before=gather) < 1e-5
