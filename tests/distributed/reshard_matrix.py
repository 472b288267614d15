"""Which sharding saved a checkpoint, which one loads it, and the page that shows the outcome."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2 import checkpoint, fully_shard
from tests.distributed.checkpoint_trainings import Sharding, digests, muon
from tests.distributed.test_tensor_shards import _Parts, _sharded
from tests.distributed.wrapping import STRATEGIES
from tests.pages import page, table

OPTIMIZERS = ("AdamW", "SGD, momentum", "Muon")
SIZES = ((1, 1), (2, 1), (4, 1), (2, 2), (3, 1))


@dataclass(frozen=True)
class Arrangement:
    """How the ranks of a run share a model.

    Attributes:
        dp: Data-parallel ranks.
        tp: Tensor-parallel ranks.
        strategy: Sharding strategy, along the inner axis where there are two.
        hybrid: `HSDP` or `HFSDP`, over two axes of two ranks; or nothing.
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
        outer = "optim" if self.hybrid == "HFSDP" else "no_shard"
        return fully_shard(_Parts(0, 1), **Sharding((2, 2), self.strategy, outer).options)


ARRANGEMENTS = (
    *(Arrangement(dp, tp, strategy) for dp, tp in SIZES for strategy in STRATEGIES),
    *(
        Arrangement(4, 1, strategy, hybrid)
        for hybrid in ("HSDP", "HFSDP")
        for strategy in ("optim", "optim_grads_params")
    ),
)
KINDS = (*STRATEGIES, "HSDP", "HFSDP")

Pair = tuple[Arrangement, Arrangement]


def covering_pairs() -> list[Pair]:
    """Few pairs that together have every pair of sizes and every pair of strategies."""
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
    """Train and save with every optimizer; digests by optimizer."""
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
    """Load into fresh models; digests by who saved and optimizer."""
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
    if name == "AdamW":
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    if name == "SGD, momentum":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, muon(model)


# -- the page ------------------------------------------------------------------------------------

_ABOUT = (
    "A small model, part of it tensor-parallel, is trained for two steps, saved with "
    "`checkpoint.save` and loaded into a fresh model and optimizer that are sharded in another "
    "way. A load counts when every parameter and every optimizer state is equal bit by bit and "
    "the options of groups are back. {number} loads: every one of {ways} ways to shard against "
    "every other and itself, with {optimizers}. HSDP and HFSDP are two groups of two ranks, with "
    "`optim` and `optim_grads_params` inside. `make test` loads pairs that have every cell of both "
    "tables."
)
Outcome = tuple[Arrangement, Arrangement, str]


def matrix_page(outcomes: Mapping[Outcome, bool]) -> str:
    """The page: loads that are bit-equal, by sizes and by strategies."""
    about = _ABOUT.format(
        number=len(outcomes), ways=len(ARRANGEMENTS), optimizers=" / ".join(OPTIMIZERS)
    )
    parts = []
    for title, names, attribute in (
        ("data-parallel x tensor-parallel ranks", [f"{d}x{t}" for d, t in SIZES], "size"),
        ("strategies", list(KINDS), "kind"),
    ):
        parts += [f"## By {title}", "Rows saved, columns load."]
        parts.append(_table(outcomes, names, attribute))
    return page("Reshard matrix", about, *parts)


def _table(outcomes: Mapping[Outcome, bool], names: list[str], attribute: str) -> str:
    found: dict[tuple[str, str], list[bool]] = {}
    for (saves, loads, _), is_equal in outcomes.items():
        cell = (getattr(saves, attribute), getattr(loads, attribute))
        found.setdefault(cell, []).append(is_equal)
    counts = {cell: f"{sum(equal)} of {len(equal)}" for cell, equal in found.items()}
    return table(["", *names], [[row, *(counts[row, column] for column in names)] for row in names])
