"""A checkpoint loads at any world size and strategy, regardless of those of the save."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import checkpoint, fully_shard
from tests.distributed.checkpoint_trainings import digests
from tests.distributed.test_tensor_parallel import _Parts, _sharded
from tests.distributed.test_torch_checkpoint import OPTIMIZERS
from tests.distributed.wrapping import STRATEGIES, on_mesh
from tests.ranks import RankPools

NAMES = ("AdamW", "SGD, momentum", "Muon")
SIZES = ((1, 1), (2, 1), (4, 1), (2, 2), (3, 1))


@dataclass(frozen=True)
class Arrangement:
    """How the ranks of a run share a model.

    Attributes:
        dp: Data-parallel ranks.
        tp: Tensor-parallel ranks.
        strategy: Sharding strategy; along the inner axis of two axes.
        hybrid: `HSDP` or `HFSDP`, over two axes of two ranks; or empty.
    """

    dp: int
    tp: int
    strategy: str
    hybrid: str = ""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    @property
    def size(self) -> str:
        return f"{self.dp}x{self.tp}"

    @property
    def kind(self) -> str:
        return self.hybrid or self.strategy

    @property
    def name(self) -> str:
        return " ".join(word for word in (self.size, self.hybrid, self.strategy) if word)

    def model(self) -> Any:
        """The model, sharded. Collective."""
        if not self.hybrid:
            return _sharded(self.dp, self.tp, self.strategy)
        options = on_mesh(f"{self.hybrid} 2x2")
        return fully_shard(_Parts(0, 1), sharding_strategy=self.strategy, **options)


ARRANGEMENTS = (
    *(Arrangement(dp, tp, strategy) for dp, tp in SIZES for strategy in STRATEGIES),
    *(
        Arrangement(4, 1, strategy, hybrid)
        for hybrid in ("HSDP", "HFSDP")
        for strategy in ("optim", "optim_grads_params")
    ),
)

Pair = tuple[Arrangement, Arrangement]


def covering_pairs() -> list[Pair]:
    """A small set of pairs that covers every pair of sizes and every pair of strategies."""
    pairs = list(itertools.product(ARRANGEMENTS, repeat=2))
    missing = {fact for pair in pairs for fact in _facts(pair)}
    found = []
    while missing:
        best = max(pairs, key=lambda pair: len(missing & _facts(pair)))
        missing -= _facts(best)
        found.append(best)
    return found


def _facts(pair: Pair) -> set[tuple[str, str]]:
    saves, loads = pair
    return {(saves.size, loads.size), (saves.kind, loads.kind)}


# -- on every rank -------------------------------------------------------------------------------


def saved(folder: str, saves: Arrangement, optimizers: Iterable[str]) -> dict[str, dict[str, str]]:
    """Train and save with every optimizer; return digests by optimizer."""
    found = {}
    for name in optimizers:
        model, optimizer = _made(saves, name)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3)).backward()
            optimizer.step()
        checkpoint.save(f"{folder}/{saves.name}, {name}", model, optimizer, extra=saves.name)
        found[name] = digests(model, optimizer)
    return found


def loaded(
    folder: str, loads: Arrangement, sources: Iterable[tuple[Arrangement, str]]
) -> dict[tuple[Arrangement, str], dict[str, str]]:
    """Load into new models; return digests by saving arrangement and optimizer."""
    found = {}
    for saves, name in sources:
        model, optimizer = _made(loads, name)
        for group in optimizer.param_groups:
            group["lr"] = 7.0
        extra = checkpoint.load(f"{folder}/{saves.name}, {name}", model, optimizer)
        assert extra == saves.name
        assert all(group["lr"] == 0.1 for group in optimizer.param_groups)
        found[saves, name] = digests(model, optimizer)
    return found


def _made(arrangement: Arrangement, name: str) -> tuple[Any, torch.optim.Optimizer]:
    model: nn.Module = arrangement.model()
    return model, OPTIMIZERS[name](model)


# Optimizers alternate from pair to pair.
QUICK = list(zip(covering_pairs(), itertools.cycle(NAMES), strict=False))


@pytest.mark.parametrize("size", [f"{dp}x{tp}" for dp, tp in SIZES])
def test_a_checkpoint_loads_bit_equal_at_every_size_and_strategy(
    pools: RankPools, tmp_path: Path, size: str
) -> None:
    mine = [(pair, name) for pair, name in QUICK if pair[0].size == size]
    originals = {
        saves: pools(saves.ranks).run(saved, str(tmp_path), saves, sorted(names))[0]
        for saves, names in _grouped((saves, name) for (saves, _), name in mine).items()
    }
    loads_of = _grouped((loads, (saves, name)) for (saves, loads), name in mine)
    for loads, sources in loads_of.items():
        for of_rank in pools(loads.ranks).run(loaded, str(tmp_path), loads, sources):
            for (saves, name), found in of_rank.items():
                assert found == originals[saves][name], f"{saves.name} to {loads.name}, {name}"


def _grouped[K, V](items: Iterator[tuple[K, V]]) -> dict[K, list[V]]:
    found: dict[K, list[V]] = {}
    for key, value in items:
        if value not in found.setdefault(key, []):
            found[key].append(value)
    return found


@pytest.mark.functional
@pytest.mark.parametrize("saves", ARRANGEMENTS, ids=lambda saves: saves.name.replace(" ", "-"))
def test_a_checkpoint_loads_bit_equal_in_every_arrangement(
    pools: RankPools, tmp_path: Path, saves: Arrangement
) -> None:
    original = pools(saves.ranks).run(saved, str(tmp_path), saves, NAMES)[0]
    sources = [(saves, name) for name in NAMES]
    wrong = []
    for loads in ARRANGEMENTS:
        results = pools(loads.ranks).run(loaded, str(tmp_path), loads, sources)
        for name in NAMES:
            if any(found[saves, name] != original[name] for found in results):
                wrong.append((loads.name, name))
    assert wrong == []
