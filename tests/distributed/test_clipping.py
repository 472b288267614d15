"""What is communicated to clip gradients."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    MESHES,
    gradient_error,
    of_all_ranks,
    on_mesh,
    pair,
    weight_error,
    wrap,
)


@pytest.mark.parametrize(("mesh_name", "num_holders"), [("4", 3), ("HFSDP 2x2", 1)])
@on_ranks("mesh_name")
def test_clipping_where_a_rank_is_empty_is_one_all_reduce_per_axis_on_every_rank(
    mesh_name: str, num_holders: int
) -> None:
    model = wrap(nn.Linear(4, num_holders, bias=False), **on_mesh(mesh_name))
    model(torch.ones(2, 4)).square().sum().backward()
    sent: list[str] = []

    def noted(name: str) -> Any:
        original = getattr(dist, name)
        return mock.patch.object(
            dist, name, lambda *a, **k: (sent.append(name), original(*a, **k))[1]
        )

    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with contextlib.ExitStack() as stack:
        for name in ("send", "recv", "all_reduce", "all_gather", "barrier"):
            stack.enter_context(noted(name))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    start, end = model.weight.local_rows
    assert sum(of_all_ranks(end > start)) == num_holders
    assert sent == ["all_reduce"] * len(MESHES[mesh_name][0])


X = torch.arange(16.0).view(2, 8)


class Two(nn.Module):
    """Over four ranks, `few` is on two of them and `many` on three."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(4, 2, bias=False)
        self.many = nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x[:, :4]).square().sum() + self.many(x).square().sum()


def _two() -> tuple[Any, Any]:
    """The model with gradients twice: plain, and sharded over all ranks."""
    plain, model = pair(Two, lambda m: [m.few])
    for either in (plain, model):
        either(X).backward()
    return plain, model


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("name", "num_holders"), [("few", 2), ("many", 3)])
@on_ranks(4, timeout_s=20)
def test_a_subset_that_some_rank_holds_no_row_of_is_clipped_to_the_unsharded_norm_on_all(
    name: str, num_holders: int, foreach: bool, order: float
) -> None:
    part, whole = (getattr(model, name) for model in reversed(_two()))
    options: dict[str, Any] = {"norm_type": order, "foreach": foreach}
    for _ in range(2):
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5, **options)
        norm = nn.utils.clip_grad_norm_(part.parameters(), 0.5, **options).item()
    holds = part.weight.to_local().numel() > 0
    assert sum(of_all_ranks(holds)) == num_holders
    assert holds == (part.weight.grad is not None)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    assert gradient_error(part, whole) < 1e-6


@on_ranks(4, timeout_s=20)
def test_ranks_without_rows_come_to_clip_exactly_where_others_have_gradients() -> None:
    _, model = _two()

    def norm() -> bool:
        return bool(nn.utils.clip_grad_norm_(model.few.parameters(), 1.0).item())

    found = [norm()]
    model.zero_grad()
    found.append(norm())
    model(torch.ones(2, 8)).backward()
    found.append(norm())
    model.zero_grad(set_to_none=False)
    found.append(norm())
    model.few.requires_grad_(False)
    model.zero_grad()
    model(torch.ones(2, 8)).backward()
    assert [*found, norm()] == [True, False, True, False, False]


@pytest.mark.parametrize("broken", [None, 0, 3], ids=["whole", "inf on rank 0", "inf on rank 3"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["few", "many", ""])
@on_ranks(4, timeout_s=20)
def test_grad_scaler_decides_alike_where_ranks_hold_no_rows(
    name: str, fused: bool, broken: int | None
) -> None:
    plain, model = _two()
    optimizers = []
    for either in (plain, model):
        either.zero_grad()
        params = getattr(either, name).parameters() if name else either.parameters()
        optimizers.append(torch.optim.AdamW(params, lr=0.1, fused=fused))
    if broken is None:
        plain(X).backward()
        optimizers[0].step()
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(model(X * float("inf") if dist.get_rank() == broken else X)).backward()
    if not fused:
        scaler.unscale_(optimizers[1])
    scaler.step(optimizers[1])
    scaler.update()
    # A step that only some ranks skip would leave weights that differ from the plain ones.
    assert scaler.get_scale() == (8.0 if broken is None else 2.0)
    assert weight_error(model, plain) < 1e-5
