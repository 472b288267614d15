"""What is communicated to clip gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.wrapping import held_error, mesh_of, wrap
from tests.ranks import RankPools


def sent_when_clipping(sizes: tuple[int, ...]) -> tuple[bool, list[str]]:
    """Whether this rank holds any row, and what it communicates to clip a second time."""
    model = nn.Linear(4, 3 if len(sizes) == 1 else 1, bias=False)
    outer = "optim" if len(sizes) == 2 else "no_shard"
    wrapped = wrap(model, [], mesh=mesh_of(*sizes), outer_dp_sharding_strategy=outer)
    wrapped(torch.ones(2, 4)).square().sum().backward()
    names = ("send", "recv", "all_reduce", "all_gather", "barrier")
    originals = {name: getattr(dist, name) for name in names}
    sent: list[str] = []
    nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
    for name, original in originals.items():
        setattr(dist, name, lambda *a, _n=name, _f=original, **k: (sent.append(_n), _f(*a, **k))[1])
    try:
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    start, end = wrapped.weight.local_rows
    return end > start, sent


@pytest.mark.parametrize(("sizes", "num_holders"), [((4,), 3), ((2, 2), 1)])
def test_clipping_where_a_rank_is_empty_is_one_all_reduce_per_axis_on_every_rank(
    pools: RankPools, sizes: tuple[int, ...], num_holders: int
) -> None:
    found = pools(4).run(sent_when_clipping, sizes)
    assert sum(holds for holds, _ in found) == num_holders
    for _, sent in found:
        assert sent == ["all_reduce"] * len(sizes)


class Two(nn.Module):
    """Over four ranks, `few` is on two of them and `many` on three."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(4, 2, bias=False)
        self.many = nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x[:, :4]).square().sum() + self.many(x).square().sum()


def two_trained() -> tuple[Any, Any]:
    """The model with gradients twice: plain, and sharded over all ranks."""
    models = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = Two()
        models.append(wrap(model, [model.few]) if shards else model)
        models[-1](torch.arange(16.0).view(2, 8)).backward()
    return models[0], models[1]


def clipped(name: str, order: float, foreach: bool) -> tuple[bool, float, float]:
    """Whether this rank holds a row, relative error of the norm of a subset, and of gradients."""
    plain, model = two_trained()
    part, whole = getattr(model, name), getattr(plain, name)
    options: dict[str, Any] = {"norm_type": order, "foreach": foreach}
    for _ in range(2):
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5, **options)
        norm = nn.utils.clip_grad_norm_(part.parameters(), 0.5, **options)
    holds = part.weight.to_local().numel() > 0
    assert holds == (part.weight.grad is not None)
    error = held_error(part.weight.grad, whole.weight.grad) if holds else 0.0
    return holds, abs(norm.item() / expected.item() - 1), error


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("name", "num_holders"), [("few", 2), ("many", 3)])
def test_a_subset_that_some_rank_holds_no_row_of_is_clipped_to_the_unsharded_norm_on_all(
    pools: RankPools, name: str, num_holders: int, foreach: bool
) -> None:
    for order in (2.0, float("inf")):
        found = pools(4).run(clipped, name, order, foreach, timeout_s=20)
        assert sum(holds for holds, _, _ in found) == num_holders
        assert max(max(errors) for _, *errors in found) < 1e-6


def seen_by_clipping() -> list[bool]:
    """Whether clipping has a norm after a backward, after `zero_grad`, with zeros, and frozen."""
    _, model = two_trained()

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
    return [*found, norm()]


def test_ranks_without_rows_come_to_clip_exactly_where_others_have_gradients(
    pools: RankPools,
) -> None:
    for found in pools(4).run(seen_by_clipping, timeout_s=20):
        assert found == [True, False, True, False, False]


def scaled_step(broken: int | None, name: str, fused: bool) -> tuple[float, float]:
    """The next scale after a step where one rank may have an inf, and the error of weights."""
    plain, model = two_trained()
    x = torch.arange(16.0).view(2, 8)
    optimizers = []
    for one in (plain, model):
        one.zero_grad()
        params = getattr(one, name).parameters() if name else one.parameters()
        optimizers.append(torch.optim.AdamW(params, lr=0.1, fused=fused))
    if broken is None:
        plain(x).backward()
        optimizers[0].step()
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(model(x * float("inf") if dist.get_rank() == broken else x)).backward()
    if not fused:
        scaler.unscale_(optimizers[1])
    scaler.step(optimizers[1])
    scaler.update()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return scaler.get_scale(), max(held_error(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["few", "many", ""])
def test_grad_scaler_decides_alike_where_ranks_hold_no_rows(
    pools: RankPools, name: str, fused: bool
) -> None:
    for broken in (None, 0, 3):
        found = pools(4).run(scaled_step, broken, name, fused, timeout_s=20)
        for scale, error in found:
            # A step that only some ranks skip would leave weights that differ from the plain ones.
            assert scale == (8.0 if broken is None else 2.0), (broken, found)
            assert error < 1e-5, (broken, found)
