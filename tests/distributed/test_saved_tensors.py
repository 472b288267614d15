"""Hooks on what autograd saves: results stay, and gathered weights are neither kept nor copied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2.params.gathered_parameter import is_gathered_weight
from megatron_fsdp_v2.params.saved_activations import save_activations_on_cpu
from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import batch, step_all, wrap
from tests.reference.models import INPUT

WIDTH = 12


class Block(nn.Module):
    """Two layers, of which the second may be recomputed."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(INPUT), nn.Linear(INPUT, WIDTH)
        self.down, self.recomputes = nn.Linear(WIDTH, INPUT), recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        if self.recomputes:
            return x + checkpoint(self.down, hidden, use_reentrant=False)
        return x + self.down(hidden)


class _Copies(saved_tensors_hooks):
    """What an offload to another device does: a copy of everything, weights included."""

    def __init__(self) -> None:
        super().__init__(torch.clone, lambda packed: packed)


class _Recorder(saved_tensors_hooks):
    """Notes what is saved, and keeps it as it is."""

    def __init__(self) -> None:
        self.saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.saved.append(tensor.detach() if not is_gathered_weight(tensor) else tensor)
            return tensor

        super().__init__(pack, lambda packed: packed)


def _steps(hooks: Any, *, pool: bool, recomputes: bool) -> list[torch.Tensor]:
    """Gradients of all steps."""
    torch.manual_seed(0)
    blocks = [Block(recomputes) for _ in range(3)]
    model = wrap(nn.Sequential(*blocks), units=blocks, enable_trace_pool=pool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = []
    for step in range(4):
        with hooks:
            loss = model(batch(torch.distributed.get_rank(), step)).square().mean()
        if isinstance(hooks, _Recorder) and not pool:
            _check_saved(model, hooks)
        loss.backward()
        # A rank without rows of a parameter has no gradient of it.
        grads += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        step_all(optimizer)
    return grads


def _check_saved(model: Any, hooks: _Recorder) -> None:
    """See that saved weights, of which there are some, are known and have no memory."""
    weights = {
        buffer.tensor.untyped_storage()._cdata
        for name, unit in named_units(model)
        if name
        for group in unit.groups
        for buffer in group.weights.temporaries().values()
    }
    seen = [t for t in hooks.saved if t.untyped_storage()._cdata in weights]
    hooks.saved = []
    # Each block saves the weights of its norm and, transposed, of its layers.
    assert len(seen) >= 3 * 2
    assert all(map(is_gathered_weight, seen))
    assert not any(t.untyped_storage().nbytes() for t in seen)


@pytest.mark.parametrize("make", [save_on_cpu, _Copies, _Recorder, save_activations_on_cpu])
@pytest.mark.parametrize("recomputes", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("pool", [False, True], ids=["plain", "pool"])
@on_ranks(2)
def test_hooks_on_saved_tensors_change_no_gradient(
    pool: bool, recomputes: bool, make: Callable[[], Any]
) -> None:
    options = {"pool": pool, "recomputes": recomputes}
    plain = _steps(contextlib.nullcontext(), **options)
    assert all(map(torch.equal, _steps(make(), **options), plain))


@on_ranks(2)
def test_activations_go_to_the_host_and_weights_do_not() -> None:
    original = torch.Tensor.copy_
    shapes: set[tuple[int, ...]] = set()

    def noted(tensor: Any, source: Any, *rest: Any) -> Any:
        shapes.add(tuple(source.shape))
        return original(tensor, source, *rest)

    layer = Block(recomputes=False)
    model = wrap(nn.Sequential(layer), units=[layer])
    with pytest.MonkeyPatch.context() as patch, save_activations_on_cpu():
        patch.setattr(torch.Tensor, "copy_", noted)
        model(batch(0))
    assert (4, WIDTH) in shapes
    assert not shapes & {(WIDTH, INPUT), (INPUT, WIDTH), (INPUT,)}


def test_a_threshold_that_is_no_number_of_bytes_is_an_error() -> None:
    with pytest.raises(ValueError, match="min_nbytes is a number of bytes, got -1"):
        save_activations_on_cpu(min_nbytes=-1)
