"""nemo-automodel's Megatron-FSDP strategy, sharded by this package.

It trains as without sharding, and its recipes as with FSDP2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp_v2_for.automodel
from megatron_fsdp_v2.runtime.module import named_units
from megatron_fsdp_v2_for.megatron_fsdp import MegatronFSDP
from tests.clients import automodel
from tests.clients.automodel import Run
from tests.clients.conftest import Measure, Record
from tests.clients.differences import difference_of, train_plain
from tests.clients.hf_models import MODELS
from tests.ranks import RankPools, rank_pools

COMPARED = "losses, norms, parameters of 3 steps of 2 micro-batches"
STEPS, MICRO = 3, 2
MAX_NORM = 0.5


def built() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = MODELS["Llama tied"].build()
    return model, lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3)


def parallelized(zero_dp_strategy: int, strategy: str | None) -> tuple[Any, Any]:
    """Shard a model, then its optimizer, as automodel's recipes do."""
    megatron_fsdp_v2_for.automodel.install(strategy)
    try:
        from nemo_automodel.components.distributed import config, megatron_fsdp

        settings = config.MegatronFSDPConfig(
            zero_dp_strategy=zero_dp_strategy, check_for_nan_in_grad=False
        )
        mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
        model, optimizer_of = built()
        model, _ = megatron_fsdp.parallelize_megatron_fsdp(model, settings, mesh)
        attributes = megatron_fsdp.snapshot_distributed_param_attrs(model)
        megatron_fsdp.restore_distributed_param_attrs(model, attributes)
        optimizer = megatron_fsdp.maybe_shard_optimizer(
            model, optimizer_of(model.parameters()), settings
        )
    finally:
        megatron_fsdp_v2_for.automodel.uninstall()
    return model, optimizer


def difference(zero_dp_strategy: int, strategy: str | None = None) -> float:
    model, optimizer = parallelized(zero_dp_strategy, strategy)
    assert isinstance(model, MegatronFSDP)
    assert len(named_units(model)) == 3
    plain, optimizer_of = built()

    def loss_of(of: Any, step: int, micro: int, ranks: list[int]) -> torch.Tensor:
        batches = [MODELS["Llama tied"].batch(100 * step + 10 * micro + rank) for rank in ranks]
        return torch.stack([of(**batch).loss for batch in batches]).mean()

    def steps(of: Any, ranks: list[int]) -> Any:
        return [
            [partial(loss_of, of, step, micro, ranks) for micro in range(MICRO)]
            for step in range(STEPS)
        ]

    ours = train_plain(model, steps(model, [dist.get_rank()]), optimizer, MAX_NORM)
    model._replace_param_with_distributed_if_needed()
    wanted = train_plain(plain, steps(plain, [0, 1]), optimizer_of(plain.parameters()), MAX_NORM)
    losses = ours["losses"].clone()  # type: ignore[union-attr]
    dist.all_reduce(losses)
    parameters = {name.removeprefix("module."): p for name, p in ours["parameters"].items()}  # type: ignore[union-attr]
    return difference_of({**ours, "losses": losses / 2, "parameters": parameters}, wanted)


@pytest.mark.parametrize("zero_dp_strategy", range(4))
def test_llama_trains_like_unsharded(measure: Measure, zero_dp_strategy: int) -> None:
    measure("nemo-automodel", COMPARED, 2, difference, zero_dp_strategy)


def test_llama_trains_with_the_strategy_given_to_install(measure: Measure) -> None:
    measure("nemo-automodel", COMPARED, 2, difference, 3, "optim")


# -- recipes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipes() -> Iterator[RankPools]:
    """Yield rank pools by world size, forked from a process that has imported the recipe."""
    with rank_pools(["tests.clients.preloaded_automodel"]) as pools:
        yield pools


def recipe_difference(run: Run, fsdp2: Run, first: int) -> float:
    """Difference of a training from FSDP2's, whose steps before `first` are another training's."""
    theirs = dict(automodel.train(fsdp2))
    if first:
        automodel.train(dataclasses.replace(run, steps=first))
    for name in ("losses", "norms"):
        theirs[name] = theirs[name][first:]  # type: ignore[index]
    return difference_of(automodel.train(run), theirs)


@pytest.mark.parametrize(
    ("zero_dp_strategy", "name", "resumes_at"),
    [
        (0, "Llama tied", 0),
        (1, "Llama", 2),
        (2, "Llama tied", 0),
        (3, "Llama", 0),
        (3, "Llama tied", 2),
    ],
)
def test_recipe_trains_and_resumes_like_fsdp2(
    recipes: RankPools,
    record: Record,
    tmp_path: Path,
    zero_dp_strategy: int,
    name: str,
    resumes_at: int,
) -> None:
    model = str(tmp_path / "model")
    automodel.save_model(model, name)
    run, fsdp2 = (
        Run(model, str(tmp_path / f"{strategy}"), strategy) for strategy in (zero_dp_strategy, None)
    )
    found = recipes(2).run(recipe_difference, run, fsdp2, resumes_at)
    record("nemo-automodel", "losses, norms, parameters of 4 steps of a recipe", max(found))
