"""Hooks on what autograd saves: results stay, and gathered weights are neither kept nor copied."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2.params.gathered_parameter import is_gathered_weight
from megatron_fsdp_v2.params.saved_activations import save_activations_on_cpu
from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.distributed.wrapping import batch, mesh_of, wrap
from tests.ranks import RankPools
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


def _steps(hooks: Any, *, pool: bool, recomputes: bool) -> tuple[list[torch.Tensor], Any]:
    """Gradients of all steps, and what is known of the model after the last forward."""
    torch.manual_seed(0)
    blocks = [Block(recomputes) for _ in range(3)]
    options: dict[str, Any] = {"mesh": mesh_of(2), "enable_trace_pool": pool}
    model = wrap(nn.Sequential(*blocks), units=blocks, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads, facts = [], None
    for step in range(4):
        with hooks:
            loss = model(batch(torch.distributed.get_rank(), step)).square().mean()
        facts = _facts(model, hooks)
        loss.backward()
        # A rank without rows of a parameter has no gradient of it.
        grads += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return grads, facts


def _facts(model: Any, hooks: Any) -> Any:
    if not isinstance(hooks, _Recorder):
        return None
    weights = {
        buffer.tensor.untyped_storage()._cdata
        for name, unit in named_units(model)
        if name
        for group in unit.groups
        for buffer in group.weights.temporaries().values()
    }
    seen = [t for t in hooks.saved if t.untyped_storage()._cdata in weights]
    hooks.saved = []
    return (
        len(seen),
        all(map(is_gathered_weight, seen)),
        [t.untyped_storage().nbytes() for t in seen],
    )


def _compare(pool: bool, recomputes: bool) -> list[str]:
    options = {"pool": pool, "recomputes": recomputes}
    plain, _ = _steps(contextlib.nullcontext(), **options)
    wrong = []
    for make in (save_on_cpu, _Copies, _Recorder, save_activations_on_cpu):
        grads, facts = _steps(make(), **options)
        if not all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True)):
            wrong.append(make.__name__)
        if facts is not None and not pool:
            number, are_known, sizes = facts
            # Each block saves the weights of its norm and, transposed, of its layers.
            if number < 3 * 2 or not are_known or any(sizes):
                wrong.append(f"{number} weights saved, known {are_known}, bytes {sizes}")
    return wrong


@pytest.mark.parametrize("recomputes", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("pool", [False, True], ids=["plain", "pool"])
def test_hooks_on_saved_tensors_change_no_gradient(
    pools: RankPools, pool: bool, recomputes: bool
) -> None:
    assert pools(2).run(_compare, pool, recomputes) == [[], []]


def _copied() -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Shapes of what is copied by torch's own hooks, and by ours."""
    found = []
    original = torch.Tensor.copy_
    for make in (lambda: save_on_cpu(pin_memory=False), save_activations_on_cpu):
        shapes: set[tuple[int, ...]] = set()

        def noted(tensor: Any, source: Any, *rest: Any, seen: Any = shapes) -> Any:
            seen.add(tuple(source.shape))
            return original(tensor, source, *rest)

        layer = Block(recomputes=False)
        model = wrap(nn.Sequential(layer), units=[layer], mesh=mesh_of(2))
        torch.Tensor.copy_ = noted  # type: ignore[method-assign, assignment]
        try:
            with make():
                model(batch(0))
        finally:
            torch.Tensor.copy_ = original  # type: ignore[method-assign]
        found.append(shapes)
    return found[0], found[1]


def test_activations_go_to_the_host_and_weights_do_not(pools: RankPools) -> None:
    for _, ours in pools(2).run(_copied):
        assert (4, WIDTH) in ours
        assert not ours & {(WIDTH, INPUT), (INPUT, WIDTH), (INPUT,)}


def test_a_threshold_that_is_no_number_of_bytes_is_an_error() -> None:
    with pytest.raises(ValueError, match="min_nbytes is a number of bytes, got -1"):
        save_activations_on_cpu(min_nbytes=-1)
